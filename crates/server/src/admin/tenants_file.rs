//! Changes the tenants file as text, so that its comments and its layout stay as they are. The result is parsed before
//! it replaces the file: if it differs in more than the intended entry, nothing is written.

use std::fs::{File, OpenOptions, Permissions};
use std::io::{self, Write};
use std::ops::Range;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt, fchown};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FlockOperation, Mode, OFlags, flock, openat, renameat, unlinkat};
use serde::Deserialize;
use toml::Spanned;

#[derive(Debug, thiserror::Error)]
pub(crate) enum TenantsFileError {
    #[error("cannot change the tenants file `{}`: {source}", path.display())]
    Io { path: PathBuf, source: io::Error },
    #[error("the tenants file `{}`: {why}", path.display())]
    Content { path: PathBuf, why: String },
}

/// A change to the tenants file.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Change<'a> {
    Add {
        name: &'a str,
        digest: &'a str,
    },
    /// Adds the hash of a token before the others, and removes these unless `keep` is true.
    Rotate {
        name: &'a str,
        digest: &'a str,
        keep: bool,
    },
    /// Keeps only the first hash, which is the newest one.
    DropOld {
        name: &'a str,
    },
    Remove {
        name: &'a str,
    },
}

/// Applies a change and replaces the file atomically. The new file has the owner and mode of the old one. Adding a tenant
/// creates the file if there is none.
pub(crate) fn edit(path: &Path, change: Change<'_>) -> Result<(), TenantsFileError> {
    let failed = |source| TenantsFileError::Io { path: path.into(), source };
    if let Change::Add { .. } = change {
        match OpenOptions::new().write(true).create_new(true).mode(0o600).open(path) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => return Err(failed(error)),
            _ => {}
        }
    }
    // A symlink stays one: the file that it leads to is replaced.
    let target = path.canonicalize().map_err(failed)?;
    let old = locked(&target).map_err(failed)?;
    let text = io::read_to_string(&old).map_err(failed)?;
    let new = changed(&text, change).map_err(|why| TenantsFileError::Content { path: path.into(), why })?;
    replace(&target, &old, &new).map_err(failed)
}

/// Opens the file and waits until no other command changes it. Each change replaces the file, so the one that was
/// locked may not be the current one any more.
fn locked(path: &Path) -> io::Result<File> {
    loop {
        let file = File::open(path)?;
        flock(&file, FlockOperation::LockExclusive)?;
        if file.metadata()?.ino() == path.metadata()?.ino() {
            return Ok(file);
        }
    }
}

fn replace(path: &Path, old: &File, text: &str) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default();
    let temporary = format!(".{}.{}", name.to_string_lossy(), uuid::Uuid::new_v4().simple());
    // The directory may belong to another user than the one who runs the command. Everything is done by descriptors, so
    // that this user cannot exchange a file on the way.
    let dir = File::open(path.parent().unwrap_or(Path::new("/")))?;
    let write = || {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file = File::from(openat(&dir, temporary.as_str(), flags, Mode::from_raw_mode(0o600))?);
        let before = old.metadata()?;
        let own = file.metadata()?;
        if (before.uid(), before.gid()) != (own.uid(), own.gid()) {
            fchown(&file, Some(before.uid()), Some(before.gid()))?;
        }
        file.set_permissions(Permissions::from_mode(before.mode() & 0o7777))?;
        file.write_all(text.as_bytes())?;
        file.sync_all()?;
        Ok(renameat(&dir, temporary.as_str(), &dir, name)?)
    };
    write().inspect_err(|_| {
        let _ = unlinkat(&dir, temporary.as_str(), AtFlags::empty());
    })
}

#[derive(Deserialize)]
struct TenantsText {
    #[serde(default)]
    tenant: Vec<TenantText>,
}

#[derive(Deserialize)]
struct TenantText {
    name: Spanned<String>,
    token_sha256: Option<Spanned<Digests>>,
}

#[derive(Clone, Deserialize)]
#[serde(untagged)]
enum Digests {
    One(String),
    Several(Vec<String>),
}

impl Digests {
    fn all(&self) -> Vec<String> {
        match self {
            Self::One(one) => vec![one.clone()],
            Self::Several(all) => all.clone(),
        }
    }
}

/// Returns the text with the change applied.
fn changed(text: &str, change: Change<'_>) -> Result<String, String> {
    let file: TenantsText = toml::from_str(text).map_err(|error| error.message().to_owned())?;
    let find = |name: &str| {
        let at = file.tenant.iter().position(|entry| entry.name.get_ref() == name);
        at.ok_or_else(|| format!("there is no tenant `{name}`"))
    };
    let mut new = text.to_owned();
    match change {
        Change::Add { name, digest } => {
            crate::auth::check_tenant_name(name)?;
            if find(name).is_ok() {
                return Err(format!("there is a tenant `{name}` already; `rotate` gives it another token"));
            }
            let gap = if text.is_empty() || text.ends_with("\n\n") { "" } else { "\n" };
            let end = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
            new.push_str(&format!("{end}{gap}[[tenant]]\nname = \"{name}\"\ntoken_sha256 = \"{digest}\"\n"));
        }
        Change::Rotate { name, digest, keep } => {
            let entry = &file.tenant[find(name)?];
            let old = entry.token_sha256.as_ref().map(|digests| digests.get_ref().all()).unwrap_or_default();
            let digests = std::iter::once(digest.to_owned()).chain(old.into_iter().filter(|_| keep)).collect();
            set_digests(&mut new, entry, digests);
        }
        Change::DropOld { name } => {
            let entry = &file.tenant[find(name)?];
            let old = entry.token_sha256.as_ref().map(|digests| digests.get_ref().all()).unwrap_or_default();
            let [newest, _, ..] = &old[..] else { return Err(format!("tenant `{name}` has no old token")) };
            set_digests(&mut new, entry, vec![newest.clone()]);
        }
        Change::Remove { name } => {
            let at = find(name)?;
            if file.tenant.len() == 1 {
                return Err(format!("`{name}` is the only tenant, and the file needs one"));
            }
            let blocks = blocks(text, file.tenant.len())?;
            new.replace_range(blocks[at].clone(), "");
        }
    }
    check(text, &new, change).map(|()| new)
}

fn set_digests(text: &mut String, entry: &TenantText, digests: Vec<String>) {
    let quoted: Vec<String> = digests.iter().map(|digest| format!("\"{digest}\"")).collect();
    let value = if quoted.len() == 1 { quoted[0].clone() } else { format!("[{}]", quoted.join(", ")) };
    match &entry.token_sha256 {
        Some(old) => text.replace_range(old.span(), &value),
        None => text.insert_str(entry.name.span().end, &format!("\ntoken_sha256 = {value}")),
    }
}

/// Returns the part of the text that belongs to each tenant: from its header, including the comments directly above it,
/// to the beginning of the next part.
fn blocks(text: &str, tenants: usize) -> Result<Vec<Range<usize>>, String> {
    let (mut starts, mut comments, mut at) = (Vec::new(), None, 0);
    for line in text.split_inclusive('\n') {
        let trimmed = line.trim_start();
        if trimmed.starts_with("[[") {
            starts.push(comments.unwrap_or(at));
        }
        comments = trimmed.starts_with('#').then(|| comments.unwrap_or(at));
        at += line.len();
    }
    if starts.len() != tenants {
        return Err("its entries are not all written as `[[tenant]]`; change it with an editor".into());
    }
    let ends = starts.iter().skip(1).copied().chain([text.len()]);
    Ok(starts.iter().copied().zip(ends).map(|(start, end)| start..end).collect())
}

/// Checks that the new text differs from the old one only in the intended entry.
fn check(old: &str, new: &str, change: Change<'_>) -> Result<(), String> {
    let (Change::Add { name, .. } | Change::Rotate { name, .. } | Change::DropOld { name } | Change::Remove { name }) =
        change;
    let others = |text: &str| -> Result<Vec<toml::Value>, String> {
        let file: toml::Table = text.parse().map_err(|error: toml::de::Error| error.message().to_owned())?;
        let all = file.get("tenant").and_then(toml::Value::as_array).cloned().unwrap_or_default();
        Ok(all.into_iter().filter(|entry| entry.get("name").and_then(toml::Value::as_str) != Some(name)).collect())
    };
    let count = |text: &str| toml::from_str::<TenantsText>(text).map_or(0, |file| file.tenant.len());
    let wanted = match change {
        Change::Add { .. } => count(old) + 1,
        Change::Remove { .. } => count(old) - 1,
        Change::Rotate { .. } | Change::DropOld { .. } => count(old),
    };
    if others(old)? != others(new)? || count(new) != wanted {
        return Err("it is written in a way that this command cannot change; use an editor".into());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::scratch::Scratch;

    const FILE: &str = "# The tenants of this machine.\n\n# Blue pays.\n[[tenant]]\nname = \"blue\"   # since May\ntoken_sha256 = \"aa\" # old\n\
                        quotas = { contexts = 2 }\n\n# Green is a trial.\n[[tenant]]\nname = 'green'\ntoken_sha256 = [\n  'bb', # new\n  'cc',\n]\n";

    #[test]
    fn a_change_touches_its_entry_alone() {
        let change = |change| changed(FILE, change).unwrap();
        assert_eq!(
            change(Change::Add { name: "red", digest: "dd" }),
            format!("{FILE}\n[[tenant]]\nname = \"red\"\ntoken_sha256 = \"dd\"\n")
        );
        assert_eq!(
            change(Change::Rotate { name: "blue", digest: "dd", keep: false }),
            FILE.replace("\"aa\" # old", "\"dd\" # old")
        );
        assert_eq!(
            change(Change::Rotate { name: "blue", digest: "dd", keep: true }),
            FILE.replace("\"aa\" # old", "[\"dd\", \"aa\"] # old")
        );
        let green = "[\n  'bb', # new\n  'cc',\n]";
        assert_eq!(change(Change::DropOld { name: "green" }), FILE.replace(green, "\"bb\""));
        let at = FILE.find("# Green").unwrap();
        assert_eq!(change(Change::Remove { name: "green" }), FILE[..at]);
        let from = FILE.find("# Blue").unwrap();
        assert_eq!(change(Change::Remove { name: "blue" }), format!("{}{}", &FILE[..from], &FILE[at..]));
        let quotas_only = "[[tenant]]\nname = \"alice\" # by the provider\n";
        assert_eq!(
            changed(quotas_only, Change::Rotate { name: "alice", digest: "dd", keep: true }).unwrap(),
            "[[tenant]]\nname = \"alice\"\ntoken_sha256 = \"dd\" # by the provider\n"
        );
    }

    #[test]
    fn what_cannot_be_done_is_refused_with_the_reason() {
        let refused = |text: &str, change| changed(text, change).unwrap_err();
        assert_eq!(refused(FILE, Change::Remove { name: "red" }), "there is no tenant `red`");
        assert_eq!(refused(FILE, Change::DropOld { name: "blue" }), "tenant `blue` has no old token");
        assert_eq!(
            refused(FILE, Change::Add { name: "blue", digest: "dd" }),
            "there is a tenant `blue` already; `rotate` gives it another token"
        );
        assert!(refused(FILE, Change::Add { name: "Red", digest: "dd" }).contains("1 to 64"));
        let one = "[[tenant]]\nname = 'blue'\ntoken_sha256 = 'aa'\n";
        assert_eq!(refused(one, Change::Remove { name: "blue" }), "`blue` is the only tenant, and the file needs one");
        let inline = "tenant = [{ name = 'blue', token_sha256 = 'aa' }, { name = 'green', token_sha256 = 'bb' }]\n";
        assert!(refused(inline, Change::Remove { name: "blue" }).contains("change it with an editor"));
        assert!(changed(inline, Change::Add { name: "red", digest: "dd" }).is_err());
    }

    #[test]
    fn the_file_is_replaced_and_keeps_its_mode() {
        let dir = Scratch::new();
        let path = dir.write("tenants", FILE);
        std::fs::set_permissions(&path, Permissions::from_mode(0o640)).unwrap();
        let link = dir.0.join("link");
        std::os::unix::fs::symlink(&path, &link).unwrap();
        edit(&link, Change::Remove { name: "green" }).unwrap();
        assert!(link.is_symlink());
        assert!(!std::fs::read_to_string(&path).unwrap().contains("green"));
        assert_eq!(path.metadata().unwrap().mode() & 0o7777, 0o640);
        assert!(edit(&link, Change::Remove { name: "green" }).is_err());
        assert_eq!(std::fs::read_dir(&dir.0).unwrap().count(), 2, "no temporary file is left");
    }
}

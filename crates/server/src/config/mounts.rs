//! The setting `mount`: directories of this machine that contexts see. Everything that can be wrong with a mount is
//! found here, while the configuration is read, and not by the first client.

use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};

use engine::op::SharedVolume;
use engine::{DATA, WORKSPACE};
use runtimes::Resolved;
use rustix::fs::{Access as Permission, Mode, OFlags};
use serde::Deserialize;

use super::{ConfigError, Effective, beside, nearest};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct MountConfig {
    pub volume: SharedVolume,
    /// Dialects whose contexts have it.
    pub dialects: Vec<&'static str>,
    /// Tenants that the operator named. Without a name it is for the local tenant alone.
    pub tenants: Vec<String>,
}

/// Name that stands for all tenants.
pub(crate) const ALL_TENANTS: &str = "*";

/// Where contexts can have mounts: in place of the first two, and below each of them.
const PLACES: [&str; 4] = [WORKSPACE, DATA, "/tmp", "/mnt"];
/// The browser writes its downloads to one of these.
const DOWNLOADS: [&str; 2] = ["/workspace/downloads", "/tmp/downloads"];
/// Directories of the machine that are no files of anybody, or that hold the sockets of its services.
const SYSTEM: [&str; 4] = ["/proc", "/sys", "/dev", "/run"];
/// Where removable media are, below one of them.
const MEDIA: &str = "/run/media";

/// The content of `[[mount]]` in the file, and of `--mount`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct MountTable {
    host: PathBuf,
    guest: Option<PathBuf>,
    #[serde(default)]
    access: MountAccess,
    dialects: Option<Vec<String>>,
    tenants: Option<Vec<String>>,
}

#[derive(Deserialize, Default, Clone, Copy, PartialEq, Eq)]
#[serde(rename_all = "lowercase")]
enum MountAccess {
    #[default]
    Ro,
    Rw,
}

/// Files of the server that code must not reach through a mount.
#[derive(Default)]
pub(super) struct PrivateFiles {
    /// Those that code must neither read nor write, each with its setting.
    pub secret: Vec<(String, PathBuf)>,
    /// Those that code must not write, because the server trusts them.
    pub trusted: Vec<(String, PathBuf)>,
    /// Home directories of people, with their keys and the files that their shells execute.
    pub homes: Vec<PathBuf>,
}

/// Converts the text of `--mount` to the table that `[[mount]]` has in the file.
pub(super) fn from_flag(text: &str) -> Result<toml::Table, String> {
    let (paths, access) = match text.rsplit_once(':') {
        Some((paths, access @ ("ro" | "rw"))) => (paths, Some(access)),
        _ => (text, None),
    };
    let (host, guest) = paths.rsplit_once(':').map_or((paths, None), |(host, guest)| (host, Some(guest)));
    if host.is_empty() || guest.is_some_and(|guest| !guest.starts_with('/')) {
        return Err(format!(
            "`{text}` is not `HOST[:GUEST][:ro|rw]`, where GUEST is an absolute path; a HOST with a colon goes into \
             `[[mount]]` in the configuration file"
        ));
    }
    let host = std::path::absolute(host).map_err(|error| format!("`{host}`: {error}"))?;
    let host = host.to_str().ok_or_else(|| format!("`{text}`: the working directory is not valid UTF-8"))?;
    let members = [("host", Some(host)), ("guest", guest), ("access", access)];
    Ok(members.into_iter().filter_map(|(key, value)| Some((key.into(), value?.into()))).collect())
}

pub(super) fn typed(
    effective: &Effective,
    is_root: bool,
    private: &PrivateFiles,
) -> Result<Vec<MountConfig>, ConfigError> {
    let beside = beside(effective);
    let tables = effective.value("mount").and_then(toml::Value::as_array);
    let tables = tables.into_iter().flatten().map(|table| ("mount", table.clone()));
    let mut mounts: Vec<MountConfig> = Vec::new();
    let mut links = Vec::new();
    for (key, table) in workspace(effective)?.map(|table| ("workspace", table.into())).into_iter().chain(tables) {
        let name = table.get("host").and_then(toml::Value::as_str).unwrap_or_default().to_owned();
        let wrong = |why: &str| effective.error(key, &format!("`{name}`: {why}"));
        let table: MountTable = table.try_into().map_err(|error: toml::de::Error| wrong(error.message().trim()))?;
        let host = beside.as_deref().map_or_else(|| table.host.clone(), |dir| dir.join(&table.host));
        links.extend(Resolved::of(&host).links.into_iter().map(|link| (key, name.clone(), link)));
        let mount = mount(table, &host, is_root, private).map_err(|why| wrong(&why))?;
        if let Some(other) = mounts.iter().find(|other| mount.collides_with(other)) {
            let (own, other) = (mount.volume.inside.display(), other.volume.inside.display());
            return Err(wrong(&format!(
                "its place `{own}` and that of another mount, `{other}`, contain each other; give it a place of its \
                 own, such as `/mnt/{}`",
                mount.volume.inside.file_name().unwrap_or_default().display()
            )));
        }
        mounts.push(mount);
    }
    // Code could change where such a mount leads at the next start.
    let writable =
        |link: &Path| mounts.iter().any(|mount| !mount.volume.read_only && link.starts_with(&mount.volume.host));
    match links.into_iter().find(|(_, _, link)| writable(link)) {
        None => Ok(mounts),
        Some((key, name, link)) => Err(effective.error(
            key,
            &format!(
                "`{name}`: the symlink `{}` is in a writable mount, where code can change it; give the path without it",
                link.display()
            ),
        )),
    }
}

/// Returns the table that `workspace` is short for. A path from the file stays relative to the file.
fn workspace(effective: &Effective) -> Result<Option<toml::Table>, ConfigError> {
    let Some(host) = effective.get::<Option<String>>("workspace")? else { return Ok(None) };
    if effective.is_from_file("workspace") {
        let members = [("host", host.as_str()), ("guest", WORKSPACE), ("access", "rw")];
        return Ok(Some(members.into_iter().map(|(key, value)| (key.to_owned(), value.into())).collect()));
    }
    from_flag(&format!("{host}:{WORKSPACE}:rw")).map(Some).map_err(|why| effective.error("workspace", &why))
}

fn mount(table: MountTable, host: &Path, is_root: bool, private: &PrivateFiles) -> Result<MountConfig, String> {
    let MountTable { guest, access, dialects, tenants, .. } = table;
    // The path without symlinks: later, none is followed.
    let host = fs::canonicalize(host).map_err(|error| error.to_string())?;
    let found = fs::metadata(&host).map_err(|error| error.to_string())?;
    check_host(&host, &found, access, private)?;
    check_rights(&host, &found, access, is_root)?;
    let inside = match guest {
        Some(guest) => guest,
        None => Path::new(WORKSPACE).join(host.file_name().unwrap_or_default()),
    };
    let inside = check_guest(&inside)?;
    // An empty list would later mean the local tenant.
    if tenants.as_ref().is_some_and(Vec::is_empty) {
        return Err("`tenants` is empty: name those that may use it".into());
    }
    Ok(MountConfig {
        volume: SharedVolume { host, inside, read_only: access == MountAccess::Ro },
        dialects: check_dialects(dialects)?,
        tenants: tenants.unwrap_or_default(),
    })
}

impl MountConfig {
    fn collides_with(&self, other: &Self) -> bool {
        let (a, b) = (&self.volume.inside, &other.volume.inside);
        let both = |a: &[String], b: &[String]| {
            let all = |tenants: &[String]| tenants.iter().any(|name| name == ALL_TENANTS);
            all(a) || all(b) || (a.is_empty() && b.is_empty()) || a.iter().any(|name| b.contains(name))
        };
        (a.starts_with(b) || b.starts_with(a))
            && self.dialects.iter().any(|id| other.dialects.contains(id))
            && both(&self.tenants, &other.tenants)
    }
}

fn check_guest(guest: &Path) -> Result<PathBuf, String> {
    let steps_up = guest.components().any(|part| part == Component::ParentDir);
    let normal: PathBuf = guest.components().collect();
    let fits = PLACES.iter().any(|place| normal.starts_with(place)) && normal != Path::new("/tmp");
    if steps_up || !fits || DOWNLOADS.iter().any(|dir| normal.starts_with(dir)) {
        return Err(format!(
            "`{}` is not a place for a mount; use `/workspace`, `/data`, or a directory below `/workspace`, `/data`, \
             `/tmp` or `/mnt` (but neither `{}` nor `{}`)",
            guest.display(),
            DOWNLOADS[0],
            DOWNLOADS[1]
        ));
    }
    Ok(normal)
}

fn check_host(host: &Path, found: &Metadata, access: MountAccess, private: &PrivateFiles) -> Result<(), String> {
    if !found.is_dir() {
        return Err("is not a directory".into());
    }
    check_place(host, access == MountAccess::Rw, private)
}

/// Refuses directories, given without symlinks, that no sandbox may see, whether they exist yet or not.
pub(super) fn check_place(host: &Path, writes: bool, private: &PrivateFiles) -> Result<(), String> {
    let is_system = SYSTEM.iter().any(|dir| host.starts_with(dir)) && !host.starts_with(MEDIA);
    if host == Path::new("/") || is_system || shows_the_kernel(host) {
        return Err("is a part of the system and not a directory of files; mount another directory".into());
    }
    private.check(host, writes)?;
    if let Some(home) = private.homes.iter().find(|home| home.starts_with(host)) {
        return Err(format!(
            "holds the home directory `{}`, with keys and with files that a shell executes; mount a directory below it",
            home.display()
        ));
    }
    Ok(())
}

impl PrivateFiles {
    /// Refuses a directory, given without symlinks, that would show or let code change one of the files.
    fn check(&self, host: &Path, writes: bool) -> Result<(), String> {
        for (setting, path) in self.secret.iter().chain(self.trusted.iter().filter(|_| writes)) {
            let Resolved { real, links } = Resolved::of(path);
            let is_in_it = real.starts_with(host) || (host.starts_with(&real) && real.is_dir());
            let leads_through_it = writes && links.iter().any(|link| link.starts_with(host));
            if is_in_it || leads_through_it {
                let remedy = match self.secret.iter().any(|(secret, _)| secret == setting) {
                    true => "mount a directory below it, or move the file",
                    false => "mount a directory below it, move the file, or mount it read-only",
                };
                let shown = if is_in_it { &real } else { path };
                return Err(format!("holds `{}` (`{setting}`), which code must not reach; {remedy}", shown.display()));
            }
        }
        Ok(())
    }
}

fn shows_the_kernel(dir: &Path) -> bool {
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    rustix::fs::open(dir, flags, Mode::empty()).is_ok_and(sandbox::is_kernel_file_system)
}

/// Returns the home directories of root, of people and of the user of the server. Those of services are left out: they
/// are directories of data.
pub(super) fn homes(users: &str, own: Option<&Path>) -> Vec<PathBuf> {
    const PEOPLE: std::ops::Range<u32> = 1000..65_534;
    let home = |line: &str| {
        let mut fields = line.split(':').skip(2);
        let user: u32 = fields.next()?.parse().ok()?;
        let home = Path::new(fields.nth(2)?);
        (user == 0 || PEOPLE.contains(&user)).then(|| home.to_owned())
    };
    let all = users.lines().filter_map(home).chain(own.map(Path::to_owned));
    all.filter(|home| home.is_absolute()).map(|home| Resolved::of(&home).real).filter(|home| home.is_dir()).collect()
}

/// Checks that the code of a sandbox will be able to use the directory. For root, the owner of the directory becomes the
/// sandbox's user, which may not be root; for an ordinary user, the sandbox has the rights of that user.
fn check_rights(host: &Path, found: &Metadata, access: MountAccess, is_root: bool) -> Result<(), String> {
    let writes = access == MountAccess::Rw;
    let belongs_to_root = found.uid() == 0 || found.gid() == 0;
    if is_root && belongs_to_root && writes {
        return Err("belongs to root, and files that code writes there would, too; give it to another user and group \
                    (`chown -R USER:GROUP`), or mount it read-only with `:ro`"
            .into());
    }
    if is_root && belongs_to_root && found.mode() & 0o005 != 0o005 {
        return Err("belongs to root, and nobody else may read it; give it to another user and group \
                    (`chown -R USER:GROUP`), or let everybody read it (`chmod o+rx`)"
            .into());
    }
    let wanted = if writes { Permission::WRITE_OK } else { Permission::READ_OK } | Permission::EXEC_OK;
    if !is_root && rustix::fs::access(host, wanted).is_err() {
        let owner = if found.uid() == 0 { "belongs to root" } else { "belongs to another user" };
        let remedy = if writes { "; choose a directory of yours, or mount it read-only with `:ro`" } else { "" };
        let verb = if writes { "write" } else { "read" };
        return Err(format!("{owner}, and you may not {verb} there{remedy}"));
    }
    Ok(())
}

fn check_dialects(wanted: Option<Vec<String>>) -> Result<Vec<&'static str>, String> {
    let fit = || dialects::IDS.iter().copied().filter(|id| *id != dialects::conversation::REALM.0);
    let Some(wanted) = wanted else { return Ok(fit().collect()) };
    let known = |name: &String| {
        fit().find(|id| id == name).ok_or_else(|| {
            let nearest = nearest(name, fit()).unwrap_or_default();
            format!("`dialects`: there is no dialect `{name}` with mounts; did you mean `{nearest}`?")
        })
    };
    wanted.iter().map(known).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Environment, Sources};
    use testkit::scratch::Scratch;

    /// Loads a configuration whose home is below the directory.
    fn load(dir: &Scratch, file: &str, flags: &[&str], is_root: bool) -> Result<Vec<MountConfig>, String> {
        let home = dir.0.join("home");
        let path = dir.write("sandpool.toml", file);
        let mut given = vec![("config", path.to_string_lossy().into_owned())];
        given.extend(flags.iter().map(|flag| ("mount", flag.replace("DIR", &dir.0.to_string_lossy()))));
        let environment = Environment::of(&[("HOME", home.to_str().unwrap())]);
        let config = Config::load(&Sources { environment, flags: given, is_root });
        config.map(|config| config.mounts).map_err(|error| error.to_string().replace(&*dir.0.to_string_lossy(), "DIR"))
    }

    /// Returns a directory with some to mount. Whoever runs the tests may write to them.
    fn scratch() -> Scratch {
        let dir = Scratch::new();
        for name in ["project", "a:b", "home/.local/state/sandpool/data", "home/.local/share/sandpool/runtimes"] {
            fs::create_dir_all(dir.0.join(name)).unwrap();
        }
        dir
    }

    fn shown(dir: &Scratch, mounts: &[MountConfig]) -> Vec<String> {
        let row = |mount: &MountConfig| {
            let SharedVolume { host, inside, read_only } = &mount.volume;
            let host = host.strip_prefix(dir.0.canonicalize().unwrap()).unwrap();
            format!("{} {} {}", host.display(), inside.display(), if *read_only { "ro" } else { "rw" })
        };
        mounts.iter().map(row).collect()
    }

    #[test]
    fn a_mount_is_read_only_and_in_the_workspace_unless_it_says_otherwise() {
        let dir = scratch();
        // The owner of the directory does not matter to an ordinary user who may write there.
        for (flag, mount) in [
            ("DIR/project", "project /workspace/project ro"),
            ("DIR/project/../project/.", "project /workspace/project ro"),
            ("DIR/project:rw", "project /workspace/project rw"),
            ("DIR/project:/data:rw", "project /data rw"),
            ("DIR/project:/workspace", "project /workspace ro"),
            ("DIR/project:/tmp/x/:rw", "project /tmp/x rw"),
            ("DIR/project:/mnt//y:ro", "project /mnt/y ro"),
            ("DIR/a:b:/data/c", "a:b /data/c ro"),
        ] {
            assert_eq!(shown(&dir, &load(&dir, "", &[flag], false).unwrap()), [mount], "{flag}");
        }
        let file =
            "[[mount]]\nhost = 'a:b'\nguest = '/data/x'\naccess = 'rw'\ndialects = ['workbench']\ntenants = ['blue']";
        let mounts = load(&dir, file, &["DIR/project"], false).unwrap();
        assert_eq!(shown(&dir, &mounts), ["a:b /data/x rw", "project /workspace/project ro"], "a flag adds one");
        assert_eq!((&mounts[0].dialects[..], &mounts[0].tenants[..]), (&["workbench"][..], &["blue".to_owned()][..]));
        assert!(mounts[1].dialects.contains(&"sandpool") && !mounts[1].dialects.contains(&"conversation"));
        assert!(mounts[1].tenants.is_empty());
    }

    #[test]
    fn a_symlink_is_resolved_once_and_the_name_is_that_of_the_directory() {
        let dir = scratch();
        std::os::unix::fs::symlink(dir.0.join("project"), dir.0.join("link")).unwrap();
        assert_eq!(shown(&dir, &load(&dir, "", &["DIR/link"], false).unwrap()), ["project /workspace/project ro"]);
    }

    #[test]
    fn what_cannot_be_mounted_is_refused_with_a_remedy() {
        let dir = scratch();
        dir.write("file", "");
        dir.write("home/secret", "");
        std::os::unix::fs::symlink("/", dir.0.join("root")).unwrap();
        for (flag, why) in [
            ("", "is not `HOST[:GUEST][:ro|rw]`"),
            (":/data", "is not `HOST[:GUEST][:ro|rw]`"),
            ("DIR/project:data", "is not `HOST[:GUEST][:ro|rw]`"),
            ("DIR/project:/data:wr", "is not `HOST[:GUEST][:ro|rw]`"),
            ("DIR/none", "No such file or directory"),
            ("DIR/file", "is not a directory"),
            ("/", "is a part of the system"),
            ("DIR/root", "is a part of the system"),
            ("/proc/self", "is a part of the system"),
            ("DIR/project:/", "is not a place for a mount"),
            ("DIR/project:/tmp", "is not a place for a mount"),
            ("DIR/project:/usr", "is not a place for a mount"),
            ("DIR/project:/proc/x", "is not a place for a mount"),
            ("DIR/project:/dev/shm", "is not a place for a mount"),
            ("DIR/project:/etc", "is not a place for a mount"),
            ("DIR/project:/workspace/../usr", "is not a place for a mount"),
            ("DIR/project:/workspaces", "is not a place for a mount"),
            ("DIR/project:/workspace/downloads", "is not a place for a mount"),
            ("DIR/home/.local/state/sandpool", "(`state_dir`), which code must not reach"),
            ("DIR/home/.local/state/sandpool/data", "(`state_dir`), which code must not reach"),
            ("DIR/home", "(`state_dir`), which code must not reach"),
            ("DIR/home/.local/share:rw", "(`runtimes.dir`), which code must not reach"),
        ] {
            let refused = load(&dir, "", &[flag], false).unwrap_err();
            assert!(refused.starts_with("`mount` (from --mount): ") && refused.contains(why), "{flag}: {refused}");
        }
        // What the server trusts can be read.
        assert!(load(&dir, "", &["DIR/home/.local/share"], false).is_ok());
        let file = |text: &str| load(&dir, text, &[], false).unwrap_err();
        let private = PrivateFiles {
            trusted: vec![("config".into(), dir.0.join("project/sandpool.toml"))],
            ..PrivateFiles::default()
        };
        let (host, found) = (dir.0.join("project"), fs::metadata(dir.0.join("project")).unwrap());
        let host = host.canonicalize().unwrap();
        let refused = check_host(&host, &found, MountAccess::Rw, &private).unwrap_err();
        assert!(refused.contains("(`config`), which code must not reach"), "{refused}");
        assert_eq!(check_host(&host, &found, MountAccess::Ro, &private), Ok(()));
        assert!(file("[[mount]]\nhost = 'project'\naccess = 'w'").contains("unknown variant `w`"));
        assert!(file("[[mount]]\nhost = 'project'\nread_only = true").contains("unknown field `read_only`"));
        assert!(file("[[mount]]\nhost = 'project'\ntenants = []").contains("`tenants` is empty"));
        let dialect = file("[[mount]]\nhost = 'project'\ndialects = ['sandpol']");
        assert!(dialect.ends_with("did you mean `sandpool`?"), "{dialect}");
        assert!(file("[[mount]]\nhost = 'project'\ndialects = ['conversation']").contains("with mounts"));
        let secret = "auth.token_file = 'DIR/a:b/token'\n[[mount]]\nhost = 'a:b'";
        let secret = file(&secret.replace("DIR", &dir.0.to_string_lossy()));
        assert!(secret.contains("(`auth.token_file`), which code must not reach"), "{secret}");
    }

    #[test]
    fn no_mount_is_found_through_a_symlink_of_a_writable_one() {
        let dir = scratch();
        fs::create_dir_all(dir.0.join("outside")).unwrap();
        std::os::unix::fs::symlink("../outside", dir.0.join("project/link")).unwrap();
        let two = |access: &str| {
            let file = format!(
                "[[mount]]\nhost = 'project'\naccess = '{access}'\n[[mount]]\nhost = 'project/link'\nguest = '/data'"
            );
            load(&dir, &file, &[], false)
        };
        let refused = two("rw").unwrap_err();
        assert!(refused.contains("the symlink `DIR/project/link` is in a writable mount"), "{refused}");
        assert_eq!(shown(&dir, &two("ro").unwrap()), ["project /workspace/project ro", "outside /data ro"]);
    }

    #[test]
    fn home_directories_and_sockets_of_services_are_refused() {
        let dir = scratch();
        let place = dir.0.canonicalize().unwrap();
        let at = |name: &str| place.join(name).display().to_string();
        let users = format!(
            "root:x:0:0:root:{}:/bin/sh\ndaemon:x:1:1::{}:/bin/false\nann:x:1000:1000:Ann:{}:/bin/sh\nbroken\n\
             nobody:x:65534:65534::{}:/bin/false\nnone:x:1001:1001::{}:/bin/sh\n",
            at("project"),
            at("a:b"),
            at("home"),
            at("a:b"),
            at("nowhere")
        );
        let homes = homes(&users, Some(Path::new("relative")));
        assert_eq!(homes, [place.join("project"), place.join("home")]);
        let private = PrivateFiles { homes, ..PrivateFiles::default() };
        let check = |host: &Path| check_host(host, &fs::metadata(host).unwrap(), MountAccess::Ro, &private);
        for host in [place.join("home"), place.clone()] {
            let refused = check(&host).unwrap_err();
            assert!(refused.starts_with("holds the home directory `"), "{refused}");
        }
        assert_eq!(check(&place.join("home/.local")), Ok(()));
        assert_eq!(check(&place.join("a:b")), Ok(()), "the home of a service");
        if Path::new("/run/lock").is_dir() {
            assert!(check(&fs::canonicalize("/run/lock").unwrap()).unwrap_err().contains("is a part of the system"));
        }
    }

    /// W64: what the server reads or executes must not change because code wrote a file, also not at its next start.
    #[test]
    fn w64_what_the_server_trusts_is_in_no_writable_mount_and_no_path_leads_through_one() {
        let dir = scratch();
        for name in ["outside", "python/bin", "python/lib/python3.13"] {
            fs::create_dir_all(dir.0.join(name)).unwrap();
        }
        dir.write("outside/keys.json", "{}");
        std::os::unix::fs::symlink("../outside", dir.0.join("project/link")).unwrap();
        let place = dir.0.to_string_lossy().into_owned();
        let of = |setting: &str, host: &str, access: &str| {
            let file = format!("{setting}\n[[mount]]\nhost = '{host}'\naccess = '{access}'").replace("DIR", &place);
            load(&dir, &file, &[], false)
        };
        for (setting, host) in [
            ("auth.jwks = 'DIR/project/keys.json'", "project"),
            ("auth.jwks = 'DIR/project/link/keys.json'", "project"),
            ("auth.tenants = 'DIR/project/link/tenants.toml'", "project"),
            ("auth.token_file = 'DIR/project/link/token'", "project"),
            ("runtimes.python = 'DIR/project/.venv/bin/python'", "project"),
            ("runtimes.python = 'DIR/python/bin/python3'", "python/lib/python3.13"),
            ("runtimes.node = 'DIR/project/link/../node'", "project"),
            ("browser = 'DIR/project/chromium'", "project"),
        ] {
            let name = setting.split(' ').next().unwrap();
            let refused = of(setting, host, "rw").unwrap_err();
            assert!(refused.contains(&format!("(`{name}`), which code must not reach")), "{setting}: {refused}");
        }
        // Code may read what is no secret, and changes nothing.
        for setting in ["auth.jwks = 'DIR/project/keys.json'", "runtimes.python = 'DIR/project/.venv/bin/python'"] {
            assert!(of(setting, "project", "ro").is_ok(), "{setting}");
        }
        assert!(of("auth.jwks = 'https://id.example.com/project/keys'", "project", "rw").is_ok());
        assert!(of("runtimes.python = 'DIR/python/bin/python3'", "project", "rw").is_ok());
    }

    /// W64: a shared volume of the dialect `microsandbox` is no mount, but code writes to it all the same.
    #[test]
    fn w64_a_shared_volume_holds_nothing_that_the_server_trusts() {
        let dir = scratch();
        let volumes = |text: &str| {
            let place = dir.0.canonicalize().unwrap();
            let text = format!("microsandbox.volumes = ['{}']", text.replace("DIR", place.to_str().unwrap()));
            load(&dir, &text, &[], false).map(drop)
        };
        for (volume, setting) in [
            ("DIR:/v:ro", "state_dir"),
            ("DIR/home/.config:/v", "config"),
            ("DIR/home/.local/share:/v", "runtimes.dir"),
        ] {
            let refused = volumes(volume).unwrap_err();
            assert!(refused.starts_with("`microsandbox.volumes` (from "), "{refused}");
            assert!(refused.contains(&format!("(`{setting}`), which code must not reach")), "{refused}");
        }
        let refused = volumes("/proc:/v:ro").unwrap_err();
        assert!(refused.contains("is a part of the system"), "{refused}");
        assert_eq!(volumes("DIR/project:/v"), Ok(()));
        assert_eq!(volumes("DIR/home/.local/share:/v:ro"), Ok(()));
    }

    /// W64: the next start would read the configuration file that code wrote.
    #[test]
    fn w64_the_usual_place_of_the_configuration_file_is_in_no_writable_mount() {
        let dir = scratch();
        let config = dir.0.join("home/.config/sandpool");
        fs::create_dir_all(&config).unwrap();
        for flag in ["DIR/home/.config:rw", "DIR/home/.config/sandpool:rw"] {
            let refused = load(&dir, "", &[flag], false).unwrap_err();
            let why = "home/.config/sandpool/sandpool.toml` (`config`), which code must not reach; mount a directory below \
                       it, move the file, or mount it read-only";
            assert!(refused.ends_with(why), "{flag}: {refused}");
        }
        assert!(load(&dir, "", &["DIR/home/.config"], false).is_ok());
        // The directory need not exist either, and may be elsewhere.
        fs::remove_dir(&config).unwrap();
        assert!(load(&dir, "", &["DIR/home/.config:rw"], false).is_err());
        std::os::unix::fs::symlink(dir.0.join("project"), &config).unwrap();
        assert!(load(&dir, "", &["DIR/home/.config:rw"], false).is_err());
        assert!(load(&dir, "", &["DIR/project:rw"], false).is_err());
    }

    #[test]
    fn no_mount_is_in_another_for_the_same_tenant() {
        let dir = scratch();
        let two = |first: &str, second: &str| {
            let file = format!(
                "[[mount]]\nhost = 'project'\nguest = '/data'\n{first}\n[[mount]]\nhost = 'a:b'\nguest = '/data/x'\n{second}"
            );
            load(&dir, &file, &[], false)
        };
        let refused = two("", "").unwrap_err();
        assert!(refused.contains("`/data/x`") && refused.ends_with("such as `/mnt/x`"), "{refused}");
        assert!(two("tenants = ['blue']", "tenants = ['blue', 'green']").is_err());
        assert!(two("tenants = ['*']", "tenants = ['green']").is_err());
        assert!(two("tenants = ['blue']", "tenants = ['green']").is_ok());
        assert!(two("dialects = ['workbench']", "dialects = ['sandpool']").is_ok());
    }

    #[test]
    fn for_a_server_of_root_roots_directory_is_refused_for_writing() {
        // `/usr` belongs to root on every machine, and everybody may read it.
        let dir = scratch();
        let refused = load(&dir, "", &["/usr:/data:rw"], true).unwrap_err();
        assert!(refused.contains("belongs to root") && refused.contains("chown -R USER:GROUP"), "{refused}");
        assert!(refused.contains("`:ro`"), "{refused}");
        assert!(load(&dir, "", &["/usr:/data:ro"], true).is_ok());
        if !rustix::process::geteuid().is_root() {
            let refused = load(&dir, "", &["/usr:/data:rw"], false).unwrap_err();
            assert!(refused.contains("belongs to root, and you may not write there"), "{refused}");
        }
    }
}

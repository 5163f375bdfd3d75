//! The names of all tenants that have or had a token, in a file of the state directory. No subject of the identity
//! provider gets one of these names, because it would find the files that the tenant left, also after a restart.

use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{self, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

/// Adds names to the file, one in each line, and returns all of them. It creates the file when there is a name to add.
pub(super) fn add<'a>(path: &Path, names: impl Iterator<Item = &'a str>) -> io::Result<BTreeSet<String>> {
    let text = match std::fs::read_to_string(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => String::new(),
        read => read?,
    };
    let mut all: BTreeSet<String> = text.lines().map(str::to_owned).collect();
    let new: String = names.filter(|name| all.insert((*name).to_owned())).map(|name| format!("{name}\n")).collect();
    if new.is_empty() {
        return Ok(all);
    }
    if let Some(dir) = path.parent() {
        std::fs::create_dir_all(dir)?;
    }
    let mut file = OpenOptions::new().append(true).create(true).mode(0o600).open(path)?;
    // A crash may have cut the last line.
    let start = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    file.write_all(format!("{start}{new}").as_bytes())?;
    file.sync_all()?;
    Ok(all)
}

#[cfg(test)]
mod tests {
    use super::*;
    use testkit::scratch::Scratch;

    #[test]
    fn names_are_only_added_and_a_cut_line_spoils_none() {
        let dir = Scratch::new();
        let path = dir.0.join("state/names");
        let add = |names: &[&str]| add(&path, names.iter().copied()).unwrap().into_iter().collect::<Vec<_>>().join(" ");
        assert_eq!((add(&[]).as_str(), path.exists()), ("", false));
        assert_eq!(add(&["blue", "green"]), "blue green");
        assert_eq!(add(&["green"]), "blue green");
        std::fs::write(&path, "blue\ngre").unwrap();
        assert_eq!(add(&["green", "red"]), "blue gre green red");
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "blue\ngre\ngreen\nred\n");
    }
}

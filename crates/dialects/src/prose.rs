//! Parses the prose files: `# section`, a description (one line for each paragraph), then ``- `field`: text`` lines.

/// Returns the body of a section.
pub(super) fn section<'a>(prose: &'a str, name: &str) -> Option<&'a str> {
    prose.split("\n# ").map(|part| part.strip_prefix("# ").unwrap_or(part)).find_map(|part| {
        let (title, body) = part.split_once('\n')?;
        (title.trim() == name).then_some(body)
    })
}

/// Returns the text before the list of fields.
pub(super) fn description(section: &str) -> &str {
    section.split("\n- `").next().unwrap_or(section).trim()
}

pub(super) fn field<'a>(section: &'a str, name: &str) -> Option<&'a str> {
    section.lines().find_map(|line| line.strip_prefix("- `")?.strip_prefix(name)?.strip_prefix("`: "))
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROSE: &str = "# one\nFirst.\n\n- `a`: the a\n- `ab`: the ab\n\n# two\nSecond.\nMore.\n";

    #[test]
    fn a_section_has_a_description_and_fields() {
        let one = section(PROSE, "one").unwrap();
        assert_eq!(description(one), "First.");
        assert_eq!(field(one, "a"), Some("the a"));
        assert_eq!(field(one, "ab"), Some("the ab"));
        assert_eq!(description(section(PROSE, "two").unwrap()), "Second.\nMore.");
        assert_eq!(section(PROSE, "three"), None);
    }
}

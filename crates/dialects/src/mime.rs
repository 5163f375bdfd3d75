//! Determines the media type of a file from the extension of its name. A file with another extension is plain bytes.

/// Extensions and media types of the files that are common in sandboxes.
const KNOWN: &[(&str, &str)] = &[
    ("css", "text/css"),
    ("csv", "text/csv"),
    ("docx", "application/vnd.openxmlformats-officedocument.wordprocessingml.document"),
    ("gif", "image/gif"),
    ("gz", "application/gzip"),
    ("htm", "text/html"),
    ("html", "text/html"),
    ("ico", "image/x-icon"),
    ("ipynb", "application/x-ipynb+json"),
    ("jpeg", "image/jpeg"),
    ("jpg", "image/jpeg"),
    ("js", "text/javascript"),
    ("json", "application/json"),
    ("log", "text/plain"),
    ("md", "text/markdown"),
    ("mjs", "text/javascript"),
    ("mp3", "audio/mpeg"),
    ("mp4", "video/mp4"),
    ("parquet", "application/vnd.apache.parquet"),
    ("pdf", "application/pdf"),
    ("png", "image/png"),
    ("pptx", "application/vnd.openxmlformats-officedocument.presentationml.presentation"),
    ("py", "text/x-python"),
    ("sh", "application/x-sh"),
    ("svg", "image/svg+xml"),
    ("tar", "application/x-tar"),
    ("toml", "application/toml"),
    ("ts", "text/x-typescript"),
    ("tsv", "text/tab-separated-values"),
    ("txt", "text/plain"),
    ("wav", "audio/wav"),
    ("webm", "video/webm"),
    ("webp", "image/webp"),
    ("xlsx", "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet"),
    ("xml", "application/xml"),
    ("yaml", "application/yaml"),
    ("yml", "application/yaml"),
    ("zip", "application/zip"),
];

pub fn of(name: &str) -> &'static str {
    let end = name.rsplit_once('.').map(|(_, end)| end.to_ascii_lowercase());
    let known = KNOWN.iter().find(|(known, _)| Some(*known) == end.as_deref());
    known.map_or("application/octet-stream", |(_, mime)| mime)
}

/// Returns whether the content is shown as text rather than as bytes.
pub fn is_text(mime: &str) -> bool {
    mime.starts_with("text/")
        || matches!(
            mime,
            "application/json"
                | "application/xml"
                | "application/yaml"
                | "application/toml"
                | "application/x-sh"
                | "image/svg+xml"
        )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_end_of_the_name_decides() {
        assert_eq!(of("a.b/plot.PNG"), "image/png");
        assert_eq!(of("data"), "application/octet-stream");
        assert_eq!(of("x.unknown"), "application/octet-stream");
        assert!(is_text(of("a.csv")) && !is_text(of("a.zip")));
        assert!(KNOWN.is_sorted(), "easy to look through");
    }
}

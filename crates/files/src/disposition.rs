//! `Content-Disposition` (RFC 6266): makes a browser save the file under its name, whatever the name is.

use dialects::links::encoded;

/// Returns the header's value with the name in two forms: encoded for clients that implement RFC 8187, and in ASCII for
/// those that do not. The ASCII form has no `%`, because some clients decode it.
pub(crate) fn attachment(name: &str) -> String {
    let safe = |c: char| if matches!(c, ' '..='~') && !matches!(c, '"' | '\\' | '%') { c } else { '_' };
    let fallback: String = name.chars().map(safe).collect();
    format!("attachment; filename=\"{fallback}\"; filename*=UTF-8''{}", encoded(name))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Covers hostile row A14.
    #[test]
    fn no_name_can_end_the_header_or_the_quotes() {
        let cases = [
            ("plot.png", r#"attachment; filename="plot.png"; filename*=UTF-8''plot.png"#),
            ("a\"b\\c.txt", r#"attachment; filename="a_b_c.txt"; filename*=UTF-8''a%22b%5Cc.txt"#),
            (
                "x\r\nSet-Cookie: a=1",
                r#"attachment; filename="x__Set-Cookie: a=1"; filename*=UTF-8''x%0D%0ASet-Cookie%3A%20a%3D1"#,
            ),
            ("图.csv", r#"attachment; filename="_.csv"; filename*=UTF-8''%E5%9B%BE.csv"#),
            ("é.csv", r#"attachment; filename="_.csv"; filename*=UTF-8''%C3%A9.csv"#),
            ("100%25;'.txt", r#"attachment; filename="100_25;'.txt"; filename*=UTF-8''100%2525%3B%27.txt"#),
            ("\u{202e}gpj.exe\u{7f}", r#"attachment; filename="_gpj.exe_"; filename*=UTF-8''%E2%80%AEgpj.exe%7F"#),
        ];
        for (name, header) in cases {
            assert_eq!(attachment(name), header);
            assert!(http::HeaderValue::try_from(header).is_ok());
        }
    }
}

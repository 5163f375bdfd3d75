//! Reads the one file of a form (`multipart/form-data`, RFC 7578) as it arrives, without collecting it.

use axum::body::Bytes;
use http::HeaderValue;

use super::upload::{Incoming, UploadFailure};

/// Maximum size of what precedes the content of the file: a preamble and the header of its part.
const MAX_HEAD: usize = 16 << 10;

/// The content of the file in a form.
pub(super) struct FormFile {
    body: Incoming,
    /// Line end, two hyphens and the boundary, which follow the content.
    delimiter: Vec<u8>,
    /// Bytes that arrived and were not returned.
    buffer: Vec<u8>,
    is_over: bool,
}

impl FormFile {
    /// Reads up to the beginning of the content.
    pub(super) async fn open(content_type: Option<&HeaderValue>, body: Incoming) -> Result<Self, UploadFailure> {
        let boundary = content_type.and_then(|value| boundary(value.to_str().ok()?));
        let boundary = boundary.ok_or(UploadFailure::Form("send the form as multipart/form-data"))?;
        let delimiter = [b"\r\n--", boundary.as_bytes()].concat();
        // The first delimiter needs no line end before it.
        let mut form = Self { body, delimiter, buffer: b"\r\n".to_vec(), is_over: false };
        let delimiter = form.delimiter.clone();
        form.read_past(&delimiter).await?;
        let header = form.read_past(b"\r\n\r\n").await?;
        let header = String::from_utf8_lossy(&header).to_ascii_lowercase();
        let disposition = header.lines().find_map(|line| line.strip_prefix("content-disposition:")).unwrap_or_default();
        if !disposition.contains("name=\"file\"") || disposition.contains("filename=\"\"") {
            return Err(UploadFailure::Form("choose a file first"));
        }
        Ok(form)
    }

    /// Returns the next bytes of the content, or `None` after its end.
    pub(super) async fn next(&mut self) -> Result<Option<Bytes>, UploadFailure> {
        while !self.is_over {
            if let Some(at) = find(&self.buffer, &self.delimiter) {
                let content = self.buffer[..at].to_vec();
                self.buffer.drain(..at + self.delimiter.len());
                self.is_over = true;
                self.check_end().await?;
                return Ok(Some(content.into()));
            }
            // The last bytes may be the beginning of the delimiter.
            let safe = self.buffer.len().saturating_sub(self.delimiter.len() - 1);
            if safe > 0 {
                return Ok(Some(self.buffer.drain(..safe).collect::<Vec<u8>>().into()));
            }
            self.read_more().await?;
        }
        Ok(None)
    }

    /// Checks that the form ends after the file: a broken form must not look like a short file.
    async fn check_end(&mut self) -> Result<(), UploadFailure> {
        while self.buffer.len() < 2 {
            self.read_more().await?;
        }
        match self.buffer.starts_with(b"--") {
            true => Ok(()),
            false => Err(UploadFailure::Form("this link takes one file")),
        }
    }

    /// Reads until `end` and returns what stands before it.
    async fn read_past(&mut self, end: &[u8]) -> Result<Vec<u8>, UploadFailure> {
        loop {
            if let Some(at) = find(&self.buffer, end) {
                let before = self.buffer[..at].to_vec();
                self.buffer.drain(..at + end.len());
                return Ok(before);
            }
            if self.buffer.len() > MAX_HEAD {
                return Err(UploadFailure::Form("the form has no file"));
            }
            self.read_more().await?;
        }
    }

    async fn read_more(&mut self) -> Result<(), UploadFailure> {
        let more = self.body.next().await?.ok_or(UploadFailure::Form("the form broke off"))?;
        self.buffer.extend_from_slice(&more);
        Ok(())
    }
}

/// Returns the boundary of a form: 1 to 70 characters that need no escape.
fn boundary(content_type: &str) -> Option<&str> {
    let (kind, parameters) = content_type.split_once(';')?;
    let named = parameters.split(';').find_map(|parameter| {
        let (name, value) = parameter.trim().split_once('=')?;
        name.eq_ignore_ascii_case("boundary").then_some(value)
    })?;
    let boundary = named.strip_prefix('"').and_then(|quoted| quoted.strip_suffix('"')).unwrap_or(named);
    let is_plain = (1..=70).contains(&boundary.len()) && boundary.bytes().all(|b| b.is_ascii_graphic() && b != b'"');
    (kind.trim().eq_ignore_ascii_case("multipart/form-data") && is_plain).then_some(boundary)
}

fn find(text: &[u8], part: &[u8]) -> Option<usize> {
    let first = *part.first()?;
    let mut from = 0;
    while let Some(at) = text[from..].iter().position(|byte| *byte == first) {
        from += at;
        if text[from..].starts_with(part) {
            return Some(from);
        }
        from += 1;
    }
    None
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use axum::body::Body;
    use futures_util::stream;
    use telemetry::transfer::{Direction, Transfer};

    use super::*;

    const TYPE: &str = "multipart/form-data; boundary=xYz";
    const HEAD: &str = "--xYz\r\nContent-Disposition: form-data; name=\"file\"; filename=\"a.txt\"\r\nContent-Type: text/plain\r\n\r\n";

    async fn read(content_type: &str, form: &[u8], piece: usize) -> Result<Vec<u8>, String> {
        let pieces: Vec<_> = form.chunks(piece).map(|piece| Ok::<_, std::io::Error>(piece.to_vec())).collect();
        let transfer = Arc::new(Transfer::begin(&Arc::default(), Direction::Upload, "", None));
        let body = Incoming::new(Body::from_stream(stream::iter(pieces)), transfer);
        let content_type = HeaderValue::from_str(content_type).unwrap();
        let mut file = FormFile::open(Some(&content_type), body).await.map_err(|failure| failure.to_string())?;
        let mut content = Vec::new();
        while let Some(bytes) = file.next().await.map_err(|failure| failure.to_string())? {
            content.extend_from_slice(&bytes);
        }
        Ok(content)
    }

    /// Contents that look like delimiters, in pieces of every size.
    #[tokio::test]
    async fn a_file_comes_out_as_it_went_in_however_it_arrives() {
        let contents: [&[u8]; 8] =
            [b"", b"x", b"\r\n", b"\r\n--xY", b"\r\n--xYy\r\n--", b"--xYz--", b"\r\r\n\r\n--x\0\xff", &[b'\r'; 300]];
        for content in contents {
            let form = [HEAD.as_bytes(), content, b"\r\n--xYz--\r\nepilogue"].concat();
            for piece in 1..form.len() {
                assert_eq!(read(TYPE, &form, piece).await.as_deref(), Ok(content), "{content:?} by {piece}");
            }
        }
        let quoted = "Multipart/Form-Data; charset=utf-8; Boundary=\"xYz\"";
        let form = [b"preamble\r\n".as_slice(), HEAD.as_bytes(), b"1\r\n--xYz--"].concat();
        assert_eq!(read(quoted, &form, 7).await.as_deref(), Ok(b"1".as_slice()));
    }

    #[tokio::test]
    async fn broken_and_foreign_forms_are_refused() {
        let second = format!("{HEAD}1\r\n{HEAD}2\r\n--xYz--");
        let none = HEAD.replace("a.txt", "") + "\r\n--xYz--";
        let other = HEAD.replace("\"file\"", "\"other\"") + "1\r\n--xYz--";
        let long = format!("--xYz\r\nX: {}\r\n\r\n1\r\n--xYz--", "x".repeat(2 * MAX_HEAD));
        for (form, why) in [
            (second.as_str(), "this link takes one file"),
            (&none, "choose a file first"),
            (&other, "choose a file first"),
            (&long, "the form has no file"),
            ("", "the form broke off"),
            (HEAD, "the form broke off"),
            (&format!("{HEAD}half\r\n--xY"), "the form broke off"),
            (&format!("{HEAD}half\r\n--xYz"), "the form broke off"),
        ] {
            assert_eq!(read(TYPE, form.as_bytes(), 5).await, Err(why.into()), "{form}");
        }
        for content_type in
            ["text/plain", "multipart/form-data", "multipart/form-data; boundary=", "multipart/mixed; boundary=xYz"]
        {
            let why = "send the form as multipart/form-data";
            assert_eq!(read(content_type, HEAD.as_bytes(), 99).await, Err(why.into()), "{content_type}");
        }
    }
}

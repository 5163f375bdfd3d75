//! Takes known texts out of an answer on its way, also where one comes in two pieces. Each is masked by as many characters, so that
//! the lengths that were announced remain true.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Buf as _, Bytes, BytesMut};
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use memchr::memmem;
use pin_project_lite::pin_project;
use zeroize::Zeroizing;

const MASK: u8 = b'*';

/// What is to be masked.
#[derive(Default)]
pub struct Needles(Vec<Zeroizing<Vec<u8>>>);

impl Needles {
    pub fn add(&mut self, needle: &[u8]) {
        if !needle.is_empty() {
            self.0.push(Zeroizing::new(needle.to_vec()));
        }
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Masks in `shown` what is found in `text`, which is as long. Found are also those that overlap: one may be part of another.
    fn mask(&self, text: &[u8], shown: &mut [u8]) -> bool {
        let mut found = false;
        for needle in &self.0 {
            let mut from = 0;
            while let Some(at) = memmem::find(&text[from..], needle) {
                shown[from + at..from + at + needle.len()].fill(MASK);
                from += at + 1;
                found = true;
            }
        }
        found
    }

    /// How many bytes at the end may be the beginning of one.
    fn begun(&self, text: &[u8]) -> usize {
        let begun = |needle: &Zeroizing<Vec<u8>>| {
            let most = (needle.len() - 1).min(text.len());
            (1..=most).rev().find(|length| needle.starts_with(&text[text.len() - length..])).unwrap_or(0)
        };
        self.0.iter().map(begun).max().unwrap_or(0)
    }

    /// Names come in small letters, whatever they were.
    fn is_in_name(&self, name: &HeaderName) -> bool {
        self.0.iter().any(|needle| memmem::find(name.as_str().as_bytes(), &needle.to_ascii_lowercase()).is_some())
    }

    pub fn mask_headers(&self, headers: &mut HeaderMap) {
        let named: Vec<HeaderName> = headers.keys().filter(|name| self.is_in_name(name)).cloned().collect();
        for name in named {
            headers.remove(name);
        }
        for value in headers.values_mut() {
            let mut bytes = value.as_bytes().to_vec();
            if self.mask(value.as_bytes(), &mut bytes)
                && let Ok(masked) = HeaderValue::from_bytes(&bytes)
            {
                *value = masked;
            }
        }
    }
}

pin_project! {
    /// A body without them.
    pub struct Scrubbed<B> {
        #[pin]
        body: B,
        needles: Needles,
        // What may be the beginning of one, until the next piece says: as it came, and with what was found in it masked.
        held: BytesMut,
        shown: BytesMut,
        trailers: Option<HeaderMap>,
        ended: bool,
    }
}

impl<B> Scrubbed<B> {
    pub fn new(body: B, needles: Needles) -> Self {
        Self { body, needles, held: BytesMut::new(), shown: BytesMut::new(), trailers: None, ended: false }
    }
}

impl<B: Body<Data = Bytes>> Body for Scrubbed<B> {
    type Data = Bytes;
    type Error = B::Error;

    fn poll_frame(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Result<Frame<Bytes>, B::Error>>> {
        let mut this = self.project();
        if this.needles.is_empty() {
            return this.body.poll_frame(context);
        }
        while !*this.ended {
            match ready!(this.body.as_mut().poll_frame(context)) {
                None => *this.ended = true,
                Some(Err(error)) => return Poll::Ready(Some(Err(error))),
                Some(Ok(frame)) => match frame.into_data() {
                    Ok(data) => {
                        this.held.extend_from_slice(&data);
                        this.shown.extend_from_slice(&data);
                        this.needles.mask(this.held, this.shown);
                        let ready = this.held.len() - this.needles.begun(this.held);
                        if ready > 0 {
                            this.held.advance(ready);
                            return Poll::Ready(Some(Ok(Frame::data(this.shown.split_to(ready).freeze()))));
                        }
                    }
                    Err(frame) => {
                        *this.trailers = frame.into_trailers().ok().map(|mut trailers| {
                            this.needles.mask_headers(&mut trailers);
                            trailers
                        });
                        *this.ended = true;
                    }
                },
            }
        }
        if !this.shown.is_empty() {
            this.held.clear();
            return Poll::Ready(Some(Ok(Frame::data(this.shown.split().freeze()))));
        }
        Poll::Ready(this.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.shown.is_empty() && self.trailers.is_none() && (self.ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let (held, inner) = (self.shown.len() as u64, self.body.size_hint());
        let mut hint = SizeHint::new();
        if let Some(upper) = inner.upper() {
            hint.set_upper(upper + held);
        }
        hint.set_lower(inner.lower() + held);
        hint
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use http_body_util::{BodyExt, StreamBody};

    use super::*;

    async fn scrubbed(pieces: &[&str], needles: &[&str]) -> Vec<String> {
        let frames: Vec<_> = pieces
            .iter()
            .map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::copy_from_slice(piece.as_bytes()))))
            .collect();
        let mut all = Needles::default();
        needles.iter().for_each(|needle| all.add(needle.as_bytes()));
        let mut body = Scrubbed::new(StreamBody::new(futures_util::stream::iter(frames)), all);
        let mut out = Vec::new();
        while let Some(frame) = body.frame().await {
            out.push(String::from_utf8(frame.unwrap().into_data().unwrap().to_vec()).unwrap());
        }
        out
    }

    #[tokio::test]
    async fn a_text_is_masked_wherever_the_pieces_are_cut() {
        let whole = "a=hunter22; b=hunter2; hunter22hunter22";
        let expected = "a=********; b=hunter2; ****************";
        for first in 0..whole.len() {
            for second in first..whole.len() {
                let pieces = [&whole[..first], &whole[first..second], &whole[second..]];
                assert_eq!(scrubbed(&pieces, &["hunter22"]).await.concat(), expected, "{first} {second}");
            }
        }
    }

    #[tokio::test]
    async fn what_cannot_be_a_beginning_is_not_held_back() {
        assert_eq!(
            scrubbed(&["data: one\n\n", "data: h", "ow\n\n"], &["hunter22"]).await,
            ["data: one\n\n", "data: ", "how\n\n"]
        );
        assert_eq!(scrubbed(&["hunt"], &["hunter22"]).await, ["hunt"]);
        assert_eq!(scrubbed(&["aab", "aac"], &["aabaac", "other-one"]).await.concat(), "******");
    }

    #[tokio::test]
    async fn of_texts_that_overlap_nothing_remains() {
        for (whole, needles) in [
            // One is the beginning of another, which must not be recognised by its rest.
            ("hunter22-and-more", &["hunter22", "hunter22-and-more"][..]),
            ("hunter22-tail", &["hunter22", "22-tail"]),
            // What somebody puts before it makes an earlier place of it look like the right one.
            ("abcabcabcab", &["abcabcab"]),
        ] {
            for cut in 0..whole.len() {
                let shown = scrubbed(&[&whole[..cut], &whole[cut..]], needles).await.concat();
                assert_eq!(shown, "*".repeat(whole.len()), "{whole} at {cut}");
            }
        }
    }
}

//! Takes known texts out of an answer on its way, also where one comes in two pieces. Each is masked by as many characters, so that
//! the lengths that were announced remain true.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::{Bytes, BytesMut};
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{HeaderMap, HeaderValue};
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

    fn mask(&self, text: &mut [u8]) -> bool {
        let mut found = false;
        for needle in &self.0 {
            let mut from = 0;
            while let Some(at) = memmem::find(&text[from..], needle) {
                text[from + at..from + at + needle.len()].fill(MASK);
                from += at + needle.len();
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

    pub fn mask_headers(&self, headers: &mut HeaderMap) {
        for value in headers.values_mut() {
            let mut bytes = value.as_bytes().to_vec();
            if self.mask(&mut bytes)
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
        // What may be the beginning of one, until the next piece says.
        held: BytesMut,
        trailers: Option<HeaderMap>,
        ended: bool,
    }
}

impl<B> Scrubbed<B> {
    pub fn new(body: B, needles: Needles) -> Self {
        Self { body, needles, held: BytesMut::new(), trailers: None, ended: false }
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
                        this.needles.mask(this.held);
                        let ready = this.held.len() - this.needles.begun(this.held);
                        if ready > 0 {
                            return Poll::Ready(Some(Ok(Frame::data(this.held.split_to(ready).freeze()))));
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
        if !this.held.is_empty() {
            return Poll::Ready(Some(Ok(Frame::data(this.held.split().freeze()))));
        }
        Poll::Ready(this.trailers.take().map(|trailers| Ok(Frame::trailers(trailers))))
    }

    fn is_end_stream(&self) -> bool {
        self.held.is_empty() && self.trailers.is_none() && (self.ended || self.body.is_end_stream())
    }

    fn size_hint(&self) -> SizeHint {
        let (held, inner) = (self.held.len() as u64, self.body.size_hint());
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
}

//! Masks secrets in a response as it streams through, even if a secret is split between two chunks. A mask is as long
//! as the secret it hides, so announced lengths stay correct.
//!
//! Code in the sandbox chooses its requests, and a host may echo what it receives. Code can therefore put any text
//! into a response and observe how the response arrives. It must not learn from this how much of the text is the
//! beginning of a secret; otherwise it could find the secret letter by letter. Therefore:
//!
//! - **The amount held back does not depend on the letters of a secret.** After each chunk, everything is released
//!   except the last `longest - 1` bytes, where `longest` is the length of the longest text to mask. In
//!   addition, everything is released up to the last byte that no secret can contain, which is any byte other than
//!   printable ASCII ([`is_possible`]). Both follow from lengths and from bytes that the host sent. The number and
//!   sizes of the chunks, and the arrival that releases each of them, are the same for every text with the same
//!   lengths and the same unprintable bytes. This is also sufficient: a secret that ends after the released part also
//!   begins after it.
//! - **The work does not depend on the letters either.** A search that compares letters, or that skips ahead by rare
//!   letters, takes longer the more letters match, and a long response multiplies the difference. Here each byte
//!   costs one step of a rolling hash with a random key for each secret. Letters are compared only where the hashes
//!   are equal, which without the whole secret happens once in 2^48 bytes or more.
//! - **Masking reveals only whole secrets.** Code that already has the whole secret learns that it is correct, which
//!   the host itself would tell it as well.
//!
//! The lengths of secrets are not hidden: the host's `Content-Length` reveals them where it echoes one.

use std::hash::{BuildHasher as _, Hasher as _, RandomState};
use std::pin::Pin;
use std::task::{Context, Poll, ready};

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD_NO_PAD;
use bytes::{Buf as _, Bytes, BytesMut};
use hyper::body::{Body, Frame, SizeHint};
use hyper::header::{HeaderMap, HeaderName, HeaderValue};
use pin_project_lite::pin_project;
use zeroize::Zeroizing;

const MASK: u8 = b'*';

/// Returns whether a secret, or its base64 form, can contain this byte: [`crate::Value::parse`] refuses all others.
fn is_possible(byte: u8) -> bool {
    matches!(byte, b' '..=b'~')
}

/// The texts to mask.
pub(crate) struct Needles {
    /// Key of the hashes. Code that knew it could construct texts with equal hashes.
    key: u64,
    all: Vec<Needle>,
}

struct Needle {
    text: Zeroizing<Vec<u8>>,
    hash: u64,
    /// Weight of the first byte in the hash.
    first: u64,
    /// Numbers of bytes before and after the text that are masked with it.
    edges: (usize, usize),
}

/// Progress of the search for one needle: the hash of the last bytes, at most one fewer than the needle has.
#[derive(Clone, Copy, Default)]
struct Window {
    hash: u64,
    length: usize,
    /// Number of bytes still to mask after a needle that was found.
    after: usize,
}

/// Modulus of the hashes. It is a Mersenne prime, so that no division is needed, whose duration would depend on its
/// operands.
const PRIME: u64 = (1 << 61) - 1;

fn reduce(value: u128) -> u64 {
    let folded = (value as u64 & PRIME) + (value >> 61) as u64;
    folded.min(folded.wrapping_sub(PRIME))
}

fn product(a: u64, b: u64) -> u64 {
    reduce(u128::from(a) * u128::from(b))
}

impl Default for Needles {
    fn default() -> Self {
        let random = RandomState::new().build_hasher().finish();
        Self { key: random % (PRIME - 256) + 256, all: Vec::new() }
    }
}

impl Needles {
    /// Adds a text to mask. All its bytes have to be [possible](is_possible).
    pub(crate) fn add(&mut self, needle: &[u8]) {
        self.add_with_edges(needle, (0, 0));
    }

    /// Adds the base64 of a text for wherever it can stand in the base64 of a longer one, such as a password after the
    /// name of its user. A group of four characters holds three bytes, so there are three forms. Their first and last
    /// characters can depend on the bytes around the text, too; these are masked, whatever they are.
    pub(crate) fn add_base64(&mut self, text: &[u8]) {
        for before in 0..3 {
            let padded = Zeroizing::new([&[0; 2][..before], text].concat());
            let encoded = Zeroizing::new(STANDARD_NO_PAD.encode(&*padded));
            let (begin, end) = ((before * 8).div_ceil(6), padded.len() * 8 / 6);
            self.add_with_edges(&encoded.as_bytes()[begin..end], (before.min(1), encoded.len() - end));
        }
    }

    fn add_with_edges(&mut self, needle: &[u8], edges: (usize, usize)) {
        debug_assert!(needle.iter().copied().all(is_possible), "it would be released before it is found");
        if needle.is_empty() {
            return;
        }
        let hash = needle.iter().fold(0, |hash, byte| self.with(hash, *byte));
        let first = needle[1..].iter().fold(1, |weight, _| product(weight, self.key));
        self.all.push(Needle { text: Zeroizing::new(needle.to_vec()), hash, first, edges });
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.all.is_empty()
    }

    fn with(&self, hash: u64, byte: u8) -> u64 {
        reduce(u128::from(hash) * u128::from(self.key) + u128::from(byte))
    }

    fn windows(&self) -> Vec<Window> {
        vec![Window::default(); self.all.len()]
    }

    /// Masks in `shown` every needle found in `text`, which has the same length. `windows` holds the state of the
    /// search at `from`. Overlapping needles are all found, because one may be part of another.
    fn mask(&self, windows: &mut [Window], text: &[u8], from: usize, shown: &mut [u8]) -> bool {
        let mut found = false;
        for (needle, window) in self.all.iter().zip(windows) {
            let length = needle.text.len();
            for at in from..text.len() {
                if !is_possible(text[at]) {
                    *window = Window::default();
                    continue;
                }
                if window.after > 0 {
                    shown[at] = MASK;
                    window.after -= 1;
                }
                window.hash = self.with(window.hash, text[at]);
                window.length += 1;
                if window.length < length {
                    continue;
                }
                let begin = at + 1 - length;
                if window.hash == needle.hash && text[begin..=at] == **needle.text {
                    shown[begin.saturating_sub(needle.edges.0)..=at].fill(MASK);
                    window.after = needle.edges.1;
                    found = true;
                }
                let oldest = product(u64::from(text[begin]), needle.first);
                window.hash = reduce(u128::from(window.hash + PRIME - oldest));
                window.length = length - 1;
            }
        }
        found
    }

    /// Returns how many bytes of `text` can be released. The bytes from `from` on are new.
    fn released(&self, text: &[u8], from: usize) -> usize {
        let longest = self.all.iter().map(|needle| needle.edges.0 + needle.text.len()).max().unwrap_or(1);
        let certain = text[from..].iter().rposition(|byte| !is_possible(*byte)).map_or(0, |at| from + at + 1);
        certain.max(text.len().saturating_sub(longest - 1))
    }

    fn masked(&self, text: &[u8]) -> Option<Vec<u8>> {
        let mut shown = text.to_vec();
        self.mask(&mut self.windows(), text, 0, &mut shown).then_some(shown)
    }

    pub(crate) fn mask_headers(&self, headers: &mut HeaderMap) {
        // Header names arrive in lower case, however they were written.
        let mut small = Self::default();
        self.all.iter().for_each(|needle| small.add(&Zeroizing::new(needle.text.to_ascii_lowercase())));
        let is_named = |name: &&HeaderName| small.masked(name.as_str().as_bytes()).is_some();
        let named: Vec<HeaderName> = headers.keys().filter(is_named).cloned().collect();
        for name in named {
            headers.remove(name);
        }
        for value in headers.values_mut() {
            if let Some(masked) = self.masked(value.as_bytes())
                && let Ok(masked) = HeaderValue::from_bytes(&masked)
            {
                *value = masked;
            }
        }
    }
}

pin_project! {
    /// A body in which the needles are masked.
    pub(crate) struct Scrubbed<B> {
        #[pin]
        body: B,
        needles: Needles,
        windows: Vec<Window>,
        // Bytes that may belong to a needle that ends later: as they arrived, and with the needles found so far
        // masked.
        held: BytesMut,
        shown: BytesMut,
        trailers: Option<HeaderMap>,
        ended: bool,
    }
}

impl<B> Scrubbed<B> {
    pub(crate) fn new(body: B, needles: Needles) -> Self {
        let windows = needles.windows();
        Self { body, needles, windows, held: BytesMut::new(), shown: BytesMut::new(), trailers: None, ended: false }
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
                        let from = this.held.len();
                        this.held.extend_from_slice(&data);
                        this.shown.extend_from_slice(&data);
                        this.needles.mask(this.windows, this.held, from, this.shown);
                        let ready = this.needles.released(this.held, from);
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

    use base64::engine::general_purpose::STANDARD;
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

    /// W52: the characters around the base64 are masked wherever the pieces are cut, too.
    #[tokio::test]
    async fn w52_the_edges_of_a_base64_are_masked_wherever_the_pieces_are_cut() {
        for (user, expected) in
            [("", "a \"***********=\""), ("u", "a \"d***********\""), ("us", "a \"dX************==\"")]
        {
            let whole = format!("a \"{}\"", STANDARD.encode(format!("{user}hunter22")));
            for first in 0..whole.len() {
                for second in first..whole.len() {
                    let pieces = [&whole[..first], &whole[first..second], &whole[second..]];
                    let frames = pieces.map(|piece| Ok::<_, Infallible>(Frame::data(Bytes::from(piece.to_owned()))));
                    let mut needles = Needles::default();
                    needles.add_base64(b"hunter22");
                    let body = Scrubbed::new(StreamBody::new(futures_util::stream::iter(frames)), needles);
                    assert_eq!(body.collect().await.unwrap().to_bytes(), expected, "{first} {second}");
                }
            }
        }
    }

    #[tokio::test]
    async fn a_line_is_not_held_back_and_other_text_by_a_fixed_number_of_bytes() {
        assert_eq!(
            scrubbed(&["data: one\n\n", "data: h", "ow\n\n"], &["hunter22"]).await,
            ["data: one\n\n", "data: how\n\n"]
        );
        assert_eq!(scrubbed(&["hunt"], &["hunter22"]).await, ["hunt"]);
        assert_eq!(scrubbed(&["0123456789", "ab"], &["hunter22"]).await, ["012", "34", "56789ab"]);
        assert_eq!(scrubbed(&["aab", "aac"], &["aabaac", "other-one"]).await.concat(), "******");
    }

    /// Returns the sizes of the chunks released by each arriving piece, and of those released by the end.
    fn moments(pieces: &[&[u8]], needles: &[&str]) -> Vec<Vec<usize>> {
        let mut all = Needles::default();
        needles.iter().for_each(|needle| all.add(needle.as_bytes()));
        let (sender, receiver) = tokio::sync::mpsc::unbounded_channel::<Bytes>();
        let mut receiver = Some(receiver);
        let arriving = futures_util::stream::poll_fn(move |context| {
            let Some(open) = &mut receiver else { return Poll::Ready(None) };
            let arrived = ready!(open.poll_recv(context));
            if arrived.is_none() {
                receiver = None;
            }
            Poll::Ready(arrived.map(|data| Ok::<_, Infallible>(Frame::data(data))))
        });
        let mut body = std::pin::pin!(Scrubbed::new(StreamBody::new(arriving), all));
        let mut context = Context::from_waker(std::task::Waker::noop());
        let mut released = || {
            let mut sizes = Vec::new();
            while let Poll::Ready(Some(frame)) = body.as_mut().poll_frame(&mut context) {
                sizes.push(frame.unwrap().into_data().unwrap().len());
            }
            sizes
        };
        let mut moments: Vec<Vec<usize>> = Vec::new();
        for piece in pieces {
            sender.send(Bytes::copy_from_slice(piece)).unwrap();
            moments.push(released());
        }
        drop(sender);
        moments.push(released());
        moments
    }

    /// W21: a text that is the beginning, the end or the whole of a secret is cut like any other text, into the same
    /// sizes and at the same moments.
    #[test]
    fn w21_what_begins_a_secret_is_cut_as_any_other_text() {
        let secrets = ["hunter22-and-a-long-tail", "hunt-the-snark"];
        for secret in secrets {
            for length in 1..=secret.len() {
                for guess in [&secret[..length], &secret[secret.len() - length..]] {
                    let other = "#".repeat(length);
                    for around in [0, 9, 23, 40] {
                        let [told, untold] = [guess, other.as_str()].map(|middle| {
                            format!("{}{middle}{}\nnext {middle}", "x".repeat(around), "y".repeat(40 - around))
                        });
                        for cut in 1..told.len() {
                            let halves = |text: &str| {
                                let (first, second) = text.as_bytes().split_at(cut);
                                moments(&[first, second], &secrets)
                            };
                            assert_eq!(halves(&told), halves(&untold), "{guess} after {around}, cut at {cut}");
                        }
                    }
                    let bytes = |text: &str| {
                        let text = format!("{text}{text}");
                        moments(&text.as_bytes().chunks(1).collect::<Vec<_>>(), &secrets)
                    };
                    assert_eq!(bytes(guess), bytes(&other), "{guess}, byte by byte");
                }
            }
        }
    }

    #[test]
    fn hashes_of_windows_are_those_of_their_bytes() {
        let mut needles = Needles::default();
        needles.add(b"0123456");
        let text: Vec<u8> = (0..5_000_u32).map(|n| b' ' + (n * n % 95) as u8).collect();
        let mut windows = needles.windows();
        for (at, _) in text.iter().enumerate() {
            needles.mask(&mut windows, &text[..=at], at, &mut text.clone());
            let last = &text[(at + 1).saturating_sub(6)..=at];
            let expected = last.iter().fold(0, |hash, byte| needles.with(hash, *byte));
            assert_eq!((windows[0].hash, windows[0].length), (expected, last.len()), "{at}");
        }
        for (value, expected) in [(0, 0), (PRIME, 0), (PRIME - 1, PRIME - 1), (PRIME + 1, 1), (2 * PRIME, 0)] {
            assert_eq!(reduce(u128::from(value)), expected, "{value}");
        }
        assert_eq!(product(PRIME - 1, PRIME - 1), 1);
    }

    #[tokio::test]
    async fn of_texts_that_overlap_nothing_remains() {
        for (whole, needles) in [
            // One needle is the beginning of the other, so the rest of the longer one must not remain visible.
            ("hunter22-and-more", &["hunter22", "hunter22-and-more"][..]),
            ("hunter22-tail", &["hunter22", "22-tail"]),
            // The text before the needle makes an earlier position look like a match.
            ("abcabcabcab", &["abcabcab"]),
        ] {
            for cut in 0..whole.len() {
                let shown = scrubbed(&[&whole[..cut], &whole[cut..]], needles).await.concat();
                assert_eq!(shown, "*".repeat(whole.len()), "{whole} at {cut}");
            }
        }
    }
}

//! This module encodes and decodes frames. A frame consists of a fixed header, which is enough to route it without
//! decoding, and a payload.
//!
//! ```text
//! 0        4      5        8                16
//! +--------+------+--------+----------------+---------
//! | length | kind | 0 0 0  | call           | payload
//! +--------+------+--------+----------------+---------
//! ```
//! Integers are little endian. `call` ties every frame to one request; the guest uses 0 for messages that no request
//! caused.

use serde::Serialize;

use crate::{MAX_CHUNK, MAX_MESSAGE};

pub const HEADER: usize = 16;

/// Maximum capacity that an empty decoder retains. Without it, one large message would occupy memory for as long as the
/// connection lives.
const MAX_RETAINED: usize = 64 << 10;

/// Type of a payload. Data frames contain raw bytes, so output and files are never JSON-escaped in transit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum FrameKind {
    Message = 1,
    Stdout = 2,
    Stderr = 3,
    File = 4,
}

impl FrameKind {
    fn from_byte(byte: u8) -> Option<Self> {
        [Self::Message, Self::Stdout, Self::Stderr, Self::File].into_iter().find(|k| *k as u8 == byte)
    }

    const fn max_payload(self) -> usize {
        match self {
            Self::Message => MAX_MESSAGE,
            Self::Stdout | Self::Stderr | Self::File => MAX_CHUNK,
        }
    }
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Frame {
    pub kind: FrameKind,
    pub call: u64,
    pub payload: Vec<u8>,
}

/// Error in a frame. Every variant ends the connection, because the next frame cannot be found after a bad one.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FrameError {
    #[error("unknown frame kind `{0}`")]
    Kind(u8),
    #[error("reserved header bytes are not zero")]
    Reserved,
    #[error("payload of `{length}` bytes is over the limit of `{limit}`")]
    TooLong { length: usize, limit: usize },
    #[error("message cannot be read: {0}")]
    Message(String),
}

/// Appends one frame. The caller must keep the payload within [`MAX_MESSAGE`] for a message, [`MAX_CHUNK`] for data.
pub fn encode(out: &mut Vec<u8>, kind: FrameKind, call: u64, payload: &[u8]) {
    debug_assert!(payload.len() <= kind.max_payload());
    out.extend_from_slice(&(payload.len() as u32).to_le_bytes());
    out.extend_from_slice(&[kind as u8, 0, 0, 0]);
    out.extend_from_slice(&call.to_le_bytes());
    out.extend_from_slice(payload);
}

/// Appends one message frame, or returns an error if it would be too long.
pub fn encode_message<M: Serialize>(out: &mut Vec<u8>, call: u64, message: &M) -> Result<(), FrameError> {
    let payload = serde_json::to_vec(message).map_err(|e| FrameError::Message(e.to_string()))?;
    if payload.len() > MAX_MESSAGE {
        return Err(FrameError::TooLong { length: payload.len(), limit: MAX_MESSAGE });
    }
    encode(out, FrameKind::Message, call, &payload);
    Ok(())
}

impl Frame {
    /// Decodes the payload as a message. `serde_json` rejects nesting deeper than 128 levels.
    pub fn message<M: serde::de::DeserializeOwned>(&self) -> Result<M, FrameError> {
        serde_json::from_slice(&self.payload).map_err(|e| FrameError::Message(e.to_string()))
    }
}

/// Decodes frames from bytes that arrive in chunks of any size.
#[derive(Debug, Default)]
pub struct Decoder {
    buffer: Vec<u8>,
    start: usize,
}

impl Decoder {
    pub fn push(&mut self, bytes: &[u8]) {
        if self.start > 0 && (self.start == self.buffer.len() || self.start >= MAX_RETAINED) {
            self.buffer.drain(..self.start);
            self.start = 0;
        }
        self.buffer.extend_from_slice(bytes);
    }

    /// Returns the next complete frame, or `None` if more bytes are needed.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let rest = &self.buffer[self.start..];
        let Some(header) = rest.first_chunk::<HEADER>() else { return Ok(None) };
        let [l0, l1, l2, l3, kind, r0, r1, r2, call @ ..] = *header;
        let length = u32::from_le_bytes([l0, l1, l2, l3]) as usize;
        let kind = FrameKind::from_byte(kind).ok_or(FrameError::Kind(kind))?;
        if [r0, r1, r2] != [0; 3] {
            return Err(FrameError::Reserved);
        }
        if length > kind.max_payload() {
            return Err(FrameError::TooLong { length, limit: kind.max_payload() });
        }
        let Some(payload) = rest.get(HEADER..HEADER + length) else { return Ok(None) };
        let frame = Frame { kind, call: u64::from_le_bytes(call), payload: payload.to_vec() };
        self.start += HEADER + length;
        if self.start == self.buffer.len() {
            self.buffer.clear();
            self.buffer.shrink_to(MAX_RETAINED);
            self.start = 0;
        }
        Ok(Some(frame))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn frames_of(bytes: &[u8], cut: usize) -> Result<Vec<Frame>, FrameError> {
        let mut decoder = Decoder::default();
        let mut frames = Vec::new();
        for chunk in bytes.chunks(cut.max(1)) {
            decoder.push(chunk);
            while let Some(frame) = decoder.next_frame()? {
                frames.push(frame);
            }
        }
        Ok(frames)
    }

    proptest! {
        #[test]
        fn what_was_encoded_comes_back_however_it_was_cut(
            parts in proptest::collection::vec((2u8..=4, any::<u64>(), proptest::collection::vec(any::<u8>(), 0..300)), 0..20),
            cut in 1usize..100,
        ) {
            let mut bytes = Vec::new();
            let sent: Vec<Frame> = parts.into_iter()
                .map(|(kind, call, payload)| Frame { kind: FrameKind::from_byte(kind).unwrap(), call, payload })
                .collect();
            for f in &sent { encode(&mut bytes, f.kind, f.call, &f.payload); }
            prop_assert_eq!(frames_of(&bytes, cut).unwrap(), sent);
        }

        #[test]
        fn arbitrary_bytes_never_panic(bytes in proptest::collection::vec(any::<u8>(), 0..2000), cut in 1usize..64) {
            let _ = frames_of(&bytes, cut);
        }
    }

    #[test]
    fn a_large_message_leaves_nothing_behind() {
        let mut bytes = Vec::new();
        encode(&mut bytes, FrameKind::Message, 1, &vec![b' '; MAX_MESSAGE]);
        let mut decoder = Decoder::default();
        bytes.chunks(64 << 10).for_each(|chunk| decoder.push(chunk));
        assert_eq!(decoder.next_frame().unwrap().unwrap().payload.len(), MAX_MESSAGE);
        assert!(decoder.buffer.capacity() <= MAX_RETAINED, "{}", decoder.buffer.capacity());
    }

    #[test]
    fn a_claimed_length_over_the_limit_is_refused_before_its_bytes_arrive() {
        let mut bytes = Vec::new();
        bytes.extend_from_slice(&u32::MAX.to_le_bytes());
        bytes.extend_from_slice(&[1, 0, 0, 0]);
        bytes.extend_from_slice(&7u64.to_le_bytes());
        assert_eq!(frames_of(&bytes, 16), Err(FrameError::TooLong { length: u32::MAX as usize, limit: MAX_MESSAGE }));
    }
}

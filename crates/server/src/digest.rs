//! Computes hashes with `ring`, which TLS needs anyway.

use ring::digest::{SHA256, digest};

/// Returns the SHA-256 of some bytes.
pub(crate) fn sha256(bytes: impl AsRef<[u8]>) -> [u8; 32] {
    digest(&SHA256, bytes.as_ref()).as_ref().try_into().expect("32 bytes")
}

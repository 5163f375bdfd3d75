//! Links: the key of a context's or a conversation's files is the permission to read them, and says nothing about whose they are.

use ring::hmac;

use crate::op::{Realm, Tenant};

/// What the names of links of a context are made of.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keys {
    /// Of the files in `/workspace`.
    pub(crate) files: String,
    /// Of output that was kept whole.
    pub(crate) outputs: String,
}

impl Keys {
    pub(crate) fn of_context(secret: &[u8; 32], tenant: &Tenant, realm: Realm, id: &str) -> Self {
        Self {
            files: key(secret, &[realm.0, &tenant.0, id]),
            outputs: key(secret, &["outputs", realm.0, &tenant.0, id]),
        }
    }
}

/// Also the name of the volume with the conversation's files.
pub(crate) fn conversation_key(secret: &[u8; 32], tenant: &Tenant, conversation: &str) -> String {
    key(secret, &[&tenant.0, conversation])
}

/// Each part with its length before it, so that no two lists of parts are the same bytes.
fn key(secret: &[u8; 32], parts: &[&str]) -> String {
    let mut hash = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
    for part in parts {
        hash.update(&(part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    hash.sign().as_ref().iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_hundred_thousand_keys_are_all_different_and_look_alike() {
        let secret = [7; 32];
        let mut seen = HashSet::new();
        for n in 0..20_000 {
            let id = format!("ctx-{n}");
            for tenant in ["a", "b"].map(|name| Tenant(name.into())) {
                let keys = Keys::of_context(&secret, &tenant, Realm::SANDPOOL, &id);
                for key in [keys.files, keys.outputs, conversation_key(&secret, &tenant, &id)] {
                    assert!(key.len() == 64 && key.bytes().all(|b| b.is_ascii_digit() || (b'a'..=b'f').contains(&b)));
                    assert!(seen.insert(key), "twice");
                }
            }
        }
        assert_eq!(seen.len(), 120_000);
    }

    #[test]
    fn moving_a_letter_from_one_part_to_the_next_changes_the_key() {
        let secret = [7; 32];
        let of = |tenant: &str, id: &str| conversation_key(&secret, &Tenant(tenant.into()), id);
        assert_ne!(of("ab", "c"), of("a", "bc"));
        assert_ne!(of("a", "b"), conversation_key(&[8; 32], &Tenant("a".into()), "b"));
        assert_ne!(of("a", "é"), of("a", "e\u{301}"), "exact bytes");
    }
}

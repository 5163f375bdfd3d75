//! Generates ids that are short and hard to confuse, for clients whose model reads and repeats them. An id is no secret:
//! every look-up is by tenant.

/// Letters and digits without those that look alike.
const ALPHABET: &[u8; 31] = b"abcdefghjkmnpqrstuvwxyz23456789";
/// With 31 symbols these are 39 bits, so that two of a tenant's few thousand ids do not collide.
const LENGTH: usize = 8;

/// Returns a new random id.
pub(crate) fn short() -> String {
    let mut random = uuid::Uuid::new_v4().as_u128();
    let symbols = (0..LENGTH).map(|_| {
        let symbol = ALPHABET[(random % ALPHABET.len() as u128) as usize];
        random /= ALPHABET.len() as u128;
        symbol as char
    });
    symbols.collect()
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn ids_are_short_and_differ() {
        let ids: BTreeSet<String> = (0..10_000).map(|_| short()).collect();
        assert!(ids.len() >= 9_999, "{}", ids.len());
        assert!(ids.iter().all(|id| id.len() == LENGTH && id.bytes().all(|byte| ALPHABET.contains(&byte))));
        // Every place has every symbol.
        for place in 0..LENGTH {
            let symbols: BTreeSet<u8> = ids.iter().map(|id| id.as_bytes()[place]).collect();
            assert_eq!(symbols.len(), ALPHABET.len());
        }
    }
}

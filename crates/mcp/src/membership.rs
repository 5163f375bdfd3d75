//! Memberships: for how long a tenant is a tenant of the server.

use std::sync::Arc;

use tokio_util::sync::CancellationToken;

/// The time from the addition of a tenant until its removal. A tenant that is removed and added again has another
/// membership, although its name is the same. The default membership has no end.
#[derive(Debug, Clone, Default)]
pub struct Membership(Option<Arc<CancellationToken>>);

impl Membership {
    /// Begins a membership that can end.
    pub fn begin() -> Self {
        Self(Some(Arc::default()))
    }

    /// Ends the membership, and all sessions and streams that belong to it.
    pub fn end(&self) {
        if let Some(ended) = &self.0 {
            ended.cancel();
        }
    }

    /// Returns a token that is cancelled when the membership ends. Cancelling the token does not end the membership.
    pub(crate) fn token(&self) -> CancellationToken {
        self.0.as_ref().map_or_else(CancellationToken::new, |ended| ended.child_token())
    }
}

impl PartialEq for Membership {
    fn eq(&self, other: &Self) -> bool {
        match (&self.0, &other.0) {
            (Some(one), Some(other)) => Arc::ptr_eq(one, other),
            (None, None) => true,
            _ => false,
        }
    }
}

impl Eq for Membership {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_membership_is_equal_only_to_itself_and_ends_its_tokens() {
        let (first, second) = (Membership::begin(), Membership::begin());
        assert!(first == first.clone() && first != second && first != Membership::default());
        assert_eq!(Membership::default(), Membership::default());
        let (token, other) = (first.token(), second.token());
        first.end();
        assert!(token.is_cancelled() && first.token().is_cancelled() && !other.is_cancelled());
        other.cancel();
        assert!(!second.token().is_cancelled());
    }
}

//! Links to files. The key of a context's or a conversation's files is the permission to read them, and does not reveal
//! their owner.

use std::sync::Arc;

use proto::Root;
use ring::hmac;
use sandbox::WORKSPACE_PREFIX;

use crate::context::ContextLease;
use crate::engine::Inner;
use crate::memory::Hold;
use crate::op::{EngineError, Realm, Tenant};
use crate::ops::read_file::{Identity, Range, read};
use crate::provision::Shape;
use crate::registry::LiveSandbox;

/// Maximum number of bytes of one read.
const MAX_READ: u64 = 1 << 20;

/// The keys of the links of a context.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Keys {
    /// Key of the files in `/workspace`.
    pub(crate) files: String,
    /// Key of the kept outputs.
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

/// Returns the key of a conversation's files, which is also the name of their kept volume.
pub(crate) fn conversation_key(secret: &[u8; 32], tenant: &Tenant, conversation: &str) -> String {
    key(secret, &[&tenant.0, conversation])
}

/// Returns the name of the kept volume that is the workspace of a named context.
pub(crate) fn workspace_name(secret: &[u8; 32], tenant: &Tenant, realm: Realm, name: &str) -> String {
    format!("{WORKSPACE_PREFIX}{}", key(secret, &["workspace", realm.0, &tenant.0, name]))
}

/// Computes a key from its parts. Each part is preceded by its length, so that no two lists of parts give the same
/// bytes.
pub(crate) fn key(secret: &[u8; 32], parts: &[&str]) -> String {
    let mut hash = hmac::Context::with_key(&hmac::Key::new(hmac::HMAC_SHA256, secret));
    for part in parts {
        hash.update(&(part.len() as u64).to_be_bytes());
        hash.update(part.as_bytes());
    }
    text::hex(hash.sign().as_ref())
}

/// A file behind a link: its metadata, and its content in pieces. While it exists its context does not count as idle.
pub struct LinkedFile {
    pub size: u64,
    pub modified_ns: i64,
    pub inode: u64,
    path: String,
    source: LinkTarget,
    inner: Arc<Inner>,
}

enum LinkTarget {
    Context { context: ContextLease, root: Root },
    Conversation { key: String, shape: Box<Shape> },
}

impl LinkedFile {
    /// Reads at most 1 MiB, less at the end of the file. Fails if the file is no longer the one that was opened.
    pub async fn read(&self, offset: u64, length: u64) -> Result<Vec<u8>, EngineError> {
        let (identity, content) = self.source.read(&self.inner, &self.path, offset, length.min(MAX_READ)).await?;
        let opened = Identity { size: self.size, modified_ns: self.modified_ns, inode: self.inode };
        if identity != opened {
            return Err(EngineError::Sandbox("the file changed while it was read".into()));
        }
        Ok(content)
    }
}

impl LinkTarget {
    /// Reads a part of the file. Its bytes are added to no hold, so callers that collect parts have to count them.
    async fn read(
        &self,
        inner: &Inner,
        path: &str,
        offset: u64,
        length: u64,
    ) -> Result<(Identity, Vec<u8>), EngineError> {
        let range = Range { offset, length, max_size: inner.config.max_link_bytes };
        let result = match self {
            Self::Context { context, root } => {
                let missing = || EngineError::FileNotFound(path.into());
                let living = context.live_sandbox().filter(|_| !context.gone.is_cancelled());
                let sandbox: Arc<LiveSandbox> = living.ok_or_else(missing)?;
                read(&sandbox, *root, path, range, &Hold::default()).await
            }
            Self::Conversation { key, shape } => {
                let wait = inner.config.queue_wait;
                let turn = tokio::time::timeout(wait, inner.conversations.turns.turn(key)).await;
                let mut turn = turn.map_err(|_| EngineError::Busy(wait))?;
                let sandbox = inner.sandbox_for_data(&mut turn, shape).await.map_err(|failure| {
                    tracing::warn!(why = failure.log, "no sandbox for a link");
                    EngineError::Sandbox(failure.public)
                })?;
                read(&sandbox, Root::Data, path, range, &Hold::default()).await
            }
        };
        // The holder of a link must learn nothing else about the files, so an invalid path looks like a missing file.
        result.map_err(|error| match error {
            EngineError::InvalidPath { path, .. } => EngineError::FileNotFound(path),
            other => other,
        })
    }
}

impl Inner {
    /// Returns the owner used for download accounting. If the owner is unknown, the key itself is the accounting
    /// bucket.
    pub(crate) fn owner_of(&self, key: &str) -> Option<String> {
        let of_context = self.tenants.by_key(key).map(|(tenant, ..)| tenant);
        let owner = of_context.or_else(|| self.conversations.owner(key));
        owner.map(|owner| owner.0).or_else(|| self.conversations.exists(key).then(|| key.into()))
    }

    /// Opens the file behind a link, which must exist and be no larger than links may serve. If a tenant is given, the
    /// link must lead to its files.
    pub(crate) async fn open_link(
        self: Arc<Self>,
        key: &str,
        path: &str,
        of: Option<&Tenant>,
    ) -> Result<LinkedFile, EngineError> {
        let source = self.target_of(key, of).ok_or_else(|| EngineError::FileNotFound(path.into()))?;
        let Identity { size, modified_ns, inode } = source.read(&self, path, 0, 0).await?.0;
        Ok(LinkedFile { size, modified_ns, inode, path: path.into(), source, inner: self })
    }

    fn target_of(&self, key: &str, of: Option<&Tenant>) -> Option<LinkTarget> {
        if let Some((tenant, context, root)) = self.tenants.by_key(key) {
            return of.is_none_or(|of| *of == tenant).then_some(LinkTarget::Context { context, root });
        }
        let realm = self.tenants.realms().find(|realm| realm.kept.is_some())?;
        let (kept, owner) = (realm.kept?, self.conversations.owner(key));
        let shape = match (&owner, of) {
            (Some(owner), of) if of.is_none_or(|tenant| tenant == owner) => {
                Shape::with_data(&*self.tenants.of(owner, realm.realm).ok()?, key, kept)
            }
            // The conversation was used before the engine started, so its tenant is unknown.
            (None, None) if self.conversations.exists(key) => Shape::for_link(realm, key, kept),
            _ => return None,
        };
        Some(LinkTarget::Conversation { key: key.into(), shape: Box::new(shape) })
    }
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
                let keys = Keys::of_context(&secret, &tenant, Realm("sandpool"), &id);
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

//! Links for uploads. Such a link permits writing one file to one path of one context, once and for a short time.
//!
//! The address of a link is an HMAC over the context's key (which covers tenant, realm and context), the path, the size
//! limit, the expiry time and a random number. The engine accepts only links that it made itself, and each of them only
//! until the first upload succeeds.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::{FromGuest, MAX_CHUNK, ToGuest};
use text::unix_now;
use tokio::runtime::Handle;
use tokio::time::Instant;

use crate::config::EngineConfig;
use crate::context::ContextLease;
use crate::engine::Inner;
use crate::guest::{GuestLost, GuestReply, PendingCall, lock};
use crate::links::key;
use crate::op::{EngineError, LimitKind, Tenant, UploadLink};
use crate::operator::Working;
use crate::ops::{FILE_WAIT, file_error};
use crate::registry::LiveSandbox;

/// Time for which a link can be used.
const LIFE: Duration = Duration::from_secs(15 * 60);
/// Time for which a link that is used or expired is remembered, so that its holder learns why it fails.
const MEMORY: Duration = Duration::from_secs(60 * 60);
/// Maximum number of links of one tenant that are usable or remembered.
const MAX_LINKS: usize = 256;
/// Number of hexadecimal digits of an id: 128 bits.
const ID_DIGITS: usize = 32;

#[derive(Default)]
pub(crate) struct UploadLinks(Mutex<HashMap<String, Grant>>);

/// The permission behind a link.
#[derive(Debug, Clone)]
struct Grant {
    tenant: Tenant,
    /// Key of the context's files.
    key: String,
    path: String,
    max_bytes: u64,
    until: Instant,
    expires_at: u64,
    state: GrantState,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum GrantState {
    Open,
    /// An upload is under way. If it fails, the link is open again.
    InUse,
    Used,
}

/// A link that can be used, as its holder may see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct UploadOffer {
    pub path: String,
    pub max_bytes: u64,
    pub expires_at: u64,
    /// Owner of the context, for the accounting of uploads.
    pub owner: String,
    /// Key of the context's files, for the journal.
    pub key: String,
}

/// The reason why a link does not permit an upload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum UploadRefusal {
    /// No such link was made, or it is forgotten.
    Unknown,
    Used,
    Expired,
    /// Another upload by this link is under way.
    InUse,
    /// The context is gone, or the guest refuses the file.
    Failed(EngineError),
}

impl UploadLinks {
    pub(crate) fn issue(
        &self,
        config: &EngineConfig,
        tenant: &Tenant,
        context_key: &str,
        path: String,
    ) -> Result<UploadLink, EngineError> {
        let (now, expires_at) = (Instant::now(), unix_now().saturating_add(LIFE.as_secs()));
        let max_bytes = config.max_link_bytes;
        let random = uuid::Uuid::new_v4().simple().to_string();
        let parts = ["upload link", context_key, &path, &max_bytes.to_string(), &expires_at.to_string(), &random];
        let mut id = key(&config.file_secret, &parts);
        id.truncate(ID_DIGITS);
        let mut grants = lock(&self.0);
        grants.retain(|_, grant| now < grant.until + MEMORY);
        let of_tenant = grants.iter().filter(|(_, grant)| grant.tenant == *tenant);
        if of_tenant.clone().count() >= MAX_LINKS {
            // Links that are used or expired make room first.
            let useless = of_tenant.filter(|(_, grant)| grant.state == GrantState::Used || grant.until <= now);
            let oldest = useless.min_by_key(|(_, grant)| grant.until).map(|(id, _)| id.clone());
            let full = || EngineError::OverLimit { what: LimitKind::UploadLinks, limit: MAX_LINKS.to_string() };
            grants.remove(&oldest.ok_or_else(full)?);
        }
        let grant = Grant {
            tenant: tenant.clone(),
            key: context_key.into(),
            path: path.clone(),
            max_bytes,
            until: now + LIFE,
            expires_at,
            state: GrantState::Open,
        };
        grants.insert(id.clone(), grant);
        Ok(UploadLink { id, path, max_bytes, expires_at })
    }

    /// Returns the link if an upload may begin now.
    fn open(&self, id: &str) -> Result<Grant, UploadRefusal> {
        usable(&lock(&self.0), id)
    }

    /// Takes the link for one upload. If several uploads begin at the same time, only one of them gets it.
    fn take(&self, id: &str) -> Result<Grant, UploadRefusal> {
        let mut grants = lock(&self.0);
        let grant = usable(&grants, id)?;
        grants.entry(id.to_owned()).and_modify(|grant| grant.state = GrantState::InUse);
        Ok(grant)
    }

    fn give_back(&self, id: &str, state: GrantState) {
        if let Some(grant) = lock(&self.0).get_mut(id) {
            grant.state = state;
        }
    }
}

fn usable(grants: &HashMap<String, Grant>, id: &str) -> Result<Grant, UploadRefusal> {
    let grant = grants.get(id).ok_or(UploadRefusal::Unknown)?;
    match grant.state {
        GrantState::Used => Err(UploadRefusal::Used),
        GrantState::InUse => Err(UploadRefusal::InUse),
        GrantState::Open if grant.until <= Instant::now() => Err(UploadRefusal::Expired),
        GrantState::Open => Ok(grant.clone()),
    }
}

/// A link that was taken. Dropping this value opens the link again, unless it was used.
struct Claim {
    inner: Arc<Inner>,
    id: String,
    used: bool,
}

impl Drop for Claim {
    fn drop(&mut self) {
        let state = if self.used { GrantState::Used } else { GrantState::Open };
        self.inner.upload_links.give_back(&self.id, state);
    }
}

/// An upload under way. If it is dropped before it is finished, nothing of the file remains and the link is open again.
/// While it exists its context does not count as idle.
pub struct Upload {
    pub max_bytes: u64,
    path: String,
    size: u64,
    claim: Claim,
    pending: PendingCall,
    sandbox: Arc<LiveSandbox>,
    context: ContextLease,
    _working: Working,
}

impl Upload {
    /// Waits until the context is removed. The file cannot be stored then.
    pub fn context_gone(&self) -> impl Future<Output = EngineError> + use<> {
        let (gone, error) = (self.context.gone.clone(), self.context.not_found());
        async move {
            gone.cancelled().await;
            error
        }
    }

    /// Sends the next bytes of the file, as fast as the guest takes them.
    pub async fn send(&mut self, bytes: &[u8]) -> Result<(), EngineError> {
        self.size = self.size.saturating_add(bytes.len() as u64);
        if self.size > self.max_bytes {
            return Err(EngineError::FileTooLarge { path: self.path.clone(), limit: self.max_bytes });
        }
        for chunk in bytes.chunks(MAX_CHUNK) {
            // A refusal may arrive before everything is sent.
            if let Some(early) = self.pending.try_next() {
                return Err(self.refused(early));
            }
            let sent = self.pending.send_file(chunk).await;
            sent.map_err(|gone| self.lost(gone))?;
        }
        Ok(())
    }

    /// Gives the file its name and returns its size. From here on the link is used.
    pub async fn finish(mut self) -> Result<u64, EngineError> {
        // The guest may store the file even if nobody waits for its answer.
        self.claim.used = true;
        let sent = self.pending.send(&ToGuest::EndFile).await;
        sent.map_err(|gone| self.lost(gone))?;
        let reply = tokio::time::timeout(2 * FILE_WAIT, self.pending.next()).await;
        let reply = reply.map_err(|_| EngineError::Sandbox("the guest did not store the file in time".into()))?;
        match reply {
            Ok(GuestReply::Message(FromGuest::Written { size })) if size == self.size => Ok(size),
            other => {
                self.claim.used = false;
                Err(self.refused(other))
            }
        }
    }

    fn refused(&self, reply: Result<GuestReply, GuestLost>) -> EngineError {
        match reply {
            Ok(GuestReply::Message(message)) => file_error(&self.path, self.max_bytes, message, &self.sandbox),
            Ok(GuestReply::Data(..)) => {
                self.lost(self.sandbox.guest.close("the guest sent data where an answer was due"))
            }
            Err(gone) => self.lost(gone),
        }
    }

    fn lost(&self, lost: GuestLost) -> EngineError {
        match self.context.gone.is_cancelled() {
            true => self.context.not_found(),
            false => EngineError::Sandbox(lost.0),
        }
    }
}

impl Drop for Upload {
    fn drop(&mut self) {
        if let (false, Ok(runtime)) = (self.claim.used, Handle::try_current()) {
            let interrupt = self.pending.interrupt();
            self.claim.inner.tasks.spawn_on(async move { drop(interrupt.await) }, &runtime);
        }
    }
}

impl Inner {
    pub(crate) fn upload_offer(&self, id: &str) -> Result<UploadOffer, UploadRefusal> {
        let Grant { tenant, key, path, max_bytes, expires_at, .. } = self.upload_links.open(id)?;
        self.tenants.by_key(&key).ok_or_else(|| context_gone(&path))?;
        Ok(UploadOffer { path, max_bytes, expires_at, owner: tenant.0, key })
    }

    pub(crate) async fn begin_upload(self: Arc<Self>, id: &str) -> Result<Upload, UploadRefusal> {
        let working = self.working().map_err(UploadRefusal::Failed)?;
        let Grant { key, path, max_bytes, .. } = self.upload_links.take(id)?;
        let claim = Claim { inner: self.clone(), id: id.to_owned(), used: false };
        let (_, context, root) = self.tenants.by_key(&key).ok_or_else(|| context_gone(&path))?;
        let living = context.live_sandbox().filter(|_| !context.gone.is_cancelled());
        let sandbox = living.ok_or_else(|| context_gone(&path))?;
        let request = ToGuest::StreamFile { root, path: path.clone(), max_size: max_bytes };
        let pending = sandbox.guest.call(&request).await;
        let pending = pending.map_err(|lost| UploadRefusal::Failed(EngineError::Sandbox(lost.0)))?;
        Ok(Upload { max_bytes, path, size: 0, claim, pending, sandbox, context, _working: working })
    }
}

/// Returns the refusal of an upload into a context that was removed or lost its sandbox.
fn context_gone(path: &str) -> UploadRefusal {
    UploadRefusal::Failed(EngineError::FileNotFound(path.into()))
}

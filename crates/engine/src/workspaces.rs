//! Workspaces that outlive their sandboxes. Named contexts have them in realms for which the operator sets `persist`.
//! Each is a kept volume with a quota, an owner and a lifetime, and one sandbox at a time has it.

use std::time::Duration;

use sandbox::{BackendError, KeptVolume, KeptWorkspace, WORKSPACE_PREFIX, WorkspaceOwner};
use text::unix_now;

use crate::config::{KeptConfig, PACKAGES, WORKSPACE};
use crate::engine::Inner;
use crate::links::workspace_name;
use crate::op::EngineError;
use crate::provision::{Provisioner, Shape};
use crate::registry::{LiveSandbox, SandboxFailure};
use crate::tenancy::Tenancy;

/// Maximum time that a context waits for its workspace while an earlier sandbox with it ends.
const PATIENCE: Duration = Duration::from_secs(10);
/// Pause between two attempts to get the workspace.
const LOOK: Duration = Duration::from_millis(100);

/// Message of the first run in a context whose workspace was there before.
pub(crate) const OPENED_AGAIN: &str =
    "[the context was opened again: variables are gone; files in /workspace and installed packages are kept]";

/// Returns whether a kept volume with this name is a workspace.
pub(crate) fn is_workspace(volume: &str) -> bool {
    volume.starts_with(WORKSPACE_PREFIX)
}

/// Returns the kept volume of a context with this name, if its workspace is to outlive its sandboxes. A mount in place
/// of the workspace lasts anyway.
pub(crate) fn volume_of(secret: &[u8; 32], tenancy: &Tenancy, context: &str) -> Option<KeptVolume> {
    let (tenant, config) = (&tenancy.tenant.tenant, tenancy.config());
    let KeptConfig { bytes, inodes, .. } = config.persist?;
    let is_mounted = tenancy.mounts().any(|mount| mount.inside == std::path::Path::new(WORKSPACE));
    if context.is_empty() || is_mounted {
        return None;
    }
    let owner =
        WorkspaceOwner { tenant: tenant.0.clone(), dialect: config.realm.0.into(), context: context.to_owned() };
    let workspace = Some(KeptWorkspace { owner, packages: PACKAGES.into() });
    Some(KeptVolume { name: workspace_name(secret, tenant, config.realm, context), bytes, inodes, workspace })
}

impl Inner {
    /// Returns whether the workspace exists. Fails if it would be a new one and the tenant already has `max_contexts`
    /// workspaces, or if they take all the space that they may take.
    pub(crate) async fn has_workspace(&self, tenancy: &Tenancy, volume: &KeptVolume) -> Result<bool, EngineError> {
        let failed = |error: BackendError| EngineError::CreateFailed(SandboxFailure::from(error).public);
        let all = self.registry.backend().kept().await.map_err(failed)?;
        if all.iter().any(|kept| kept.name == volume.name) {
            return Ok(true);
        }
        let owner = volume.workspace.as_ref().map(|workspace| &workspace.owner);
        let (most, most_bytes) = (tenancy.most_contexts(), tenancy.config().persist_bytes);
        let is_own = |kept: &WorkspaceOwner| {
            owner.is_some_and(|own| (&own.tenant, &own.dialect) == (&kept.tenant, &kept.dialect))
        };
        let own: Vec<u64> =
            all.iter().filter(|kept| kept.owner.as_ref().is_some_and(is_own)).map(|kept| kept.used_bytes).collect();
        let full = if own.len() >= most {
            format!("{most} workspaces are kept, which is the most")
        } else if own.iter().sum::<u64>() >= most_bytes {
            format!("the workspaces that are kept take {} MB, which is the most", most_bytes >> 20)
        } else {
            return Ok(false);
        };
        let remedy =
            "use the name of an earlier context, or ask the operator to remove one (`sandpool workspace remove`)";
        Err(EngineError::CreateFailed(format!("{full}: {remedy}")))
    }

    /// Deletes workspaces that were unused for too long. The back end refuses to delete one that is in use.
    pub(crate) async fn sweep_workspaces(&self, persist: KeptConfig) {
        let backend = self.registry.backend();
        let all = match backend.kept().await {
            Ok(all) => all,
            Err(error) => return tracing::warn!(%error, "cannot list the workspaces of contexts"),
        };
        let oldest = unix_now().saturating_sub(persist.stays.as_secs());
        for volume in all.into_iter().filter(|volume| is_workspace(&volume.name) && volume.last_used < oldest) {
            match backend.discard(&volume.name).await {
                Ok(()) => tracing::info!("a workspace that was unused for too long is deleted"),
                Err(error) => tracing::debug!(%error, "the workspace of a context cannot be deleted now"),
            }
        }
    }
}

impl Provisioner {
    /// Creates a sandbox. Waits while an earlier sandbox has its workspace.
    pub(crate) async fn create_with_workspace(
        &self,
        shape: &Shape,
        first: Option<proto::Language>,
    ) -> Result<std::sync::Arc<LiveSandbox>, SandboxFailure> {
        let until = tokio::time::Instant::now() + PATIENCE;
        loop {
            match self.create(shape, first).await {
                Err(failure) if failure.in_use && tokio::time::Instant::now() < until => tokio::time::sleep(LOOK).await,
                other => return other,
            }
        }
    }
}

//! Puts the parts together: configuration to engine, the native back end and its guest.

use std::sync::Arc;

use engine::{Engine, EngineConfig, Op};
use sandbox::Backend;

use super::Failed;
use crate::config::Config;
use crate::mcp::{Execute, Executing};

/// The native back end. Its launcher is started before there is a second thread.
pub struct Native {
    backend: Arc<dyn Backend>,
}

impl Native {
    pub fn launch(_config: &Config) -> Result<Self, Failed> {
        let _guest = guest()?;
        Err(Failed("the native back end is not there yet".into()))
    }

    pub fn backend(self) -> Arc<dyn Backend> {
        self.backend
    }
}

/// The guest's executable: built in, or next to ours in a development tree.
#[cfg(embedded_guest)]
fn guest() -> Result<std::borrow::Cow<'static, [u8]>, Failed> {
    Ok(include_bytes!(concat!(env!("OUT_DIR"), "/guest")).into())
}

#[cfg(not(embedded_guest))]
fn guest() -> Result<std::borrow::Cow<'static, [u8]>, Failed> {
    let own = std::env::current_exe().map_err(|error| Failed(format!("cannot find the own executable: {error}")))?;
    let path = own.with_file_name("sandpool-guest");
    let content = std::fs::read(&path).map_err(|error| {
        Failed(format!("`{}`: {error}; build the whole workspace (`cargo build`), or use `make build`", path.display()))
    })?;
    Ok(content.into())
}

impl Execute for Engine {
    fn execute<'a>(&'a self, call: &'a engine::Call, op: Op) -> Executing<'a> {
        Box::pin(self.execute(call, op))
    }
}

/// What the dialect's limits mean for the engine: memory and processor time are one budget for all contexts of a tenant.
pub fn engine_config(config: &Config) -> EngineConfig {
    let limits = &config.agentrun.limits;
    let usual = EngineConfig::default();
    let memory_bytes = limits.memory_mb << 20;
    // Within the bounds of the settings this is exact enough and fits.
    let cpu_millis = (limits.cpus * 1000.0).round() as u32;
    EngineConfig {
        timeout: limits.timeout,
        limits: sandbox::Limits {
            memory_bytes,
            cpu_millis,
            pids: limits.pids,
            disk_bytes: limits.disk_mb << 20,
            ..usual.limits
        },
        group_memory_bytes: Some(memory_bytes),
        group_cpu_millis: Some(cpu_millis),
        pool_size: limits.pool_size,
        session_ttl: limits.session_ttl,
        max_contexts: limits.max_contexts,
        text_budget: limits.text_budget,
        shutdown_grace: limits.shutdown_grace,
        ..usual
    }
}

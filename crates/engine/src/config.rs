//! Everything the engine can be told, typed. Reads no environment and no file; the defaults are those of the `agentrun` dialect.

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::time::Duration;

use proto::{KernelSpec, Language};

use crate::op::Tenant;

/// Where code starts, and what paths of files are relative to.
pub const WORKSPACE: &str = "/workspace";

#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// Of one run, unless the run asks for less or more.
    pub timeout: Duration,
    /// The most a run may ask for.
    pub max_timeout: Duration,
    /// Between the interrupt of a run and the kill.
    pub grace: Duration,
    /// Of one sandbox.
    pub limits: sandbox::Limits,
    /// Of all sandboxes of one tenant together.
    pub group_memory_bytes: Option<u64>,
    pub group_cpu_millis: Option<u32>,
    /// Of one file read or written by an operation.
    pub max_file_bytes: u64,
    /// Entries of one listing.
    pub max_files_listed: u32,
    /// Of the code of one run.
    pub max_code_bytes: usize,
    /// Sessions kept ready, and runs that execute at once, per tenant.
    pub pool_size: usize,
    pub session_ttl: Duration,
    pub health_interval: Duration,
    /// How long a run waits for a permit.
    pub queue_wait: Duration,
    /// Runs of one tenant that may wait at once.
    pub queue_length: usize,
    pub max_contexts: usize,
    /// Characters kept of each stream, value and error.
    pub text_budget: usize,
    /// Contexts nobody used for so long are stopped.
    pub idle_timeout: Option<Duration>,
    pub shutdown_grace: Duration,
    /// How long an operation waits for the engine to become ready.
    pub ready_wait: Duration,
    /// How long a sandbox, and then an interpreter, may take to start.
    pub start_timeout: Duration,
    /// The tenant whose group the sessions of the pool belong to: a sandbox cannot change its group later.
    pub pool_tenant: Tenant,
    /// Where interpreters start. `/workspace` in every real sandbox.
    pub cwd: String,
}

impl Default for EngineConfig {
    fn default() -> Self {
        let memory_bytes = 2048 << 20;
        Self {
            timeout: Duration::from_secs(30),
            max_timeout: Duration::from_secs(300),
            grace: Duration::from_secs(2),
            limits: sandbox::Limits {
                memory_bytes,
                cpu_millis: 2000,
                pids: 256,
                disk_bytes: 1024 << 20,
                disk_inodes: 100_000,
            },
            group_memory_bytes: Some(memory_bytes),
            group_cpu_millis: Some(2000),
            max_file_bytes: 16 << 20,
            max_files_listed: 10_000,
            max_code_bytes: 8 << 20,
            pool_size: 3,
            session_ttl: Duration::from_secs(60 * 60),
            health_interval: Duration::from_secs(300),
            queue_wait: Duration::from_secs(30),
            queue_length: 100,
            max_contexts: 50,
            text_budget: 20_000,
            idle_timeout: None,
            shutdown_grace: Duration::from_secs(30),
            ready_wait: Duration::from_secs(10),
            start_timeout: Duration::from_secs(60),
            pool_tenant: Tenant::local(),
            cwd: WORKSPACE.into(),
        }
    }
}

/// What is needed to start interpreters. Known only once they are installed, hence apart from the configuration.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Runtimes {
    pub python: KernelCommand,
    /// JavaScript and TypeScript; contexts in them are refused without it.
    pub node: Option<KernelCommand>,
    /// The drivers: absolute path inside the sandbox, content.
    pub files: Vec<(PathBuf, Vec<u8>)>,
}

/// How to start one interpreter. Paths are those inside the sandbox; `binds` lie at the same path on the host.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct KernelCommand {
    /// Interpreter, its flags and the driver file.
    pub argv: Vec<String>,
    /// The whole environment.
    pub env: BTreeMap<String, String>,
    /// Host directories and files it needs, shown read-only.
    pub binds: Vec<PathBuf>,
}

impl Runtimes {
    pub(crate) fn kernel(&self, language: Language, cwd: &str) -> Option<KernelSpec> {
        let command = match language {
            Language::Python => &self.python,
            Language::Javascript | Language::Typescript => self.node.as_ref()?,
        };
        Some(KernelSpec {
            language,
            argv: command.argv.clone(),
            env: command.env.clone(),
            cwd: cwd.into(),
            merge_output: false,
        })
    }

    pub(crate) fn binds(&self) -> Vec<PathBuf> {
        let mut binds = self.python.binds.clone();
        binds.extend(self.node.iter().flat_map(|node| node.binds.clone()));
        binds.sort();
        binds.dedup();
        binds
    }
}

//! How a sandbox is made on Linux: a spec becomes a plan, a plan is applied, and a small process of its own does both.
//!
//! `JailSpec → Plan → apply` ([`spec`], [`plan`](mod@plan), [`apply`]) is what one sandbox is; [`launcher`] is the process that makes,
//! watches and destroys them ([`keeper`]); [`wire`] is what the server tells it. The other modules are the layers. Nothing here knows what
//! runs in a sandbox, and nothing here is asynchronous.
#![allow(unsafe_code)] // The one crate (besides the zygote) that talks to the kernel directly.

pub mod apply;
pub mod beneath;
pub mod caps;
pub mod cgroup;
pub mod confine;
pub mod disk;
pub mod driver;
pub mod heap;
pub mod ids;
pub mod image;
pub mod inherited;
pub mod instance;
pub mod interfaces;
pub mod keeper;
pub mod kept_volumes;
pub mod landlock;
pub mod launcher;
pub mod plan;
pub mod process;
pub mod rlimits;
pub mod scope;
pub mod seccomp;
pub mod sockets;
pub mod spare;
pub mod spec;
pub mod survey;
pub mod sys;
pub mod volume;
pub mod wire;
pub mod zygote;

/// A directory for one test.
#[cfg(test)]
fn test_dir(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("sandpool-test-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

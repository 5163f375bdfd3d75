//! Creates sandboxes on Linux: a specification becomes a plan, and a small separate process computes and applies the
//! plan.
//!
//! `JailSpec → Plan → apply` ([`spec`], [`plan`](mod@plan), [`apply`]) defines one sandbox. [`launcher`] is the process
//! that creates, watches and destroys sandboxes ([`keeper`]); [`wire`] is the protocol between it and the server. The
//! other modules are the layers of confinement. Nothing in this crate knows what runs in a sandbox, and nothing is
//! asynchronous.
#![allow(unsafe_code)] // This crate and the zygote are the only ones that call the kernel directly.

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
mod token;
pub mod volume;
pub mod wire;
pub mod zygote;

/// Creates a directory for one test.
#[cfg(test)]
fn test_dir(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("sandpool-test-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

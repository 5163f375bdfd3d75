//! This crate creates sandboxes on Linux: a small separate process, the launcher, turns a specification into a plan and
//! applies it.
//!
//! `JailSpec → Plan → apply` ([`spec`], `plan`, `apply`) defines one sandbox. [`launcher`] is the process that creates,
//! watches and destroys sandboxes (`keeper`); [`wire`] is the protocol between it and the server. The other modules are
//! the layers of confinement. Nothing in this crate knows what runs in a sandbox, and nothing is asynchronous.
#![warn(unreachable_pub)]
#![allow(unsafe_code)] // This crate and the zygote are the only ones that call the Linux kernel directly.

mod apply;
pub mod beneath;
mod caps;
pub mod cgroup;
pub mod confine;
pub mod disk;
mod driver;
pub mod heap;
pub mod ids;
pub mod image;
pub mod inherited;
mod instance;
mod interfaces;
mod keeper;
pub mod kept_volumes;
mod landlock;
pub mod launcher;
mod memory;
mod plan;
pub mod pool;
pub mod process;
pub mod rlimits;
mod scope;
pub mod seccomp;
mod sockets;
mod spare;
pub mod spec;
pub mod survey;
pub mod sys;
mod token;
mod volume;
pub mod wire;
pub mod zygote;

/// Creates a directory for one test.
#[cfg(test)]
fn test_dir(name: &str) -> std::path::PathBuf {
    let dir = std::env::temp_dir().join(format!("sandpool-test-{name}-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    dir
}

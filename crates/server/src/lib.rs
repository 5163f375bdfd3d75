//! The outer layer of Sandpool: command line, configuration, runtimes, tokens, file links, journal and metrics.
//!
//! This is the only crate that knows the environment and how everything is wired together.

pub mod auth;
pub mod cli;
pub mod config;
pub mod files;
pub mod handler;
pub mod journal;
pub mod logging;
pub mod metrics;
pub mod observe;
mod persistent_secret;
pub mod runtimes;
#[cfg(test)]
mod scratch;

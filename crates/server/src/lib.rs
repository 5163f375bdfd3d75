//! The outer layer of Sandpool: command line, configuration, runtimes, the Model Context Protocol and its dialects.
//!
//! This is the only crate that knows MCP, the environment and how everything is wired together.

pub mod auth;
pub mod cli;
pub mod config;
pub mod files;
pub mod http;
pub mod journal;
pub mod logging;
pub mod mcp;
pub mod metrics;
pub mod observe;
mod persistent_secret;
pub mod runtimes;
#[cfg(test)]
mod scratch;

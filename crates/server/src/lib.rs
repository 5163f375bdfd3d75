//! The outside of Sandpool: command line, configuration, runtimes, the Model Context Protocol and its dialects.
//!
//! The only crate that knows MCP, the environment and how everything is wired together.

pub mod cli;
pub mod config;
pub mod dialect;
pub mod logging;
pub mod files;
pub mod mcp;
pub mod runtimes;

//! The outer layer of Sandpool: command line, configuration, tokens, file links, journal and metrics.
//!
//! This is the only crate that reads the environment and that connects the other crates.
#![warn(unreachable_pub)]

mod auth;
pub mod cli;
pub mod config;
mod digest;
pub mod files;
pub mod handler;
mod outgoing;

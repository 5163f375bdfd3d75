//! The outer layer of Sandpool: command line, configuration, tokens and the MCP handler.
//!
//! This is the only crate that reads the environment and that connects the other crates.
#![warn(unreachable_pub)]

mod admin;
mod auth;
pub mod cli;
pub mod config;
mod digest;
pub mod handler;
mod outgoing;

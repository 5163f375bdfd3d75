//! For tests only: back ends that isolate nothing, and clients of the built programs.

pub mod client;
pub mod collector;
pub mod fake;
pub mod host;
pub mod http;
pub mod inprocess;
pub mod pages;
pub mod probe;
pub mod scratch;

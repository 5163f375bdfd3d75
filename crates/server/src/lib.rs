//! The outside of Sandpool: command line, configuration, the Model Context Protocol and its dialects.

pub mod dialect;
pub mod mcp;

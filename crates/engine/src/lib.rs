//! placeholder
pub mod op;

//! The dialects against their documents, with a fake engine behind them: schemas, results, refusals.

#[path = "../mcp_fake/mod.rs"]
mod mcp_fake;

mod agentrun;
mod budgets;
mod conversation;
mod every;
mod microsandbox;
mod revisions;
mod sandpool;
mod tools;
mod untrusted;
mod workbench;

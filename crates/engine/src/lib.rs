//! The product in its own words: contexts, sessions, runs, files. An [`op::Op`] goes in, an [`op::Outcome`] comes out.
//!
//! Knows no protocol of the outside, no environment and no kind of back end. Everything that reaches it from a guest is bounded
//! here; everything it makes is destroyed here.

mod background;
mod browser;
mod capture;
mod cell;
pub mod config;
mod context;
mod conversation;
mod demand;
mod engine;
mod guest;
mod keyed;
mod links;
pub mod memory;
pub mod op;
mod ops;
mod provision;
mod registry;
mod sandbox_egress;
mod stock;
mod tenancy;

pub use browser::Browsers;
pub use config::{BrowserCommand, DATA, EngineConfig, KeptConfig, KernelCommand, RealmConfig, Runtimes, WORKSPACE};
pub use egress::Traffic;
pub use engine::{Counts, Engine, STARTUP_LOG};
pub use links::LinkedFile;
pub use memory::{Hold, Memory};
pub use op::{Call, EngineError, Event, EventSink, Op, Outcome, Realm, Tenant};
pub use sandbox::ZygoteStatus;
pub use stock::Ready;

//! The product without protocols: contexts, conversations, runs, files and the pool. An [`op::Op`] goes in, an
//! [`op::Outcome`] comes out.
//!
//! The engine knows no client protocol, no environment variable and no particular back end. It bounds everything that a
//! guest sends, and it destroys everything that it creates.

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
mod ids;
mod keyed;
mod links;
pub mod memory;
mod metering;
pub mod op;
mod operator;
mod ops;
mod provision;
mod registry;
mod sandbox_egress;
mod stock;
mod tenancy;
mod upload;
mod workspaces;

pub use browser::Browsers;
pub use config::{
    BrowserCommand, DATA, EngineConfig, KeptConfig, KernelCommand, Mount, RealmConfig, Runtimes, WORKSPACE,
};
pub use egress::Traffic;
pub use engine::{Counts, Engine};
pub use links::LinkedFile;
pub use memory::{Hold, Memory};
pub use metering::TenantUsage;
pub use op::{Call, EngineError, Event, EventSink, Op, Outcome, Realm, StartupStep, Tenant};
pub use operator::ContextView;
pub use sandbox::ZygoteStatus;
pub use stock::Ready;
pub use upload::{Upload, UploadOffer, UploadRefusal};

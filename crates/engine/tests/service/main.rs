//! What the tool sets need beyond cells: targets, limits, commands, background runs, conversations, links, and tenants kept apart.

#[path = "../support/mod.rs"]
mod support;

mod background;
mod browser;
mod commands;
mod conversations;
mod languages;
mod limits;
mod links;
mod network;
mod reload;
mod stages;
mod stock;
mod targets;
mod tenants;
mod uploads;

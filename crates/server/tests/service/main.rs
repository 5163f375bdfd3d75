//! The built server over HTTP with real sandboxes: tenants, load, availability, quotas. The `A` and `X` rows of the hostile
//! catalogue, as far as they need the whole program; those of the transport alone are in `tests/http`.
//! Needs the runtimes of `sandpool setup` (`make test` prepares them).

mod admin;
mod availability;
mod files;
mod launcher;
mod load;
mod many_tenants;
mod matrix;
mod memory;
mod neighbours;
mod noise;
mod noisy;
mod observed;
mod otel;
mod quotas;
mod reload;
mod requests;
mod support;

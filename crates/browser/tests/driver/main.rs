//! The driver with the real Chromium, outside of a sandbox: asked as the guest asks it.

mod actions;
mod changes;
mod downloads;
mod harness;
mod hostile;
mod reading;
mod targets;
mod widgets;

//! Puts the static guest and the library of the warm interpreter into the binary when `SANDPOOL_GUEST_EMBED` and
//! `SANDPOOL_ZYGOTE_EMBED` name them (`make build` does). Without that they are looked for next to the executable, where
//! `cargo build` leaves them.

use std::path::Path;

fn main() {
    embed("SANDPOOL_GUEST_EMBED", "guest");
    embed("SANDPOOL_ZYGOTE_EMBED", "zygote");
}

#[allow(clippy::disallowed_methods, reason = "cargo talks to build scripts through the environment")]
fn embed(variable: &str, name: &str) {
    println!("cargo::rerun-if-env-changed={variable}");
    println!("cargo::rustc-check-cfg=cfg(embedded_{name})");
    let Some(file) = std::env::var_os(variable).filter(|path| !path.is_empty()) else { return };
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    println!("cargo::rerun-if-changed={}", Path::new(&file).display());
    std::fs::copy(&file, Path::new(&out).join(name)).expect("the variable names a readable file");
    println!("cargo::rustc-cfg=embedded_{name}");
}

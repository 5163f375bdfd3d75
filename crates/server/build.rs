//! Puts the static guest into the binary when `SANDPOOL_GUEST_EMBED` names one (`make build` does). Without it the guest is
//! looked for next to the executable, where `cargo build` leaves it.

use std::path::Path;

#[allow(clippy::disallowed_methods, reason = "cargo talks to build scripts through the environment")]
fn main() {
    println!("cargo::rerun-if-env-changed=SANDPOOL_GUEST_EMBED");
    println!("cargo::rustc-check-cfg=cfg(embedded_guest)");
    let Some(guest) = std::env::var_os("SANDPOOL_GUEST_EMBED").filter(|path| !path.is_empty()) else { return };
    let out = std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR");
    println!("cargo::rerun-if-changed={}", Path::new(&guest).display());
    std::fs::copy(&guest, Path::new(&out).join("guest")).expect("SANDPOOL_GUEST_EMBED names a readable file");
    println!("cargo::rustc-cfg=embedded_guest");
}

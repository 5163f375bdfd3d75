//! This module drops all capabilities in every set, permanently.

use std::io;

use rustix::thread::{self, CapabilitiesSecureBits, CapabilitySet, CapabilitySets};

#[derive(Debug, thiserror::Error)]
#[error("cannot {step}")]
pub(crate) struct CapsError {
    pub step: &'static str,
    #[source]
    pub source: io::Error,
}

/// Empties the ambient, bounding, inheritable, permitted and effective sets and locks the rules by which root or a file
/// could fill them again. Needs CAP_SETPCAP on the first call; a second call does nothing.
pub(crate) fn drop_all() -> Result<(), CapsError> {
    let at = |step| move |e: rustix::io::Errno| CapsError { step, source: e.into() };
    thread::clear_ambient_capability_set().map_err(at("clear the ambient set"))?;
    for number in 0..u64::BITS {
        // Iterate by number, because a newer Linux kernel may have capabilities without a constant. An error marks the
        // end.
        let capability = CapabilitySet::from_bits_retain(1 << number);
        match thread::capability_is_in_bounding_set(capability) {
            Ok(true) => thread::remove_capability_from_bounding_set(capability).map_err(at("drop the bounding set"))?,
            Ok(false) => {}
            Err(_) => break,
        }
    }
    if thread::capabilities_secure_bits().map_err(at("read the secure bits"))? != LOCKED {
        thread::set_capabilities_secure_bits(LOCKED).map_err(at("lock the secure bits"))?;
    }
    let none = CapabilitySet::empty();
    thread::set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
        .map_err(at("drop the capabilities"))
}

/// Secure bits that deny privileges to uid 0, prevent keeping or gaining capabilities by a change of uids, prevent
/// raising ambient capabilities, and lock all of these rules.
const LOCKED: CapabilitiesSecureBits = CapabilitiesSecureBits::NO_ROOT
    .union(CapabilitiesSecureBits::NO_ROOT_LOCKED)
    .union(CapabilitiesSecureBits::NO_SETUID_FIXUP)
    .union(CapabilitiesSecureBits::NO_SETUID_FIXUP_LOCKED)
    .union(CapabilitiesSecureBits::KEEP_CAPS_LOCKED)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE)
    .union(CapabilitiesSecureBits::NO_CAP_AMBIENT_RAISE_LOCKED);

#[cfg(test)]
mod tests {
    use super::*;

    fn set(name: &str) -> String {
        let status = std::fs::read_to_string("/proc/thread-self/status").unwrap();
        status.lines().find_map(|l| l.strip_prefix(name)).unwrap().trim().to_owned()
    }

    #[test]
    fn nothing_is_left_in_any_set_and_a_second_time_is_no_error() {
        if !thread::capabilities(None).unwrap().effective.contains(CapabilitySet::SETPCAP) {
            eprintln!("SKIP: needs CAP_SETPCAP");
            return;
        }
        // Capabilities belong to a thread, so a separate thread protects the other tests.
        std::thread::spawn(|| {
            drop_all().unwrap();
            for name in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
                assert_eq!(set(name), "0000000000000000", "{name}");
            }
            assert_eq!(thread::capabilities_secure_bits().unwrap(), LOCKED);
            drop_all().unwrap();
        })
        .join()
        .unwrap();
    }
}

//! The capabilities that a server of root needs besides those that the trial of namespaces tests. Containers often lack
//! some of them.

use rustix::thread::CapabilitySet;

use super::{Fact, MissingRequirement, fact};

/// Capabilities without which no sandbox can be created, and what each of them is for.
const NEEDED: [(CapabilitySet, &str, &str); 4] = [
    (CapabilitySet::NET_ADMIN, "NET_ADMIN", "its loopback interface"),
    (CapabilitySet::CHOWN, "CHOWN", "the owner of its files"),
    (CapabilitySet::SETUID, "SETUID", "its uid"),
    (CapabilitySet::SETGID, "SETGID", "its gid"),
];

/// Reports which needed capabilities this process has, and refuses to run without all of them.
pub(super) fn check() -> (Option<MissingRequirement>, Fact) {
    let effective = rustix::thread::capabilities(None).map_or(CapabilitySet::empty(), |sets| sets.effective);
    judge(effective)
}

fn judge(effective: CapabilitySet) -> (Option<MissingRequirement>, Fact) {
    const LAYER: &str = "capabilities";
    let missing = NEEDED.iter().filter(|(capability, ..)| !effective.contains(*capability));
    let (names, uses): (Vec<&str>, Vec<String>) =
        missing.map(|(_, name, use_)| (*name, format!("{name} for {use_}"))).unzip();
    if names.is_empty() {
        return (None, fact(LAYER, true, NEEDED.map(|(_, name, _)| name).join(", "), ""));
    }
    let why = format!("the server lacks capabilities that each sandbox needs: {}", uses.join(", "));
    let flags: Vec<String> = names.iter().map(|name| format!("--cap-add {name}")).collect();
    let hint = format!("in a container: `{}`; in a unit of systemd: see `CapabilityBoundingSet`", flags.join(" "));
    (Some(MissingRequirement { why: why.clone(), hint: hint.clone() }), fact(LAYER, false, why, hint))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::survey::FactState;

    /// W80.
    #[test]
    fn w80_each_missing_capability_is_named_with_its_remedy() {
        let all = NEEDED.iter().fold(CapabilitySet::empty(), |all, (capability, ..)| all | *capability);
        let (refusal, fact) = judge(all | CapabilitySet::SYS_ADMIN);
        assert_eq!((refusal, fact.state), (None, FactState::On));
        for (capability, name, _) in NEEDED {
            let (refusal, fact) = judge(all - capability);
            let refusal = refusal.unwrap();
            assert_eq!((fact.state, &fact.why, &fact.what_to_do), (FactState::Off, &refusal.why, &refusal.hint));
            assert!(refusal.why.contains(&format!("needs: {name} for ")), "{refusal:?}");
        }
        let (refusal, _) = judge(all - CapabilitySet::SETUID - CapabilitySet::NET_ADMIN);
        let MissingRequirement { why, hint } = refusal.unwrap();
        assert_eq!(
            why,
            "the server lacks capabilities that each sandbox needs: NET_ADMIN for its loopback interface, SETUID for its uid"
        );
        assert!(hint.starts_with("in a container: `--cap-add NET_ADMIN --cap-add SETUID`"), "{hint}");
    }
}

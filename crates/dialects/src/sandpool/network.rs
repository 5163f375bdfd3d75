//! What a result says about the network: each denial once, and when there is no network at all.

use engine::op::{Ran, RunOutcome};

/// What the runtime prints when `pip` is started without a network.
const PIP_NOTE: &str = "NOTE: this sandbox has no network";

/// How the programs that sandboxes have report that they could not reach any host.
const NO_NETWORK: [&str; 11] = [
    PIP_NOTE,
    "name resolution",
    "Name or service not known",
    "Network is unreachable",
    "Could not resolve host",
    "Couldn't resolve host",
    "unable to resolve host",
    "EAI_AGAIN",
    "ENETUNREACH",
    "ENOTFOUND",
    "ERR_INTERNET_DISCONNECTED",
];

/// Returns the sentence for a run that failed because its sandbox has no network.
pub(super) fn off(ran: &Ran) -> Option<String> {
    let why = ran.network_off?;
    let texts = [ran.error.as_ref().map(|error| &error.text), Some(&ran.stderr.text), Some(&ran.stdout.text)];
    let says = |text: &String| NO_NETWORK.iter().any(|sign| text.contains(sign));
    let failed = !matches!(ran.end, RunOutcome::Ok | RunOutcome::Exit { code: 0 });
    (failed && texts.into_iter().flatten().any(says)).then(|| format!("Network access is off: {why}."))
}

/// Removes what the runtime says about the missing network, for a result whose note says it.
pub(super) fn without_pip_note(text: &str) -> String {
    text.split_inclusive('\n').filter(|line| !line.starts_with(PIP_NOTE)).collect()
}

/// Shortens the denials in a text to `<request> was denied`. The whole sentence, which the proxy also sends to programs,
/// is in `denied` and need not be there again.
pub(super) fn shortened(mut text: String, denied: &[String]) -> String {
    const DENIED: &str = " was denied";
    for sentence in denied {
        let Some(end) = sentence.find(DENIED).map(|at| at + DENIED.len()) else { continue };
        // As a program prints it, and as it is written inside a string.
        for written in [sentence.clone(), sentence.replace('"', "\\\"")] {
            if text.contains(&written) {
                text = text.replace(&written, &sentence[..end]);
            }
        }
    }
    text
}

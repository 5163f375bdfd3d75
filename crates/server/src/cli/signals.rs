//! Handles SIGINT and SIGTERM: the first signal asks for an orderly shutdown, the second for an immediate one.

use tokio::signal::unix::{SignalKind, signal};
use tokio_util::sync::CancellationToken;

pub(crate) struct Signals {
    pub first: CancellationToken,
    pub second: CancellationToken,
}

impl Signals {
    pub(crate) fn listen() -> std::io::Result<Self> {
        let (first, second) = (CancellationToken::new(), CancellationToken::new());
        let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let tokens = [first.clone(), second.clone()];
        tokio::spawn(async move {
            for token in tokens {
                tokio::select! {
                    _ = int.recv() => {}
                    _ = term.recv() => {}
                }
                token.cancel();
            }
        });
        Ok(Self { first, second })
    }
}

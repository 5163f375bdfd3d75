//! Handles SIGINT, SIGTERM and SIGHUP. The first SIGINT or SIGTERM asks for an orderly shutdown, the second for an
//! immediate one. SIGHUP asks a server over HTTP to reload, and everything else to end.

use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::mpsc;
use tokio_util::sync::CancellationToken;

pub(crate) struct Signals {
    pub first: CancellationToken,
    pub second: CancellationToken,
}

impl Signals {
    /// Listens for signals, each of which ends the program.
    pub(crate) fn listen() -> std::io::Result<Self> {
        Self::listen_with(None)
    }

    /// Listens for signals, and sends a message for each SIGHUP that asks for a reload.
    pub(crate) fn listen_for_reloads() -> std::io::Result<(Self, mpsc::Receiver<()>)> {
        let (sender, reloads) = mpsc::channel(1);
        Ok((Self::listen_with(Some(sender))?, reloads))
    }

    fn listen_with(reloads: Option<mpsc::Sender<()>>) -> std::io::Result<Self> {
        // A program that was started with `nohup` outlives its terminal.
        let ignores_hangups = ignores_hangups();
        let ends_with_terminal = !ignores_hangups && has_terminal();
        let (first, second) = (CancellationToken::new(), CancellationToken::new());
        let (mut int, mut term) = (signal(SignalKind::interrupt())?, signal(SignalKind::terminate())?);
        let mut hangup = signal(SignalKind::hangup())?;
        let tokens = [(first.clone(), "stopping"), (second.clone(), "stopping without delay")];
        tokio::spawn(async move {
            for (token, how) in tokens {
                let name = loop {
                    tokio::select! {
                        _ = int.recv() => break "SIGINT",
                        _ = term.recv() => break "SIGTERM",
                        _ = hangup.recv() => match &reloads {
                            Some(reloads) if !ends_with_terminal || has_terminal() => {
                                // If the channel is full, a reload is about to begin anyway.
                                let _ = reloads.try_send(());
                            }
                            None if ignores_hangups => {}
                            _ => break "SIGHUP",
                        },
                    }
                };
                tracing::info!("{name}: {how}");
                token.cancel();
            }
        });
        Ok(Self { first, second })
    }
}

/// Returns whether this process has a controlling terminal. After the terminal was closed it has none.
fn has_terminal() -> bool {
    std::fs::File::open("/dev/tty").is_ok()
}

/// Returns whether this process was started with SIGHUP ignored.
fn ignores_hangups() -> bool {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let ignored = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    // The bits count from SIGHUP, which is signal 1.
    ignored.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).is_some_and(|mask| mask & 1 == 1)
}

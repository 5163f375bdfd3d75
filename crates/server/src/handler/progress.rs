//! Sends progress notifications: output while a cell runs, and a sign of life when there is no output.
//!
//! Only a client that sent a progress token gets them. Their rate and size are bounded; a slow client loses lines but
//! never delays the cell.

use std::time::Duration;

use engine::op::{Event, Waiting};
use mcp::Outlet;
use rmcp::RoleServer;
use rmcp::model::{NumberOrString, ProgressNotification, ProgressNotificationParam, ProgressToken, ServerNotification};
use rmcp::service::{Peer, RequestContext};
use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio::time::{Instant, sleep_until};
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long output is gathered before it is sent. The answer contains the output at the end of a call.
const PACE: Duration = Duration::from_millis(100);

/// Interval between signs of life. TypeScript clients give up after 60 s without a message.
const ALIVE: Duration = Duration::from_secs(10);

/// Maximum bytes of output in one notification; the result contains what does not fit.
const MESSAGE: usize = 4096;

/// Maximum number of events that wait to be sent. A run sends ten a second.
const QUEUE: usize = 32;

/// Maximum length of a progress token, which is echoed in every notification.
const TOKEN: usize = 1024;

/// The task that sends progress notifications, if the client asked for them.
pub(super) struct Reporter(Option<(JoinHandle<Option<()>>, DropGuard)>);

impl Reporter {
    /// Returns when no more notifications will be sent, so that the answer comes last. Remaining output is not sent:
    /// the answer contains it, and a TypeScript client that reads both at once no longer knows the token.
    pub(super) async fn finish(self) {
        if let Some((task, stop)) = self.0 {
            drop(stop);
            let _ = task.await;
        }
    }
}

/// Starts the reports of a call. `waiting` says, in the words of the dialect, what the call waits for.
pub(super) fn start(
    context: &RequestContext<RoleServer>,
    waiting: fn(&Waiting) -> String,
) -> (Option<mpsc::Sender<Event>>, Reporter) {
    let Some(token) = context.meta.get_progress_token().filter(is_short) else { return (None, Reporter(None)) };
    let (sender, events) = mpsc::channel(QUEUE);
    let stop = CancellationToken::new();
    let route = match context.extensions.get::<Outlet>() {
        Some(outlet) => ProgressRoute::Outlet(outlet.clone()),
        None => ProgressRoute::Peer(context.peer.clone()),
    };
    let report = ProgressState {
        route,
        token,
        waiting,
        waits: false,
        count: 0,
        pending: String::new(),
        due: Instant::now() + ALIVE,
    };
    // After a cancellation the client no longer knows the token.
    let task = tokio::spawn(context.ct.clone().run_until_cancelled_owned(report.until(stop.clone(), events)));
    (Some(sender), Reporter(Some((task, stop.drop_guard()))))
}

fn is_short(token: &ProgressToken) -> bool {
    match &token.0 {
        NumberOrString::Number(_) => true,
        NumberOrString::String(text) => text.len() <= TOKEN,
    }
}

enum ProgressRoute {
    Peer(Peer<RoleServer>),
    Outlet(Outlet),
}

struct ProgressState {
    route: ProgressRoute,
    token: ProgressToken,
    waiting: fn(&Waiting) -> String,
    /// True while the call waits.
    waits: bool,
    count: u32,
    pending: String,
    due: Instant,
}

impl ProgressState {
    async fn until(mut self, stop: CancellationToken, mut events: mpsc::Receiver<Event>) {
        let started = Instant::now();
        let mut open = true;
        loop {
            tokio::select! {
                event = events.recv(), if open => match event {
                    Some(event) => self.add(event),
                    None => open = false,
                },
                () = sleep_until(self.due) => {
                    if self.pending.is_empty() {
                        let state = if self.waits { "waiting" } else { "running" };
                        self.pending = format!("still {state} after {} s", started.elapsed().as_secs());
                    }
                    self.send().await;
                }
                () = stop.cancelled() => break,
            }
        }
    }

    fn add(&mut self, event: Event) {
        self.waits = matches!(event, Event::Waiting(_));
        let text = match event {
            Event::Output { text, .. } => text,
            Event::Waiting(waiting) => format!("{}\n", (self.waiting)(&waiting)),
            Event::Resumed => return,
        };
        if self.pending.is_empty() {
            self.due = self.due.min(Instant::now() + PACE);
        }
        let room = MESSAGE.saturating_sub(self.pending.len());
        let cut = (0..=room.min(text.len())).rev().find(|at| text.is_char_boundary(*at)).unwrap_or(0);
        self.pending.push_str(&text[..cut]);
    }

    async fn send(&mut self) {
        self.count += 1;
        self.due = Instant::now() + ALIVE;
        let message = std::mem::take(&mut self.pending);
        let note = ProgressNotificationParam::new(self.token.clone(), f64::from(self.count))
            .with_message(message.strip_suffix('\n').unwrap_or(&message));
        match &self.route {
            ProgressRoute::Peer(peer) => drop(peer.notify_progress(note).await),
            ProgressRoute::Outlet(Outlet(notes)) => {
                let note = ServerNotification::ProgressNotification(ProgressNotification::new(note));
                let _ = notes.send(note).await;
            }
        }
    }
}

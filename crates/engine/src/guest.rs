//! The connection to the guest of one sandbox. Each call has a random number, which the frames of its replies carry.
//!
//! The host does not trust the guest. An unreadable frame, or a stream of frames that belong to no call, ends the
//! connection and with it the sandbox. A flood fills only this connection's buffer and then waits in the guest.

use std::collections::{HashMap, VecDeque};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use proto::{Decoder, Frame, FrameError, FrameKind, FromGuest, ToGuest};
use sandbox::GuestStream;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, mpsc, oneshot, watch};
use tokio_util::sync::CancellationToken;

mod bounded;

pub(crate) use bounded::{BoundedCall, CallEnd, ReplySink};

/// Number of received bytes of one connection that may wait in the host for processing. A longer frame takes all of it.
const ROOM: u32 = 1 << 20;
/// Minimum cost of a frame, so that a million empty frames are bounded too.
const FRAME_COST: u32 = 1 << 10;
/// Bounds on frames and bytes for calls that never existed, or that have used up their allowance for late data.
const MAX_STALE_FRAMES: u64 = 10_000;
const MAX_STALE_BYTES: u64 = 64 << 20;
/// Number of ended calls that are remembered, and the bytes that may still arrive for each of them, which are dropped.
/// An honest guest continues with an abandoned call, for example with the rest of a file, until it learns of the end.
const PAST_CALLS: usize = 1024;
const PAST_CALL_BYTES: u32 = 32 << 20;
/// Maximum number of structural characters of one message outside its strings, each of which may cost a hundred bytes
/// once it is decoded: a colon, a comma and a bracket for each value, and some for the message itself.
const MAX_TOKENS: usize = 3 * proto::MAX_VALUES + 64;
const HELLO_WAIT: Duration = Duration::from_secs(10);

/// The reason why a connection is over. The text may be shown to clients.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub(crate) struct GuestLost(pub(crate) String);

#[derive(Debug)]
pub(crate) enum GuestReply {
    Message(FromGuest),
    Data(FrameKind, Vec<u8>),
}

/// A frame on its way to its call, with the buffer space that it occupies.
struct Routed {
    frame: Frame,
    _room: OwnedSemaphorePermit,
}

#[derive(Clone)]
pub(crate) struct GuestClient {
    shared: Arc<GuestConnection>,
}

struct GuestConnection {
    outgoing: mpsc::Sender<Vec<u8>>,
    calls: Mutex<HashMap<u64, mpsc::Sender<Routed>>>,
    lost: watch::Sender<Option<GuestLost>>,
    /// Token that is cancelled to end the tasks of the connection and to close the stream.
    closed: CancellationToken,
    /// Numbers of the latest [`PAST_CALLS`] ended calls, oldest first, and how many bytes may still arrive for each.
    past: Mutex<VecDeque<(u64, u32)>>,
    stale_frames: AtomicU64,
    stale_bytes: AtomicU64,
    /// Kernels that ended while no cell ran in them.
    exited: Mutex<HashMap<proto::KernelId, proto::Ended>>,
    /// True if the browser ended by itself.
    browser_exited: AtomicBool,
}

impl GuestClient {
    /// Greets the guest. Both sides must use the same protocol version.
    pub(crate) async fn open(stream: GuestStream) -> Result<Self, GuestLost> {
        let (reader, writer) = tokio::io::split(stream);
        let (outgoing, queue) = mpsc::channel(8);
        let shared = Arc::new(GuestConnection {
            outgoing,
            calls: Mutex::default(),
            lost: watch::Sender::new(None),
            closed: CancellationToken::new(),
            past: Mutex::default(),
            stale_frames: AtomicU64::new(0),
            stale_bytes: AtomicU64::new(0),
            exited: Mutex::default(),
            browser_exited: AtomicBool::new(false),
        });
        let (said_hello, hello) = oneshot::channel();
        tokio::spawn(write(writer, queue, shared.clone()));
        tokio::spawn(read(reader, shared.clone(), said_hello));
        let client = Self { shared };
        client.greet(hello).await.inspect_err(|lost| drop(client.close(&lost.0)))?;
        Ok(client)
    }

    async fn greet(&self, hello: oneshot::Receiver<u32>) -> Result<(), GuestLost> {
        self.send(0, &ToGuest::Hello { version: proto::VERSION }).await?;
        match tokio::time::timeout(HELLO_WAIT, hello).await {
            Ok(Ok(proto::VERSION)) => Ok(()),
            Ok(Ok(other)) => Err(GuestLost(format!("the guest speaks version `{other}`, not `{}`", proto::VERSION))),
            Ok(Err(_)) => Err(self.why_lost()),
            Err(_) => Err(GuestLost("the guest did not answer the greeting".into())),
        }
    }

    /// Sends a request and registers the call that receives its replies.
    pub(crate) async fn call(&self, request: &ToGuest) -> Result<PendingCall, GuestLost> {
        let (sender, answers) = mpsc::channel((ROOM / FRAME_COST) as usize);
        let id = {
            let mut calls = lock(&self.shared.calls);
            let id = std::iter::repeat_with(random_id).find(|id| *id != 0 && !calls.contains_key(id)).unwrap_or(1);
            calls.insert(id, sender);
            id
        };
        let pending = PendingCall { id, answers, client: self.clone() };
        // A call that was registered after `close` had emptied the table would wait forever.
        if self.shared.closed.is_cancelled() {
            return Err(self.why_lost());
        }
        self.send(id, request).await?;
        Ok(pending)
    }

    /// Sends a request whose whole reply is one message.
    pub(crate) async fn ask(&self, request: &ToGuest, wait: Duration) -> Result<FromGuest, GuestLost> {
        self.call(request).await?.only_reply(wait).await
    }

    async fn send(&self, call: u64, message: &ToGuest) -> Result<(), GuestLost> {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, call, message).map_err(|e| GuestLost(e.to_string()))?;
        self.send_bytes(bytes).await
    }

    async fn send_bytes(&self, bytes: Vec<u8>) -> Result<(), GuestLost> {
        tokio::select! {
            sent = self.shared.outgoing.send(bytes) => sent.map_err(|_| self.why_lost()),
            () = self.shared.closed.cancelled() => Err(self.why_lost()),
        }
    }

    /// Ends the connection and returns the reason. If the connection has already ended, that is the earlier reason.
    pub(crate) fn close(&self, why: &str) -> GuestLost {
        self.shared.close(why);
        self.why_lost()
    }

    pub(crate) fn is_lost(&self) -> bool {
        self.shared.lost.borrow().is_some()
    }

    pub(crate) fn why_lost(&self) -> GuestLost {
        self.shared.lost.borrow().clone().unwrap_or_else(|| GuestLost("the guest closed the connection".into()))
    }

    /// Returns once the connection is over.
    pub(crate) async fn lost(&self) -> GuestLost {
        let mut watching = self.shared.lost.subscribe();
        let _ = watching.wait_for(Option::is_some).await;
        self.why_lost()
    }

    /// Returns how a kernel ended by itself between two cells, if it did. Each end is returned once.
    pub(crate) fn take_exited(&self, kernel: proto::KernelId) -> Option<proto::Ended> {
        lock(&self.shared.exited).remove(&kernel)
    }

    pub(crate) fn has_exited(&self, kernel: proto::KernelId) -> bool {
        lock(&self.shared.exited).contains_key(&kernel)
    }

    pub(crate) fn browser_has_exited(&self) -> bool {
        self.shared.browser_exited.load(Ordering::SeqCst)
    }

    /// Forgets the end of an earlier browser before another one is started.
    pub(crate) fn expect_browser(&self) {
        self.shared.browser_exited.store(false, Ordering::SeqCst);
    }

    /// Returns once the connection is over, or once that kernel or the browser has ended by itself.
    pub(crate) async fn lost_or_exited(&self, kernel: proto::KernelId) {
        let mut watching = self.shared.lost.subscribe();
        loop {
            if self.is_lost() || self.has_exited(kernel) || self.browser_has_exited() {
                return;
            }
            if watching.changed().await.is_err() {
                return;
            }
        }
    }

    /// Returns the number of frames that belonged to no call.
    pub(crate) fn stale_frames(&self) -> u64 {
        self.shared.stale_frames.load(Ordering::Relaxed)
    }
}

/// A request in progress. After it is dropped, frames that still arrive for it are ignored.
pub(crate) struct PendingCall {
    id: u64,
    answers: mpsc::Receiver<Routed>,
    client: GuestClient,
}

impl PendingCall {
    /// Returns the next reply. A message that cannot be decoded ends the connection.
    pub(crate) async fn next(&mut self) -> Result<GuestReply, GuestLost> {
        let routed = self.answers.recv().await;
        self.open(routed)
    }

    /// Returns the reply of a call whose whole reply is one message.
    pub(crate) async fn only_reply(&mut self, wait: Duration) -> Result<FromGuest, GuestLost> {
        match tokio::time::timeout(wait, self.next()).await {
            Ok(Ok(GuestReply::Message(message))) => Ok(message),
            Ok(Ok(GuestReply::Data(..))) => Err(self.client.close("the guest sent data where an answer was due")),
            Ok(Err(lost)) => Err(lost),
            Err(_) => Err(GuestLost(format!("the guest did not answer within {wait:?}"))),
        }
    }

    /// Returns a reply that has already arrived.
    pub(crate) fn try_next(&mut self) -> Option<Result<GuestReply, GuestLost>> {
        match self.answers.try_recv() {
            Err(mpsc::error::TryRecvError::Empty) => None,
            routed => Some(self.open(routed.ok())),
        }
    }

    fn open(&self, routed: Option<Routed>) -> Result<GuestReply, GuestLost> {
        let Some(Routed { frame, _room }) = routed else { return Err(self.client.why_lost()) };
        match frame.kind {
            FrameKind::Message => match decode(&frame) {
                Ok(message) => Ok(GuestReply::Message(message)),
                Err(error) => Err(self.client.close(&bad_frame(&error))),
            },
            kind => Ok(GuestReply::Data(kind, frame.payload)),
        }
    }

    /// Returns a future that interrupts the call in the guest. It does not borrow the call.
    pub(crate) fn interrupt(&self) -> impl Future<Output = Result<(), GuestLost>> + use<> {
        let (id, client) = (self.id, self.client.clone());
        async move { client.send(id, &ToGuest::Interrupt).await }
    }

    /// Sends another message of the same call.
    pub(crate) async fn send(&self, message: &ToGuest) -> Result<(), GuestLost> {
        self.client.send(self.id, message).await
    }

    pub(crate) async fn send_file(&self, chunk: &[u8]) -> Result<(), GuestLost> {
        let mut bytes = Vec::with_capacity(chunk.len() + proto::frame::HEADER);
        proto::encode(&mut bytes, FrameKind::File, self.id, chunk);
        self.client.send_bytes(bytes).await
    }
}

impl Drop for PendingCall {
    fn drop(&mut self) {
        let shared = &self.client.shared;
        let mut past = lock(&shared.past);
        if past.len() == PAST_CALLS {
            past.pop_front();
        }
        past.push_back((self.id, PAST_CALL_BYTES));
        drop(past);
        // The call is removed only after its number was remembered, so that a frame in between does not count as stale.
        lock(&shared.calls).remove(&self.id);
    }
}

impl GuestConnection {
    fn close(&self, why: &str) {
        self.lost.send_if_modified(|lost| {
            let first = lost.is_none();
            if first {
                *lost = Some(GuestLost(why.into()));
            }
            first
        });
        self.closed.cancel();
        // Calls that wait for a reply notice the end because their channel closes.
        lock(&self.calls).clear();
    }

    /// Drops a frame that belongs to no call, and fails if there were too many of them.
    fn count_stale(&self, frame: &Frame) -> Result<(), String> {
        if let Some((_, left)) = lock(&self.past).iter_mut().rev().find(|(call, _)| *call == frame.call) {
            let cost = u32::try_from(frame.payload.len()).unwrap_or(u32::MAX).max(FRAME_COST);
            if let Some(rest) = left.checked_sub(cost) {
                *left = rest;
                return Ok(());
            }
        }
        let frames = self.stale_frames.fetch_add(1, Ordering::Relaxed) + 1;
        let bytes =
            self.stale_bytes.fetch_add(frame.payload.len() as u64, Ordering::Relaxed) + frame.payload.len() as u64;
        if frames > MAX_STALE_FRAMES || bytes > MAX_STALE_BYTES {
            return Err("the guest keeps sending what nobody asked for".into());
        }
        Ok(())
    }

    async fn route(
        &self,
        frame: Frame,
        room: &Arc<Semaphore>,
        hello: &mut Option<oneshot::Sender<u32>>,
    ) -> Result<(), String> {
        if frame.call == 0 {
            return self.unasked(&frame, hello);
        }
        let call = lock(&self.calls).get(&frame.call).cloned();
        let Some(call) = call else { return self.count_stale(&frame) };
        let cost = u32::try_from(frame.payload.len()).unwrap_or(ROOM).clamp(FRAME_COST, ROOM);
        let Ok(permit) = room.clone().acquire_many_owned(cost).await else { return Ok(()) };
        // An error means that the call ended in the meantime.
        if let Err(unsent) = call.send(Routed { frame, _room: permit }).await {
            return self.count_stale(&unsent.0.frame);
        }
        Ok(())
    }

    /// Handles a frame that the guest sends unasked: its greeting, once, and the end of kernels or a browser between
    /// calls.
    fn unasked(&self, frame: &Frame, hello: &mut Option<oneshot::Sender<u32>>) -> Result<(), String> {
        if frame.kind != FrameKind::Message {
            return self.count_stale(frame);
        }
        match decode(frame).map_err(|e| bad_frame(&e))? {
            FromGuest::Hello { version } if hello.is_some() => {
                let _ = hello.take().map(|said| said.send(version));
                Ok(())
            }
            FromGuest::KernelExited { kernel, how } => {
                let mut exited = lock(&self.exited);
                // The host chose the kernel numbers and uses few, so a guest that invents others is ignored.
                if exited.len() < 16 || exited.contains_key(&kernel) {
                    exited.insert(kernel, how);
                }
                drop(exited);
                self.lost.send_modify(|_| ());
                self.count_stale(frame)
            }
            FromGuest::BrowserExited => {
                self.browser_exited.store(true, Ordering::SeqCst);
                self.lost.send_modify(|_| ());
                self.count_stale(frame)
            }
            _ => self.count_stale(frame),
        }
    }
}

async fn read(
    mut stream: tokio::io::ReadHalf<GuestStream>,
    shared: Arc<GuestConnection>,
    said_hello: oneshot::Sender<u32>,
) {
    let mut hello = Some(said_hello);
    let room = Arc::new(Semaphore::new(ROOM as usize));
    let reading = read_frames(&mut stream, &shared, &room, &mut hello);
    let why = tokio::select! {
        why = reading => why,
        () = shared.closed.cancelled() => return,
    };
    shared.close(&why);
}

/// Reads frames until the connection fails, and returns the reason.
async fn read_frames(
    stream: &mut tokio::io::ReadHalf<GuestStream>,
    shared: &GuestConnection,
    room: &Arc<Semaphore>,
    hello: &mut Option<oneshot::Sender<u32>>,
) -> String {
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 << 10];
    loop {
        let filled = match stream.read(&mut buffer).await {
            Ok(0) | Err(_) => return "the guest closed the connection".into(),
            Ok(n) => {
                decoder.push(&buffer[..n]);
                n == buffer.len()
            }
        };
        loop {
            match decoder.next_frame() {
                Ok(None) => break,
                Err(error) => return bad_frame(&error),
                Ok(Some(frame)) => {
                    if let Err(why) = shared.route(frame, room, hello).await {
                        return why;
                    }
                }
            }
        }
        // A guest that floods the host must not occupy a worker thread permanently.
        if filled {
            tokio::task::yield_now().await;
        }
    }
}

async fn write(
    mut stream: tokio::io::WriteHalf<GuestStream>,
    mut queue: mpsc::Receiver<Vec<u8>>,
    shared: Arc<GuestConnection>,
) {
    let writing = async {
        while let Some(bytes) = queue.recv().await {
            if stream.write_all(&bytes).await.is_err() || stream.flush().await.is_err() {
                return;
            }
        }
    };
    tokio::select! {
        () = writing => shared.close("the guest closed the connection"),
        () = shared.closed.cancelled() => {}
    }
    let _ = stream.shutdown().await;
}

fn decode(frame: &Frame) -> Result<FromGuest, FrameError> {
    if count_tokens(&frame.payload) > MAX_TOKENS {
        return Err(FrameError::Message("too many members".into()));
    }
    frame.message()
}

/// Counts the members and elements of a JSON text without decoding it.
fn count_tokens(json: &[u8]) -> usize {
    let mut tokens = 0;
    let mut in_string = false;
    let mut escaped = false;
    for byte in json {
        match byte {
            _ if escaped => escaped = false,
            b'\\' if in_string => escaped = true,
            b'"' => in_string = !in_string,
            b',' | b':' | b'[' | b'{' if !in_string => tokens += 1,
            _ => {}
        }
    }
    tokens
}

/// Describes a bad frame. The text may quote the guest, so it is cut to one short line.
fn bad_frame(error: &FrameError) -> String {
    let text: String = error.to_string().chars().filter(|c| !c.is_control()).take(160).collect();
    format!("the guest sent a bad frame: {text}")
}

fn random_id() -> u64 {
    // Each half of a version 4 UUID has some fixed bits; their combination has none.
    let (high, low) = uuid::Uuid::new_v4().as_u64_pair();
    high ^ low.rotate_left(32)
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A call made at the moment of the end: its request may still be queued, but its reply never arrives.
    #[tokio::test(start_paused = true)]
    async fn a_call_on_a_closed_connection_ends_at_once() {
        for _ in 0..64 {
            let (ours, mut theirs) = tokio::io::duplex(1 << 16);
            let mut hello = Vec::new();
            proto::encode_message(&mut hello, 0, &FromGuest::Hello { version: proto::VERSION }).unwrap();
            theirs.write_all(&hello).await.unwrap();
            let client = GuestClient::open(Box::new(ours)).await.unwrap();
            client.close("the end");
            assert_eq!(client.ask(&ToGuest::Ping, HELLO_WAIT).await, Err(GuestLost("the end".into())));
        }
    }

    /// The guest may still send the rest of an abandoned file, but not more, and nothing for a call that never existed.
    #[tokio::test]
    async fn what_still_comes_for_a_call_that_is_over_is_dropped_up_to_a_bound() {
        let (ours, mut theirs) = tokio::io::duplex(1 << 16);
        let mut hello = Vec::new();
        proto::encode_message(&mut hello, 0, &FromGuest::Hello { version: proto::VERSION }).unwrap();
        theirs.write_all(&hello).await.unwrap();
        let shared = GuestClient::open(Box::new(ours)).await.unwrap().shared;
        let frame = |call| Frame { call, kind: FrameKind::Stdout, payload: vec![0; 1 << 20] };
        for call in 1..=8 {
            lock(&shared.past).push_back((call, PAST_CALL_BYTES));
            for _ in 0..PAST_CALL_BYTES >> 20 {
                shared.count_stale(&frame(call)).unwrap();
            }
        }
        assert_eq!(shared.stale_frames.load(Ordering::Relaxed), 0);
        let unasked = (0..MAX_STALE_BYTES >> 20).map(|n| shared.count_stale(&frame(if n % 2 == 0 { 1 } else { 1000 })));
        assert!(unasked.collect::<Result<Vec<_>, _>>().is_ok());
        assert_eq!(shared.count_stale(&frame(1)).unwrap_err(), "the guest keeps sending what nobody asked for");
    }

    #[test]
    fn structure_inside_strings_is_not_counted() {
        assert_eq!(count_tokens(br#"{"a":"[,,\",,]","b":[1,2]}"#), 6);
    }
}

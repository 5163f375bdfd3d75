//! The exchange of messages with the guest.

use std::io;
use std::rc::Rc;
use std::time::Duration;

use proto::browser::{BrowserReply, FromDriver, ToDriver};
use proto::{BrowseError, BrowseFailure, BrowseResult, Decoder, Frame, FrameKind};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio::net::unix::{OwnedReadHalf, OwnedWriteHalf};
use tokio::sync::{Notify, mpsc};

use crate::driver::{Driver, DriverRequest};
use crate::workspace::FileChannel;

/// Starts the browser and answers requests of the guest until the guest closes the connection.
pub(crate) async fn serve_guest(guest: UnixStream) -> io::Result<()> {
    let (read, mut write) = guest.into_split();
    let (files, mut asked) = FileChannel::new();
    let mut frames = Frames { read, decoder: Decoder::default(), buffer: Vec::new(), files: files.clone() };
    let Some((call, ToDriver::Start { spec })) = frames.next().await? else {
        return Err(protocol_error("the first message was not a start"));
    };
    let mut driver = match Driver::start(&spec, files).await {
        Ok(driver) => driver,
        Err(message) => {
            send(&mut write, call, &FromDriver::Failed { message: message.clone() }).await?;
            return Err(io::Error::other(message));
        }
    };
    send(&mut write, call, &FromDriver::Ready { version: driver.version.clone() }).await?;
    loop {
        let next = tokio::select! {
            next = frames.next() => next?,
            Some((number, message)) = asked.recv() => {
                send(&mut write, number, &message).await?;
                continue;
            }
            how = driver.ended() => return Err(io::Error::other(format!("the browser ended: {how}"))),
        };
        match next {
            Some((call, ToDriver::Browse { ask, after_ms, uploads, changes })) => {
                let after = Duration::from_millis(after_ms);
                let request = DriverRequest { ask: &ask, after, uploads: uploads.as_deref(), changes };
                let wire = Wire { frames: &mut frames, write: &mut write, asked: &mut asked };
                let Some(browsed) = answer(&mut driver, wire, call, request).await? else { return Ok(()) };
                send_reply(&mut write, call, browsed).await?;
            }
            // The request was answered before its cancellation arrived.
            Some((_, ToDriver::Cancel | ToDriver::File { .. } | ToDriver::NoFile)) => {}
            Some((_, ToDriver::Start { .. })) => return Err(protocol_error("a second start")),
            None => return Ok(()),
        }
    }
}

/// The connection to the guest while a request is performed.
struct Wire<'a> {
    frames: &'a mut Frames,
    write: &'a mut OwnedWriteHalf,
    /// Files that the guest has to be asked for.
    asked: &'a mut mpsc::UnboundedReceiver<(u64, FromDriver)>,
}

/// Answers a request. Returns `None` if the guest has closed the connection.
async fn answer(
    driver: &mut Driver,
    wire: Wire<'_>,
    call: u64,
    request: DriverRequest<'_>,
) -> io::Result<Option<BrowserReply>> {
    let cancel = Notify::new();
    let mut answering = std::pin::pin!(driver.answer(request, cancel.notified()));
    loop {
        tokio::select! {
            browsed = &mut answering => return Ok(Some(browsed)),
            Some((number, message)) = wire.asked.recv() => send(wire.write, number, &message).await?,
            next = wire.frames.next() => match next? {
                Some((number, ToDriver::Cancel)) if number == call => cancel.notify_one(),
                Some((_, ToDriver::Cancel)) => {}
                Some(_) => return Err(protocol_error("a request before the last one was answered")),
                None => return Ok(None),
            },
        }
    }
}

fn protocol_error(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, what)
}

async fn send(write: &mut OwnedWriteHalf, call: u64, message: &FromDriver) -> io::Result<()> {
    let mut bytes = Vec::new();
    proto::encode_message(&mut bytes, call, message).map_err(io::Error::other)?;
    write.write_all(&bytes).await
}

/// Sends a reply. A result that is too large for one message is replaced by an error.
async fn send_reply(write: &mut OwnedWriteHalf, call: u64, mut browsed: BrowserReply) -> io::Result<()> {
    if size_of(&browsed.result) > proto::MAX_MESSAGE / 4 * 3 {
        let message = "the answer is too large".into();
        browsed.result = Err(BrowseError { why: BrowseFailure::Invalid, message });
    }
    send(write, call, &FromDriver::Browsed { browsed: Box::new(browsed) }).await
}

fn size_of(result: &Result<BrowseResult, BrowseError>) -> usize {
    serde_json::to_vec(result).map_or(usize::MAX, |bytes| bytes.len())
}

struct Frames {
    read: OwnedReadHalf,
    decoder: Decoder,
    buffer: Vec<u8>,
    /// Takes what the guest sends of files.
    files: Rc<FileChannel>,
}

impl Frames {
    /// Returns the next message. Dropping the future before it completes loses no data.
    async fn next(&mut self) -> io::Result<Option<(u64, ToDriver)>> {
        loop {
            while let Some(frame) = self.decoder.next_frame().map_err(io::Error::other)? {
                if frame.kind == FrameKind::File {
                    self.files.take_bytes(frame.call, frame.payload);
                    continue;
                }
                let (number, message) = read(&frame)?;
                if let Some(message) = self.files.take(number, message) {
                    return Ok(Some((number, message)));
                }
            }
            self.buffer.clear();
            if self.read.read_buf(&mut self.buffer).await? == 0 {
                return Ok(None);
            }
            self.decoder.push(&self.buffer);
        }
    }
}

fn read(frame: &Frame) -> io::Result<(u64, ToDriver)> {
    if frame.kind != FrameKind::Message {
        return Err(protocol_error("a frame that is no message"));
    }
    Ok((frame.call, frame.message().map_err(io::Error::other)?))
}

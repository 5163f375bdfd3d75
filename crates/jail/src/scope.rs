//! This module asks systemd for a cgroup: a scope with `Delegate=yes` around the launcher, for a server whose unit
//! cannot be used.
//!
//! The launcher sends the request before it has a sandbox or a namespace: the scope is for the sandboxes it creates,
//! and the server stays in its unit or session. This module implements as much of D-Bus as one method call needs, in a
//! hundred and fifty lines without a thread. The D-Bus libraries bring an executor, which the one process that forks
//! cannot have, and some thirty crates.
//!
//! Only the manager of the server's unit is asked, and the scope is placed in the same slice with the limits of that
//! unit, so that nothing escapes its limits this way.

use std::fmt::Write as _;
use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::cgroup::{Absence, Unified, is_unit};

/// How long to wait for the bus and for systemd on a busy machine; the default timeout of D-Bus libraries.
const PATIENCE: Duration = Duration::from_secs(25);

/// Advice for the operator when systemd cannot be reached.
pub(crate) const REACH: &str = "install D-Bus (for an ordinary user the package dbus-user-session, and log in again), or start the server in a unit \
     with `Delegate=yes`";

/// The systemd manager to ask, and the properties of the scope.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Manager {
    bus: PathBuf,
    /// Slice of the scope; `None` means the manager's default.
    slice: Option<String>,
    /// Limits of the server's unit, which the scope gets as well.
    bounds: Bounds,
    /// A cgroup that has the same controllers as the scope will have.
    pub like: PathBuf,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Bounds {
    memory: Option<u64>,
    memory_high: Option<u64>,
    swap: Option<u64>,
    /// Microseconds of processor time per second.
    cpu: Option<u64>,
    pids: Option<u64>,
}

impl Manager {
    /// Finds the manager of the unit that the server is in. The error says why there is none to ask, and what to do
    /// about it.
    pub(crate) fn find(root: &Path, unified: &Unified, uid: u32) -> Result<Self, Absence> {
        const DELEGATE: &str = "set `Delegate=yes` in the unit that starts the server";
        let parts: Vec<_> = unified.path.components().filter_map(|c| c.as_os_str().to_str()).skip(1).collect();
        let at_unit = |from: usize| parts[from..].iter().position(|part| is_unit(Path::new(part))).map(|at| from + at);
        let Some(outer) = at_unit(0) else {
            return Err(Absence::new("the server is in no unit of systemd", DELEGATE));
        };
        let slice_before = |at: usize| at.checked_sub(1).map(|at| parts[at]).filter(|part| part.ends_with(".slice"));
        let user_manager = format!("user@{uid}.service");
        // Finds the unit whose limits the scope would otherwise escape, and the slice around it.
        let (bus, unit, slice) = if uid == 0 {
            ("run/dbus/system_bus_socket".to_owned(), outer, slice_before(outer))
        } else if parts[..outer] != ["user.slice", &format!("user-{uid}.slice")] {
            let why = format!("`{}` belongs to the system, whose manager takes no orders from this user", parts[outer]);
            return Err(Absence::new(why, DELEGATE));
        } else {
            let own = if parts[outer] == user_manager { at_unit(outer + 1) } else { None };
            let slice = own.and_then(slice_before);
            (format!("run/user/{uid}/bus"), own.unwrap_or(outer), slice)
        };
        let bus = root.join(bus);
        if let Err(e) = fs::metadata(&bus) {
            let why = format!("there is no bus to ask systemd over: `{}`: {e}", bus.display());
            return Err(Absence::new(why, REACH));
        }
        let like = if uid == 0 {
            unified.top.clone()
        } else {
            unified.top.join("user.slice").join(format!("user-{uid}.slice")).join(user_manager)
        };
        let unit = unified.top.join(parts[..=unit].iter().collect::<PathBuf>());
        let inside: Vec<&Path> = unified.ancestors().take_while(|dir| dir.starts_with(&unit)).collect();
        Ok(Self { bus, slice: slice.map(str::to_owned), bounds: Bounds::least(&inside), like })
    }

    /// Checks that the manager can be reached. Changes nothing.
    pub(crate) fn answers(&self) -> Result<(), String> {
        Bus::connect(&self.bus).map(drop).map_err(|e| self.failed(&e))
    }

    /// Moves the calling process into a scope of this name, and returns once it is there.
    pub(crate) fn start_scope(&self, name: &str) -> Result<(), String> {
        let body = self.start_transient_unit(name);
        let ask = || -> io::Result<()> {
            let mut bus = Bus::connect(&self.bus)?;
            bus.call(&Method {
                destination: "org.freedesktop.systemd1",
                path: "/org/freedesktop/systemd1",
                interface: "org.freedesktop.systemd1.Manager",
                member: "StartTransientUnit",
                signature: "ssa(sv)a(sa(sv))",
                body: &body,
            })?;
            // The reply only says that the job was accepted.
            wait_until(|| Unified::find(Path::new("/")).is_some_and(|now| now.path.ends_with(name)))
        };
        ask().map_err(|e| self.failed(&e))
    }

    fn failed(&self, e: &io::Error) -> String {
        format!("systemd gave no scope over `{}`: {e}", self.bus.display())
    }

    fn start_transient_unit(&self, name: &str) -> Vec<u8> {
        let Bounds { memory, memory_high, swap, cpu, pids } = self.bounds;
        let mut body = Encoder::default();
        body.text(name);
        body.text("fail");
        body.array(8, |list| {
            list.property("Description", |v| v.variant_text("Sandboxes of a sandpool server"));
            // Pid 0 stands for the sender, as identified by the bus.
            list.property("PIDs", |v| {
                v.signature("au");
                v.array(4, |pids| pids.u32(0));
            });
            list.property("Delegate", |v| {
                v.signature("b");
                v.u32(1);
            });
            list.property("CollectMode", |v| v.variant_text("inactive-or-failed"));
            if let Some(slice) = &self.slice {
                list.property("Slice", |v| v.variant_text(slice));
            }
            let numbers = [
                // The launcher ignores SIGTERM and ends after its server; a logout must not wait long for that.
                ("TimeoutStopUSec", Some(10_000_000)),
                ("MemoryMax", memory),
                ("MemoryHigh", memory_high),
                ("MemorySwapMax", swap),
                ("CPUQuotaPerSecUSec", cpu),
                ("TasksMax", pids),
            ];
            for (name, value) in numbers.into_iter().filter_map(|(name, value)| Some((name, value?))) {
                list.property(name, |v| {
                    v.signature("t");
                    v.u64(value);
                });
            }
        });
        body.array(8, |_| {});
        body.bytes
    }
}

fn wait_until(mut done: impl FnMut() -> bool) -> io::Result<()> {
    let until = Instant::now() + PATIENCE;
    while !done() {
        if Instant::now() > until {
            return Err(io::Error::other("systemd accepted the request, but the scope did not appear"));
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    Ok(())
}

impl Bounds {
    /// Returns the lowest value of each limit in these cgroups.
    fn least(dirs: &[&Path]) -> Self {
        let read = |dir: &&Path, file: &str| fs::read_to_string(dir.join(file)).ok();
        let number = |file| dirs.iter().filter_map(|dir| read(dir, file)?.trim().parse::<u64>().ok()).min();
        let cpu = |dir: &&Path| {
            let text = read(dir, "cpu.max")?;
            let (quota, period) = text.trim().split_once(' ')?;
            let (quota, period): (u64, u64) = (quota.parse().ok()?, period.parse().ok()?);
            quota.checked_mul(1_000_000)?.checked_div(period)
        };
        Self {
            memory: number("memory.max"),
            memory_high: number("memory.high"),
            swap: number("memory.swap.max"),
            cpu: dirs.iter().filter_map(cpu).min(),
            pids: number("pids.max"),
        }
    }
}

struct Method<'a> {
    destination: &'a str,
    path: &'a str,
    interface: &'a str,
    member: &'a str,
    signature: &'a str,
    body: &'a [u8],
}

const BUS: Method<'_> = Method {
    destination: "org.freedesktop.DBus",
    path: "/org/freedesktop/DBus",
    interface: "org.freedesktop.DBus",
    member: "Hello",
    signature: "",
    body: &[],
};

const ENDIAN: u8 = if cfg!(target_endian = "little") { b'l' } else { b'B' };
const METHOD_CALL: u8 = 1;
const METHOD_RETURN: u8 = 2;
const ERROR: u8 = 3;
/// Codes of the header fields of a message.
const PATH: u8 = 1;
const INTERFACE: u8 = 2;
const MEMBER: u8 = 3;
const ERROR_NAME: u8 = 4;
const REPLY_SERIAL: u8 = 5;
const DESTINATION: u8 = 6;
const SIGNATURE: u8 = 8;

struct Bus {
    stream: UnixStream,
    serial: u32,
    until: Instant,
}

impl Bus {
    fn connect(path: &Path) -> io::Result<Self> {
        let mut bus = Self { stream: UnixStream::connect(path)?, serial: 0, until: Instant::now() + PATIENCE };
        bus.stream.set_write_timeout(Some(PATIENCE))?;
        let mut id = String::new();
        for digit in rustix::process::getuid().as_raw().to_string().bytes() {
            let _ = write!(id, "{digit:02x}");
        }
        bus.stream.write_all(format!("\0AUTH EXTERNAL {id}\r\n").as_bytes())?;
        let answer = bus.line()?;
        if !answer.starts_with("OK ") {
            return Err(io::Error::other(format!("the bus rejects this user: `{}`", answer.trim_end())));
        }
        bus.stream.write_all(b"BEGIN\r\n")?;
        bus.call(&BUS)?;
        Ok(bus)
    }

    /// Reads byte by byte, because the bytes after the line must stay in the stream.
    fn line(&mut self) -> io::Result<String> {
        const LONGEST: usize = 1024;
        let mut line = Vec::new();
        while !line.ends_with(b"\r\n") {
            if line.len() >= LONGEST {
                return Err(io::Error::other("the other side does not speak D-Bus"));
            }
            line.push(self.read(1)?[0]);
        }
        Ok(String::from_utf8_lossy(&line).into_owned())
    }

    fn read(&mut self, length: usize) -> io::Result<Vec<u8>> {
        let left = self.until.saturating_duration_since(Instant::now());
        self.stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        let mut bytes = vec![0; length];
        self.stream.read_exact(&mut bytes).map_err(|e| match e.kind() {
            io::ErrorKind::WouldBlock => io::Error::other("no answer"),
            _ => e,
        })?;
        Ok(bytes)
    }

    /// Sends a call and waits for its reply; all other messages are ignored.
    fn call(&mut self, method: &Method<'_>) -> io::Result<()> {
        self.serial += 1;
        self.stream.write_all(&message(self.serial, method))?;
        loop {
            let message = self.receive()?;
            if message.reply_to == Some(self.serial) {
                return match message.kind {
                    METHOD_RETURN => Ok(()),
                    ERROR => Err(io::Error::other(message.error)),
                    kind => Err(io::Error::other(format!("an answer of kind {kind}"))),
                };
            }
        }
    }

    fn receive(&mut self) -> io::Result<BusMessage> {
        const LONGEST: usize = 1 << 20;
        let fixed = self.read(16)?;
        let number = |at: usize| {
            let bytes = fixed[at..at + 4].try_into().unwrap_or_default();
            u32::from_ne_bytes(bytes) as usize
        };
        let (body, fields) = (number(4), number(12));
        if fixed[0] != ENDIAN || body > LONGEST || fields > LONGEST {
            return Err(io::Error::other("a message that cannot be read"));
        }
        let header = self.read(fields.next_multiple_of(8))?;
        let body = self.read(body)?;
        BusMessage::read(fixed[1], &header[..fields], &body)
            .ok_or_else(|| io::Error::other("a message that cannot be read"))
    }
}

fn message(serial: u32, method: &Method<'_>) -> Vec<u8> {
    let mut header = Encoder::default();
    header.bytes.extend([ENDIAN, METHOD_CALL, 0, 1]);
    header.u32(method.body.len() as u32);
    header.u32(serial);
    header.array(8, |fields| {
        let texts = [
            (PATH, "o", method.path),
            (DESTINATION, "s", method.destination),
            (INTERFACE, "s", method.interface),
            (MEMBER, "s", method.member),
            (SIGNATURE, "g", method.signature),
        ];
        for (code, kind, text) in texts.into_iter().filter(|(.., text)| !text.is_empty()) {
            fields.align(8);
            fields.bytes.push(code);
            fields.signature(kind);
            if kind == "g" { fields.signature(text) } else { fields.text(text) }
        }
    });
    header.align(8);
    header.bytes.extend(method.body);
    header.bytes
}

/// The parts of a received message that are used here.
#[derive(Debug, PartialEq, Eq)]
struct BusMessage {
    kind: u8,
    reply_to: Option<u32>,
    error: String,
}

impl BusMessage {
    fn read(kind: u8, header: &[u8], body: &[u8]) -> Option<Self> {
        let mut fields = Decoder { bytes: header, at: 0 };
        let (mut reply_to, mut name, mut has_text) = (None, String::new(), false);
        while fields.at < header.len() {
            fields.align(8);
            let code = fields.take(1)?[0];
            match (code, fields.signature()?.as_str()) {
                (REPLY_SERIAL, "u") => reply_to = Some(fields.u32()?),
                (ERROR_NAME, "s") => name = fields.text()?,
                (SIGNATURE, "g") => has_text = fields.signature()?.starts_with('s'),
                (_, "s" | "o") => drop(fields.text()?),
                (_, "u") => drop(fields.u32()?),
                (_, "g") => drop(fields.signature()?),
                _ => return None,
            }
        }
        let text = if has_text { Decoder { bytes: body, at: 0 }.text()? } else { String::new() };
        let error = if kind == ERROR { format!("{text} ({name})").trim_start().to_owned() } else { String::new() };
        Some(Self { kind, reply_to, error })
    }
}

/// Encodes a sequence of values, each aligned to its size relative to the start of the message.
#[derive(Default)]
struct Encoder {
    bytes: Vec<u8>,
}

impl Encoder {
    fn align(&mut self, to: usize) {
        self.bytes.resize(self.bytes.len().next_multiple_of(to), 0);
    }

    fn u32(&mut self, value: u32) {
        self.align(4);
        self.bytes.extend(value.to_ne_bytes());
    }

    fn u64(&mut self, value: u64) {
        self.align(8);
        self.bytes.extend(value.to_ne_bytes());
    }

    fn text(&mut self, text: &str) {
        self.u32(text.len() as u32);
        self.bytes.extend(text.bytes().chain([0]));
    }

    fn signature(&mut self, text: &str) {
        self.bytes.push(text.len() as u8);
        self.bytes.extend(text.bytes().chain([0]));
    }

    fn variant_text(&mut self, text: &str) {
        self.signature("s");
        self.text(text);
    }

    /// Writes an array. Its length does not include the padding before the first element.
    fn array(&mut self, align: usize, fill: impl FnOnce(&mut Self)) {
        self.u32(0);
        let at = self.bytes.len();
        self.align(align);
        let begin = self.bytes.len();
        fill(self);
        let length = (self.bytes.len() - begin) as u32;
        self.bytes[at - 4..at].copy_from_slice(&length.to_ne_bytes());
    }

    /// Writes a pair of a name and a variant; `value` writes the variant with its signature.
    fn property(&mut self, name: &str, value: impl FnOnce(&mut Self)) {
        self.align(8);
        self.text(name);
        value(self);
    }
}

struct Decoder<'a> {
    bytes: &'a [u8],
    at: usize,
}

impl Decoder<'_> {
    fn align(&mut self, to: usize) {
        self.at = self.at.next_multiple_of(to);
    }

    fn take(&mut self, length: usize) -> Option<&[u8]> {
        let found = self.bytes.get(self.at..self.at.checked_add(length)?)?;
        self.at += length;
        Some(found)
    }

    fn u32(&mut self) -> Option<u32> {
        self.align(4);
        Some(u32::from_ne_bytes(self.take(4)?.try_into().ok()?))
    }

    fn text(&mut self) -> Option<String> {
        let length = self.u32()? as usize;
        self.ended(length)
    }

    fn signature(&mut self) -> Option<String> {
        let length = usize::from(self.take(1)?[0]);
        self.ended(length)
    }

    /// Reads `length` bytes and the zero byte after them.
    fn ended(&mut self, length: usize) -> Option<String> {
        let bytes = self.take(length.checked_add(1)?)?;
        Some(String::from_utf8_lossy(&bytes[..length]).into_owned())
    }
}

#[cfg(test)]
mod tests;

//! The guests of the fake back end: one well-behaved, which understands the small language.

use std::collections::{BTreeMap, HashMap};
use std::net::SocketAddr;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use proto::{
    Deadline, Decoder, Ended, Frame, FrameKind, FromGuest, GuestFailure, KernelEvent, KernelId, RunEnd, RunStatus,
    ToGuest,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt, DuplexStream};
use tokio::net::TcpStream;
use tokio::sync::{Mutex as AsyncMutex, Notify};

use super::browser::Tabs;
use super::{FakeSandbox, File, Files, Shared, at, lock, take_one};

/// The guest's end of the connection.
#[derive(Clone)]
pub struct Wire {
    writer: Arc<AsyncMutex<Option<tokio::io::WriteHalf<DuplexStream>>>>,
}

impl Wire {
    pub async fn send(&self, call: u64, message: &FromGuest) {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, call, message).expect("a short message");
        self.raw(&bytes).await;
    }

    pub async fn data(&self, kind: FrameKind, call: u64, payload: &[u8]) {
        let mut bytes = Vec::new();
        for chunk in payload.chunks(proto::MAX_CHUNK) {
            proto::encode(&mut bytes, kind, call, chunk);
        }
        self.raw(&bytes).await;
    }

    /// Anything at all. An error means that the host hung up, which is for the host's side of a test to look at.
    pub async fn raw(&self, bytes: &[u8]) {
        if let Some(writer) = self.writer.lock().await.as_mut() {
            let _ = writer.write_all(bytes).await;
        }
    }

    pub async fn hang_up(&self) {
        if let Some(mut writer) = self.writer.lock().await.take() {
            let _ = writer.shutdown().await;
        }
    }

    pub async fn end(&self, call: u64, status: RunStatus) {
        let end =
            RunEnd { status, micros: 1000, stdout_bytes: 0, stderr_bytes: 0, stdout_kept: None, stderr_kept: None };
        self.send(call, &FromGuest::RunEnd { end }).await;
    }
}

/// One well-behaved guest.
pub(super) struct Guest {
    pub(super) shared: Arc<Shared>,
    pub(super) wire: Wire,
    pub(super) interrupts: Mutex<HashMap<u64, Arc<Notify>>>,
    variables: Mutex<HashMap<KernelId, BTreeMap<String, String>>>,
    /// Environments of kernels.
    env: Mutex<HashMap<KernelId, BTreeMap<String, String>>>,
    pub(super) files: [Arc<Files>; 4],
    pub(super) egress: Option<SocketAddr>,
    pub(super) drivers: Arc<AtomicU32>,
    pub(super) browser: AsyncMutex<Option<Tabs>>,
}

/// A file on its way in.
struct Upload {
    root: proto::Root,
    path: String,
    size: usize,
    content: Vec<u8>,
}

/// What a cell or a command is run with.
struct Doing {
    code: String,
    /// None for a command.
    kernel: Option<KernelId>,
    env: BTreeMap<String, String>,
    deadline: Deadline,
    merged: bool,
    keep_over: Option<u64>,
}

pub(super) async fn serve(stream: DuplexStream, sandbox: &FakeSandbox) {
    let (mut reader, writer) = tokio::io::split(stream);
    let wire = Wire { writer: Arc::new(AsyncMutex::new(Some(writer))) };
    let guest = Arc::new(Guest {
        shared: sandbox.backend.shared.clone(),
        wire,
        interrupts: Mutex::default(),
        variables: Mutex::default(),
        env: Mutex::default(),
        files: sandbox.files.clone(),
        egress: sandbox.egress_at,
        drivers: sandbox.drivers.clone(),
        browser: AsyncMutex::default(),
    });
    let mut decoder = Decoder::default();
    let mut buffer = vec![0; 64 << 10];
    let mut uploads: HashMap<u64, Upload> = HashMap::new();
    // Cells end with their guest.
    let mut cells = tokio::task::JoinSet::new();
    while let Ok(n @ 1..) = reader.read(&mut buffer).await {
        decoder.push(&buffer[..n]);
        while let Some(frame) = decoder.next_frame().expect("the host sends good frames") {
            guest.take(frame, &mut uploads, &mut cells).await;
        }
    }
}

impl Guest {
    async fn take(
        self: &Arc<Self>,
        frame: Frame,
        uploads: &mut HashMap<u64, Upload>,
        cells: &mut tokio::task::JoinSet<()>,
    ) {
        let call = frame.call;
        if frame.kind == FrameKind::File {
            let Some(upload) = uploads.get_mut(&call) else { return };
            upload.content.extend(frame.payload);
            return self.finish_upload(call, uploads).await;
        }
        let request: ToGuest = frame.message().expect("the host sends good messages");
        if let ToGuest::Run { code, .. } = &request {
            lock(&self.shared.runs).push(code.clone());
        }
        let script = lock(&self.shared.script).clone();
        if let Some(work) = script.and_then(|script| script(call, &request, &self.wire)) {
            cells.spawn(work);
            return;
        }
        match request {
            ToGuest::WriteFile { root, path, size } => {
                uploads.insert(call, Upload { root, path, size: size as usize, content: Vec::new() });
                self.finish_upload(call, uploads).await;
            }
            ToGuest::StreamFile { path, .. } if path == "full" => {
                self.wire.send(call, &failed(GuestFailure::NoSpace)).await;
            }
            ToGuest::StreamFile { root, path, .. } => {
                uploads.insert(call, Upload { root, path, size: usize::MAX, content: Vec::new() });
            }
            ToGuest::EndFile => {
                if let Some(upload) = uploads.get_mut(&call) {
                    upload.size = 0;
                    self.finish_upload(call, uploads).await;
                }
            }
            ToGuest::Run { kernel, code, env, deadline, keep_over, .. } => {
                lock(&self.shared.env).push(env.clone());
                let merged = lock(&self.variables).get(&kernel).is_some_and(|v| v.contains_key(MERGED));
                let mut whole = lock(&self.env).get(&kernel).cloned().unwrap_or_default();
                whole.extend(env);
                self.begin(call, Doing { code, kernel: Some(kernel), env: whole, deadline, merged, keep_over }, cells);
            }
            ToGuest::Exec { argv, env, deadline, merge_output, keep_over, .. } => {
                let [shell, _, code] = argv.as_slice() else { return self.not_found(call).await };
                if shell != "/bin/sh" {
                    return self.not_found(call).await;
                }
                lock(&self.shared.runs).push(code.clone());
                lock(&self.shared.env).push(env.clone());
                let code = code.clone();
                self.begin(call, Doing { code, kernel: None, env, deadline, merged: merge_output, keep_over }, cells);
            }
            ToGuest::StartBrowser { spec } => {
                let guest = self.clone();
                cells.spawn(async move { guest.start_browser(call, spec).await });
            }
            ToGuest::Browse { ask, uploads, after_ms, .. } => {
                let interrupt = self.interrupt_of(call);
                lock(&self.shared.browsed).push(ask.clone());
                let guest = self.clone();
                cells.spawn(async move { guest.browse(call, (ask, uploads), after_ms, &interrupt).await });
            }
            ToGuest::Interrupt => {
                uploads.remove(&call);
                if let Some(interrupt) = lock(&self.interrupts).get(&call) {
                    interrupt.notify_one();
                }
            }
            other => self.answer(call, other).await,
        }
    }

    fn begin(self: &Arc<Self>, call: u64, doing: Doing, cells: &mut tokio::task::JoinSet<()>) {
        let (guest, interrupt) = (self.clone(), self.interrupt_of(call));
        cells.spawn(async move { guest.run(call, doing, &interrupt).await });
    }

    fn interrupt_of(&self, call: u64) -> Arc<Notify> {
        lock(&self.interrupts).entry(call).or_default().clone()
    }

    pub(super) async fn not_found(&self, call: u64) {
        self.wire.send(call, &failed(GuestFailure::NotFound)).await;
    }

    fn write(&self, root: proto::Root, path: &str, content: Vec<u8>) {
        let number = self.shared.writes.fetch_add(1, Ordering::SeqCst) + 1;
        lock(&self.files[at(root)]).insert(path.to_owned(), File { content, number });
    }

    async fn finish_upload(&self, call: u64, uploads: &mut HashMap<u64, Upload>) {
        if uploads.get(&call).is_some_and(|upload| upload.content.len() >= upload.size)
            && let Some(Upload { root, path, content, .. }) = uploads.remove(&call)
        {
            let size = content.len() as u64;
            self.write(root, &path, content);
            self.wire.send(call, &FromGuest::Written { size }).await;
        }
    }

    async fn answer(&self, call: u64, request: ToGuest) {
        let wire = &self.wire;
        match request {
            ToGuest::Hello { .. } => wire.send(call, &FromGuest::Hello { version: proto::VERSION }).await,
            ToGuest::StartKernel { .. } if take_one(&self.shared.fail_kernels) => {
                let message = "told to fail".into();
                wire.send(call, &FromGuest::Failed { failure: GuestFailure::Kernel, message }).await;
            }
            ToGuest::StartKernel { kernel, spec, .. } => {
                let merged = spec.merge_output.then(|| (MERGED.to_owned(), String::new()));
                lock(&self.variables).insert(kernel, merged.into_iter().collect());
                lock(&self.env).insert(kernel, spec.env.clone());
                lock(&self.shared.kernels).push(spec);
                wire.send(call, &FromGuest::KernelReady { version: "1.0".into() }).await;
            }
            ToGuest::StopKernel { kernel } => {
                lock(&self.variables).remove(&kernel);
                wire.send(call, &FromGuest::Done).await;
            }
            ToGuest::ReadFile { root, path, offset, length, max_size } => {
                let file = lock(&self.files[at(root)]).get(&path).cloned();
                match file {
                    None => wire.send(call, &failed(GuestFailure::NotFound)).await,
                    Some(file) if max_size.is_some_and(|most| file.content.len() as u64 > most) => {
                        wire.send(call, &failed(GuestFailure::TooLarge)).await
                    }
                    Some(File { content, number }) => {
                        let size = content.len() as u64;
                        wire.send(call, &FromGuest::FileStart { size, modified_ns: number as i64, inode: number })
                            .await;
                        let from = content.len().min(offset as usize);
                        let to = from + (content.len() - from).min(length as usize);
                        wire.data(FrameKind::File, call, &content[from..to]).await;
                        wire.send(call, &FromGuest::Done).await;
                    }
                }
            }
            ToGuest::ListFiles { root, max_entries, order, .. } => {
                let entry = |(path, file): (&String, &File)| proto::FileEntry {
                    path: path.clone(),
                    size: file.content.len() as u64,
                    kind: proto::FileKind::File,
                    modified: file.number as i64,
                    below: None,
                };
                let mut entries: Vec<_> = lock(&self.files[at(root)]).iter().map(entry).collect();
                if order == proto::ListOrder::Newest {
                    entries.sort_by_key(|entry| std::cmp::Reverse(entry.modified));
                }
                let total = entries.len() as u64;
                entries.truncate(max_entries as usize);
                wire.send(call, &FromGuest::Files { entries, total }).await;
            }
            _ => wire.send(call, &FromGuest::Done).await,
        }
    }

    async fn run(&self, call: u64, doing: Doing, interrupt: &Notify) {
        if doing.kernel.is_some_and(|kernel| !lock(&self.variables).contains_key(&kernel)) {
            return self.wire.send(call, &failed(GuestFailure::Kernel)).await;
        }
        let counts = usize::from(!matches!(doing.code.as_str(), "pass" | ";"));
        let running = self.shared.running.fetch_add(counts, Ordering::SeqCst) + counts;
        self.shared.most_running.fetch_max(running, Ordering::SeqCst);
        let status = tokio::select! {
            status = self.cell(call, &doing) => status,
            () = interrupt.notified() => RunStatus::Cancelled { state_kept: true },
            () = tokio::time::sleep(Duration::from_millis(doing.deadline.after_ms)), if !doing.code.contains("deaf") => {
                RunStatus::TimedOut { state_kept: true }
            }
        };
        self.shared.running.fetch_sub(counts, Ordering::SeqCst);
        lock(&self.interrupts).remove(&call);
        match (doing.kernel, &status) {
            (Some(kernel), RunStatus::Ended { .. }) => {
                lock(&self.variables).remove(&kernel);
            }
            (None, RunStatus::Ok) => return self.wire.end(call, exited(0)).await,
            (None, RunStatus::Exit { code }) => return self.wire.end(call, exited(*code)).await,
            _ => {}
        }
        if let Some(kept) = self.kept_output(&doing) {
            let (stdout_kept, stderr_kept) = (Some(kept), None);
            let end = RunEnd { status, micros: 1000, stdout_bytes: 0, stderr_bytes: 0, stdout_kept, stderr_kept };
            return self.wire.send(call, &FromGuest::RunEnd { end }).await;
        }
        self.wire.end(call, status).await;
    }

    /// What a flood of more than `keep_over` bytes leaves behind.
    fn kept_output(&self, doing: &Doing) -> Option<proto::KeptOutput> {
        let bytes: u64 = doing.code.strip_prefix("flood ")?.parse().ok()?;
        doing.keep_over.filter(|over| bytes > *over)?;
        let name = format!("out-{}.txt", self.shared.writes.load(Ordering::SeqCst));
        self.write(proto::Root::Outputs, &name, vec![b'x'; bytes as usize]);
        Some(proto::KeptOutput { name, bytes })
    }

    async fn cell(&self, call: u64, doing: &Doing) -> RunStatus {
        // A command has no variables of its own; it sees none.
        let kernel = doing.kernel.unwrap_or(KernelId::MAX);
        let errors = if doing.merged { FrameKind::Stdout } else { FrameKind::Stderr };
        for line in doing.code.lines() {
            let (word, rest) = line.split_once(' ').unwrap_or((line, ""));
            match word {
                "print" => self.wire.data(FrameKind::Stdout, call, format!("{rest}\n").as_bytes()).await,
                "error" => self.wire.data(errors, call, format!("{rest}\n").as_bytes()).await,
                "sleep" => tokio::time::sleep(Duration::from_millis(rest.parse().expect("a number"))).await,
                "hang" => std::future::pending().await,
                "deaf" => {
                    lock(&self.interrupts).remove(&call);
                    std::future::pending().await
                }
                "raise" => {
                    let event =
                        KernelEvent::Error { name: rest.into(), value: String::new(), text: format!("{rest}\n") };
                    self.wire.send(call, &FromGuest::Event { event }).await;
                    return RunStatus::Error;
                }
                "die" => return RunStatus::Ended { how: Ended::Signaled { signal: rest.parse().expect("a number") } },
                "exit" => return RunStatus::Exit { code: rest.parse().expect("a number") },
                "flood" => {
                    let line = vec![b'x'; 64 << 10];
                    for _ in 0..rest.parse::<usize>().expect("a number") / line.len() {
                        self.wire.data(FrameKind::Stdout, call, &line).await;
                    }
                }
                "set" => {
                    let (name, value) = rest.split_once(' ').unwrap_or((rest, ""));
                    lock(&self.variables).entry(kernel).or_default().insert(name.into(), value.into());
                }
                "get" => {
                    let value = lock(&self.variables).get(&kernel).and_then(|v| v.get(rest).cloned());
                    let Some(value) = value else { return RunStatus::Error };
                    self.wire.data(FrameKind::Stdout, call, format!("{value}\n").as_bytes()).await;
                }
                "env" => {
                    let value = doing.env.get(rest).map_or("(none)", String::as_str);
                    self.wire.data(FrameKind::Stdout, call, format!("{value}\n").as_bytes()).await;
                }
                "fetch" => {
                    let status = fetch(self.egress, rest).await;
                    self.wire.data(FrameKind::Stdout, call, format!("{status}\n").as_bytes()).await;
                }
                "write" => {
                    let (path, text) = rest.split_once(' ').unwrap_or((rest, ""));
                    let (root, path) = place(path);
                    self.write(root, path, text.into());
                }
                "read" => {
                    let (root, path) = place(rest);
                    let content = lock(&self.files[at(root)]).get(path).map(|file| file.content.clone());
                    let Some(content) = content else { return RunStatus::Error };
                    self.wire.data(FrameKind::Stdout, call, &content).await;
                }
                _ => {}
            }
        }
        RunStatus::Ok
    }
}

/// A variable no code can name: the kernel's streams are one.
const MERGED: &str = "";

fn place(path: &str) -> (proto::Root, &str) {
    let dirs = [("/data/", proto::Root::Data), ("/tmp/", proto::Root::Tmp)];
    let found = dirs.iter().find_map(|(dir, root)| Some((*root, path.strip_prefix(dir)?)));
    found.unwrap_or((proto::Root::Workspace, path))
}

/// Asks for a page through the egress, and says with which status it came.
pub(super) async fn fetch(egress: Option<SocketAddr>, name: &str) -> String {
    let asking = async {
        let mut stream = TcpStream::connect(egress?).await.ok()?;
        let request = format!("GET http://{name}/ HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\n\r\n");
        stream.write_all(request.as_bytes()).await.ok()?;
        let mut answer = String::new();
        stream.take(1 << 20).read_to_string(&mut answer).await.ok()?;
        answer.split(' ').nth(1).map(str::to_owned)
    };
    asking.await.unwrap_or_else(|| "nothing".into())
}

fn exited(code: i32) -> RunStatus {
    RunStatus::Ended { how: Ended::Exited { code } }
}

fn failed(failure: GuestFailure) -> FromGuest {
    FromGuest::Failed { failure, message: "no".into() }
}

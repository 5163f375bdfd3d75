//! A host for tests: a guest in a thread, and the other end of its socket.
#![allow(dead_code, reason = "each test file uses a part")]

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use proto::{
    Deadline, Decoder, FileEntry, Frame, FrameKind, FromGuest, GuestFailure, KernelEvent, KernelSpec, Language,
    ListOrder, Root, RunEnd, RunStatus, Stream, ToGuest,
};

/// Longer than anything may take on a loaded machine.
pub const PATIENCE: Duration = Duration::from_secs(20);

pub struct Client {
    stream: UnixStream,
    decoder: Decoder,
    next_call: u64,
    guest: Option<std::thread::JoinHandle<std::io::Result<()>>>,
    /// Answers to calls that nobody has asked for yet.
    pub unclaimed: Vec<Frame>,
}

/// Everything one run brought, in order.
#[derive(Debug, Default)]
pub struct Ran {
    pub stdout: Vec<u8>,
    pub stderr: Vec<u8>,
    pub events: Vec<KernelEvent>,
    pub gaps: Vec<(Stream, u64)>,
    pub late: Option<(String, String, u64)>,
    /// Output and events, one line each, in the order they came.
    pub order: Vec<String>,
    pub frames: usize,
    pub end: Option<RunEnd>,
    pub failed: Option<String>,
    pub took: Duration,
}

impl Ran {
    pub fn status(&self) -> &RunStatus {
        &self.end.as_ref().unwrap_or_else(|| panic!("no end: {self:?}")).status
    }

    pub fn out(&self) -> String {
        String::from_utf8_lossy(&self.stdout).into_owned()
    }

    pub fn err(&self) -> String {
        String::from_utf8_lossy(&self.stderr).into_owned()
    }

    pub fn result(&self) -> Option<&str> {
        self.events.iter().find_map(|event| match event {
            KernelEvent::Result { data } => data.get("text/plain")?.as_str(),
            _ => None,
        })
    }

    pub fn error(&self) -> Option<(&str, &str, &str)> {
        self.events.iter().find_map(|event| match event {
            KernelEvent::Error { name, value, text } => Some((&name[..], &value[..], &text[..])),
            _ => None,
        })
    }
}

pub fn config() -> guest::GuestConfig {
    let part = |name: &str| vec![env!("CARGO_BIN_EXE_sandpool-guest").to_owned(), name.to_owned()];
    guest::GuestConfig { transpiler: part("transpile"), searcher: part("search"), ..guest::GuestConfig::default() }
}

/// Size, time and inode of a file that was read.
pub type Start = (u64, i64, u64);

impl Client {
    pub fn raw(config: guest::GuestConfig) -> Self {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let guest = std::thread::spawn(move || guest::serve(theirs, config));
        Self { guest: Some(guest), ..Self::over(ours) }
    }

    pub fn over(stream: UnixStream) -> Self {
        stream.set_read_timeout(Some(PATIENCE)).unwrap();
        Self { stream, decoder: Decoder::default(), next_call: 0, guest: None, unclaimed: Vec::new() }
    }

    pub fn new() -> Self {
        let mut client = Self::raw(config());
        client.hello();
        client
    }

    pub fn hello(&mut self) {
        let call = self.send(&ToGuest::Hello { version: proto::VERSION });
        assert_eq!(self.answer(call), FromGuest::Hello { version: proto::VERSION });
    }

    pub fn send(&mut self, message: &ToGuest) -> u64 {
        self.next_call += 1;
        self.send_as(self.next_call, message);
        self.next_call
    }

    pub fn send_as(&mut self, call: u64, message: &ToGuest) {
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, call, message).unwrap();
        self.stream.write_all(&bytes).unwrap();
    }

    pub fn send_bytes(&mut self, bytes: &[u8]) {
        self.stream.write_all(bytes).unwrap();
    }

    pub fn send_file(&mut self, call: u64, bytes: &[u8]) {
        let mut out = Vec::new();
        for chunk in bytes.chunks(100_000) {
            proto::encode(&mut out, FrameKind::File, call, chunk);
        }
        // The guest may have refused already and closed nothing: it reads on.
        self.stream.write_all(&out).unwrap();
    }

    /// The next frame from the socket; `None` at its end.
    pub fn frame(&mut self) -> Option<Frame> {
        loop {
            if let Some(frame) = self.decoder.next_frame().unwrap() {
                return Some(frame);
            }
            let mut buffer = [0; 65536];
            match self.stream.read(&mut buffer) {
                Ok(0) => return None,
                Ok(read) => self.decoder.push(&buffer[..read]),
                Err(error) if error.kind() == std::io::ErrorKind::ConnectionReset => return None,
                Err(error) => panic!("no answer: {error}"),
            }
        }
    }

    pub fn frame_of(&mut self, call: u64) -> Frame {
        if let Some(at) = self.unclaimed.iter().position(|frame| frame.call == call) {
            return self.unclaimed.remove(at);
        }
        loop {
            let frame = self.frame().expect("the guest hung up");
            if frame.call == call {
                return frame;
            }
            self.unclaimed.push(frame);
        }
    }

    pub fn answer(&mut self, call: u64) -> FromGuest {
        self.frame_of(call).message().unwrap()
    }

    pub fn call(&mut self, message: &ToGuest) -> FromGuest {
        let call = self.send(message);
        self.answer(call)
    }

    pub fn start(&mut self, kernel: u32, spec: &KernelSpec) -> FromGuest {
        self.call(&ToGuest::StartKernel { kernel, spec: spec.clone(), warm: false })
    }

    pub fn started(&mut self, kernel: u32, spec: &KernelSpec) {
        let answer = self.start(kernel, spec);
        assert!(matches!(answer, FromGuest::KernelReady { .. }), "{answer:?}");
    }

    pub fn run(&mut self, code: &str) -> Ran {
        let call = self.begin(code, LONG, 1 << 20);
        self.finish(call)
    }

    pub fn begin(&mut self, code: &str, deadline: Deadline, forward_bytes: u64) -> u64 {
        let (kernel, code, env) = (1, code.into(), BTreeMap::new());
        self.send(&ToGuest::Run { kernel, code, env, deadline, forward_bytes, keep_over: None })
    }

    pub fn run_with(&mut self, code: &str, env: &[(&str, &str)]) -> Ran {
        let env = env.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect();
        let (kernel, code, forward_bytes) = (1, code.into(), 1 << 20);
        let call = self.send(&ToGuest::Run { kernel, code, env, deadline: LONG, forward_bytes, keep_over: None });
        self.finish(call)
    }

    pub fn exec(&mut self, script: &str, deadline: Deadline, forward_bytes: u64) -> u64 {
        self.exec_with(script, deadline, forward_bytes, None, false)
    }

    pub fn exec_with(
        &mut self,
        script: &str,
        deadline: Deadline,
        forward_bytes: u64,
        keep_over: Option<u64>,
        merge_output: bool,
    ) -> u64 {
        let argv = ["/bin/sh", "-c", script].map(String::from).to_vec();
        let (env, cwd) = (env(), "/".into());
        self.send(&ToGuest::Exec { argv, env, cwd, merge_output, deadline, forward_bytes, keep_over })
    }

    /// Collects a run up to its one end.
    pub fn finish(&mut self, call: u64) -> Ran {
        let start = Instant::now();
        let mut ran = Ran::default();
        while ran.end.is_none() && ran.failed.is_none() {
            let frame = self.frame_of(call);
            ran.frames += 1;
            match frame.kind {
                FrameKind::Stdout => {
                    ran.order.push(format!("out {}", String::from_utf8_lossy(&frame.payload).trim_end()));
                    ran.stdout.extend(frame.payload);
                }
                FrameKind::Stderr => {
                    ran.order.push(format!("err {}", String::from_utf8_lossy(&frame.payload).trim_end()));
                    ran.stderr.extend(frame.payload);
                }
                FrameKind::File => panic!("a file in a run"),
                FrameKind::Message => match frame.message().unwrap() {
                    FromGuest::Event { event } => {
                        let name = serde_json::to_value(&event).unwrap()["t"].as_str().unwrap().to_owned();
                        ran.order.push(name);
                        ran.events.push(event);
                    }
                    FromGuest::Gap { stream, bytes } => ran.gaps.push((stream, bytes)),
                    FromGuest::LateOutput { stdout, stderr, dropped } => ran.late = Some((stdout, stderr, dropped)),
                    FromGuest::RunEnd { end } => ran.end = Some(end),
                    FromGuest::Failed { message, .. } => ran.failed = Some(message),
                    other => panic!("unexpected {other:?}"),
                },
            }
        }
        ran.took = start.elapsed();
        ran
    }

    /// Waits until a run prints; what it printed is not part of what `finish` collects.
    pub fn wait_for_output(&mut self, call: u64) {
        assert_eq!(self.frame_of(call).kind, FrameKind::Stdout);
    }

    pub fn interrupt(&mut self, call: u64) {
        self.send_as(call, &ToGuest::Interrupt);
    }

    pub fn read_file(&mut self, path: &str, max_bytes: u64) -> Result<Vec<u8>, (GuestFailure, String)> {
        self.read_part(Root::Workspace, path, 0, u64::MAX, Some(max_bytes)).map(|(_, bytes)| bytes)
    }

    /// What `FileStart` said, and the bytes.
    pub fn read_part(
        &mut self,
        root: Root,
        path: &str,
        offset: u64,
        length: u64,
        max_size: Option<u64>,
    ) -> Result<(Start, Vec<u8>), (GuestFailure, String)> {
        let call = self.send(&ToGuest::ReadFile { root, path: path.into(), offset, length, max_size });
        let (mut start, mut bytes) = (None, Vec::new());
        loop {
            let frame = self.frame_of(call);
            match frame.kind {
                FrameKind::File => bytes.extend(frame.payload),
                FrameKind::Stdout | FrameKind::Stderr => panic!("output in a file"),
                FrameKind::Message => match frame.message().unwrap() {
                    FromGuest::FileStart { size, modified_ns, inode } => start = Some((size, modified_ns, inode)),
                    FromGuest::Done => return Ok((start.expect("a start"), bytes)),
                    FromGuest::Failed { failure, message } => return Err((failure, message)),
                    other => panic!("unexpected {other:?}"),
                },
            }
        }
    }

    pub fn list(&mut self, root: Root, path: &str, max_entries: u32, order: ListOrder) -> (Vec<FileEntry>, u64) {
        match self.call(&ToGuest::ListFiles { root, path: path.into(), max_entries, order }) {
            FromGuest::Files { entries, total } => (entries, total),
            other => panic!("{other:?}"),
        }
    }

    /// After a ping nothing more may come for earlier calls but what is asked for here.
    pub fn nothing_left(&mut self) {
        let answer = self.call(&ToGuest::Ping);
        assert_eq!(answer, FromGuest::Done);
        let left: Vec<_> = self.unclaimed.iter().map(|f| (f.call, String::from_utf8_lossy(&f.payload))).collect();
        assert!(left.is_empty(), "{left:?}");
    }

    /// Hangs up and waits for the guest's end.
    pub fn bye(mut self) {
        self.stream.shutdown(std::net::Shutdown::Both).unwrap();
        if let Some(guest) = self.guest.take() {
            guest.join().unwrap().unwrap();
        }
    }
}

pub const LONG: Deadline = Deadline { after_ms: 15_000, grace_ms: 2_000 };

pub fn env() -> BTreeMap<String, String> {
    [("PATH".to_owned(), "/usr/local/bin:/usr/bin:/bin".to_owned())].into()
}

/// A kernel that is a small Python program: `n`, `code` of each request, `ev(**members)` to answer.
pub fn fake(body: &str) -> KernelSpec {
    fake_in(Language::Python, body)
}

pub fn fake_in(language: Language, body: &str) -> KernelSpec {
    let program = format!(
        "import json,os,sys,time,signal\n\
         signal.signal(signal.SIGINT, signal.SIG_IGN)\n\
         def raw(b):\n while b: b=b[os.write(4,b):]\n\
         def ev(**k): raw((json.dumps(k)+'\\n').encode())\n\
         def out(s): os.write(1,s.encode())\n\
         os.set_inheritable(3,False); os.set_inheritable(4,False)\n\
         ev(t='ready',n=0,version='fake')\n\
         for line in os.fdopen(3):\n r=json.loads(line); n=r['n']; code=r['code']\n{}",
        body.lines().map(|line| format!(" {line}\n")).collect::<String>()
    );
    let argv = ["python3", "-I", "-S", "-c", &program].map(String::from).to_vec();
    KernelSpec { language, argv, env: env(), cwd: "/".into(), merge_output: false }
}

/// A fake that runs the cell's code as it is and then says `done`.
pub fn exec_fake() -> KernelSpec {
    fake("exec(code)\nev(t='done',n=n,status='ok',ms=0)")
}

/// The real Python kernel, if there is an interpreter for it.
pub fn python() -> Option<KernelSpec> {
    let interpreter = runtime("SANDPOOL_TEST_PYTHON")?;
    let argv = vec![interpreter, "-I".into(), kernel_file("driver.py")];
    Some(KernelSpec { language: Language::Python, argv, env: env(), cwd: "/tmp".into(), merge_output: false })
}

pub fn node(language: Language) -> Option<KernelSpec> {
    let interpreter = runtime("SANDPOOL_TEST_NODE")?;
    let argv = vec![interpreter, "--no-force-async-hooks-checks".into(), kernel_file("driver.cjs")];
    Some(KernelSpec { language, argv, env: env(), cwd: "/tmp".into(), merge_output: false })
}

#[allow(clippy::disallowed_methods, reason = "tests have no configuration of their own")]
fn runtime(variable: &str) -> Option<String> {
    let found = std::env::var(variable).ok().filter(|value| !value.is_empty());
    if found.is_none() {
        assert!(std::env::var_os("CI").is_none(), "{variable} must name an interpreter in CI");
        eprintln!("SKIP: {variable} names no interpreter");
    }
    found
}

fn kernel_file(name: &str) -> String {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("kernels").join(name).to_str().unwrap().to_owned()
}

/// A directory that goes away with the test.
pub struct Scratch(PathBuf);

impl Scratch {
    pub fn new() -> Self {
        static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
        let number = NEXT.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
        let path = std::env::temp_dir().join(format!("guest-{}-{number}", std::process::id()));
        std::fs::create_dir(&path).unwrap();
        Self(path)
    }

    pub fn path(&self) -> &std::path::Path {
        &self.0
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

/// Waits until the file is there, and takes it away.
pub fn wait_for(file: &std::path::Path) {
    let start = Instant::now();
    while std::fs::remove_file(file).is_err() {
        assert!(start.elapsed() < PATIENCE, "{} never came", file.display());
        std::thread::sleep(Duration::from_millis(2));
    }
}

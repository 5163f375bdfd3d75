//! An engine without sandboxes for the tests of the protocol: contexts are real, code is a handful of known texts.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use engine::op::{
    Call, Captured, CellError, ContextInfo, Ended, EngineError, Event, FileEntry, FileKind, Language, MimeBundle, Op,
    Outcome, Ran, RunOutcome, Stream,
};
use server::mcp::{Execute, Executing};

/// 2025-10-22T06:53:42Z.
const NOW: u64 = 1_761_116_022;

/// One white pixel.
pub const PNG: &str = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAQAAAC1HAwCAAAAC0lEQVR42mP8/x8AAwMCAO+ip1sAAAAASUVORK5CYII=";

#[derive(Default)]
pub struct FakeEngine {
    contexts: Mutex<Vec<Context>>,
    made: AtomicUsize,
    pub running: AtomicUsize,
    pub cancelled: AtomicUsize,
    /// Every code in the order in which it came.
    pub ran: Mutex<Vec<String>>,
}

struct Context {
    info: ContextInfo,
    /// The value of `x`, the only variable there is.
    x: Option<String>,
    files: BTreeMap<String, Vec<u8>>,
}

impl Execute for FakeEngine {
    fn execute<'a>(&'a self, call: &'a Call, op: Op) -> Executing<'a> {
        Box::pin(async move {
            match op {
                Op::CreateContext { name, language, description } => self.create(name, language, description),
                Op::ListContexts => Ok(Outcome::Contexts(self.list())),
                Op::StopContext { context } => self.stop(&context),
                Op::RunCode { context, code, .. } => self.run(call, &context, &code).await,
                Op::WriteFile { context, path, content } => self.with(&context, |c| {
                    let size = content.len() as u64;
                    c.files.insert(path.clone(), content);
                    Ok(Outcome::Written { path, size })
                }),
                Op::ReadFile { context, path } => self.with(&context, |c| match c.files.get(&path) {
                    Some(content) => Ok(Outcome::File { path, content: content.clone() }),
                    None => Err(EngineError::FileNotFound(path)),
                }),
                Op::ListFiles { path, .. } if path.starts_with("many") => {
                    let entries = (0..10_000).map(|n| entry(&format!("{n:05}"), 1)).collect();
                    Ok(Outcome::Files { entries, total: 123_456 })
                }
                Op::ListFiles { context, .. } => self.with(&context, |c| {
                    let entries: Vec<FileEntry> =
                        c.files.iter().map(|(path, content)| entry(path, content.len())).collect();
                    let total = entries.len() as u64;
                    Ok(Outcome::Files { entries, total })
                }),
                Op::Health => Err(EngineError::NotReady("no health in a fake".into())),
            }
        })
    }
}

fn entry(path: &str, size: usize) -> FileEntry {
    FileEntry { path: path.into(), size: size as u64, kind: FileKind::File, modified: NOW as i64 }
}

impl FakeEngine {
    fn create(&self, name: String, language: Language, description: String) -> Result<Outcome, EngineError> {
        if name == "one-too-many" {
            return Err(EngineError::ContextLimit(50));
        }
        if name == "broken" {
            return Err(EngineError::CreateFailed("internal server error".into()));
        }
        let number = self.made.fetch_add(1, Ordering::SeqCst) as u64 + 1;
        let info = ContextInfo {
            id: format!("ctx-{number}"),
            name,
            description,
            language,
            created_at: NOW + number,
            last_used: NOW + number,
            isolation: sandbox::Isolation { level: sandbox::Level::Full, missing: Vec::new() },
        };
        self.contexts.lock().unwrap().push(Context { info: info.clone(), x: None, files: BTreeMap::new() });
        Ok(Outcome::Created(info))
    }

    fn list(&self) -> Vec<ContextInfo> {
        self.contexts.lock().unwrap().iter().rev().map(|c| c.info.clone()).collect()
    }

    fn stop(&self, context: &str) -> Result<Outcome, EngineError> {
        if context == "ctx-unstoppable" {
            return Err(EngineError::StopFailed("the back end does not answer".into()));
        }
        let id = self.with(context, |c| Ok(c.info.id.clone()))?;
        self.contexts.lock().unwrap().retain(|c| c.info.id != id);
        Ok(Outcome::Stopped { context_id: id })
    }

    fn with<T>(&self, context: &str, f: impl FnOnce(&mut Context) -> Result<T, EngineError>) -> Result<T, EngineError> {
        let mut contexts = self.contexts.lock().unwrap();
        if let Some(found) = contexts.iter_mut().find(|c| c.info.id == context) {
            return f(found);
        }
        let mut named: Vec<&mut Context> = contexts.iter_mut().filter(|c| c.info.name == context).collect();
        match named.as_mut_slice() {
            [] => Err(EngineError::ContextNotFound(context.into())),
            [one] => f(one),
            several => Err(EngineError::AmbiguousName {
                name: context.into(),
                ids: several.iter().map(|c| c.info.id.clone()).collect(),
            }),
        }
    }

    async fn run(&self, call: &Call, context: &str, code: &str) -> Result<Outcome, EngineError> {
        self.with(context, |_| Ok(()))?;
        self.running.fetch_add(1, Ordering::SeqCst);
        self.ran.lock().unwrap().push(code.into());
        let ran = self.cell(call, context, code).await;
        self.running.fetch_sub(1, Ordering::SeqCst);
        ran.map(Outcome::Ran)
    }

    async fn cell(&self, call: &Call, context: &str, code: &str) -> Result<Ran, EngineError> {
        if let Some(value) = code.strip_prefix("x = ") {
            self.with(context, |c| {
                c.x = Some(value.into());
                Ok(())
            })?;
            return Ok(printed(""));
        }
        let x = self.with(context, |c| Ok(c.x.clone()))?;
        let end = |end| Ok(Ran { end, ..printed("so far\n") });
        match code {
            "print(x)" | "console.log(x)" => {
                Ok(x.map_or_else(|| raised("NameError: name 'x' is not defined"), |x| printed(&format!("{x}\n"))))
            }
            "x" => Ok(Ran { value: Some(plain(&x.unwrap_or_default())), ..printed("") }),
            "print('a', end=''); 7" => Ok(Ran { value: Some(plain("7")), ..printed("a") }),
            "1 / 0" => Ok(raised("ZeroDivisionError: division by zero")),
            "ticks" => {
                for i in 0..3 {
                    call.events.send(Event::Output { stream: Stream::Stdout, text: format!("tick {i}\n") });
                    tokio::time::sleep(Duration::from_millis(150)).await;
                }
                Ok(printed("tick 0\ntick 1\ntick 2\n"))
            }
            "flood" => {
                for i in 0..100_000 {
                    call.events.send(Event::Output {
                        stream: Stream::Stdout,
                        text: format!("{{\"jsonrpc\":\"2.0\",\"id\":{i}}}\n"),
                    });
                }
                Ok(printed(""))
            }
            "sleep" => {
                tokio::time::sleep(Duration::from_millis(300)).await;
                Ok(printed("slept\n"))
            }
            "forever" => {
                call.cancel.cancelled().await;
                self.cancelled.fetch_add(1, Ordering::SeqCst);
                end(RunOutcome::Cancelled { state_kept: true })
            }
            "forever and ever" => {
                call.events.send(Event::Output { stream: Stream::Stdout, text: "begun\n".into() });
                std::future::pending().await
            }
            "picture" => {
                let figure = MimeBundle::from([
                    ("image/png".into(), PNG.into()),
                    ("text/plain".into(), "<Figure size 640x480 with 1 Axes>".into()),
                ]);
                let forged = MimeBundle::from([("image/png".into(), "not base64 \u{1F600}".into())]);
                let huge = MimeBundle::from([("image/png".into(), "A".repeat(6 << 20).into())]);
                let table = plain("   a\n0  1");
                Ok(Ran { displays: vec![figure, table, forged, huge], ..printed("drawn\n") })
            }
            "huge" => Ok(printed(&"x".repeat(9 << 20))),
            "big" => Ok(printed(&"x".repeat(2 << 20))),
            "panic" => panic!("the fake engine panics on purpose"),
            "late" => Ok(Ran { late: Some("from the background".into()), ..printed("") }),
            "notice" => {
                Ok(Ran { notice: Some("[the sandbox was lost: variables and files are gone]".into()), ..printed("") })
            }
            "displays" => Ok(Ran {
                displays: vec![plain(&"😀".repeat(20_000)); 64],
                value: Some(plain("the end")),
                ..printed("")
            }),
            "markup" => Ok(Ran {
                displays: vec![MimeBundle::from([("text/html".into(), "<b>bold</b>".into())])],
                ..printed("")
            }),
            "exit" => end(RunOutcome::Exit { code: 3 }),
            "timeout kept" => end(RunOutcome::TimedOut { after: Duration::from_secs(30), state_kept: true }),
            "timeout lost" => end(RunOutcome::TimedOut { after: Duration::from_secs(30), state_kept: false }),
            "interrupted" => end(RunOutcome::Interrupted),
            "memory" => end(RunOutcome::OutOfMemory { limit_bytes: 2048 << 20 }),
            "exited" => end(RunOutcome::Ended { how: Ended::Exited { code: 7 } }),
            "crashed" => end(RunOutcome::Ended { how: Ended::Signaled { signal: 11 } }),
            "lost" => end(RunOutcome::SandboxLost { why: "its first process died".into() }),
            "queue full" => Err(EngineError::QueueFull(100)),
            "busy" => Err(EngineError::Busy(Duration::from_secs(30))),
            "not ready" => Err(EngineError::NotReady("preparing python, 3 of 9 packages".into())),
            "back end" => Err(EngineError::Sandbox("connection reset".into())),
            _ => Ok(printed("")),
        }
    }
}

fn plain(text: &str) -> MimeBundle {
    MimeBundle::from([("text/plain".into(), text.into())])
}

fn printed(text: &str) -> Ran {
    Ran {
        stdout: Captured { text: text.into(), total_bytes: text.len() as u64, truncated: false },
        stderr: Captured::default(),
        value: None,
        displays: Vec::new(),
        error: None,
        late: None,
        notice: None,
        end: RunOutcome::Ok,
        duration: Duration::from_micros(12_345),
    }
}

fn raised(line: &str) -> Ran {
    let (name, value) = line.split_once(": ").unwrap();
    let text = format!("Traceback (most recent call last):\n  File \"<stdin>\", line 1, in <module>\n{line}\n");
    let error = CellError { name: name.into(), value: value.into(), text };
    Ran { error: Some(error), end: RunOutcome::Error, ..printed("") }
}

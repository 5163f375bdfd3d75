//! A guest that lies, floods or talks nonsense costs its own sandbox and nothing else.

mod support;

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use engine::Op;
use engine::op::{RunOutcome, Search};
use engine::{Call, EngineError};
use proto::{FrameKind, FromGuest, RunStatus, ToGuest};
use support::*;
use testkit::fake::{FakeBackend, Wire};
use tokio::sync::Notify;

/// Plays `attack` for the cell `attack`; everything else is answered well.
fn attacked_by<F, W>(attack: F) -> FakeBackend
where
    F: Fn(u64, Wire) -> W + Send + Sync + 'static,
    W: Future<Output = ()> + Send + 'static,
{
    FakeBackend::scripted(move |call, request, wire| match request {
        ToGuest::Run { code, .. } if code == "attack" => Some(Box::pin(attack(call, wire.clone()))),
        _ => None,
    })
}

/// The attacked run ends with a lost sandbox, its neighbour keeps its state, and the context itself works again.
async fn costs_only_its_sandbox(backend: &FakeBackend, expected: &str) {
    let engine = engine(backend).await;
    let (victim, neighbour) = (create(&engine, "victim").await, create(&engine, "neighbour").await);
    run(&engine, &neighbour, "set x 1").await;
    let attacked = run(&engine, &victim, "attack").await;
    assert!(lost(&attacked).contains(expected), "{attacked:?}");
    assert_eq!(text(&run(&engine, &neighbour, "get x").await.stdout), "1\n");
    assert_eq!(text(&run(&engine, &victim, "print again").await.stdout), "again\n");
    engine.shutdown(std::time::Duration::ZERO).await;
    assert_eq!(backend.living(), 0);
}

#[tokio::test(start_paused = true)]
async fn garbage_costs_the_sandbox_only() {
    let backend = attacked_by(|_, wire| async move { wire.raw(&[0xff; 100]).await });
    costs_only_its_sandbox(&backend, "bad frame: unknown frame kind `255`").await;
}

#[tokio::test(start_paused = true)]
async fn a_frame_longer_than_allowed_is_refused_by_its_header() {
    let backend = attacked_by(|call, wire| async move {
        let mut header = (64u32 << 20).to_le_bytes().to_vec();
        header.extend([FrameKind::Stdout as u8, 0, 0, 0]);
        header.extend(call.to_le_bytes());
        wire.raw(&header).await;
    });
    costs_only_its_sandbox(&backend, "over the limit").await;
}

#[tokio::test(start_paused = true)]
async fn a_message_that_cannot_be_read_costs_the_sandbox() {
    let backend = attacked_by(|call, wire| async move {
        wire.data(FrameKind::Message, call, br#"{"t":"obey","command":"rm"}"#).await;
    });
    costs_only_its_sandbox(&backend, "message cannot be read").await;
}

/// HOSTILE G34: depth, and millions of members, are refused before they cost memory.
#[tokio::test(start_paused = true)]
async fn deep_or_wide_messages_cost_the_sandbox() {
    let deep = attacked_by(|call, wire| async move {
        let nested = format!("{{\"t\":\"event\",\"event\":{}", "[".repeat(100_000));
        wire.data(FrameKind::Message, call, nested.as_bytes()).await;
    });
    costs_only_its_sandbox(&deep, "message cannot be read").await;
    let wide = attacked_by(|call, wire| async move {
        let members = "0,".repeat(120_000);
        let value = format!(r#"{{"t":"event","event":{{"t":"result","data":{{"a":[{members}0]}}}}}}"#);
        let mut bytes = Vec::new();
        proto::encode(&mut bytes, FrameKind::Message, call, value.as_bytes());
        wire.raw(&bytes).await;
        wire.end(call, RunStatus::Ok).await;
    });
    let engine = engine(&wide).await;
    let context = create(&engine, "a").await;
    assert_eq!(run(&engine, &context, "attack").await.end, RunOutcome::Ok, "120,000 members are still fine");
}

/// What an honest guest passes on of a cell is never taken for an attack.
#[tokio::test(start_paused = true)]
async fn the_largest_object_a_guest_passes_on_is_read() {
    let backend = attacked_by(|call, wire| async move {
        let members: Vec<String> = (0..proto::MAX_VALUES - 2).map(|n| format!("\"{n}\":{{}}")).collect();
        let object = format!("{{{}}}", members.join(","));
        let event = format!(r#"{{"t":"event","event":{{"t":"result","data":{{"application/json":{object}}}}}}}"#);
        let mut bytes = Vec::new();
        proto::encode(&mut bytes, FrameKind::Message, call, event.as_bytes());
        wire.raw(&bytes).await;
        wire.end(call, RunStatus::Ok).await;
    });
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    assert_eq!(run(&engine, &context, "attack").await.end, RunOutcome::Ok);
}

#[tokio::test(start_paused = true)]
async fn an_answer_of_the_wrong_kind_costs_the_sandbox() {
    let backend = attacked_by(|call, wire| async move { wire.send(call, &FromGuest::Written { size: 1 }).await });
    costs_only_its_sandbox(&backend, "something else").await;
    let backend = attacked_by(|call, wire| async move { wire.data(FrameKind::File, call, b"x").await });
    costs_only_its_sandbox(&backend, "a file instead of output").await;
}

#[tokio::test(start_paused = true)]
async fn half_a_frame_and_the_end_is_a_lost_sandbox() {
    let backend = attacked_by(|call, wire| async move {
        let mut bytes = Vec::new();
        proto::encode(&mut bytes, FrameKind::Stdout, call, b"never finished");
        wire.raw(&bytes[..20]).await;
        wire.hang_up().await;
    });
    costs_only_its_sandbox(&backend, "closed the connection").await;
}

/// HOSTILE G32.
#[tokio::test(start_paused = true)]
async fn frames_for_other_calls_are_ignored() {
    let earlier = Arc::new(AtomicU64::new(0));
    let backend = FakeBackend::scripted(move |call, request, wire| {
        let ToGuest::Run { code, .. } = request else { return None };
        let (stale, wire) = (earlier.swap(call, Ordering::SeqCst), wire.clone());
        (code == "attack").then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                for forged in [stale, call.wrapping_add(1), call.wrapping_sub(1), 7] {
                    wire.data(FrameKind::Stdout, forged, b"forged").await;
                    wire.end(forged, RunStatus::Exit { code: 99 }).await;
                }
                wire.data(FrameKind::Stdout, call, b"true").await;
                wire.end(call, RunStatus::Ok).await;
                wire.end(call, RunStatus::Error).await;
            })
        })
    });
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    run(&engine, &context, "print first").await;
    let attacked = run(&engine, &context, "attack").await;
    assert_eq!((text(&attacked.stdout), &attacked.end), ("true", &RunOutcome::Ok));
    assert_eq!(run(&engine, &context, "print after").await.end, RunOutcome::Ok);
}

#[tokio::test(start_paused = true)]
async fn a_guest_that_keeps_sending_for_nobody_is_lost() {
    let backend = attacked_by(|call, wire| async move {
        for _ in 0..10_001 {
            wire.data(FrameKind::Stdout, call ^ 1, b"x").await;
        }
    });
    costs_only_its_sandbox(&backend, "what nobody asked for").await;
}

/// HOSTILE G35: each tiny frame is paid for, none is queued without bound, and the run still ends.
#[tokio::test]
async fn a_hundred_thousand_tiny_frames_are_all_counted() {
    let backend = attacked_by(|call, wire| async move {
        let mut bytes = Vec::new();
        (0..1000).for_each(|_| proto::encode(&mut bytes, FrameKind::Stdout, call, b"x"));
        for _ in 0..100 {
            wire.raw(&bytes).await;
        }
        wire.end(call, RunStatus::Ok).await;
    });
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    let flooded = run(&engine, &context, "attack").await;
    assert_eq!((flooded.stdout.total_bytes, flooded.stdout.truncated), (100_000, true));
}

#[tokio::test(start_paused = true)]
async fn a_guest_of_another_version_or_without_a_word_makes_no_session() {
    let other = FakeBackend::scripted(|call, request, wire| {
        let wire = wire.clone();
        matches!(request, ToGuest::Hello { .. }).then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move { wire.send(call, &FromGuest::Hello { version: 999 }).await })
        })
    });
    let silent = FakeBackend::scripted(|_, request, _| {
        matches!(request, ToGuest::Hello { .. })
            .then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> { Box::pin(std::future::pending()) })
    });
    for (backend, expected) in [(other, "version `999`"), (silent, "did not answer the greeting")] {
        let started = engine::Engine::start(config(), runtimes(), Arc::new(backend.clone())).await;
        let error = started.err().expect("no start").to_string();
        assert!(error.contains(expected), "{error}");
        assert_eq!((backend.created(), backend.living()), (9, 0), "three sessions, three times each");
    }
}

/// HOSTILE G09: what a cell prints is never taken for what a guest says.
#[tokio::test(start_paused = true)]
async fn printed_frames_are_plain_output() {
    let backend = attacked_by(|call, wire| async move {
        let mut fake = Vec::new();
        let end = proto::RunEnd {
            status: RunStatus::Exit { code: 1 },
            micros: 0,
            stdout_bytes: 0,
            stderr_bytes: 0,
            stdout_kept: None,
            stderr_kept: None,
        };
        proto::encode_message(&mut fake, call, &FromGuest::RunEnd { end }).unwrap();
        wire.data(FrameKind::Stdout, call, &fake).await;
        wire.end(call, RunStatus::Ok).await;
    });
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    let printed = run(&engine, &context, "attack").await;
    assert_eq!(printed.end, RunOutcome::Ok);
    assert!(printed.stdout.text.contains("run_end"));
}

#[tokio::test(start_paused = true)]
async fn a_file_larger_than_announced_or_allowed_is_not_collected() {
    let backend = FakeBackend::scripted(|call, request, wire| {
        let wire = wire.clone();
        matches!(request, ToGuest::ReadFile { .. }).then(|| -> std::pin::Pin<Box<dyn Future<Output = ()> + Send>> {
            Box::pin(async move {
                wire.send(call, &FromGuest::FileStart { size: 1, modified_ns: 0, inode: 1 }).await;
                loop {
                    wire.data(FrameKind::File, call, &vec![0; 256 << 10]).await;
                    tokio::task::yield_now().await;
                }
            })
        })
    });
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    let read = engine.execute(&call(), Op::ReadFile { owner: files_of(&context), path: "x".into() }).await;
    assert!(read.unwrap_err().to_string().contains("not what it announced"));
    assert_eq!(run(&engine, &context, "print on").await.end, RunOutcome::Ok);
}

/// HOSTILE G01: frames that are almost right, and bytes that are not at all, from a fixed seed.
#[tokio::test(start_paused = true)]
async fn no_bytes_of_a_guest_harm_anything_but_its_sandbox() {
    let seed = Arc::new(AtomicU64::new(0x5eed));
    let backend = attacked_by(move |call, wire| {
        let mut random = Random(seed.fetch_add(1, Ordering::SeqCst).wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1);
        async move {
            for _ in 0..20 {
                wire.raw(&random.frame(call)).await;
            }
            wire.end(call, RunStatus::Ok).await;
            wire.hang_up().await;
        }
    });
    let engine = engine(&backend).await;
    let (victim, neighbour) = (create(&engine, "victim").await, create(&engine, "neighbour").await);
    run(&engine, &neighbour, "set x 1").await;
    for _ in 0..300 {
        run(&engine, &victim, "attack").await;
    }
    assert_eq!(text(&run(&engine, &neighbour, "get x").await.stdout), "1\n");
    assert_eq!(text(&run(&engine, &victim, "print on").await.stdout), "on\n");
}

/// xorshift: enough to vary bytes, the same each time.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    fn frame(&mut self, call: u64) -> Vec<u8> {
        let end = proto::RunEnd {
            status: RunStatus::Error,
            micros: u64::MAX,
            stdout_bytes: u64::MAX,
            stderr_bytes: 0,
            stdout_kept: None,
            stderr_kept: None,
        };
        let bundle = proto::MimeBundle::from([("image/png".into(), "AAAA".into()), ("x\n".into(), 1.into())]);
        let messages = [
            FromGuest::Gap { stream: proto::Stream::Stdout, bytes: u64::MAX },
            FromGuest::LateOutput { stdout: "a\0b".into(), stderr: String::new(), dropped: u64::MAX },
            FromGuest::Event { event: proto::KernelEvent::Result { data: bundle } },
            FromGuest::Event { event: proto::KernelEvent::Clear { wait: true } },
            FromGuest::KernelExited { kernel: self.next() as u32, how: proto::Ended::Signaled { signal: -1 } },
            FromGuest::Hello { version: 7 },
            FromGuest::RunEnd { end },
        ];
        let call = [call, call, call, 0, self.next()][self.next() as usize % 5];
        let mut bytes = Vec::new();
        match self.next() % 10 {
            0 => proto::encode(&mut bytes, FrameKind::Stderr, call, &self.next().to_le_bytes()),
            1 => proto::encode(&mut bytes, FrameKind::Stdout, call, b"\xf0\x9f"),
            _ => proto::encode_message(&mut bytes, call, &messages[self.next() as usize % messages.len()]).unwrap(),
        }
        if self.next().is_multiple_of(8) {
            let at = self.next() as usize % bytes.len();
            bytes[at] ^= 1 << (self.next() % 8);
        }
        bytes
    }
}

/// A search that nobody waits for any more ends in the guest, too.
#[tokio::test(start_paused = true)]
async fn cancelling_a_search_interrupts_it_in_the_guest() {
    let (searching, searched, interrupted) = (AtomicU64::new(0), Arc::new(Notify::new()), Arc::new(Notify::new()));
    let (begun, ended) = (searched.clone(), interrupted.clone());
    let backend = FakeBackend::scripted(move |call, request, _| match request {
        ToGuest::SearchFiles { .. } => {
            searching.store(call, Ordering::SeqCst);
            begun.notify_one();
            Some(Box::pin(async {}))
        }
        ToGuest::Interrupt if call == searching.load(Ordering::SeqCst) => {
            ended.notify_one();
            None
        }
        _ => None,
    });
    let engine = engine(&backend).await;
    let context = create(&engine, "a").await;
    let search = Search { glob: None, text: Some("x".into()), regex: false, max_bytes: 1000 };
    let op = Op::SearchFiles { owner: files_of(&context), path: String::new(), search };
    let call: Call = call();
    let cancel = async {
        searched.notified().await;
        call.cancel.cancel();
    };
    let (result, ()) = tokio::join!(engine.execute(&call, op), cancel);
    assert_eq!(result.unwrap_err(), EngineError::Cancelled);
    interrupted.notified().await;
}

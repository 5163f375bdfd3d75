//! The host's side of one connection, as small as it can be: one call at a time.

use std::collections::BTreeMap;
use std::time::Duration;

use proto::{Deadline, Decoder, Frame, FrameKind, FromGuest, Root, RunStatus, ToGuest};
use sandbox::{GuestStream, Sandbox};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::Result;

pub struct Guest {
    stream: GuestStream,
    decoder: Decoder,
    calls: u64,
}

#[derive(Debug)]
pub struct Done {
    pub stdout: String,
    pub stderr: String,
    pub status: RunStatus,
}

const PATIENCE: Duration = Duration::from_secs(60);

impl Guest {
    pub async fn open(sandbox: &dyn Sandbox) -> Result<Self> {
        let mut guest = Self { stream: sandbox.connect().await?, decoder: Decoder::default(), calls: 0 };
        match guest.ask(&ToGuest::Hello { version: proto::VERSION }, &[]).await?.last {
            FromGuest::Hello { version: proto::VERSION } => Ok(guest),
            other => Err(format!("unexpected greeting `{other:?}`").into()),
        }
    }

    pub async fn ping(&mut self) -> Result<()> {
        match self.ask(&ToGuest::Ping, &[]).await?.last {
            FromGuest::Done => Ok(()),
            other => Err(format!("unexpected answer `{other:?}`").into()),
        }
    }

    pub async fn shell(&mut self, script: &str) -> Result<Done> {
        self.exec(&["/bin/sh", "-c", script], "/workspace").await
    }

    pub async fn exec(&mut self, argv: &[&str], cwd: &str) -> Result<Done> {
        let request = ToGuest::Exec {
            argv: argv.iter().map(ToString::to_string).collect(),
            env: BTreeMap::from([("PATH".into(), "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin".into())]),
            cwd: cwd.into(),
            merge_output: false,
            deadline: Deadline { after_ms: 30_000, grace_ms: 1_000 },
            forward_bytes: 1 << 20,
            keep_over: None,
        };
        let Answer { stdout, stderr, last, .. } = self.ask(&request, &[]).await?;
        match last {
            FromGuest::RunEnd { end } => Ok(Done { stdout: text(stdout), stderr: text(stderr), status: end.status }),
            other => Err(format!("`{argv:?}`: {other:?}").into()),
        }
    }

    pub async fn write_file(&mut self, path: &str, bytes: &[u8]) -> Result<()> {
        match self
            .ask(&ToGuest::WriteFile { root: Root::Workspace, path: path.into(), size: bytes.len() as u64 }, bytes)
            .await?
            .last
        {
            FromGuest::Written { .. } => Ok(()),
            other => Err(format!("`{path}`: {other:?}").into()),
        }
    }

    pub async fn read_file(&mut self, path: &str) -> Result<Vec<u8>> {
        let (root, path, length) = (Root::Workspace, path.to_owned(), 1 << 20);
        let request = ToGuest::ReadFile { root, path: path.clone(), offset: 0, length, max_size: Some(length) };
        let answer = self.ask(&request, &[]).await?;
        match answer.last {
            FromGuest::Done => Ok(answer.file),
            other => Err(format!("`{path}`: {other:?}").into()),
        }
    }

    async fn ask(&mut self, request: &ToGuest, file: &[u8]) -> Result<Answer> {
        self.calls += 1;
        let mut bytes = Vec::new();
        proto::encode_message(&mut bytes, self.calls, request)?;
        for chunk in file.chunks(proto::MAX_CHUNK) {
            proto::encode(&mut bytes, FrameKind::File, self.calls, chunk);
        }
        self.stream.write_all(&bytes).await?;
        tokio::time::timeout(PATIENCE, self.answer()).await.map_err(|_| format!("no answer to `{request:?}`"))?
    }

    async fn answer(&mut self) -> Result<Answer> {
        let (mut stdout, mut stderr, mut file) = (Vec::new(), Vec::new(), Vec::new());
        loop {
            let frame = self.frame().await?;
            if frame.call != self.calls {
                continue;
            }
            match frame.kind {
                FrameKind::Stdout => stdout.extend(frame.payload),
                FrameKind::Stderr => stderr.extend(frame.payload),
                FrameKind::File => file.extend(frame.payload),
                FrameKind::Message => match frame.message::<FromGuest>()? {
                    FromGuest::Event { .. } | FromGuest::Gap { .. } | FromGuest::FileStart { .. } => {}
                    FromGuest::LateOutput { .. } => {}
                    last => return Ok(Answer { stdout, stderr, file, last }),
                },
            }
        }
    }

    async fn frame(&mut self) -> Result<Frame> {
        let mut buffer = [0; 16 << 10];
        loop {
            if let Some(frame) = self.decoder.next_frame()? {
                return Ok(frame);
            }
            match self.stream.read(&mut buffer).await? {
                0 => return Err("the guest closed the connection".into()),
                n => self.decoder.push(&buffer[..n]),
            }
        }
    }
}

struct Answer {
    stdout: Vec<u8>,
    stderr: Vec<u8>,
    file: Vec<u8>,
    last: FromGuest,
}

fn text(bytes: Vec<u8>) -> String {
    String::from_utf8_lossy(&bytes).into_owned()
}

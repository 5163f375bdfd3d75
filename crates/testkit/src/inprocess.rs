//! A back end without walls: the real guest in a thread, a directory of its own as workspace. Never for foreign code.
//!
//! Driver files and the workspace lie in a temporary directory; requests are rewritten on their way so that the engine may use
//! the paths it uses for real sandboxes.

use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use async_trait::async_trait;
use proto::{Decoder, Frame, FrameKind, ToGuest};
use sandbox::{
    Backend, BackendError, DATA, GuestStream, Isolation, KeptVolumeInfo, Level, Sandbox, SandboxSpec, Stats,
    UnheldLimits, WORKSPACE,
};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

/// Made below `base`, which the caller owns.
pub struct InProcess {
    base: PathBuf,
    next: AtomicUsize,
    transpiler: Vec<String>,
}

impl InProcess {
    /// `transpiler`: how to start it, for TypeScript; may be empty.
    pub fn new(base: impl Into<PathBuf>, transpiler: Vec<String>) -> Self {
        Self { base: base.into(), next: AtomicUsize::new(0), transpiler }
    }
}

#[async_trait]
impl Backend for InProcess {
    fn name(&self) -> &'static str {
        "in-process"
    }

    async fn create(&self, spec: &SandboxSpec) -> Result<Box<dyn Sandbox>, BackendError> {
        if !spec.volumes.is_empty() || spec.kept.is_some() {
            return Err(BackendError::Create("a back end without walls has no volumes".into()));
        }
        let number = self.next.fetch_add(1, Ordering::SeqCst);
        let root = self.base.join(format!("sbx-{number}"));
        write_root(&root, spec).map_err(|e| BackendError::Create(format!("{}: {e}", root.display())))?;
        Ok(Box::new(Place {
            id: format!("sbx-{number}"),
            root,
            transpiler: self.transpiler.clone(),
            isolation: isolation(),
            closing: Mutex::default(),
        }))
    }

    async fn kept(&self) -> Result<Vec<KeptVolumeInfo>, BackendError> {
        Ok(vec![])
    }

    async fn discard(&self, _name: &str) -> Result<(), BackendError> {
        Ok(())
    }

    async fn shutdown(&self) {}
}

const TMP: &str = "/tmp";

fn isolation() -> Isolation {
    Isolation {
        level: Level::Basic,
        missing: vec!["everything: a back end for tests".into()],
        unheld: UnheldLimits::default(),
    }
}

fn write_root(root: &Path, spec: &SandboxSpec) -> std::io::Result<()> {
    std::fs::create_dir_all(inside(root, WORKSPACE))?;
    std::fs::create_dir_all(inside(root, DATA))?;
    std::fs::create_dir_all(inside(root, TMP))?;
    for file in &spec.files {
        let path = inside(root, &file.path.to_string_lossy());
        path.parent().map_or(Ok(()), std::fs::create_dir_all)?;
        std::fs::write(path, file.content.as_bytes())?;
    }
    Ok(())
}

fn inside(root: &Path, path: &str) -> PathBuf {
    root.join(path.trim_start_matches('/'))
}

struct Place {
    id: String,
    root: PathBuf,
    transpiler: Vec<String>,
    isolation: Isolation,
    /// Shut down to end the guest.
    closing: Mutex<Option<UnixStream>>,
}

#[async_trait]
impl Sandbox for Place {
    fn id(&self) -> &str {
        &self.id
    }

    fn isolation(&self) -> &Isolation {
        &self.isolation
    }

    async fn connect(&self) -> Result<GuestStream, BackendError> {
        let io = |e: std::io::Error| BackendError::Launcher(e.to_string());
        let (host, guest) = UnixStream::pair().map_err(io)?;
        *self.closing.lock().unwrap_or_else(PoisonError::into_inner) = Some(host.try_clone().map_err(io)?);
        let config = guest::GuestConfig {
            workspace: inside(&self.root, WORKSPACE),
            data: inside(&self.root, DATA),
            tmp: inside(&self.root, TMP),
            outputs: self.root.clone(),
            transpiler: self.transpiler.clone(),
            ..guest::GuestConfig::default()
        };
        std::thread::spawn(move || guest::serve(guest, config));
        host.set_nonblocking(true).map_err(io)?;
        let host = tokio::net::UnixStream::from_std(host).map_err(io)?;
        let (engine_side, ours) = tokio::io::duplex(256 << 10);
        tokio::spawn(carry(ours, host, self.root.clone()));
        Ok(Box::new(engine_side))
    }

    async fn stats(&self) -> Result<Stats, BackendError> {
        Ok(Stats::default())
    }

    async fn destroy(&self) -> Result<Option<Stats>, BackendError> {
        if let Some(stream) = self.closing.lock().unwrap_or_else(PoisonError::into_inner).take() {
            let _ = stream.shutdown(std::net::Shutdown::Both);
        }
        // A process on its way out may still write.
        let root = Arc::new(self.root.clone());
        for _ in 0..50 {
            match std::fs::remove_dir_all(&*root) {
                Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
                    tokio::time::sleep(std::time::Duration::from_millis(20)).await;
                }
                _ => return Ok(None),
            }
        }
        Err(BackendError::Launcher("the directory does not go away".into()))
    }
}

/// Carries bytes both ways, translating the paths of the sandbox to those below `root`.
async fn carry(engine_side: tokio::io::DuplexStream, guest_side: tokio::net::UnixStream, root: PathBuf) {
    let (mut from_engine, mut to_engine) = tokio::io::split(engine_side);
    let (mut from_guest, mut to_guest) = guest_side.into_split();
    let down = async {
        let mut decoder = Decoder::default();
        let mut buffer = vec![0; 64 << 10];
        while let Ok(n @ 1..) = from_engine.read(&mut buffer).await {
            decoder.push(&buffer[..n]);
            let mut out = Vec::new();
            while let Ok(Some(frame)) = decoder.next_frame() {
                translate(&mut out, frame, &root);
            }
            if to_guest.write_all(&out).await.is_err() {
                break;
            }
        }
        let _ = to_guest.shutdown().await;
    };
    let up = async {
        let _ = tokio::io::copy(&mut from_guest, &mut to_engine).await;
        let _ = to_engine.shutdown().await;
    };
    tokio::join!(down, up);
}

fn translate(out: &mut Vec<u8>, frame: Frame, root: &Path) {
    let message = if frame.kind == FrameKind::Message { frame.message::<ToGuest>().ok() } else { None };
    let Some(mut message) = message else {
        return proto::encode(out, frame.kind, frame.call, &frame.payload);
    };
    let translate_path = |path: &mut String| {
        if [WORKSPACE, DATA, TMP].iter().any(|dir| Path::new(path.as_str()).starts_with(dir)) {
            *path = inside(root, path).to_string_lossy().into_owned();
        }
    };
    match &mut message {
        ToGuest::StartKernel { spec, .. } => {
            translate_path(&mut spec.cwd);
            for argument in spec.argv.iter_mut().filter(|a| a.starts_with('/') && inside(root, a).exists()) {
                *argument = inside(root, argument).to_string_lossy().into_owned();
            }
        }
        ToGuest::Exec { cwd: path, .. }
        | ToGuest::WriteFile { path, .. }
        | ToGuest::StreamFile { path, .. }
        | ToGuest::EditFile { path, .. }
        | ToGuest::SearchFiles { path, .. }
        | ToGuest::ReadFile { path, .. }
        | ToGuest::ListFiles { path, .. } => translate_path(path),
        _ => return proto::encode(out, frame.kind, frame.call, &frame.payload),
    }
    proto::encode_message(out, frame.call, &message).expect("a short message");
}

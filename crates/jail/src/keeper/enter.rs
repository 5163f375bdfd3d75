//! This module puts processes into a running sandbox: kernels forked from the warm interpreter, and browser drivers.

use std::ffi::CString;
use std::io;
use std::os::fd::OwnedFd;

use crate::ids::{IdMap, Mode};
use crate::launcher::failed;
use crate::spec::{JailSpec, Volume, ZygoteSpec};
use crate::wire::LauncherReply;
use crate::zygote::{self, Arrival, ForkOutcome, Recipe, Rotation};
use crate::{driver, plan};

use super::{Keeper, Phase, SandboxRecord, WARM_TMP};

impl Keeper {
    pub(super) fn recipe(&self, spec: ZygoteSpec, rotation: Rotation, library: Option<OwnedFd>) -> io::Result<Recipe> {
        let ZygoteSpec { argv, env, runtime, files } = spec;
        let library = library.ok_or_else(|| io::Error::other("its library is missing"))?;
        let spec = JailSpec {
            map: IdMap::new(Mode::Single, 0, 1, u32::MAX).map_err(io::Error::other)?,
            host: self.host.clone(),
            runtime,
            files,
            volume: Volume::Tmpfs { bytes: WARM_TMP, inodes: 1000 },
            kept: None,
            kept_packages: None,
            shared: vec![],
            browser: None,
            egress: None,
            shm_bytes: WARM_TMP,
            cgroup_tasks: vec![],
            processes: None,
            dir: self.instance.dir.clone(),
            mount_point: self.mount_point.clone(),
        };
        spec.check().map_err(io::Error::other)?;
        let argv = argv.into_iter().map(CString::new).collect::<Result<_, _>>()?;
        let environment = env.iter().map(|(k, v)| CString::new(format!("{k}={v}"))).collect::<Result<_, _>>()?;
        Ok(Recipe { plan: plan::warm(&spec), argv, environment, library, rotation })
    }

    pub(super) fn fork(&mut self, request: u64, key: u64) -> io::Result<()> {
        let Some(SandboxRecord { phase: Phase::Running, pidfd: Some(guest), cgroup, entry, .. }) =
            self.sandboxes.get(&key)
        else {
            self.reply(request, LauncherReply::Gone);
            return Ok(());
        };
        let (v2, tasks) = (cgroup.code().open_v2()?, cgroup.code().open_tasks()?);
        let (guest, steps) = (guest.try_clone()?, entry.clone());
        self.zygote.fork(zygote::ForkRequest { request, sandbox: key, guest, v2, tasks, steps });
        Ok(())
    }

    pub(super) fn enter_browser(&mut self, request: u64, key: u64) -> io::Result<()> {
        let Some(SandboxRecord { phase: Phase::Running, pidfd: Some(guest), cgroup, browser_entry, driver, .. }) =
            self.sandboxes.get_mut(&key)
        else {
            self.reply(request, LauncherReply::Gone);
            return Ok(());
        };
        let missing = || io::Error::other("the sandbox was made without room for a browser");
        let (Some(part), Some(steps)) = (cgroup.browser(), browser_entry) else { return Err(missing()) };
        let wanted = driver::DriverSpec {
            request,
            sandbox: key,
            guest: guest.try_clone()?,
            program: self.guest.try_clone()?,
            previous: driver.as_ref().map(OwnedFd::try_clone).transpose()?,
            v2: part.open_v2()?,
            tasks: part.open_tasks()?,
            part,
            steps: steps.clone(),
        };
        let (pid, helper) = self.drivers.begin(&self.epoll, wanted)?;
        self.watch_chore(pid, helper);
        Ok(())
    }

    /// Replies to the requests for drivers that have started or failed.
    pub(super) fn reply_drivers(&mut self) {
        for driver::DriverOutcome { request, sandbox, made } in self.drivers.outcomes() {
            let sandbox = self.sandboxes.get_mut(&sandbox).filter(|sandbox| matches!(sandbox.phase, Phase::Running));
            let reply = match (made, sandbox) {
                (_, None) => LauncherReply::Gone,
                (Err(message), _) => failed(format!("no browser: {message}")),
                (Ok((fork, leash)), Some(sandbox)) => {
                    sandbox.driver = fork.process.try_clone().ok();
                    let arrival = Arrival::Driver(fork, leash);
                    let sent = sandbox.forks.as_ref().is_some_and(|channel| arrival.send(channel).is_ok());
                    if sent { LauncherReply::Done } else { LauncherReply::Gone }
                }
            };
            self.reply(request, reply);
        }
    }

    /// Replies to the requests to the warm interpreter that have been completed.
    pub(super) fn reply_forks(&mut self) {
        for outcome in self.zygote.outcomes() {
            let (request, reply) = match outcome {
                ForkOutcome::Reply(request, reply) => (request, reply),
                // If no guest takes the kernel, it sees the end of its channel and exits.
                ForkOutcome::Forked { request, sandbox, fork } => {
                    match self.sandboxes.get(&sandbox).map(|sandbox| &sandbox.forks) {
                        Some(Some(channel)) => (
                            request,
                            Arrival::Kernel(fork).send(channel).map_or(LauncherReply::Gone, |()| LauncherReply::Done),
                        ),
                        _ => (request, LauncherReply::Gone),
                    }
                }
            };
            self.reply(request, reply);
        }
    }
}

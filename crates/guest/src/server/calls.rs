//! This module carries out the requests of the host: it finds the kernel, command or file of a call, starts the work,
//! and reports refusals.

use std::io;
use std::time::{Duration, Instant};

use proto::{
    BrowserSpec, Frame, FrameKind, FromGuest, GuestFailure, KernelId, KernelSpec, Language, MAX_COMMANDS, ToGuest,
};

use super::Server;
use crate::browser::{BrowserDriver, Request};
use crate::command::{CommandSpec, Job};
use crate::files::{Edit, List, Part};
use crate::host::{Broken, NOBODY};
use crate::kernel::{Kernel, KernelStart, Terms};
use crate::output::Share;
use crate::transpile::{SourceCell, TranspileReply};
use crate::transpiler::Client;

impl Server {
    /// Carries out one request of the host.
    pub(super) fn handle(&mut self, frame: Frame) -> Result<(), Broken> {
        let call = frame.call;
        if call == NOBODY {
            return Err(Broken);
        }
        match frame.kind {
            FrameKind::Message => {}
            FrameKind::File if self.host.greeted => return self.files.receive(call, &frame.payload, &mut self.host),
            FrameKind::File | FrameKind::Stdout | FrameKind::Stderr => return Err(Broken),
        }
        let message = frame.message::<ToGuest>().map_err(|_| Broken)?;
        if !self.host.greeted {
            return self.greet(call, &message);
        }
        match message {
            ToGuest::Hello { .. } => return Err(Broken),
            ToGuest::StartKernel { kernel, spec, warm } => self.start_kernel(call, kernel, &spec, warm),
            ToGuest::StopKernel { kernel } => match self.kernels.get_mut(&kernel) {
                Some(kernel) => kernel.stop(call),
                None => self.host.send(call, &FromGuest::Done),
            },
            ToGuest::Run { kernel, code, env, deadline, forward_bytes, keep_over } => {
                let share = Share { forward_bytes, keep_over };
                self.run_cell(call, kernel, &code, Terms { env, deadline, share });
            }
            ToGuest::Exec { argv, env, cwd, merge_output, deadline, forward_bytes, keep_over } => {
                let share = Share { forward_bytes, keep_over };
                let spec = CommandSpec { argv: &argv, env: &env, cwd: &cwd, merge_output, deadline, share };
                self.start_job(call, &spec)?;
            }
            ToGuest::Interrupt => self.interrupt(call),
            ToGuest::WriteFile { root, path, size } => self.files.write(call, root, &path, size, &mut self.host),
            ToGuest::StreamFile { root, path, max_size } => {
                self.files.write_stream(call, root, &path, max_size, &mut self.host);
            }
            ToGuest::EndFile => self.files.end_stream(call, &mut self.host),
            ToGuest::EditFile { root, path, old, new, all, max_size } => {
                let edit = Edit { old: &old, new: &new, all, max_size };
                self.files.edit(call, root, &path, &edit, &mut self.host);
            }
            ToGuest::SearchFiles { root, path, query } => self.files.search(call, root, &path, &query, &mut self.host),
            ToGuest::ReadFile { root, path, offset, length, max_size } => {
                let part = Part { offset, length, max_size };
                self.files.read(call, root, &path, part, &mut self.host);
            }
            ToGuest::ListFiles { root, path, max_entries, order } => {
                self.files.list(List { call, root, path, max_entries, order });
            }
            ToGuest::StartBrowser { spec } => self.start_browser(call, spec),
            ToGuest::Browse { ask, uploads, after_ms, changes } => {
                let after = Duration::from_millis(after_ms);
                self.browse(call, Request { ask, after, changes }, &uploads);
            }
            ToGuest::Ping => self.host.send(call, &FromGuest::Done),
        }
        Ok(())
    }

    fn greet(&mut self, call: u64, message: &ToGuest) -> Result<(), Broken> {
        match message {
            ToGuest::Hello { version: proto::VERSION } => {
                self.host.greeted = true;
                self.host.send(call, &FromGuest::Hello { version: proto::VERSION });
                Ok(())
            }
            ToGuest::Hello { version } => {
                let message = format!("the guest speaks version `{}`, not `{version}`", proto::VERSION);
                self.fail(call, GuestFailure::Io, message);
                let _ = self.host.flush();
                Err(Broken)
            }
            _ => Err(Broken),
        }
    }

    fn fail(&mut self, call: u64, failure: GuestFailure, message: String) {
        self.host.send(call, &FromGuest::Failed { failure, message });
    }

    fn start_kernel(&mut self, call: u64, id: KernelId, spec: &KernelSpec, warm: bool) {
        if self.kernels.contains_key(&id) {
            return self.fail(call, GuestFailure::Kernel, format!("kernel `{id}` exists already"));
        }
        let start = KernelStart { id, call, spec, now: Instant::now() };
        let started = if warm {
            self.arrivals.take_kernel().and_then(|fork| Kernel::adopt(fork, start, &self.outputs))
        } else {
            Kernel::start(start, &self.outputs)
        };
        match started {
            Ok(kernel) => {
                if kernel.language != Language::Python {
                    self.transpiler.warm_up();
                }
                self.kernels.insert(id, kernel);
            }
            Err(error) => {
                let program = spec.argv.first().map_or("", String::as_str);
                self.fail(call, GuestFailure::Kernel, format!("cannot start `{program}`: {error}"));
            }
        }
    }

    fn run_cell(&mut self, call: u64, id: KernelId, code: &str, terms: Terms) {
        if let Err(error) = proto::check_environment(&terms.env) {
            return self.fail(call, GuestFailure::Environment, error.to_string());
        }
        let Some(kernel) = self.kernels.get_mut(&id) else {
            return self.fail(call, GuestFailure::Kernel, format!("there is no kernel `{id}`"));
        };
        if let Err(why) = kernel.begin(call, terms, Instant::now(), &mut self.host) {
            return self.fail(call, GuestFailure::Kernel, why.into());
        }
        match kernel.language {
            Language::Python => kernel.submit(code, None),
            language @ (Language::Javascript | Language::Typescript) => {
                let number = kernel.number();
                self.transpiler.submit(Client { kernel: id, number }, SourceCell { language, number, code });
            }
        }
    }

    /// Submits the cells that the transpiler has finished to their kernels.
    pub(super) fn transpile(&mut self) {
        for (client, answer) in self.transpiler.advance(Instant::now()) {
            let waits = |kernel: &&mut Kernel| kernel.preparing() == Some(client.number);
            let Some(kernel) = self.kernels.get_mut(&client.kernel).filter(waits) else { continue };
            match answer {
                TranspileReply::Done(output) => kernel.submit(&output.code, output.map.as_deref()),
                TranspileReply::Refused(refusal) => {
                    kernel.refuse("SyntaxError", refusal.value, refusal.text, &mut self.host)
                }
                TranspileReply::Broken(why) => {
                    let text = format!("TranspilerError: {why}\n");
                    kernel.refuse("TranspilerError", why, text, &mut self.host);
                }
            }
        }
    }

    fn start_job(&mut self, call: u64, spec: &CommandSpec<'_>) -> Result<(), Broken> {
        if self.jobs.values().any(|job| job.call() == call) {
            return Err(Broken);
        }
        if self.jobs.len() >= MAX_COMMANDS {
            self.fail(call, GuestFailure::Busy, format!("`{MAX_COMMANDS}` commands run already"));
            return Ok(());
        }
        match Job::start(call, spec, &self.outputs, Instant::now()) {
            Ok(job) => {
                self.next_job += 1;
                self.jobs.insert(self.next_job, job);
            }
            Err(error) => {
                let failure = match error.kind() {
                    io::ErrorKind::NotFound => GuestFailure::NotFound,
                    _ => GuestFailure::Io,
                };
                let program = spec.argv.first().map_or("", String::as_str);
                self.fail(call, failure, format!("cannot start `{program}`: {error}"));
            }
        }
        Ok(())
    }

    /// Starts the browser. An existing browser ends, because a host that starts another one no longer uses it.
    fn start_browser(&mut self, call: u64, spec: BrowserSpec) {
        self.browser = None;
        self.uploads.forget();
        let workspace = self.config.workspace.clone();
        let started = self
            .arrivals
            .take_driver()
            .and_then(|driver| BrowserDriver::start(driver, call, spec, workspace, Instant::now()));
        match started {
            Ok(browser) => self.browser = Some(browser),
            Err(error) => self.fail(call, GuestFailure::Browser, format!("cannot start the browser: {error}")),
        }
    }

    fn browse(&mut self, call: u64, request: Request, uploads: &[String]) {
        let Some(browser) = &mut self.browser else {
            return self.fail(call, GuestFailure::Browser, "there is no browser".into());
        };
        if let Err(failure) = browser.check_page(&request.ask) {
            return failure.send(call, &mut self.host);
        }
        match self.uploads.begin(uploads) {
            Ok(copy) => {
                let refused = browser.browse(call, request, copy, Instant::now()).map(str::to_owned);
                if let Some(why) = refused {
                    self.fail(call, GuestFailure::Browser, why);
                }
            }
            Err(failure) => failure.send(call, &mut self.host),
        }
    }

    fn interrupt(&mut self, call: u64) {
        let now = Instant::now();
        self.files.abort(call);
        if let Some(browser) = &mut self.browser {
            browser.interrupt(call, now, &mut self.host);
        }
        if let Some(job) = self.jobs.values_mut().find(|job| job.call() == call) {
            job.cancel(now);
        }
        if let Some(kernel) = self.kernels.values_mut().find(|kernel| kernel.running() == Some(call)) {
            kernel.cancel(now);
        }
    }
}

//! The built binary in real sandboxes, over stdio and HTTP. One test binary; few servers, since each start fills a pool.
//! Needs the runtimes of `sandpool setup` (`make test` prepares them).

mod a_day;
mod browser_answers;
mod browser_files;
mod browser_hostile;
mod browsing;
mod data;
mod document;
mod everyday;
mod files;
mod forked;
mod host_ports;
mod hostile;
mod interfaces;
mod mask;
mod mounts;
mod offline;
mod packages;
mod prepared;
mod run;
mod secrets;
mod serve;
mod support;
mod transcripts;
mod users;
mod variables;
mod walks;
mod ways;
mod workbench;

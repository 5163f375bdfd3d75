//! The dialect `sandpool` of this project. Code, commands and files share one context, which is created on demand; long
//! runs continue in the background.

use std::time::Duration;

use engine::op::{ContextSelector, Language, NewContext, Target};
use engine::{Realm, RealmConfig};

use super::output::Output;
use super::{Dialect, Hints, Lang, LimitHelp, ProtocolErrors, ToolRow, tool};

mod answer;
mod browser;
mod contexts;
mod errors;
mod files;
mod network;
mod page;
mod runs;

use contexts::{ContextRow, Contexts, Stopped};
use files::{EditedFile, UploadAddress, WrittenFile};
use runs::Cancelled;

pub const REALM: Realm = Realm("sandpool");

const LIMIT_HELP: LimitHelp = LimitHelp::USUAL;

/// Returns the rules of the engine for this dialect.
pub fn realm() -> RealmConfig {
    let usual = RealmConfig::usual(REALM);
    RealmConfig {
        short_ids: true,
        one_run_at_a_time: false,
        waiting_counts: true,
        stop_ends_runs: true,
        unique_names: true,
        // Code may run for as long as a command, and a server in the background for hours.
        max_timeout: usual.max_command_timeout,
        max_background: Duration::from_secs(4 * 60 * 60),
        ..usual
    }
}

pub static DIALECT: Dialect = Dialect {
    id: REALM.0,
    realm,
    limit_help: LIMIT_HELP,
    startup: crate::plain_startup,
    waiting: errors::waiting,
    server_name: "sandpool",
    default_lang: Lang::En,
    brief: true,
    tools: &[
        tool!("run_code", Hints::ACTS, runs::run_code, runs::error),
        tool!("run_command", Hints::ACTS, runs::run_command, runs::error),
        WAIT_RUN,
        tool!("cancel_run", Hints::REPLACES, runs::cancel_run, Cancelled::schema, errors::error),
        tool!("create_context", Hints::ADDS, contexts::create_context, ContextRow::schema, errors::error),
        tool!("list_contexts", Hints::READS, contexts::list_contexts, Contexts::schema, errors::error),
        tool!("stop_context", Hints::REPLACES, contexts::stop_context, Stopped::schema, errors::error),
        tool!("read_file", Hints::READS, files::read_file, files::error),
        tool!("write_file", Hints::REPLACES, files::write_file, WrittenFile::schema, errors::error),
        tool!("list_files", Hints::READS, files::list_files, errors::error),
        tool!("edit_file", Hints::ACTS, files::edit_file, EditedFile::schema, files::error),
        tool!("search_files", Hints::READS, files::search_files, files::error),
        tool!("upload_link", Hints::ADDS, files::upload_link, UploadAddress::schema, errors::error),
        ToolRow {
            for_browser: true,
            ..tool!("browser_open", Hints::ACTS, browser::open, || page::schema(&[]), page::error)
        },
        ToolRow {
            for_browser: true,
            ..tool!("browser_act", Hints::ACTS, browser::act, || page::schema(&page::OF_ACTIONS), page::error)
        },
        ToolRow { for_browser: true, ..tool!("browser_snapshot", Hints::READS, browser::snapshot, page::error) },
        ToolRow { for_browser: true, ..tool!("browser_screenshot", Hints::READS, browser::screenshot, page::error) },
    ],
    aliases: &[],
    errors: ProtocolErrors::USUAL,
    open_stream: false,
    wants_token: false,
    lenient: true,
    prose_en: include_str!("prose.en.md"),
    prose_zh: include_str!("prose.zh.md"),
    refuse: errors::refusal,
    background: Some(&WAIT_RUN),
};

const WAIT_RUN: ToolRow = tool!("wait_run", Hints::READS, runs::wait_run, runs::error);

/// Name of the context for calls that name none.
const DEFAULT_CONTEXT: &str = "default";

/// Returns the context of a call. A named context has to exist, because a typing error must not look like lost
/// variables.
fn target(context: Option<String>) -> Target {
    let name = context.unwrap_or_else(|| DEFAULT_CONTEXT.to_owned());
    let make = (name == DEFAULT_CONTEXT).then(|| NewContext::named(DEFAULT_CONTEXT, Language::Python));
    Target { which: ContextSelector::Named(name), make }
}

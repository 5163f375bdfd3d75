//! The one table of settings. Flags, their help, the keys of `sandpool.toml`, the environment page and `sandpool config`
//! are all made from it; a setting that is not here does not exist.

/// One setting and everywhere it can be given.
#[derive(Debug)]
pub struct Setting {
    /// Its name in `sandpool.toml`, dotted; also its name everywhere inside the program.
    pub key: &'static str,
    pub kind: Kind,
    pub default: Fallback,
    /// `--name`, and what stands for its value in the help.
    pub flag: Option<(&'static str, &'static str)>,
    pub env: Option<&'static str>,
    pub help: &'static str,
}

/// What a value may be. Strings from flags and the environment are read accordingly.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Kind {
    Text,
    OneOf(&'static [&'static str]),
    /// Comma-separated where it is one string.
    List,
    Switch,
    /// A whole number within these bounds.
    Whole(i64, i64),
    /// A number within these bounds.
    Number(f64, f64),
    /// Seconds as a number, or a text such as `90s`, `10m`, `1h`; bounds in seconds.
    Time(f64, f64),
    /// Names the configuration file itself, so it cannot stand in one.
    ConfigFile,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fallback {
    /// A TOML value.
    Is(&'static str),
    Unset,
    /// Depends on the user: the words say how.
    Computed(&'static str),
}

use Fallback::{Computed, Is, Unset};
use Kind::{ConfigFile, List, Number, OneOf, Switch, Text, Time, Whole};

const DAY: f64 = 86_400.0;

const fn setting(key: &'static str, kind: Kind, default: Fallback, help: &'static str) -> Setting {
    Setting { key, kind, default, flag: None, env: None, help }
}

impl Setting {
    const fn flag(self, name: &'static str, value: &'static str, env: &'static str) -> Self {
        Self { flag: Some((name, value)), env: Some(env), ..self }
    }
}

pub const SETTINGS: &[Setting] = &[
    setting(
        "config",
        ConfigFile,
        Computed("`sandpool/sandpool.toml` in the XDG configuration directory, else `/etc/sandpool/sandpool.toml`"),
        "Configuration file to read",
    )
    .flag("config", "FILE", "SANDPOOL_CONFIG"),
    setting(
        "log",
        Text,
        Computed("`info` for `stdio`, else `warn`"),
        "What to log, on stderr: `error`, `warn`, `info`, `debug`, or a filter such as `engine=debug`",
    )
    .flag("log", "FILTER", "SANDPOOL_LOG"),
    setting("dialect.default", OneOf(&["agentrun"]), Is("\"agentrun\""), "The set of tools to offer").flag(
        "dialect",
        "NAME",
        "SANDPOOL_DIALECT",
    ),
    setting("lang", OneOf(&["en", "zh"]), Unset, "Language of the tools' descriptions; unset means the dialect's own")
        .flag("lang", "LANG", "SANDPOOL_LANG"),
    setting("backend", List, Is("[\"native\"]"), "Where sandboxes are made, best first").flag(
        "backend",
        "NAMES",
        "SANDPOOL_BACKEND",
    ),
    setting(
        "floor",
        OneOf(&["basic", "reduced", "full"]),
        Is("\"basic\""),
        "Refuse to run when the isolation level of this machine is lower than this",
    ),
    setting(
        "state_dir",
        Text,
        Computed("`sandpool` in the XDG state directory; for root `/var/lib/sandpool`"),
        "Directory of what belongs to running servers",
    )
    .flag("state-dir", "DIR", "SANDPOOL_STATE_DIR"),
    setting(
        "runtimes.dir",
        Text,
        Computed("`sandpool/runtimes` in the XDG data directory"),
        "Directory the language runtimes are prepared in",
    ),
    setting(
        "runtimes.python",
        Text,
        Unset,
        "Python interpreter (3.11 or newer) to build on; unset means the best one found",
    ),
    setting(
        "runtimes.packages",
        List,
        Is("[]"),
        "Python packages to install besides the pinned list, such as `polars` or `polars==1.2.3`; these are not checked against hashes",
    ),
    setting(
        "runtimes.node",
        Text,
        Is("\"auto\""),
        "`auto`: the machine's Node if it is 22 or newer, else the pinned one; `pinned`; or the path of a Node binary",
    ),
    setting(
        "runtimes.threads",
        Whole(1, 1024),
        Is("1"),
        "Threads of numeric libraries (OpenBLAS, OpenMP) in an interpreter",
    ),
    setting("dialect.agentrun.timeout", Time(0.1, DAY), Is("30"), "Longest time one run may take"),
    setting(
        "dialect.agentrun.memory_mb",
        Whole(64, 1 << 24),
        Is("2048"),
        "Memory of all contexts of a tenant together",
    ),
    setting(
        "dialect.agentrun.cpus",
        Number(0.05, 1024.0),
        Is("2.0"),
        "Processor time of all contexts of a tenant together, in cores",
    ),
    setting("dialect.agentrun.pids", Whole(16, 65_536), Is("256"), "Processes and threads of a context"),
    setting("dialect.agentrun.disk_mb", Whole(8, 1 << 24), Is("1024"), "Disk quota of a context"),
    setting("dialect.agentrun.pool_size", Whole(1, 64), Is("3"), "Sessions kept ready; as many runs execute at once"),
    setting("dialect.agentrun.session_ttl", Time(10.0, 30.0 * DAY), Is("3600"), "Age at which a session is replaced"),
    setting(
        "dialect.agentrun.idle_timeout",
        Time(1.0, 365.0 * DAY),
        Unset,
        "A context unused for so long is removed; unset means never, since over stdio all end with the client",
    ),
    setting("dialect.agentrun.max_contexts", Whole(1, 10_000), Is("50"), "Contexts a tenant may have"),
    setting(
        "dialect.agentrun.text_budget",
        Whole(200, 10_000_000),
        Is("20000"),
        "Characters of one stream in a result; head and tail are kept",
    ),
    setting(
        "dialect.agentrun.shutdown_grace",
        Time(0.0, 3600.0),
        Is("30"),
        "Time that running code gets to end when the server stops",
    ),
    setting(
        "agentrun.default_context",
        Switch,
        Is("false"),
        "Let `run_code` go without `context_id`, in a context named `default`",
    ),
];

pub fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

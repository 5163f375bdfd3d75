//! The only table of settings. Flags, their help, the keys of `sandpool.toml`, the pages of settings and environment,
//! and `sandpool config` are all generated from it. A setting that is not in the table does not exist.

use std::sync::LazyLock;

use dialects::{Dialect, Options};
use engine::RealmConfig;

/// One setting, with every way to set it.
#[derive(Debug)]
pub struct Setting {
    /// Dotted name in `sandpool.toml`, which is also its name inside the program.
    pub key: &'static str,
    pub kind: ValueKind,
    pub default: Fallback,
    /// Name of the flag without `--`, and the placeholder for its value in the help; empty for a switch.
    pub flag: Option<(&'static str, &'static str)>,
    /// Environment variables; the first one that is set counts. Those after the first are names that other servers use.
    pub env: &'static [&'static str],
    /// Whether the value is never shown and cannot be set in the configuration file.
    pub secret: bool,
    pub help: &'static str,
}

/// The type of a value, by which strings from flags and the environment are parsed.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum ValueKind {
    Text,
    OneOf(&'static [&'static str]),
    /// A list of strings, comma-separated if it is given as one string.
    List,
    Switch,
    /// A whole number within these bounds.
    Whole(i64, i64),
    /// A number within these bounds.
    Number(f64, f64),
    /// A time: seconds as a number, or a text such as `90s`, `10m`, `1h`. The bounds are in seconds.
    Time(f64, f64),
    /// A table with keys that the operator chooses. It can only be given in the file, as a whole.
    Table,
    /// An array of tables, written as `[[…]]` in the file. The one that has a flag is `mount`; each flag adds a table.
    Tables,
    /// The path of the configuration file, which therefore cannot be set in that file.
    ConfigFile,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Fallback {
    /// A TOML value.
    Is(&'static str),
    Unset,
    /// A default that depends on the user; the text says how.
    Computed(&'static str),
}

use Fallback::{Computed, Is, Unset};
use ValueKind::{ConfigFile, List, Number, OneOf, Switch, Table, Tables, Text, Time, Whole};

const DAY: f64 = 86_400.0;

const fn setting(key: &'static str, kind: ValueKind, default: Fallback, help: &'static str) -> Setting {
    Setting { key, kind, default, flag: None, env: &[], secret: false, help }
}

impl Setting {
    const fn flag(self, name: &'static str, value: &'static str, env: &'static [&'static str]) -> Self {
        Self { flag: Some((name, value)), env, ..self }
    }

    /// Returns whether a reload applies another value of this setting to a running server.
    pub(crate) fn is_reloaded(&self) -> bool {
        const OTHERS: [&str; 2] = ["auth.none", "quota.call_memory_mb"];
        let is_in = |table: &str| self.key.starts_with(table);
        let policy = self.key.ends_with(".network") || self.key == "microsandbox.show_host_paths";
        (policy || ["auth.", "quota.", "network.", "metrics.token"].into_iter().any(is_in))
            && !OTHERS.contains(&self.key)
    }

    const fn env(self, env: &'static [&'static str]) -> Self {
        Self { env, ..self }
    }

    const fn secret(self) -> Self {
        Self { secret: true, ..self }
    }
}

/// Returns the settings of `[dialect.<id>]`. Their defaults are the rules of the dialect's realm.
fn limits(dialect: &'static Dialect) -> Vec<Setting> {
    let RealmConfig { max_timeout, max_background, unique_names, .. } = (dialect.realm)();
    let RealmConfig { realm, timeout, limits, pool_size, session_ttl, idle_timeout, max_contexts, text_budget, .. } =
        (dialect.realm)();
    let help = &dialect.limit_help;
    let cores = format!("{:?}", f64::from(limits.cpu_millis) / 1000.0);
    // In `agentrun` the size of the pool is also the number of runs at once, so it cannot be 0.
    let is_agentrun = realm == dialects::agentrun::REALM;
    let idle = match idle_timeout {
        _ if is_agentrun => Computed("24 hours over HTTP; never over stdio, where contexts end with the client"),
        Some(time) => is(time.as_secs()),
        None => Unset,
    };
    let of =
        |name: &str, kind, default, help| setting(text(format!("dialect.{}.{name}", dialect.id)), kind, default, help);
    let mut all = vec![
        of(
            "timeout",
            Time(0.1, DAY),
            is(timeout.as_secs()),
            "Longest time that a run may take, unless the call asks for another",
        ),
        of("memory_mb", Whole(64, 1 << 24), is(limits.memory_bytes >> 20), help.memory),
        of("cpus", Number(0.05, 1024.0), is(cores), help.cpus),
        of("pids", Whole(16, 65_536), is(limits.pids), "Processes and threads of a sandbox"),
        of("disk_mb", Whole(8, 1 << 24), is(limits.disk_bytes >> 20), help.disk),
    ];
    if dialect.background.is_some() {
        all.extend([
            of(
                "max_timeout",
                Time(1.0, DAY),
                is(max_timeout.as_secs()),
                "Longest timeout that a call may ask for, for code and commands",
            ),
            of(
                "max_background",
                Time(1.0, 30.0 * DAY),
                is(max_background.as_secs()),
                "Longest timeout of a background run, and its timeout if it asks for none",
            ),
        ]);
    }
    if unique_names {
        all.extend([
            of(
                "persist",
                Switch,
                Is("false"),
                "Keep files and installed packages of named contexts beyond the end of the server; needs a server of root",
            ),
            of(
                "persist_days",
                Whole(1, 3650),
                Is("30"),
                "Days after its last use at which the workspace of a named context is deleted",
            ),
            of(
                "persist_mb",
                Whole(8, 1 << 24),
                Is("10240"),
                "Space of a tenant's kept workspaces at which it gets no new one; each can grow to `disk_mb`",
            ),
        ]);
    }
    if pool_size > 0 {
        all.extend([
            of("pool_size", Whole(i64::from(is_agentrun), 64), is(pool_size), help.pool),
            of(
                "session_ttl",
                Time(10.0, 30.0 * DAY),
                is(session_ttl.as_secs()),
                "Age at which a ready sandbox is replaced",
            ),
        ]);
    }
    all.extend([
        of("idle_timeout", Time(1.0, 365.0 * DAY), idle, help.idle),
        of("max_contexts", Whole(1, 100_000), is(max_contexts), help.contexts),
        of(
            "text_budget",
            Whole(200, 10_000_000),
            is(text_budget),
            "Characters of one stream in a result, in `sandpool` of a whole answer; of longer text, head and tail are kept",
        ),
        of("shutdown_grace", Time(0.0, 3600.0), Is("30"), "Time for running code to end when the server stops"),
        of("network", Text, Unset, "Policy of its sandboxes, in addition to `network.default`: both have to allow"),
    ]);
    all
}

fn is(default: impl ToString) -> Fallback {
    Is(text(default.to_string()))
}

/// Keeps a text for the lifetime of the process. The table of settings is made once.
fn text(text: String) -> &'static str {
    Box::leak(text.into_boxed_str())
}

/// Every setting, in the order in which they are printed.
pub static SETTINGS: LazyLock<Vec<Setting>> = LazyLock::new(|| {
    let mut all = Vec::from(GENERAL);
    all.extend(dialects::all(&Options::default()).flat_map(limits));
    let browses = |dialect: &&'static Dialect| (dialect.realm)().browser.is_some();
    all.extend(dialects::all(&Options::default()).filter(browses).map(|dialect| {
        let key = text(format!("dialect.{}.browser_memory_mb", dialect.id));
        let half = Computed("half of `memory_mb`");
        setting(key, Whole(64, 1 << 24), half, "Memory that the browser of a context may use, as part of `memory_mb`")
    }));
    // Some settings also have the variable names of other servers.
    for (key, name) in WRAPPER {
        if let Some(setting) = all.iter_mut().find(|setting| setting.key == *key) {
            setting.env = name;
        }
    }
    all
});

/// Variables that the microsandbox wrapper uses for some of the limits.
const WRAPPER: &[(&str, &[&str])] = &[
    ("dialect.microsandbox.timeout", &["MSB_EXECUTION_TIMEOUT"]),
    ("dialect.microsandbox.idle_timeout", &["MSB_SESSION_TIMEOUT"]),
    ("dialect.microsandbox.max_contexts", &["MSB_MAX_SESSIONS"]),
];

const GENERAL: [Setting; 103] = [
    setting(
        "config",
        ConfigFile,
        Computed("`sandpool/sandpool.toml` in the XDG configuration directory, else `/etc/sandpool/sandpool.toml`"),
        "Configuration file to read",
    )
    .flag("config", "FILE", &["SANDPOOL_CONFIG"]),
    setting(
        "log",
        Text,
        Computed("`info` for `stdio` and `serve`, else `warn`"),
        "What to log on standard error: `error`, `warn`, `info`, `debug`, or a filter such as `engine=debug`",
    )
    .flag("log", "FILTER", &["SANDPOOL_LOG"]),
    setting("log_format", OneOf(&["human", "json"]), Is("\"human\""), "Format of log lines").flag(
        "log-format",
        "FORM",
        &["SANDPOOL_LOG_FORMAT"],
    ),
    setting(
        "dialect.default",
        OneOf(dialects::IDS),
        Is("\"sandpool\""),
        "Dialect (set of tools) to serve; over HTTP, the one at `/mcp`",
    )
    .flag("dialect", "NAME", &["SANDPOOL_DIALECT"]),
    setting("lang", OneOf(&["en", "zh"]), Unset, "Language of the tools' descriptions; unset: the dialect's usual one")
        .flag("lang", "LANG", &["SANDPOOL_LANG"]),
    setting("backend", List, Is("[\"native\"]"), "Back ends that create sandboxes, the preferred one first; `native` is the only one of this version").flag(
        "backend",
        "NAMES",
        &["SANDPOOL_BACKEND"],
    ),
    setting(
        "floor",
        OneOf(&["basic", "reduced", "full"]),
        Is("\"basic\""),
        "Isolation level below which the server refuses to start",
    ),
    setting(
        "systemd_scope",
        Switch,
        Is("true"),
        "If the server may not manage its own cgroup, ask systemd over D-Bus for a scope with `Delegate=yes`, in which sandboxes get their limits",
    )
    .env(&["SANDPOOL_SYSTEMD_SCOPE"]),
    setting(
        "ready_max",
        Whole(0, 10_000),
        Is("64"),
        "Most ready sandboxes of all tenants and dialects together; demand decides how many there are, and those of `pool_size` are always kept",
    ),
    setting("ready_memory_mb", Whole(0, 1 << 24), Is("512"), "Most memory that ready sandboxes may use together"),
    setting(
        "state_dir",
        Text,
        Computed("`sandpool` in the XDG state directory; for root `/var/lib/sandpool`"),
        "Directory in which servers keep their state: volumes, keys, the journal",
    )
    .flag("state-dir", "DIR", &["SANDPOOL_STATE_DIR"]),
    setting(
        "keep_free_mb",
        Whole(0, 1 << 30),
        Unset,
        "Space that sandboxes leave free on the state directory's file system; unset: 5 % of it, at least 1024 and at most 8192",
    ),
    setting(
        "runtimes.dir",
        Text,
        Computed("`sandpool/runtimes` in the XDG data directory"),
        "Directory in which `sandpool setup` prepares the languages",
    ),
    setting(
        "runtimes.python",
        Text,
        Unset,
        "Python interpreter (3.11 to 3.14) to build on; unset: the best one found",
    ),
    setting(
        "runtimes.preset",
        Text,
        Unset,
        "Pinned packages to install: `data` or `slim`; unset: what `sandpool setup --preset` chose, else `data`",
    ),
    setting(
        "runtimes.packages",
        List,
        Is("[]"),
        "Python packages to install besides the pinned ones, such as `polars` or `polars==1.2.3`; no hashes are checked for these",
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
        "Threads that numeric libraries (OpenBLAS, OpenMP) may start in a kernel",
    ),
    setting(
        "runtimes.warm",
        Switch,
        Is("true"),
        "Fork Python kernels from one interpreter that has imported its libraries, instead of starting each kernel separately",
    )
    .env(&["SANDPOOL_WARM"]),
    setting(
        "runtimes.preload",
        List,
        Is("[\"numpy\", \"pandas\", \"matplotlib.pyplot\"]"),
        "Python modules that this interpreter imports before kernels are forked from it; they must not start threads, and none can be an added package",
    )
    .env(&["SANDPOOL_PRELOAD"]),
    setting(
        "browser",
        Text,
        Is("\"auto\""),
        "Browser of sandboxes: `auto` (Chromium, if this machine has it), `off`, or the path of a Chromium binary",
    )
    .env(&["SANDPOOL_BROWSER"]),
    setting(
        "mount",
        Tables,
        Unset,
        "Directory of this machine that contexts see, by default read-only and at `/workspace/<name>`; the flag can be repeated; docs/mounts.md explains the keys",
    )
    .flag("mount", "HOST[:GUEST][:ro|rw]", &[]),
    setting(
        "workspace",
        Text,
        Unset,
        "Directory of this machine to use as `/workspace` of contexts; it keeps their files and installed packages beyond a restart; short for a `mount` at `/workspace` with `rw`",
    )
    .flag("workspace", "DIR", &[]),
    setting(
        "network.default",
        Text,
        Computed("`off`, except for dialects that name a policy"),
        "Policy of all sandboxes: `off`, `public` (every public address), `packages` (the registries of pip, npm and the like), or the name of a table `[network.policy.<name>]`",
    ),
    setting(
        "network.allow",
        List,
        Unset,
        "What all sandboxes may reach, written as the `allow` of a policy; `host:3000` is port 3000 of this machine's loopback; replaces `network.default`",
    )
    .flag("network-allow", "NAME[:PORT],...", &["SANDPOOL_NETWORK_ALLOW"]),
    setting("network.policy", Table, Unset, "Policies by name; docs/network.md explains their keys"),
    setting("network.hosts", Table, Unset, "Names with their addresses, used in place of a resolver's answers"),
    setting(
        "network.upstream",
        Text,
        Unset,
        "Proxy through which the connections of sandboxes leave this machine: `http://host:port`, or `environment` for what `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` of the server say; unset, these variables have no effect on sandboxes",
    )
    .flag("network-upstream", "URL", &["SANDPOOL_NETWORK_UPSTREAM"]),
    setting(
        "network.upstream_credentials",
        Text,
        Unset,
        "File with `user:password` for the upstream proxy, as an absolute path",
    ),
    setting(
        "network.upstream_except",
        List,
        Is("[]"),
        "Hosts that are reached without the upstream proxy, written as the `allow` of a policy",
    ),
    setting(
        "network.fake_ip_dns",
        Switch,
        Is("false"),
        "Accept names that this machine's DNS places in 198.18.0.0/15 or fc00::/18, as the DNS of transparent proxies does",
    )
    .flag("network-fake-ip-dns", "", &["SANDPOOL_NETWORK_FAKE_IP_DNS"]),
    setting("network.secret", Tables, Unset, "Secrets that the proxy inserts into requests; docs/network.md explains their keys"),
    setting("size.small.network", Text, Unset, "Policy of sandboxes of this size, in addition to the dialect's: both have to allow"),
    setting("size.medium.network", Text, Unset, "Policy of sandboxes of this size, in addition to the dialect's: both have to allow"),
    setting("size.large.network", Text, Unset, "Policy of sandboxes of this size, in addition to the dialect's: both have to allow"),
    setting("serve.listen", Text, Is("\"127.0.0.1:8775\""), "Address that `serve` listens on").flag(
        "listen",
        "HOST:PORT",
        &["SANDPOOL_LISTEN"],
    ),
    setting("serve.host", Text, Unset, "Host of `serve.listen`, to change only that")
        .env(&["MCP_SERVER_HOST"]),
    setting("serve.port", Whole(0, 65_535), Unset, "Port of `serve.listen`, to change only that")
        .env(&["MCP_SERVER_PORT"]),
    setting(
        "serve.public_url",
        Text,
        Computed("`http://` and the address `serve` listens on"),
        "Address at which clients reach the server; links to files begin with it",
    )
    .flag("public-url", "URL", &["SANDPOOL_PUBLIC_URL", "PUBLIC_BASE_URL"]),
    setting(
        "serve.allowed_hosts",
        List,
        Is("[]"),
        "Names accepted in the `Host` header besides loopback and the name in the public URL; `*` accepts all",
    )
    .flag("allowed-hosts", "NAMES", &["SANDPOOL_ALLOWED_HOSTS"]),
    setting("serve.allowed_origins", List, Is("[]"), "Origins of web pages that may call; others are refused").flag(
        "allowed-origins",
        "ORIGINS",
        &["SANDPOOL_ALLOWED_ORIGINS"],
    ),
    setting("serve.cors", Switch, Is("false"), "Send CORS headers, so that web pages can call: those of `serve.allowed_origins`, or of every origin if that is empty; without a token, only those of this machine").flag(
        "cors",
        "",
        &["SANDPOOL_CORS", "MCP_ENABLE_CORS"],
    ),
    setting("serve.max_connections", Whole(1, 100_000), Is("8192"), "Most connections at once"),
    setting("serve.max_sessions", Whole(1, 1_000_000), Is("10000"), "Most MCP sessions at once; clients of older revisions have them"),
    setting("serve.session_idle", Time(1.0, 30.0 * DAY), Is("1800"), "An MCP session that is not used for this time is ended"),
    setting("serve.max_body_mb", Whole(1, 1024), Is("24"), "Largest body of a request"),
    setting(
        "serve.call_memory_mb",
        Whole(16, 1 << 20),
        Computed("a quarter of the machine's memory, at most 1024"),
        "Memory that the calls of all tenants may occupy in the server: requests, results, and answers until they are sent",
    ),
    setting("serve.header_timeout", Time(0.1, 3600.0), Is("10"), "Time in which the headers of a request have to arrive"),
    setting("serve.body_timeout", Time(0.1, DAY), Is("60"), "Time in which the body of a request has to arrive"),
    setting("serve.idle_timeout", Time(1.0, DAY), Is("120"), "A connection without a request for this time is closed"),
    setting("serve.write_timeout", Time(1.0, DAY), Is("60"), "A client that reads nothing for this time is disconnected"),
    setting("auth.token", Text, Unset, "Bearer token, if the server has one tenant")
        .env(&["SANDPOOL_API_TOKEN", "MCP_API_TOKEN"])
        .secret(),
    setting("auth.token_file", Text, Unset, "File whose first line is the bearer token").flag(
        "token-file",
        "FILE",
        &["SANDPOOL_TOKEN_FILE"],
    ),
    setting("auth.tenants", Text, Unset, "TOML file of tenants: names, hashes of tokens, quotas").flag(
        "tenants",
        "FILE",
        &["SANDPOOL_TENANTS"],
    ),
    setting("auth.none", Switch, Is("false"), "Serve everybody who can connect, without a token, also on addresses other than loopback")
        .flag("no-auth", "", &["SANDPOOL_NO_AUTH"]),
    setting("auth.jwks", Text, Unset, "Public keys (JWKS) of an identity provider whose tokens are accepted: a file or an `https` address"),
    setting("auth.audience", Text, Unset, "What the `aud` claim of such a token has to contain; required with `auth.jwks`"),
    setting("auth.issuer", Text, Unset, "What the `iss` claim of such a token has to be; unset: not checked"),
    setting(
        "auth.jwks_max_age",
        Time(60.0, 365.0 * DAY),
        Is("86400"),
        "How long keys are trusted while they cannot be fetched again; after that, tokens are refused",
    ),
    setting("auth.tenant_claim", Text, Is("\"sub\""), "Claim of such a token that names the tenant"),
    setting("auth.servers", List, Is("[]"), "Authorization servers that the protected resource metadata (RFC 9728) names"),
    setting("quota.contexts", Whole(1, 1_000_000), Unset, "Most contexts of a tenant, in all dialects together"),
    setting("quota.runs", Whole(1, 10_000), Unset, "Most runs of a tenant at once"),
    setting("quota.memory_mb", Whole(64, 1 << 24), Unset, "Most memory of all sandboxes of a tenant together"),
    setting(
        "quota.call_memory_mb",
        Whole(16, 1 << 20),
        Is("256"),
        "Memory that the calls of one tenant may occupy, as part of `serve.call_memory_mb`; a request counts twice its size",
    ),
    setting("quota.calls_per_second", Number(0.01, 1_000_000.0), Unset, "Most calls of a tenant in a second"),
    setting(
        "files.secret",
        Text,
        Computed("generated once and kept in the state directory"),
        "Key from which the links to files are computed",
    )
    .env(&["SANDPOOL_FILE_SECRET"])
    .secret(),
    setting(
        "files.link_ttl",
        Time(1.0, 365.0 * DAY),
        Unset,
        "Time after which a link to a file expires; unset: links end with their context",
    ),
    setting("journal.enabled", Switch, Is("true"), "Write the journal of calls: tenant, tool, time, outcome (`serve` only)"),
    setting("journal.contents", Switch, Is("false"), "Write code and output into the journal, not only their sizes"),
    setting("journal.days", Whole(1, 3650), Is("30"), "Days for which the journal is kept"),
    setting("metrics.token", Text, Unset, "Bearer token that reads `/metrics`; the tokens of tenants then do not")
        .env(&["SANDPOOL_METRICS_TOKEN"])
        .secret(),
    setting("metrics.token_file", Text, Unset, "File whose first line is the bearer token that reads `/metrics`")
        .env(&["SANDPOOL_METRICS_TOKEN_FILE"]),
    setting(
        "metrics.listen",
        Text,
        Unset,
        "Address of a listener for `/metrics`, `/healthz` and `/readyz` alone; `/metrics` is then served only there, to everybody who has `metrics.token`, or without such a token to this machine",
    )
    .env(&["SANDPOOL_METRICS_LISTEN"]),
    setting(
        "metrics.tenants",
        Whole(0, 10_000),
        Is("0"),
        "Most tenants that are named in the label `tenant` of metrics; further ones are `(others)`; 0: there is no such label",
    ),
    setting("otel.disabled", Switch, Is("false"), "Export nothing, whatever the other settings of `otel` say")
        .env(&["OTEL_SDK_DISABLED"]),
    setting(
        "otel.endpoint",
        Text,
        Unset,
        "Address of an OpenTelemetry collector (OTLP over HTTP), such as `http://127.0.0.1:4318`; traces, metrics and logs go to `/v1/traces`, `/v1/metrics` and `/v1/logs` below it",
    )
    .env(&["OTEL_EXPORTER_OTLP_ENDPOINT"]),
    setting("otel.traces_endpoint", Text, Unset, "Whole address for traces, in place of the one below `otel.endpoint`")
        .env(&["OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"]),
    setting("otel.metrics_endpoint", Text, Unset, "Whole address for metrics, in place of the one below `otel.endpoint`")
        .env(&["OTEL_EXPORTER_OTLP_METRICS_ENDPOINT"]),
    setting("otel.logs_endpoint", Text, Unset, "Whole address for logs, in place of the one below `otel.endpoint`")
        .env(&["OTEL_EXPORTER_OTLP_LOGS_ENDPOINT"]),
    setting("otel.traces", Text, Is("\"otlp\""), "`otlp`, or `none` to export no traces").env(&["OTEL_TRACES_EXPORTER"]),
    setting("otel.metrics", Text, Is("\"otlp\""), "`otlp`, or `none` to export no metrics").env(&["OTEL_METRICS_EXPORTER"]),
    setting("otel.logs", Text, Is("\"otlp\""), "`otlp`, or `none` to export no logs").env(&["OTEL_LOGS_EXPORTER"]),
    setting("otel.protocol", Text, Is("\"http/protobuf\""), "Encoding of what is exported: `http/protobuf` or `http/json`")
        .env(&["OTEL_EXPORTER_OTLP_PROTOCOL"]),
    setting("otel.headers", Text, Unset, "Headers of requests to the collector, as `name=value,…` with percent-encoded values")
        .env(&["OTEL_EXPORTER_OTLP_HEADERS"])
        .secret(),
    setting("otel.timeout_ms", Whole(1, 600_000), Is("10000"), "Longest time of a request to the collector, in milliseconds")
        .env(&["OTEL_EXPORTER_OTLP_TIMEOUT"]),
    setting("otel.service_name", Text, Computed("`sandpool`"), "Name of this server in what it exports")
        .env(&["OTEL_SERVICE_NAME"]),
    setting("otel.resource_attributes", Text, Unset, "Further attributes of this server, as `key=value,…` with percent-encoded values")
        .env(&["OTEL_RESOURCE_ATTRIBUTES"]),
    setting(
        "otel.sampler",
        Text,
        Is("\"parentbased_always_on\""),
        "Which traces are exported: `always_on`, `always_off`, `traceidratio`, or one of these after `parentbased_`, which lets the client decide where it sends a trace",
    )
    .env(&["OTEL_TRACES_SAMPLER"]),
    setting("otel.sampler_arg", Text, Is("\"1.0\""), "Share of the traces for `traceidratio`, from 0 to 1")
        .env(&["OTEL_TRACES_SAMPLER_ARG"]),
    setting(
        "otel.delay_ms",
        Whole(1, 600_000),
        Is("5000"),
        "Time for which spans and log lines are collected and then sent together, in milliseconds",
    )
    .env(&["OTEL_BSP_SCHEDULE_DELAY"]),
    setting(
        "otel.queue",
        Whole(1, 1_000_000),
        Is("2048"),
        "Most spans, and most log lines, that wait to be sent; further ones are dropped and counted",
    )
    .env(&["OTEL_BSP_MAX_QUEUE_SIZE"]),
    setting("otel.metric_interval_ms", Whole(1, 86_400_000), Is("60000"), "Time between two exports of metrics, in milliseconds")
        .env(&["OTEL_METRIC_EXPORT_INTERVAL"]),
    setting(
        "agentrun.default_context",
        Switch,
        Is("false"),
        "Accept `run_code` without `context_id`, and run it in a context named `default`",
    ),
    setting(
        "microsandbox.default_flavor",
        OneOf(&["small", "medium", "large"]),
        Is("\"small\""),
        "Flavor of a session that names none",
    )
    .env(&["MSB_DEFAULT_FLAVOR"]),
    setting("microsandbox.max_total_memory_mb", Whole(64, 1 << 24), Unset, "Most memory of the sessions of all tenants together")
        .env(&["MSB_MAX_TOTAL_MEMORY_MB"]),
    setting(
        "microsandbox.evict",
        Switch,
        Is("true"),
        "When `max_contexts` is reached, end the idle session that was unused for the longest time, to make room",
    )
    .env(&["MSB_ENABLE_LRU_EVICTION"]),
    setting("microsandbox.cleanup_interval", Time(1.0, DAY), Is("60"), "Time between two searches for sessions to end")
        .env(&["MSB_CLEANUP_INTERVAL"]),
    setting(
        "microsandbox.orphan_interval",
        Time(1.0, DAY),
        Is("600"),
        "Time between two searches for what dead servers left behind",
    )
    .env(&["MSB_ORPHAN_CLEANUP_INTERVAL"]),
    setting("microsandbox.start_timeout", Time(1.0, 3600.0), Is("180"), "Longest time that a sandbox may take to start, and that a call waits until the server is ready")
        .env(&["MSB_SANDBOX_START_TIMEOUT"]),
    setting(
        "microsandbox.volumes",
        List,
        Is("[]"),
        "Directories of this machine that all sessions share: `host:container`, or `host:container:ro` for read-only; a relative path starts in the working directory, or beside the configuration file if it is written there",
    )
    .env(&["MSB_SHARED_VOLUME_PATH"]),
    setting(
        "microsandbox.show_host_paths",
        Switch,
        Is("false"),
        "Tell tenants that have a token where shared volumes are on this machine",
    ),
    setting(
        "conversation.underscores",
        Switch,
        Is("false"),
        "Offer `sandbox_run_code` in place of `sandbox.run_code`, for clients that refuse dots in names",
    ),
];

/// Returns the keys of all settings.
pub fn keys() -> impl Iterator<Item = &'static str> {
    SETTINGS.iter().map(|setting| setting.key)
}

pub(crate) fn find(key: &str) -> Option<&'static Setting> {
    SETTINGS.iter().find(|setting| setting.key == key)
}

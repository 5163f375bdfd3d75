//! The settings of `[network]`: named policies and what they apply to, host names that the operator adds, and secrets.
//!
//! Policies can be set for all sandboxes, a dialect, a size and a tenant. If several apply, all of them have to allow a
//! connection.

use std::collections::BTreeMap;
use std::net::IpAddr;
use std::path::PathBuf;

use egress::policy::{BUILT_IN, COMMAND_LINE, OFF, PRESETS};
use egress::{Policy, Table, UpstreamProxy, Upstreams};
use engine::op::Size;
use serde::Deserialize;

use super::{ConfigError, Effective, nearest};

#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Network {
    pub policies: Policies,
    /// Policies of the dialects that have a network at all.
    pub dialects: BTreeMap<&'static str, Policy>,
    pub sizes: BTreeMap<Size, Policy>,
    pub hosts: BTreeMap<String, IpAddr>,
    pub secrets: Vec<SecretConfig>,
    pub upstream: Option<UpstreamSource>,
    /// The file with the credentials of the upstream proxy.
    pub upstream_credentials: Option<PathBuf>,
    pub upstream_except: Vec<String>,
    pub fake_ip_dns: bool,
}

/// Where the address of the upstream proxy comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum UpstreamSource {
    Given(UpstreamProxy),
    /// The variables `HTTPS_PROXY`, `HTTP_PROXY` and `NO_PROXY` of the server.
    Environment,
}

/// All policies by name, including the presets and `off`.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct Policies(BTreeMap<String, Policy>);

/// A secret and the source of its value, but never the value.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct SecretConfig {
    pub name: String,
    pub hosts: Vec<String>,
    pub header: String,
    pub format: Option<String>,
    pub tenants: Vec<String>,
    pub from: SecretSource,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum SecretSource {
    File(PathBuf),
    Variable(String),
}

impl Network {
    pub(super) fn typed(effective: &Effective) -> Result<Self, ConfigError> {
        let policies = Policies::typed(effective)?;
        let all = of_all(effective, &policies)?;
        let mut dialects = BTreeMap::new();
        for dialect in dialects::IDS {
            let own = named(effective, &policies, &format!("dialect.{dialect}.network"))?;
            let policy = match (own, &all) {
                (Some(own), Some(all)) => all.clone().and(&own),
                (Some(one), None) => one,
                (None, Some(all)) => all.clone(),
                (None, None) => continue,
            };
            if !is_off(&policy) {
                dialects.insert(*dialect, policy);
            }
        }
        let mut sizes = BTreeMap::new();
        for size in Size::ALL {
            if let Some(policy) = named(effective, &policies, &format!("size.{}.network", size.name()))? {
                sizes.insert(size, policy);
            }
        }
        Ok(Self {
            policies,
            dialects,
            sizes,
            hosts: hosts(effective)?,
            secrets: secrets(effective)?,
            upstream: upstream(effective)?,
            upstream_credentials: upstream_credentials(effective)?,
            upstream_except: upstream_except(effective)?,
            fake_ip_dns: effective.get("network.fake_ip_dns")?,
        })
    }
}

/// Returns whether a policy denies everything. One table that allows nothing is enough, because every table has to
/// allow a connection.
fn is_off(policy: &Policy) -> bool {
    policy.tables.iter().any(|table| table.allow.is_empty())
}

impl Policies {
    pub(crate) fn find(&self, name: &str) -> Result<&Policy, String> {
        self.0.get(name).ok_or_else(|| {
            let nearest = nearest(name, self.0.keys().map(String::as_str)).unwrap_or(OFF);
            format!("there is no policy `{name}`; did you mean `{nearest}`?")
        })
    }

    fn typed(effective: &Effective) -> Result<Self, ConfigError> {
        let Self(mut all) = Self::default();
        let tables = effective.value("network.policy").and_then(toml::Value::as_table);
        for (name, value) in tables.into_iter().flatten() {
            let wrong = |why: &str| effective.error_in("network.policy", &format!(".{name}"), why);
            check_policy_name(name).map_err(|why| wrong(&why))?;
            let given: PolicyTable =
                value.clone().try_into().map_err(|error: toml::de::Error| wrong(error.message().trim()))?;
            let table = given.table(name).map_err(|why| wrong(&why))?;
            all.insert(name.clone(), Policy::of(table));
        }
        Ok(Self(all))
    }
}

/// Contains the built-in policies.
impl Default for Policies {
    fn default() -> Self {
        let table = |name: &str, allow: Vec<String>| Table { name: name.into(), allow, ..Table::default() };
        let mut all = BTreeMap::from([(OFF.to_owned(), Policy::of(table(OFF, Vec::new())))]);
        all.extend(PRESETS.map(|name| (name.to_owned(), Policy::of(table(name, vec![name.into()])))));
        Self(all)
    }
}

/// Returns the policy of `network.default` or `network.allow`, whichever comes from the stronger source.
fn of_all(effective: &Effective, policies: &Policies) -> Result<Option<Policy>, ConfigError> {
    let Some(allow) = effective.get::<Option<Vec<String>>>("network.allow")? else {
        return named(effective, policies, "network.default");
    };
    if effective.strength("network.default") == effective.strength("network.allow") {
        let why = "is set together with `network.default`; set only one of them";
        return Err(effective.error("network.allow", why));
    }
    let table = Table { name: COMMAND_LINE.into(), allow, ..Table::default() };
    check(&table).map_err(|why| effective.error("network.allow", &why))?;
    Ok(Some(Policy::of(table)))
}

fn named(effective: &Effective, policies: &Policies, key: &str) -> Result<Option<Policy>, ConfigError> {
    let Some(name) = effective.get::<Option<String>>(key)? else { return Ok(None) };
    policies.find(&name).map(|policy| Some(policy.clone())).map_err(|why| effective.error(key, &why))
}

fn check_policy_name(name: &str) -> Result<(), String> {
    if BUILT_IN.contains(&name) {
        return Err(format!("`{name}` is built in and cannot be changed; choose another name"));
    }
    Ok(())
}

/// The content of `[network.policy.<name>]` in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields, default)]
#[derive(Default)]
struct PolicyTable {
    allow: Vec<String>,
    deny: Vec<String>,
    ports: Vec<u16>,
    methods: Vec<String>,
    private: Vec<String>,
    max_connections: Option<u32>,
    max_mb: Option<u32>,
    kb_per_second: Option<u32>,
    connections_per_second: Option<u32>,
}

impl PolicyTable {
    fn table(self, name: &str) -> Result<Table, String> {
        if self.max_mb == Some(0) {
            return Err("`max_mb`: 0 lets nothing through; leave the network off instead".into());
        }
        let table = Table {
            name: name.into(),
            allow: self.allow,
            deny: self.deny,
            ports: self.ports,
            methods: self.methods,
            private: self.private,
            max_connections: self.max_connections,
            max_bytes: self.max_mb.map(|mb| u64::from(mb) << 20),
            bytes_per_second: self.kb_per_second.map(|kb| u64::from(kb) << 10),
            connections_per_second: self.connections_per_second,
        };
        check(&table)?;
        Ok(table)
    }
}

/// Checks a table. The message leaves out the name of the policy, because the name of the setting contains it already.
fn check(table: &Table) -> Result<(), String> {
    let own = format!("policy `{}`, ", table.name);
    table.check().map_err(|why| why.strip_prefix(&own).map_or(why.clone(), Into::into))
}

fn hosts(effective: &Effective) -> Result<BTreeMap<String, IpAddr>, ConfigError> {
    let table = effective.value("network.hosts").and_then(toml::Value::as_table);
    let mut hosts = BTreeMap::new();
    for (name, value) in table.into_iter().flatten() {
        let wrong = |why: &str| effective.error_in("network.hosts", &format!(".\"{name}\""), why);
        let is_name = egress::is_host_name(name) && name.parse::<IpAddr>().is_err();
        if !is_name {
            return Err(wrong("not the name of a host"));
        }
        if name.eq_ignore_ascii_case(egress::HOST_NAME) {
            return Err(wrong(
                "this name is reserved: it stands for this host, whose ports `host:<port>` in `allow` opens",
            ));
        }
        let address = value.as_str().and_then(|text| text.parse().ok());
        hosts
            .insert(name.to_ascii_lowercase(), address.ok_or_else(|| wrong("expected an address such as `10.0.0.7`"))?);
    }
    Ok(hosts)
}

fn upstream(effective: &Effective) -> Result<Option<UpstreamSource>, ConfigError> {
    const KEY: &str = "network.upstream";
    let Some(text) = effective.get::<Option<String>>(KEY)? else { return Ok(None) };
    if text == "environment" {
        return Ok(Some(UpstreamSource::Environment));
    }
    let proxy = UpstreamProxy::parse(&text).map_err(|why| effective.error(KEY, why))?;
    if proxy.has_credentials() {
        let why = "the credentials of a proxy do not belong in its address; put `user:password` into a separate file and name that with `network.upstream_credentials`";
        return Err(effective.error(KEY, why));
    }
    Ok(Some(UpstreamSource::Given(proxy)))
}

fn upstream_credentials(effective: &Effective) -> Result<Option<PathBuf>, ConfigError> {
    const KEY: &str = "network.upstream_credentials";
    let Some(path) = effective.get::<Option<PathBuf>>(KEY)? else { return Ok(None) };
    if !path.is_absolute() {
        return Err(effective.error(KEY, "has to be an absolute path"));
    }
    if effective.get::<Option<String>>("network.upstream")?.is_none() {
        return Err(effective.error(KEY, "is set without `network.upstream`"));
    }
    Ok(Some(path))
}

fn upstream_except(effective: &Effective) -> Result<Vec<String>, ConfigError> {
    const KEY: &str = "network.upstream_except";
    let except: Vec<String> = effective.get(KEY)?;
    Upstreams { except: except.clone(), ..Upstreams::default() }.check().map_err(|why| effective.error(KEY, &why))?;
    Ok(except)
}

/// The content of `[[network.secret]]` in the file.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct SecretTable {
    name: String,
    hosts: Vec<String>,
    header: String,
    format: Option<String>,
    tenants: Option<Vec<String>>,
    value_file: Option<PathBuf>,
    value_env: Option<String>,
}

fn secrets(effective: &Effective) -> Result<Vec<SecretConfig>, ConfigError> {
    let tables = effective.value("network.secret").and_then(toml::Value::as_array);
    let mut secrets: Vec<SecretConfig> = Vec::new();
    for (number, value) in tables.into_iter().flatten().enumerate() {
        let name = value.get("name").and_then(toml::Value::as_str).map(|name| format!(".{name}"));
        let name = name.unwrap_or_else(|| format!("[{number}]"));
        let wrong = |why: &str| effective.error_in("network.secret", &name, why);
        if value.get("value").is_some() {
            return Err(wrong(
                "the value of a secret does not belong in this file; put it into a separate file and name that with `value_file`, or into a variable and name that with `value_env`",
            ));
        }
        let table: SecretTable =
            value.clone().try_into().map_err(|error: toml::de::Error| wrong(error.message().trim()))?;
        let secret = secret(table).map_err(|why| wrong(&why))?;
        if secrets.iter().any(|other| other.name == secret.name) {
            return Err(wrong("two secrets have this name"));
        }
        secrets.push(secret);
    }
    Ok(secrets)
}

fn secret(table: SecretTable) -> Result<SecretConfig, String> {
    let SecretTable { name, hosts, header, format, tenants, value_file, value_env } = table;
    let from = match (value_file, value_env) {
        (Some(path), None) if path.is_absolute() => SecretSource::File(path),
        (Some(_), None) => return Err("`value_file` has to be an absolute path".into()),
        (None, Some(variable)) => SecretSource::Variable(variable),
        (None, None) => return Err("set `value_file` or `value_env`, which say where the value is".into()),
        (Some(_), Some(_)) => return Err("`value_file` and `value_env` are both set; set only one of them".into()),
    };
    egress::Secret::check(&name, &hosts, &header, format.as_deref())?;
    // An empty list would later mean every tenant.
    if tenants.as_ref().is_some_and(Vec::is_empty) {
        return Err("`tenants` is empty: remove it to let all tenants use the secret, or name those that may".into());
    }
    Ok(SecretConfig { name, hosts, header, format, tenants: tenants.unwrap_or_default(), from })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Config, Environment, Sources};
    use testkit::scratch::Scratch;

    fn load(file: &str, flags: &[(&'static str, &str)]) -> Result<Network, String> {
        let dir = Scratch::new();
        let path = dir.write("sandpool.toml", file).to_string_lossy().into_owned();
        let given = flags.iter().map(|(key, value)| (*key, (*value).to_owned()));
        let flags = [("config", path.clone())].into_iter().chain(given).collect();
        let environment = Environment::of(&[("HOME", "/home/u")]);
        let config = Config::load(&Sources { environment, flags, is_root: false });
        config.map(|config| config.network).map_err(|error| error.to_string().replace(&path, "FILE"))
    }

    /// Returns the names of the tables that have to allow, for each dialect that has any.
    fn tables(file: &str, flags: &[(&'static str, &str)]) -> String {
        let names =
            |policy: &Policy| policy.tables.iter().map(|table| table.name.clone()).collect::<Vec<_>>().join("+");
        let network = load(file, flags).unwrap();
        let of = network.dialects.iter().map(|(dialect, policy)| format!("{dialect}:{}", names(policy)));
        of.collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn what_several_places_say_has_to_be_allowed_by_all() {
        assert_eq!(tables("", &[]), "");
        assert_eq!(tables("network.default = 'off'\ndialect.workbench.network = 'public'", &[]), "");
        assert_eq!(tables("dialect.workbench.network = 'public'", &[]), "workbench:public");
        let all = "network.default = 'packages'\n[dialect.agentrun]\nnetwork = 'corp'\n[dialect.conversation]\nnetwork = 'off'\n\
                   [network.policy.corp]\nallow = ['*.corp.test']";
        assert_eq!(
            tables(all, &[]),
            "agentrun:packages+corp microsandbox:packages sandpool:packages workbench:packages"
        );
        let flag = [("network.allow", "packages, api.test:8443")];
        assert_eq!(
            tables(all, &flag),
            "agentrun:command-line+corp microsandbox:command-line sandpool:command-line workbench:command-line"
        );
        assert_eq!(tables("network.default = 'public'", &[("network.allow", "")]), "");
        let sizes = load("size.small.network = 'off'\nsize.large.network = 'public'", &[]).unwrap().sizes;
        assert_eq!(sizes.keys().copied().collect::<Vec<_>>(), [Size::Small, Size::Large]);
    }

    #[test]
    fn a_policy_is_a_table_of_the_operators() {
        let file = "[network.policy.corp]\nallow = ['*.corp.test', '10.1.0.0/16:443']\ndeny = ['hr.corp.test']\nports = [443]\n\
                    methods = ['GET']\nprivate = ['10.1.0.0/16']\nmax_connections = 8\nmax_mb = 2\nkb_per_second = 3\nconnections_per_second = 4";
        let network = load(file, &[]).unwrap();
        let table = Table {
            name: "corp".into(),
            allow: vec!["*.corp.test".into(), "10.1.0.0/16:443".into()],
            deny: vec!["hr.corp.test".into()],
            ports: vec![443],
            methods: vec!["GET".into()],
            private: vec!["10.1.0.0/16".into()],
            max_connections: Some(8),
            max_bytes: Some(2 << 20),
            bytes_per_second: Some(3 << 10),
            connections_per_second: Some(4),
        };
        assert_eq!(network.policies.find("corp").unwrap(), &Policy::of(table));
    }

    #[test]
    fn names_and_secrets_are_read_and_a_value_is_not() {
        let file = "[network.hosts]\n'Pages.test' = '127.0.0.1'\n[[network.secret]]\nname = 'GITHUB_TOKEN'\n\
                    hosts = ['api.github.com', '*.corp.test:8443']\nheader = 'Authorization'\nformat = 'Bearer {}'\nvalue_file = '/run/s'\n\
                    [[network.secret]]\nname = 'KEY'\nhosts = ['k.test']\nheader = 'X-Key'\nvalue_env = 'CORP_KEY'\ntenants = ['blue']";
        let network = load(file, &[]).unwrap();
        assert_eq!(network.hosts, BTreeMap::from([("pages.test".into(), IpAddr::from([127, 0, 0, 1]))]));
        assert_eq!(
            (network.secrets[0].tenants.len(), network.secrets[1].tenants.as_slice()),
            (0, &["blue".to_owned()][..])
        );
        let from: Vec<_> = network.secrets.iter().map(|secret| (secret.name.as_str(), secret.from.clone())).collect();
        assert_eq!(
            from,
            [("GITHUB_TOKEN", SecretSource::File("/run/s".into())), ("KEY", SecretSource::Variable("CORP_KEY".into()))]
        );
        let secret = "[[network.secret]]\nname = 'T'\nhosts = ['a.test']\nheader = 'X'\nvalue = 'hunter2hunter2'";
        let refused = load(secret, &[]).unwrap_err();
        assert!(refused.contains("`network.secret.T` (from FILE): the value of a secret does not belong"), "{refused}");
        for file in [secret, "[network]\nsecret = 'hunter2hunter2'", "network.secret = ['hunter2hunter2']"] {
            assert!(!load(file, &[]).unwrap_err().contains("hunter2"), "{file}");
        }
    }

    #[test]
    fn an_upstream_is_an_address_or_the_environment_and_has_no_credentials_in_it() {
        let network = load(
            "network.upstream = 'http://proxy.corp.test:3128'\nnetwork.upstream_except = ['*.corp.test']\n\
                            network.upstream_credentials = '/run/proxy'",
            &[],
        )
        .unwrap();
        let proxy = UpstreamProxy::parse("http://proxy.corp.test:3128").unwrap();
        assert_eq!(network.upstream, Some(UpstreamSource::Given(proxy)));
        assert_eq!(network.upstream_credentials, Some("/run/proxy".into()));
        assert_eq!(network.upstream_except, ["*.corp.test"]);
        assert_eq!(load("", &[]).unwrap().upstream, None);
        let environment = load("", &[("network.upstream", "environment")]).unwrap();
        assert_eq!((environment.upstream, environment.fake_ip_dns), (Some(UpstreamSource::Environment), false));
        for (file, why) in [
            (
                "network.upstream = 'http://me:hunter2@a.test:1'",
                "`network.upstream` (from FILE): the credentials of a proxy",
            ),
            (
                "network.upstream = 'socks5://me:hunter2@a.test:1'",
                "`network.upstream` (from FILE): an upstream proxy is given as",
            ),
            ("network.upstream_credentials = '/f'", "`network.upstream_credentials` (from FILE): is set without"),
            (
                "network.upstream = 'http://a.test'\nnetwork.upstream_credentials = 'f'",
                "`network.upstream_credentials` (from FILE): has to be",
            ),
            (
                "network.upstream_except = ['http://a.test']",
                "`network.upstream_except` (from FILE): `http://a.test` is a URL",
            ),
        ] {
            let refused = load(file, &[]).unwrap_err();
            assert!(refused.starts_with(why) && !refused.contains("hunter2"), "{file}: {refused}");
        }
    }

    #[test]
    fn what_is_wrong_is_one_line_with_the_key_and_the_file() {
        let secret = |rest: &str| format!("[[network.secret]]\nname = 'T'\n{rest}");
        let whole =
            |hosts: &str, header: &str| secret(&format!("hosts = ['{hosts}']\nheader = '{header}'\nvalue_file = '/f'"));
        let cases = [
            (
                "network.default = 'pubic'".into(),
                "`network.default` (from FILE): there is no policy `pubic`; did you mean `public`?",
            ),
            (
                "network.policy.x.alow = []".into(),
                "`network.policy.x` (from FILE): unknown field `alow`, expected one of",
            ),
            ("network.policy.x = 3".into(), "`network.policy.x` (from FILE): invalid type: integer `3`"),
            ("network.policy = 'x'".into(), "`network.policy` (from FILE): expected a table"),
            (
                "network.polcy.x.allow = []".into(),
                "unknown key `network.polcy.x.allow` in `FILE`; did you mean `network.allow`?",
            ),
            ("network.policy.public.allow = []".into(), "`network.policy.public` (from FILE): `public` is built in"),
            ("network.policy.x.allow = ['https://a.test/']".into(), "`network.policy.x` (from FILE): `allow`: "),
            (
                "network.policy.x.ports = [70000]".into(),
                "`network.policy.x` (from FILE): invalid value: integer `70000`",
            ),
            ("network.policy.x.max_mb = 0".into(), "`network.policy.x` (from FILE): `max_mb`: 0 lets nothing through"),
            (
                "network.policy.x.allow = ['host']".into(),
                "`network.policy.x` (from FILE): `allow`: `host` stands for the loopback of this host and needs one port",
            ),
            (
                "network.hosts.\"host.sandpool.internal\" = '10.0.0.1'".into(),
                "`network.hosts.\"host.sandpool.internal\"` (from FILE): this name is reserved",
            ),
            ("network.hosts.a = 'b'".into(), "`network.hosts.\"a\"` (from FILE): expected an address"),
            (
                "network.default = 'public'\nnetwork.allow = ['a.test']".into(),
                "`network.allow` (from FILE): is set together with",
            ),
            (
                secret("hosts = ['a.test']\nheader = 'X'"),
                "`network.secret.T` (from FILE): set `value_file` or `value_env`",
            ),
            (whole("a.test", "X") + "\ntenants = []", "`network.secret.T` (from FILE): `tenants` is empty"),
            (whole("10.0.0.1", "X"), "`network.secret.T` (from FILE): `hosts`: `10.0.0.1` is not a name"),
            (whole("*.com", "X"), "`network.secret.T` (from FILE): `hosts`: `*.com` is not a name"),
            (whole("a.test", "Host"), "`network.secret.T` (from FILE): `header`: `Host` is for the connection"),
            (whole("a.test", "X").replace("'T'", "'PATH'"), "`network.secret.PATH` (from FILE): `PATH` cannot be"),
            (whole("a.test", "X").repeat(2).replace("'/f'[", "'/f'\n["), "`network.secret.T` (from FILE): two secrets"),
        ];
        for (file, why) in cases {
            let refused = load(&file, &[]).unwrap_err();
            assert!(refused.starts_with(why) && !refused.contains('\n'), "{file}\n{refused}");
        }
    }
}

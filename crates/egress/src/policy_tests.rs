use super::*;

fn strings(entries: &[&str]) -> Vec<String> {
    entries.iter().map(ToString::to_string).collect()
}

fn table(name: &str, allow: &[&str]) -> Table {
    Table { name: name.into(), allow: strings(allow), ..Table::default() }
}

fn asked(table: &Table, target: &str) -> Result<(), String> {
    judge(&[table])
        .asked(&Target::parse(target).unwrap())
        .map_err(|refusal| format!("{}. {}", refusal.rule, refusal.remedy))
}

fn connected(tables: &[&Table], target: &str, address: &str) -> Result<(), String> {
    judge(tables)
        .connected(&Target::parse(target).unwrap(), address.parse().unwrap())
        .map_err(|refusal| format!("{}. {}", refusal.rule, refusal.remedy))
}

fn judge(tables: &[&Table]) -> CompiledPolicy {
    CompiledPolicy::new(&Policy { tables: tables.iter().map(|table| Arc::new((*table).clone())).collect() }, false)
        .unwrap()
}

#[test]
fn what_is_not_allowed_is_said_with_what_would_allow_it() {
    let packages = table("packages", &["packages"]);
    assert_eq!(asked(&packages, "pypi.org:443"), Ok(()));
    assert_eq!(
        asked(&packages, "api.example.com:443").unwrap_err(),
        "policy \"packages\" does not allow this name. The operator can allow it in sandpool.toml by a policy in place of this one: \
         [network.policy.<name>] allow = [\"api.example.com\"]"
    );
    assert_eq!(
        asked(&table("corp", &["packages"]), "8.8.8.8:53").unwrap_err(),
        "policy \"corp\" does not allow this address. The operator can allow it in sandpool.toml: \
         [network.policy.corp] allow = [\"8.8.8.8:53\"]"
    );
    assert_eq!(
        asked(&table("command-line", &["packages"]), "a.test:22").unwrap_err(),
        "policy \"command-line\" does not allow this name. The operator can allow it by `a.test:22` in --network-allow"
    );
}

#[test]
fn deny_wins_over_allow() {
    let corp = Table {
        deny: strings(&["*.evil.test", "b.test:8080", "9.9.9.0/24"]),
        ports: vec![443, 8080],
        ..table("corp", &["*"])
    };
    assert_eq!(asked(&corp, "a.test:443"), Ok(()));
    assert_eq!(
        asked(&corp, "a.evil.test:443").unwrap_err(),
        "policy \"corp\" denies \"*.evil.test\". The operator can allow it in sandpool.toml, by a change of [network.policy.corp] deny"
    );
    assert_eq!(asked(&corp, "b.test:443"), Ok(()));
    assert!(asked(&corp, "b.test:8080").is_err());
    assert!(asked(&corp, "9.9.9.9:443").is_err());
    assert!(connected(&[&corp], "a.test:443", "9.9.9.9:443").is_err(), "a name that leads to a denied network");
}

#[test]
fn ports_are_80_and_443_unless_something_else_is_said() {
    let public = table("public", &["public"]);
    for (port, allowed) in [(80, true), (443, true), (25, false), (22, false), (8080, false)] {
        assert_eq!(asked(&public, &format!("a.test:{port}")).is_ok(), allowed, "{port}");
    }
    let other = Table { ports: vec![22], ..table("t", &["a.test", "b.test:8080", "c.test:*"]) };
    for (target, allowed) in
        [("a.test:22", true), ("a.test:443", false), ("b.test:8080", true), ("b.test:22", false), ("c.test:25", true)]
    {
        assert_eq!(asked(&other, target).is_ok(), allowed, "{target}");
    }
    assert_eq!(
        asked(&other, "a.test:25").unwrap_err(),
        "policy \"t\" does not allow port 25. The operator can allow it in sandpool.toml: [network.policy.t] allow = [\"a.test:25\"]"
    );
}

#[test]
fn a_private_address_has_to_be_listed_whatever_allow_says() {
    let every = table("t", &["*", "10.0.0.5"]);
    assert_eq!(
        asked(&every, "10.0.0.5:80").unwrap_err(),
        "10.0.0.5 is a private address, which policy \"t\" does not list. The operator can allow it in sandpool.toml: \
         [network.policy.t] private = [\"10.0.0.5:80\"]"
    );
    assert_eq!(
        connected(&[&every], "inner.test:80", "10.0.0.5:80").unwrap_err(),
        "inner.test leads to a private address, which policy \"t\" does not list. The operator can allow it in sandpool.toml: \
         [network.policy.t] private = [\"<its address>:80\"]"
    );
    assert!(asked(&every, "169.254.169.254:80").unwrap_err().contains("the cloud's metadata address"));
    let listed = Table { private: strings(&["10.0.0.5"]), ..every };
    assert_eq!(asked(&listed, "10.0.0.5:80"), Ok(()));
    assert_eq!(connected(&[&listed], "inner.test:80", "10.0.0.5:80"), Ok(()));
    assert!(connected(&[&listed], "inner.test:80", "10.0.0.6:80").is_err());
    assert!(asked(&Table { allow: vec![], ..listed }, "10.0.0.5:80").is_err(), "listed is not allowed");
}

#[test]
fn a_private_entry_with_a_port_opens_that_port_of_that_address_alone() {
    let pages = Table { private: strings(&["127.0.0.1:8123"]), ..table("t", &["pages.test"]) };
    assert_eq!(asked(&pages, "pages.test:8123"), Ok(()));
    assert_eq!(connected(&[&pages], "pages.test:8123", "127.0.0.1:8123"), Ok(()));
    assert!(connected(&[&pages], "pages.test:80", "127.0.0.1:80").is_err());
    assert!(connected(&[&pages], "pages.test:8123", "8.8.8.8:8123").is_err());
    assert!(asked(&pages, "other.test:8123").is_err());
}

#[test]
fn a_translators_prefix_does_not_open_what_is_behind_it() {
    let nat64 = Table { private: strings(&["64:ff9b::/96"]), ..table("t", &["public"]) };
    assert_eq!(connected(&[&nat64], "a.test:443", "[64:ff9b::808:808]:443"), Ok(()));
    assert!(connected(&[&nat64], "a.test:443", "[64:ff9b::a00:1]:443").is_err());
}

#[test]
fn every_table_has_to_allow_it_and_none_is_nothing() {
    let (wide, narrow) = (table("wide", &["public"]), table("narrow", &["a.test"]));
    let both = judge(&[&wide, &narrow]);
    assert_eq!(both.asked(&Target::parse("a.test:443").unwrap()), Ok(()));
    assert!(both.asked(&Target::parse("b.test:443").unwrap()).unwrap_err().rule.contains("narrow"));
    assert!(judge(&[]).asked(&Target::parse("a.test:443").unwrap()).is_err());
    let listed = Table { private: strings(&["10.0.0.1"]), ..table("listed", &["public"]) };
    assert!(connected(&[&listed, &wide], "a.test:80", "10.0.0.1:80").is_err(), "one table cannot list for another");
}

#[test]
fn methods_that_cannot_be_seen_are_denied_where_they_matter() {
    let reading = Table { methods: strings(&["GET", "HEAD"]), ..table("t", &["*"]) };
    let judge = judge(&[&reading]);
    assert_eq!(judge.method("get"), Ok(()));
    assert_eq!(judge.method("POST").unwrap_err().rule, "policy \"t\" does not allow the method POST");
    assert_eq!(
        judge.opaque().unwrap_err().rule,
        "policy \"t\" allows only the methods GET, HEAD, and what is inside this connection cannot be seen"
    );
}

#[test]
fn a_table_that_cannot_be_understood_says_where() {
    let why = |table: Table| table.check().unwrap_err();
    assert_eq!(why(table("t", &["a.test", "b.*"])), "policy `t`, `allow`: `b.*` has a `*` that is not its first label");
    assert_eq!(
        why(Table { private: strings(&["a.test"]), ..table("t", &[]) }),
        "policy `t`, `private`: `a.test` is neither an address nor a network"
    );
    assert_eq!(why(Table { methods: strings(&["GE T"]), ..table("t", &[]) }), "policy `t`, `methods`: `GE T` is none");
    assert_eq!(why(Table { ports: vec![0], ..table("t", &[]) }), "policy `t`, `ports`: 0 is none");
    assert!(why(table("a b", &[])).starts_with("`a b` is no name for a policy"));
    assert_eq!(table("t", &["public", "packages", "*.a.test:8080", "10.0.0.0/8", "::1", "[::1]:80"]).check(), Ok(()));
}

#[test]
fn a_listed_network_does_not_open_the_host_itself_or_what_hands_out_credentials() {
    let wide = Table {
        private: strings(&["127.0.0.0/8", "169.254.0.0/16", "100.64.0.0/10"]),
        ..table("t", &["inner.test", "169.254.0.0/16"])
    };
    assert!(connected(&[&wide], "inner.test:80", "127.0.0.1:80").is_err());
    assert!(connected(&[&wide], "inner.test:80", "100.100.100.200:80").is_err());
    assert!(asked(&wide, "169.254.169.254:80").is_err());
    assert_eq!(asked(&wide, "169.254.1.1:80"), Ok(()));
    assert_eq!(connected(&[&wide], "inner.test:80", "100.64.0.1:80"), Ok(()));
    let each = Table { private: strings(&["127.0.0.1", "169.254.169.254:80"]), ..wide };
    assert_eq!(connected(&[&each], "inner.test:80", "127.0.0.1:80"), Ok(()));
    assert_eq!(asked(&each, "169.254.169.254:80"), Ok(()));
}

#[test]
fn a_disguise_does_not_hide_a_denied_address() {
    let mut corp = Table { deny: strings(&["9.9.9.9"]), private: strings(&["*"]), ..table("corp", &["*"]) };
    for address in ["[::ffff:9.9.9.9]:80", "[64:ff9b::909:909]:80", "[2002:909:909::1]:80"] {
        assert!(connected(&[&corp], "a.test:80", address).is_err(), "{address}");
        assert!(asked(&corp, address).is_err(), "{address}");
    }
    // A disguise does not hide this host either.
    corp.private = strings(&["64:ff9b::/96", "127.0.0.0/8"]);
    assert!(connected(&[&corp], "a.test:80", "[64:ff9b::7f00:1]:80").is_err());
}

/// The loopback of this host is reached by its own name and only through the ports that every table names.
#[test]
fn a_port_of_this_host_has_to_be_named_by_every_table() {
    let host = |port: u16| format!("{}:{port}", loopback::NAME);
    let open = table("command-line", &["host:3000", "host.sandpool.internal:3001"]);
    for port in [3000, 3001] {
        assert_eq!(asked(&open, &host(port)), Ok(()));
        for address in loopback::ADDRESSES {
            let address = SocketAddr::new(address, port).to_string();
            assert_eq!(connected(&[&open], &host(port), &address), Ok(()));
            let others =
                Table { private: strings(&["*"]), ..table("wide", &["*:*", "public:*", "*.sandpool.internal:*"]) };
            assert!(connected(&[&open, &others], &host(port), &address).is_err(), "the other table names no port");
            assert!(connected(&[&open], "a.test:3000", &address).is_err(), "another name that leads there");
        }
    }
    assert_eq!(
        asked(&open, &host(3002)).unwrap_err(),
        "policy \"command-line\" does not allow port 3002. The operator can allow it by `host:3002` in --network-allow"
    );
    assert_eq!(
        asked(&table("corp", &["*:*", "*.internal:*", "*.sandpool.internal:*", "public:*"]), &host(80)).unwrap_err(),
        "policy \"corp\" does not allow this name. The operator can allow it in sandpool.toml: \
         [network.policy.corp] allow = [\"host:80\"]"
    );
    for other in ["localhost:3000", "127.0.0.1:3000", "[::1]:3000", "a.host.sandpool.internal:3000", "host:3000"] {
        assert!(asked(&open, other).is_err(), "{other}");
    }
    let private = Table { private: strings(&["127.0.0.1:5432"]), ..open.clone() };
    assert!(asked(&private, &host(5432)).is_err(), "`private` opens ports for other names");
    assert!(connected(&[&open], &host(3000), "127.0.0.2:3000").is_err());
    assert!(connected(&[&open], &host(3000), "10.0.0.1:3000").is_err());
    for deny in ["*", "host", "host:3000", "*.sandpool.internal", "127.0.0.0/8"] {
        let denied = Table { deny: strings(&[deny]), ..open.clone() };
        let judged = asked(&denied, &host(3000)).and_then(|()| connected(&[&denied], &host(3000), "127.0.0.1:3000"));
        assert!(judged.is_err(), "{deny}");
    }
    for entry in ["host", "host:*", "host.sandpool.internal"] {
        let why = table("t", &[entry]).check().unwrap_err();
        assert!(why.contains("needs one port, as in `host:3000`"), "{why}");
    }
    assert!(Table { private: strings(&["host:3000"]), ..table("t", &[]) }.check().is_err());
}

#[test]
fn n22_addresses_of_a_fake_dns_count_as_public_only_by_name_and_only_if_the_operator_says_so() {
    let policy = Policy::of(table("public", &["public"]));
    let judged = |fake, target: &str, address: &str| {
        let policy = CompiledPolicy::new(&policy, fake).unwrap();
        policy.connected(&Target::parse(target).unwrap(), address.parse().unwrap()).map_err(|refusal| refusal.rule)
    };
    for address in ["198.18.0.7:443", "198.19.255.254:443", "[fc00::7]:443"] {
        assert!(judged(false, "a.example:443", address).unwrap_err().contains("a.example leads to "), "{address}");
        assert_eq!(judged(true, "a.example:443", address), Ok(()), "{address}");
        assert!(judged(true, address, address).is_err(), "{address}: it was asked for, and no name led there");
    }
    for address in ["198.20.0.1:443", "1.1.1.1:443"] {
        assert_eq!(judged(false, "a.example:443", address), Ok(()));
    }
    for address in ["10.0.0.1:443", "127.0.0.1:443", "169.254.169.254:443", "[fd00::1]:443", "[fc00:4000::1]:443"] {
        assert!(judged(true, "a.example:443", address).is_err(), "{address}");
    }
}

/// W92: behind a fake DNS, the transparent proxy on this machine finds `metadata.google.internal` for the sandbox.
#[test]
fn w92_names_for_local_use_are_not_looked_up_by_a_transparent_proxy_unless_they_are_listed() {
    let judged = |allow: &[&str], target: &str, address: &str| {
        let policy = CompiledPolicy::new(&Policy::of(table("t", allow)), true).unwrap();
        policy.connected(&Target::parse(target).unwrap(), address.parse().unwrap()).map_err(|refusal| refusal.rule)
    };
    for name in ["metadata.google.internal", "metadata", "router.lan", "printer.local"] {
        let target = format!("{name}:80");
        for wide in ["public", "*"] {
            let rule = judged(&[wide], &target, "198.18.0.7:80").unwrap_err();
            assert!(rule.contains("a name of the transparent proxy's own network"), "{rule}");
            assert!(judged(&[wide], &target, "[fc00::7]:80").is_err(), "{name}");
        }
        assert_eq!(judged(&["public", name], &target, "198.18.0.7:80"), Ok(()), "{name} is listed");
        assert_eq!(judged(&["*"], &target, "1.1.1.1:80"), Ok(()), "{name} has a real address");
    }
}

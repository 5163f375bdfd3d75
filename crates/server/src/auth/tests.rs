//! Tests of identities, tokens and their replacement.

use http::Request;

use super::*;
use testkit::scratch::Scratch;
use text::hex;

const TOKEN: &str = "correct-horse-battery-staple";

fn with_token() -> Auth {
    Auth::open(AuthConfig { token: Some(Secret::parse(TOKEN).unwrap()), ..AuthConfig::default() }).unwrap()
}

fn parts(uri: &str, headers: &[(&str, &str)]) -> Parts {
    let mut request = Request::post(uri).header("host", "127.0.0.1:8775");
    for (name, value) in headers {
        request = request.header(*name, *value);
    }
    request.body(()).unwrap().into_parts().0
}

/// Covers hostile row A24.
#[test]
fn only_the_whole_token_in_one_header_is_let_in() {
    const META: &str = r#"resource_metadata="http://127.0.0.1:8775/.well-known/oauth-protected-resource/mcp""#;
    let missing = format!(r#"Bearer realm="sandpool", {META}"#);
    let wrong = format!(
        r#"Bearer realm="sandpool", error="invalid_token", error_description="the token is not valid", {META}"#
    );
    let broken = format!(
        r#"Bearer realm="sandpool", error="invalid_request", error_description="exactly one header `Authorization: Bearer <token>` is expected", {META}"#
    );
    let good = format!("Bearer {TOKEN}");
    let cases: &[(&str, &str, &[&str], Option<&str>)] = &[
        ("right", "/mcp", &[&good], None),
        ("lower-case scheme", "/mcp", &[&good.replace("Bearer", "bearer")], None),
        ("two spaces", "/mcp", &[&good.replace(' ', "  ")], None),
        ("missing", "/mcp", &[], Some(&missing)),
        ("in the query", &format!("/mcp?access_token={TOKEN}&token={TOKEN}"), &[], Some(&missing)),
        ("wrong", "/mcp", &["Bearer wrong"], Some(&wrong)),
        ("a prefix", "/mcp", &[&good[..good.len() - 1]], Some(&wrong)),
        ("longer", "/mcp", &[&format!("{good}x")], Some(&wrong)),
        ("other case", "/mcp", &[&good.replace("horse", "Horse")], Some(&wrong)),
        ("its hash", "/mcp", &[&format!("Bearer {}", hex(&sha256(TOKEN)))], Some(&wrong)),
        ("empty", "/mcp", &["Bearer "], Some(&broken)),
        ("scheme alone", "/mcp", &["Bearer"], Some(&broken)),
        ("no scheme", "/mcp", &[TOKEN], Some(&broken)),
        ("another scheme", "/mcp", &[&good.replace("Bearer", "Basic")], Some(&broken)),
        ("two tokens", "/mcp", &[&format!("{good} {TOKEN}")], Some(&broken)),
        ("a list", "/mcp", &[&format!("{good}, {good}")], Some(&broken)),
        ("two headers", "/mcp", &[&good, &good], Some(&broken)),
        ("two headers, one wrong", "/mcp", &["Bearer wrong", &good], Some(&broken)),
    ];
    let auth = with_token();
    for (what, uri, values, challenge) in cases {
        let headers: Vec<_> = values.iter().map(|value| ("authorization", *value)).collect();
        let admitted = auth.admit(&parts(uri, &headers));
        match challenge {
            None => assert_eq!(admitted.expect(what).tenant, Tenant::local(), "{what}"),
            Some(challenge) => {
                let denied = admitted.expect_err(what);
                assert_eq!(denied.status(), 401, "{what}");
                assert_eq!(denied.header(), (http::header::WWW_AUTHENTICATE, challenge.to_string()), "{what}");
                http::HeaderValue::from_str(&denied.header().1).expect(what);
                assert!(!denied.body().to_string().contains(TOKEN), "{what}");
            }
        }
    }
}

#[test]
fn bytes_that_are_no_text_are_no_token() {
    let mut parts = parts("/mcp", &[]);
    parts.headers.insert("authorization", http::HeaderValue::from_bytes(b"Bearer \xff\xfe").unwrap());
    assert_eq!(with_token().admit(&parts).unwrap_err().status(), 401);
}

/// Covers hostile row X25.
#[test]
fn no_other_header_says_who_a_caller_is() {
    let spoofs = ["x-user", "x-tenant", "x-forwarded-user", "x-forwarded-for", "forwarded", "x-remote-user", "cookie"];
    let auth = with_token();
    for name in spoofs {
        for value in [TOKEN, "admin", "for=127.0.0.1;by=admin"] {
            let denied = auth.admit(&parts("/mcp", &[(name, value)])).unwrap_err();
            assert_eq!(denied.status(), 401, "{name}");
            let good = format!("Bearer {TOKEN}");
            let caller = auth.admit(&parts("/mcp", &[("authorization", &good), (name, value)])).unwrap();
            assert_eq!(caller.tenant, Tenant::local(), "{name}");
        }
    }
    let headers = [("x-forwarded-host", "evil.example"), ("x-forwarded-proto", "https")];
    let (_, challenge) = auth.admit(&parts("/mcp", &headers)).unwrap_err().header();
    assert!(challenge.contains("http://127.0.0.1:8775/"), "{challenge}");
}

#[test]
fn without_anything_configured_everybody_is_the_local_tenant() {
    let auth = Auth::open(AuthConfig::default()).unwrap();
    let caller = auth.admit(&parts("/mcp", &[("authorization", "Bearer whatever")])).unwrap();
    assert_eq!(caller.tenant, Tenant::local());
    assert!(caller.quotas.show_host_paths);
}

#[test]
fn each_tenant_is_who_his_token_says_with_his_own_rate() {
    let dir = Scratch::new();
    let tenant = |name: &str, token: &str, quotas: &str| {
        format!("[[tenant]]\nname = '{name}'\ntoken_sha256 = '{}'\n{quotas}\n", hex(&sha256(token)))
    };
    let file = tenant("blue", "blue-token", "quotas = { calls_per_second = 2, runs = 1 }")
        + &tenant("green", "green-token", "");
    let config = AuthConfig {
        token: Some(Secret::parse(TOKEN).unwrap()),
        tenants: Some(dir.write("tenants.toml", &file)),
        quotas: Quotas { contexts: Some(7), ..Quotas::default() },
        ..AuthConfig::default()
    };
    let auth = Auth::open(config.clone()).unwrap();
    let admit = |token: &str| {
        let bearer = format!("Bearer {token}");
        auth.admit(&parts("/mcp", &[("authorization", &bearer)]))
    };
    let blue = admit("blue-token").unwrap();
    assert_eq!((blue.tenant.0.as_str(), blue.quotas.runs, blue.quotas.contexts), ("blue", Some(1), Some(7)));
    assert_eq!(admit("green-token").unwrap().tenant.0, "green");
    assert_eq!(admit(TOKEN).unwrap().tenant, Tenant::local());
    assert_eq!(admit("red-token").unwrap_err().status(), 401);
    let refused = (0..10).filter_map(|_| admit("blue-token").err()).next_back().unwrap();
    assert_eq!(refused.status(), 429);
    assert!((0..100).all(|_| admit("green-token").is_ok()), "another's rate is none of his");
    assert_eq!(
        auth.tenants().into_iter().map(|(tenant, quotas)| (tenant.0, quotas.contexts)).collect::<Vec<_>>(),
        ["local", "blue", "green"].map(|name| (name.to_owned(), Some(7)))
    );
    // After a reload only the new tokens are let in.

    let file = tenant("blue", "other-token", "quotas = { runs = 2 }") + &tenant("red", "red-token", "");
    std::fs::write(dir.0.join("tenants.toml"), file).unwrap();
    let changes = auth.replace(auth.reopen(AuthConfig { token: None, ..config.clone() }).unwrap());
    let names = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<_>>();
    let changed = vec![("blue".to_owned(), vec!["token", "quotas"])];
    let (added, removed) = (names(&["red"]), names(&["green", "local"]));
    let claimed = vec!["red".to_owned()];
    assert_eq!(changes, TenantChanges { added, removed, claimed, changed });
    for token in ["blue-token", "green-token", TOKEN] {
        assert_eq!(admit(token).unwrap_err().status(), 401, "{token}");
    }
    assert_eq!((admit("other-token").unwrap().quotas.runs, admit("red-token").is_ok()), (Some(2), true));
    assert!(auth.reopen(AuthConfig::default()).is_err(), "nobody is let in without a token by a reload");
    let file = tenant("blue", "blue-token", "") + &tenant("green", "green-token", "");
    std::fs::write(dir.0.join("tenants.toml"), file).unwrap();
    let shared = AuthConfig { token: Some(Secret::parse("blue-token").unwrap()), ..config };
    let error = Auth::open(shared).err().unwrap().to_string();
    assert_eq!(
        error,
        "the server's token (`auth.token` or `auth.token_file`) is also the token of tenant `blue`; give each tenant its own token"
    );
}

#[test]
fn a_host_that_is_none_is_not_repeated() {
    let mut parts = parts("/mcp", &[]);
    parts.headers.insert("host", http::HeaderValue::from_static("a\", error=\"x"));
    let (_, challenge) = with_token().admit(&parts).unwrap_err().header();
    assert_eq!(challenge, r#"Bearer realm="sandpool""#);
}

#[test]
fn over_calls_per_second_is_429_with_a_time_to_wait() {
    let (tenant, retry_after) = (Tenant::local(), Duration::from_millis(1200));
    let denied = Denied::TooFast { tenant, retry_after, per_second: 2.5 };
    assert_eq!(denied.status(), 429);
    assert_eq!(denied.header(), (http::header::RETRY_AFTER, "2".into()));
    assert_eq!(
        denied.body(),
        json!({"jsonrpc": "2.0", "id": null, "error": {"code": -32600,
            "message": "over the quota `calls_per_second` (2.5); try again later"}})
    );
}

#[test]
fn without_a_token_only_loopback_is_bound() {
    let refused = bind_allowed("0.0.0.0:8775".parse().unwrap(), false, false).unwrap_err();
    assert_eq!(
        refused,
        "refusing to listen on `0.0.0.0:8775` without authentication: anybody who reaches it could run code here; set \
         `SANDPOOL_API_TOKEN`, or pass `--no-auth` if a gateway in front of it checks every request"
    );
    for loopback in ["127.0.0.1:1", "127.8.9.1:1", "[::1]:1", "[::ffff:127.0.0.1]:1"] {
        assert_eq!(bind_allowed(loopback.parse().unwrap(), false, false), Ok(()), "{loopback}");
    }
    for open in ["[::]:1", "192.0.2.1:1", "[::ffff:192.0.2.1]:1", "[fe80::1]:1"] {
        assert!(bind_allowed(open.parse().unwrap(), false, false).is_err(), "{open}");
        assert_eq!(bind_allowed(open.parse().unwrap(), true, false), Ok(()), "{open}");
        assert_eq!(bind_allowed(open.parse().unwrap(), false, true), Ok(()), "{open}");
    }
}

/// W75: a request that was admitted before a reload is confirmed only if its token still speaks for the same member.
#[test]
fn w75_a_request_is_confirmed_by_the_tokens_that_are_valid_now() {
    let dir = Scratch::new();
    let file = |tenants: &[(&str, &str)]| {
        let entry = |(name, token): &(&str, &str)| {
            format!("[[tenant]]\nname = '{name}'\ntoken_sha256 = '{}'\n", hex(&sha256(token)))
        };
        dir.write("tenants.toml", &tenants.iter().map(entry).collect::<String>())
    };
    let all = [("blue", "blue-token"), ("green", "green-token"), ("red", "red-token"), ("grey", "grey-token")];
    let config = AuthConfig { tenants: Some(file(&all)), ..AuthConfig::default() };
    let auth = Auth::open(config.clone()).unwrap();
    let head = |token: &str| parts("/mcp", &[("authorization", &format!("Bearer {token}"))]);
    let admitted = all.map(|(_, token)| auth.admit(&head(token)).unwrap());
    let confirm = |number: usize| {
        let Caller { tenant, membership, .. } = &admitted[number];
        auth.confirm(&head(all[number].1), membership, tenant)
    };
    let reload = |tenants: &[(&str, &str)]| {
        file(tenants);
        let before = auth.version();
        auth.replace(auth.reopen(config.clone()).unwrap());
        assert_ne!(auth.version(), before);
    };
    assert_eq!([0, 1, 2, 3].map(confirm), [const { Ok(()) }; 4]);
    // Blue stays, green has another token, red is removed, and grey's token is that of another tenant.
    reload(&[("blue", "blue-token"), ("green", "other-token"), ("black", "grey-token")]);
    let unknown = auth.admit(&head("nobodys-token")).unwrap_err();
    assert_eq!(unknown.status(), 401);
    let wrong = || Err(unknown.clone());
    assert_eq!([0, 1, 2, 3].map(confirm), [Ok(()), wrong(), wrong(), wrong()]);
    // Under the same name and with the same token, red is another member.
    reload(&all);
    assert_eq!([0, 1, 2].map(confirm), [Ok(()), Ok(()), wrong()]);
}

/// W76: a tenant that is added again under the same name is another member.
#[test]
fn w76_a_replaced_token_keeps_the_membership_and_a_removal_ends_it() {
    let dir = Scratch::new();
    let file = |tokens: &[&str]| {
        let digests: Vec<String> = tokens.iter().map(|token| format!("'{}'", hex(&sha256(token)))).collect();
        let blue = format!("[[tenant]]\nname = 'blue'\ntoken_sha256 = [{}]\n", digests.join(", "));
        let other = format!("[[tenant]]\nname = 'other'\ntoken_sha256 = '{}'\n", hex(&sha256("other-token")));
        dir.write("tenants.toml", &format!("{}{other}", if tokens.is_empty() { "" } else { &blue }))
    };
    let config = AuthConfig { tenants: Some(file(&["one"])), ..AuthConfig::default() };
    let auth = Auth::open(config.clone()).unwrap();
    let member =
        |token: &str| auth.admit(&parts("/mcp", &[("authorization", &format!("Bearer {token}"))])).unwrap().membership;
    let reload = |tokens: &[&str]| {
        file(tokens);
        auth.replace(auth.reopen(config.clone()).unwrap());
    };
    let (first, other) = (member("one"), member("other-token"));
    reload(&["two"]);
    assert_eq!(member("two"), first);
    reload(&[]);
    reload(&["two"]);
    assert_ne!(member("two"), first);
    assert_eq!(member("other-token"), other);
    assert_ne!(first, Membership::default());
}

/// W77: after a restart, a subject of the identity provider does not get the name of a tenant that was removed before.
#[test]
fn w77_a_removed_tenants_name_is_no_subjects_after_a_restart() {
    let rsa: Value = serde_json::from_str(include_str!("rsa_fixture.json")).unwrap();
    let dir = Scratch::new();
    let keys = dir.write("jwks.json", &json!({ "keys": [rsa["jwk"]] }).to_string());
    let jwt = JwtConfig {
        keys: KeySource::File(keys),
        audience: "sandpool".into(),
        issuer: None,
        tenant_claim: "sub".into(),
        max_age: Duration::from_secs(3600),
    };
    let tenant = |name: &str| format!("[[tenant]]\nname = '{name}'\ntoken_sha256 = '{}'\n", hex(&sha256(name)));
    let server = |state: &str, tenants: &str| {
        let tenants = Some(dir.write("tenants.toml", tenants));
        let reserved = Some(dir.0.join(state).join("names"));
        Auth::open(AuthConfig { tenants, reserved, jwt: Some(jwt.clone()), ..AuthConfig::default() }).unwrap()
    };
    let admit = |auth: &Auth, token: &str| {
        auth.admit(&parts("/mcp", &[("authorization", &format!("Bearer {token}"))])).unwrap()
    };
    let subject = |auth: &Auth| admit(auth, rsa["token"].as_str().unwrap());
    let first = server("state", &tenant("rsa-user"));
    assert_eq!(admit(&first, "rsa-user").tenant.0, "rsa-user");
    assert!(subject(&first).tenant.0.starts_with("sub-"));
    let restarted = server("state", &tenant("other"));
    assert_eq!(subject(&restarted).tenant, subject(&first).tenant);
    // Where no tenant had the name, the subject has it, and its entry gives it quotas.
    let entry = format!("{}[[tenant]]\nname = 'rsa-user'\nquotas = {{ contexts = 3 }}\n", tenant("other"));
    let other = subject(&server("another-state", &entry));
    assert_eq!((other.tenant.0.as_str(), other.quotas.contexts), ("rsa-user", Some(3)));
    assert_ne!(other.membership, admit(&first, "rsa-user").membership);
}

//! Converts the settings to the configuration with which [`Auth`](super::Auth) is opened.

use std::path::{Path, PathBuf};

use super::{AuthConfig, AuthError, JwtConfig, KeySource, Quotas, Secret};
use crate::config::{self, Config};

/// File in the state directory with the names of the tenants that have or had a token.
const RESERVED: &str = "tenants-with-tokens";

impl AuthConfig {
    /// Returns who may read the metrics, if they have a token of their own.
    pub(crate) fn of_metrics(config: &Config) -> Result<Option<Self>, AuthError> {
        let token = token("metrics", &config.metrics.token, &config.metrics.token_file)?;
        Ok(token.map(|token| Self { token: Some(token), ..Self::default() }))
    }

    /// Converts the settings. If the token is in a file, this reads it.
    pub(crate) fn of(config: &Config) -> Result<Self, AuthError> {
        let quota = &config.quota;
        let quotas = Quotas {
            contexts: quota.contexts,
            runs: quota.runs,
            memory_mb: quota.memory_mb,
            calls_per_second: quota.calls_per_second,
            show_host_paths: config.dialects.microsandbox.show_host_paths,
            network: None,
        };
        let (auth, public_url) = (&config.auth, config.serve.public_url.clone());
        Ok(Self {
            token: token("auth", &auth.token, &auth.token_file)?,
            tenants: auth.tenants.clone(),
            policies: config.network.policies.clone(),
            jwt: jwt(auth)?,
            public_url,
            servers: auth.servers.clone(),
            quotas,
            reserved: Some(config.state_dir.join(RESERVED)),
        })
    }
}

/// Returns the token that is set by `<table>.token` or in the file of `<table>.token_file`.
fn token(table: &str, token: &Option<config::Secret>, file: &Option<PathBuf>) -> Result<Option<Secret>, AuthError> {
    let wrong = |setting: &str, why: String| AuthError::Setting(format!("`{table}.{setting}`: {why}"));
    match (token, file) {
        (None, None) => Ok(None),
        (Some(token), None) => Secret::parse(&token.0).map(Some).map_err(|why| wrong("token", why)),
        (None, Some(path)) => {
            let text = first_line(path).map_err(|error| wrong("token_file", format!("cannot read it: {error}")))?;
            Secret::parse(&text).map(Some).map_err(|why| wrong("token_file", why))
        }
        (Some(_), Some(_)) => Err(AuthError::Setting(format!(
            "`{table}.token` and `{table}.token_file` are both set; set only one of them"
        ))),
    }
}

fn first_line(path: &Path) -> std::io::Result<String> {
    let text = std::fs::read_to_string(path)?;
    Ok(text.lines().next().unwrap_or_default().to_owned())
}

fn jwt(auth: &config::Auth) -> Result<Option<JwtConfig>, AuthError> {
    let Some(keys) = &auth.jwks else { return Ok(None) };
    let keys = KeySource::parse(keys).map_err(|why| AuthError::Setting(format!("`auth.jwks`: {why}")))?;
    let audience = auth.audience.clone().ok_or_else(|| {
        AuthError::Setting("`auth.jwks` needs `auth.audience`: without it, tokens for any service are accepted".into())
    })?;
    let (issuer, tenant_claim) = (auth.issuer.clone(), auth.tenant_claim.clone());
    Ok(Some(JwtConfig { keys, audience, issuer, tenant_claim, max_age: auth.jwks_max_age }))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::{Environment, Sources};
    use testkit::scratch::Scratch;

    fn configured(toml: &str, env: &[(&str, &str)]) -> Result<AuthConfig, String> {
        let dir = Scratch::new();
        dir.write("token", "from-a-file\nsecond line\n");
        let path = dir.write("sandpool.toml", &toml.replace("DIR", &dir.0.to_string_lossy()));
        let flags = vec![("config", path.to_string_lossy().into_owned())];
        let env: Vec<_> = [("HOME", "/home/u")].iter().chain(env).copied().collect();
        let sources = Sources { environment: Environment::of(&env), flags, is_root: false };
        let config = Config::load(&sources).map_err(|error| error.to_string())?;
        AuthConfig::of(&config).map_err(|error| error.to_string())
    }

    fn digest(token: &str) -> Option<[u8; 32]> {
        Some(Secret::parse(token).unwrap().sha256())
    }

    #[test]
    fn a_token_comes_from_a_variable_or_a_file_and_not_from_both() {
        assert!(!configured("", &[]).unwrap().is_set());
        for variable in ["SANDPOOL_API_TOKEN", "MCP_API_TOKEN"] {
            let auth = configured("", &[(variable, "from-a-variable")]).unwrap();
            assert_eq!(auth.token.map(|token| token.sha256()), digest("from-a-variable"), "{variable}");
        }
        let auth = configured("[auth]\ntoken_file = 'DIR/token'", &[]).unwrap();
        assert_eq!(auth.token.map(|token| token.sha256()), digest("from-a-file"));
        let both = configured("[auth]\ntoken_file = 'DIR/token'", &[("SANDPOOL_API_TOKEN", "x")]).unwrap_err();
        assert_eq!(both, "`auth.token` and `auth.token_file` are both set; set only one of them");
    }

    #[test]
    fn keys_need_an_audience_and_https() {
        let refused = |toml| configured(toml, &[]).unwrap_err();
        assert_eq!(
            refused("[auth]\njwks = 'https://id.example.com/jwks'"),
            "`auth.jwks` needs `auth.audience`: without it, tokens for any service are accepted"
        );
        assert_eq!(
            refused("[auth]\njwks = 'http://id.example.com/jwks'\naudience = 'a'"),
            "`auth.jwks`: `http://id.example.com/jwks`: a key set from another machine has to come by `https`"
        );
        let auth = configured("[auth]\njwks = '/etc/jwks.json'\naudience = 'a'\ntenant_claim = 'org'", &[]).unwrap();
        let jwt = auth.jwt.unwrap();
        assert_eq!((jwt.audience.as_str(), jwt.tenant_claim.as_str(), jwt.issuer), ("a", "org", None));
    }
}

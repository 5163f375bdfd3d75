//! RFC 9728 metadata, from which a client learns who issues tokens for this server.

use serde_json::{Value, json};

/// Path of the metadata; the path of the resource follows it.
pub(crate) const WELL_KNOWN: &str = "/.well-known/oauth-protected-resource";

/// Returns the document for a resource of this server: the whole server (`""`), `/mcp` or `/mcp/<dialect>`.
pub(crate) fn document(base: &str, path: &str, servers: &[String]) -> Option<Value> {
    if !path.is_empty() && resource(path) != path {
        return None;
    }
    let mut document = json!({
        "resource": format!("{base}{path}"),
        "resource_name": "Sandpool",
        "bearer_methods_supported": ["header"],
    });
    if !servers.is_empty() {
        document["authorization_servers"] = json!(servers);
    }
    Some(document)
}

/// Returns the address of the document for a request's path.
pub(crate) fn url(base: &str, path: &str) -> String {
    format!("{base}{WELL_KNOWN}{}", resource(path))
}

/// Returns the resource that a path belongs to. A path that is not below `/mcp` (such as that of the metrics) belongs
/// to the whole server.
fn resource(path: &str) -> &str {
    let Some(rest) = path.strip_prefix("/mcp") else { return "" };
    let plain = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    match rest.strip_prefix('/') {
        None if rest.is_empty() => path,
        Some(name) if (1..=64).contains(&name.len()) && name.bytes().all(plain) => path,
        _ => "",
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BASE: &str = "https://sandbox.example.com";

    #[test]
    fn each_endpoint_has_its_document_and_the_challenge_names_it() {
        for (path, resource) in [("", ""), ("/mcp", "/mcp"), ("/mcp/agentrun", "/mcp/agentrun")] {
            let document = document(BASE, path, &["https://id.example.com".into()]).unwrap();
            assert_eq!(document["resource"], format!("{BASE}{resource}"));
            assert_eq!(document["authorization_servers"], json!(["https://id.example.com"]));
            assert_eq!(url(BASE, path), format!("{BASE}{WELL_KNOWN}{resource}"));
        }
        assert_eq!(document(BASE, "", &[]).unwrap().get("authorization_servers"), None);
        assert_eq!(url(BASE, "/metrics"), format!("{BASE}{WELL_KNOWN}"));
    }

    #[test]
    fn other_paths_have_none() {
        for path in ["/", "/mcp/", "/mcp/a/b", "/mcpx", "/metrics", "/mcp/\"", "/mcp/%22", "/mcp/.."] {
            assert_eq!(document(BASE, path, &[]), None, "{path}");
            assert_eq!(url(BASE, path), format!("{BASE}{WELL_KNOWN}"), "{path}");
        }
    }
}

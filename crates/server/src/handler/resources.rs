//! Serves files as resources. It converts `resources/*` requests to an `Op`, and the outcome to MCP's types.
//!
//! The address of a resource is the file's link, or `sandpool://files/<key>/<path>` where links cannot be made. The
//! server never fetches an address; an address that is not ours names no resource.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use dialects::links::{Address, Links};
use dialects::mime;
use engine::op::{EngineError, EventSink, Op, Outcome, RecentFile};
use rmcp::ErrorData;
use rmcp::model::{Annotations, ReadResourceResult, Resource, ResourceContents, ResourceTemplate};
use serde_json::json;
use text::{iso8601, shown};

use super::{McpContext, McpResult, McpServer};

/// Maximum size of a file that is read as a resource. As base64 it is 4 MiB, far below what clients refuse.
const MOST_BYTES: u64 = 3 << 20;

const SCHEME: &str = "sandpool:/";

/// Answers `resources/list`.
pub(super) async fn list(server: &McpServer, context: &McpContext) -> McpResult<Vec<Resource>> {
    match execute(server, Op::RecentFiles, context).await {
        Ok(Outcome::Recent(files)) => Ok(listed(files, &server.links())),
        Ok(_) => Err(unexpected_outcome()),
        Err(error) => Err(ErrorData::internal_error(error.to_string(), None)),
    }
}

/// Answers `resources/read`.
pub(super) async fn read(server: &McpServer, uri: &str, context: &McpContext) -> McpResult<ReadResourceResult> {
    let links = server.links();
    let op = lower(uri, &links)?;
    let key = match &op {
        Op::ReadLink { key, .. } => key.clone(),
        _ => String::new(),
    };
    let outcome = execute(server, op, context).await;
    let result =
        outcome.map_err(|error| render_error(uri, &error, &links)).and_then(|outcome| render(uri, outcome, &links));
    let (surface, caller) = (&server.surface, &server.caller);
    let bytes = result.as_ref().ok().map(|result| result.contents.iter().map(size).sum());
    surface.observer.resource_read(&caller.tenant.0, surface.dialect.id, &key, &super::origin(context), bytes);
    result
}

/// Returns the number of bytes of the content as it is sent.
fn size(contents: &ResourceContents) -> u64 {
    match contents {
        ResourceContents::TextResourceContents { text: content, .. }
        | ResourceContents::BlobResourceContents { blob: content, .. } => content.len() as u64,
        _ => 0,
    }
}

async fn execute(server: &McpServer, op: Op, context: &McpContext) -> Result<Outcome, EngineError> {
    server.engine.execute(&server.engine_call(context, EventSink::default()), op).await
}

fn unexpected_outcome() -> ErrorData {
    ErrorData::internal_error("the engine gave another kind of answer than was asked for", None)
}

fn listed(files: Vec<RecentFile>, links: &Links) -> Vec<Resource> {
    files.into_iter().filter_map(|file| resource(&file, links)).collect()
}

fn resource(file: &RecentFile, links: &Links) -> Option<Resource> {
    let name = file.path.rsplit('/').next().unwrap_or(&file.path);
    let mut annotations = Annotations::default();
    annotations.last_modified = Some(iso8601(file.modified));
    let resource = Resource::new(uri(&file.key, &file.path, links)?, name)
        .with_description(format!("{} of {}", file.path, file.context_id))
        .with_mime_type(mime::of(name))
        .with_size(file.size)
        .with_annotations(annotations);
    Some(resource)
}

/// Returns the address of a file, or `None` for a path that could not be requested again.
fn uri(key: &str, path: &str, links: &Links) -> Option<String> {
    links.to(key, path).or_else(|| sandpool_links().to(key, path))
}

/// Returns the settings for `sandpool:` addresses, which do not depend on the address of the server.
fn sandpool_links() -> Links {
    Links { base: Some(SCHEME.into()), expiring: None }
}

/// Answers `resources/templates/list`.
pub(super) fn templates(links: &Links) -> Vec<ResourceTemplate> {
    let bases = links.base.iter().map(String::as_str).chain([SCHEME]);
    bases
        .map(|base| {
            ResourceTemplate::new(format!("{base}/files/{{key}}/{{+path}}"), "file")
                .with_description("A file of a sandbox, by the key and the path that stand in its link")
        })
        .collect()
}

/// Converts an address to an operation. The caller is already authenticated, so the link's signature and expiry are not
/// checked.
fn lower(uri: &str, links: &Links) -> McpResult<Op> {
    let bases = links.base.iter().map(String::as_str).chain([SCHEME]);
    let address = bases.filter_map(|base| uri.strip_prefix(base)).find_map(|rest| {
        let path = rest.split_once('?').map_or(rest, |(path, _)| path);
        Address::parse(path)
    });
    let Address { key, path } = address.ok_or_else(|| not_found(uri))?;
    Ok(Op::ReadLink { key, path, max_bytes: MOST_BYTES })
}

fn render(uri: &str, outcome: Outcome, links: &Links) -> McpResult<ReadResourceResult> {
    let Outcome::File { path, content, size, key } = outcome else {
        return Err(unexpected_outcome());
    };
    if size > content.len() as u64 {
        return Err(too_large(&key, &path, links));
    }
    let mime = mime::of(&path);
    let content = match String::from_utf8(content) {
        Ok(text) if mime::is_text(mime) => ResourceContents::text(text, uri),
        Ok(text) => ResourceContents::blob(BASE64_STANDARD.encode(text), uri),
        Err(bytes) => ResourceContents::blob(BASE64_STANDARD.encode(bytes.as_bytes()), uri),
    };
    Ok(ReadResourceResult::new(vec![content.with_mime_type(mime)]))
}

fn render_error(uri: &str, error: &EngineError, links: &Links) -> ErrorData {
    match error {
        EngineError::ContextNotFound(_) | EngineError::FileNotFound(_) | EngineError::InvalidPath { .. } => {
            not_found(uri)
        }
        EngineError::FileTooLarge { path, .. } => match lower(uri, links) {
            Ok(Op::ReadLink { key, path, .. }) => too_large(&key, &path, links),
            _ => too_large("", path, &Links::default()),
        },
        other => ErrorData::internal_error(other.to_string(), None),
    }
}

/// Returns the error for an unknown resource. rmcp sets the code that the client's revision requires.
fn not_found(uri: &str) -> ErrorData {
    ErrorData::resource_not_found("Resource not found", Some(json!({ "uri": shown(uri) })))
}

fn too_large(key: &str, path: &str, links: &Links) -> ErrorData {
    let message = format!("`{}` is larger than {MOST_BYTES} bytes, the most that is read as a resource", shown(path));
    ErrorData::invalid_params(
        match links.to(key, path) {
            Some(link) => format!("{message}; fetch {link}"),
            None => format!("{message}; read a part of it with code"),
        },
        None,
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "00112233445566778899aabbccddeeff00112233445566778899aabbccddeeff";

    fn links() -> Links {
        Links { base: Some("http://127.0.0.1:8775".into()), expiring: None }
    }

    fn read_link(path: &str) -> Op {
        Op::ReadLink { key: KEY.into(), path: path.into(), max_bytes: MOST_BYTES }
    }

    fn file(path: &str, content: &[u8], size: u64) -> Outcome {
        Outcome::File { path: path.into(), content: content.to_vec(), size, key: KEY.into() }
    }

    #[test]
    fn what_is_listed_can_be_read_and_says_what_it_is() {
        let recent = RecentFile {
            key: KEY.into(),
            path: "out/plot 1.png".into(),
            size: 7,
            modified: 1_700_000_000,
            context_id: "ctx-1".into(),
        };
        let odd = RecentFile { path: "a\\b".into(), ..recent.clone() };
        for links in [links(), Links::default()] {
            let listed = listed(vec![recent.clone(), odd.clone()], &links);
            assert_eq!(listed.len(), 1, "a file without an address is no resource");
            assert_eq!(lower(&listed[0].uri, &links).unwrap(), read_link("out/plot 1.png"));
            let mut shown = serde_json::to_value(&listed[0]).unwrap();
            shown.as_object_mut().unwrap().remove("uri");
            assert_eq!(
                shown,
                json!({
                    "name": "plot 1.png",
                    "description": "out/plot 1.png of ctx-1",
                    "mimeType": "image/png",
                    "size": 7,
                    "annotations": { "lastModified": "2023-11-14T22:13:20Z" },
                })
            );
        }
        assert_eq!(listed(vec![recent], &Links::default())[0].uri, format!("sandpool://files/{KEY}/out/plot%201.png"));
    }

    #[test]
    fn the_templates_are_the_addresses_that_are_read() {
        let uris: Vec<String> = templates(&links()).into_iter().map(|template| template.uri_template).collect();
        assert_eq!(uris, ["http://127.0.0.1:8775/files/{key}/{+path}", "sandpool://files/{key}/{+path}"]);
        for uri in uris {
            let uri = uri.replace("{key}", KEY).replace("{+path}", "a/b");
            assert_eq!(lower(&uri, &links()).unwrap(), read_link("a/b"));
            assert_eq!(lower(&format!("{uri}?expires=1&signature=0"), &links()).unwrap(), read_link("a/b"));
        }
    }

    /// Covers hostile rows A37 and A12: only the server's own addresses name a resource.
    #[test]
    fn other_addresses_name_nothing() {
        let uris = [
            String::new(),
            "file:///etc/passwd".into(),
            "http://example.com/".into(),
            format!("http://example.com/files/{KEY}/a"),
            format!("http://127.0.0.1:87755/files/{KEY}/a"),
            format!("http://127.0.0.1:8775.example.com/files/{KEY}/a"),
            format!("http://127.0.0.1:8775@example.com/files/{KEY}/a"),
            format!("HTTP://127.0.0.1:8775/files/{KEY}/a"),
            format!("https://127.0.0.1:8775/files/{KEY}/a"),
            format!("sandpool://files/{KEY}/../../etc/passwd"),
            format!("sandpool://files/{KEY}/%2e%2e/passwd"),
            format!("sandpool://files/{KEY}/"),
            format!("sandpool://other/files/{KEY}/a"),
            format!("/files/{KEY}/a"),
        ];
        for uri in uris {
            let error = lower(&uri, &links()).unwrap_err();
            assert_eq!((error.code.0, error.data), (-32002, Some(json!({ "uri": uri }))));
        }
    }

    #[test]
    fn text_is_text_and_the_rest_is_bytes() {
        let shown = |path: &str, content: &[u8]| {
            let result = render("u", file(path, content, content.len() as u64), &links()).unwrap();
            serde_json::to_value(&result.contents[0]).unwrap()
        };
        assert_eq!(shown("a.csv", b"x,y"), json!({ "uri": "u", "mimeType": "text/csv", "text": "x,y" }));
        assert_eq!(shown("a.csv", b"\xff"), json!({ "uri": "u", "mimeType": "text/csv", "blob": "/w==" }));
        assert_eq!(shown("a.png", b"png"), json!({ "uri": "u", "mimeType": "image/png", "blob": "cG5n" }));
    }

    #[test]
    fn what_is_too_large_is_refused_with_its_link() {
        let link = links().to(KEY, "big.bin").unwrap();
        let limit = EngineError::FileTooLarge { path: "big.bin".into(), limit: MOST_BYTES };
        let errors = [
            render(&link, file("big.bin", b"begin", MOST_BYTES + 1), &links()).unwrap_err(),
            render_error(&link, &limit, &links()),
        ];
        for error in errors {
            assert_eq!(
                error.message,
                format!("`big.bin` is larger than 3145728 bytes, the most that is read as a resource; fetch {link}")
            );
        }
    }

    #[test]
    fn a_foreign_file_looks_like_none() {
        let uri = format!("sandpool://files/{KEY}/a");
        let absent = lower("file:///a", &links()).unwrap_err();
        for error in [EngineError::FileNotFound("a".into()), EngineError::ContextNotFound("c".into())] {
            let error = render_error(&uri, &error, &links());
            assert_eq!((error.code, error.message), (absent.code, absent.message.clone()));
        }
    }
}

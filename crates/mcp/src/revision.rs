//! Adapts everything that the server sends to the revision of the protocol that the client uses. [`Part::since`] is the
//! table of what each revision has.
//!
//! The clients of a revision check what they receive against its schema. A content block of an unknown type makes them
//! refuse a whole answer, so a block that a revision does not have is sent in a form that it has.

use std::sync::OnceLock;

use bytes::Bytes;
use rmcp::RoleServer;
use rmcp::model::{
    Annotations, CacheScope, CallToolResult, ContentBlock, EmbeddedResource, Implementation, JsonRpcMessage,
    MetaObject, Prompt, Resource, ResourceContents, ResourceTemplate, ServerCapabilities, ServerNotification,
    ServerResult, Tool,
};
use rmcp::service::TxJsonRpcMessage;

/// The revision by which a request is answered. Later revisions are greater.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord)]
pub enum Revision {
    /// The request names no revision, as in a plain POST or before `initialize`. It is answered as 2024-11-05.
    #[default]
    Unstated,
    V2024_11_05,
    V2025_03_26,
    V2025_06_18,
    V2025_11_25,
    V2026_07_28,
}

/// A part of the protocol that not every revision has.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Part {
    /// Content blocks of type `audio`.
    Audio,
    /// `annotations` of a tool.
    ToolAnnotations,
    /// `message` of a progress notification.
    ProgressMessage,
    /// The capability `completions`.
    Completions,
    /// Content blocks of type `resource_link`.
    ResourceLink,
    /// `structuredContent` of a tool's result.
    StructuredContent,
    /// `outputSchema` of a tool.
    OutputSchema,
    /// `title` of a tool, resource, prompt or server.
    Title,
    /// `_meta` of a content block, tool, resource or prompt. A result has had it since the first revision.
    ItemMeta,
    /// `lastModified` of a resource's annotations.
    LastModified,
    /// `ttlMs` and `cacheScope` of a list.
    CacheHints,
    /// `icons` of a tool, resource, prompt or server.
    Icons,
    /// `description` and `websiteUrl` of the server.
    ServerDescription,
    /// The capability `extensions`.
    Extensions,
    /// `resultType` of a result.
    ResultType,
    /// Notifications about tasks and subscriptions.
    TaskNotifications,
}

impl Part {
    /// Returns the first revision that has this part.
    const fn since(self) -> Revision {
        match self {
            Self::Audio | Self::ToolAnnotations | Self::ProgressMessage | Self::Completions => Revision::V2025_03_26,
            Self::ResourceLink
            | Self::StructuredContent
            | Self::OutputSchema
            | Self::Title
            | Self::ItemMeta
            | Self::LastModified => Revision::V2025_06_18,
            // Revision 2026-07-28 defines them. Results may have further members in every revision, and clients that
            // also speak 2026-07-28 use the hints in the revisions that they fall back to.
            Self::CacheHints => Revision::V2025_06_18,
            Self::Icons | Self::ServerDescription => Revision::V2025_11_25,
            Self::Extensions | Self::ResultType | Self::TaskNotifications => Revision::V2026_07_28,
        }
    }
}

impl Revision {
    const COUNT: usize = Self::V2026_07_28 as usize + 1;

    /// Returns the revision with this name, or the last one before it if the name is unknown.
    pub(crate) fn of(version: &str) -> Self {
        match version {
            version if version >= "2026-07-28" => Self::V2026_07_28,
            version if version >= "2025-11-25" => Self::V2025_11_25,
            version if version >= "2025-06-18" => Self::V2025_06_18,
            version if version >= "2025-03-26" => Self::V2025_03_26,
            _ => Self::V2024_11_05,
        }
    }

    /// Returns whether clients may send batches, which revision 2025-06-18 removed.
    pub(crate) fn has_batches(self) -> bool {
        self < Self::V2025_06_18
    }

    fn has(self, part: Part) -> bool {
        // The documents of the dialects print `structuredContent` in the answers to a plain POST.
        self >= part.since() || (self == Self::Unstated && part == Part::StructuredContent)
    }

    fn keep<T>(self, part: Part, member: &mut Option<T>) {
        if !self.has(part) {
            *member = None;
        }
    }

    /// Adapts a result to this revision. The result of `initialize` is adapted to the revision that it names.
    pub(crate) fn fit(self, result: &mut ServerResult) {
        if !self.has(Part::ResultType) {
            result.strip_result_type_for_legacy_peer();
        }
        match result {
            ServerResult::InitializeResult(result) => {
                let negotiated = Self::of(result.protocol_version.as_str());
                negotiated.fit_server(&mut result.capabilities, &mut result.server_info);
            }
            ServerResult::ListToolsResult(result) => {
                self.fit_hints(&mut result.ttl_ms, &mut result.cache_scope);
                result.tools.iter_mut().for_each(|tool| self.fit_tool(tool));
            }
            ServerResult::CallToolResult(result) => self.fit_call(result),
            ServerResult::ListResourcesResult(result) => {
                self.fit_hints(&mut result.ttl_ms, &mut result.cache_scope);
                result.resources.iter_mut().for_each(|resource| self.fit_resource(resource));
            }
            ServerResult::ListResourceTemplatesResult(result) => {
                self.fit_hints(&mut result.ttl_ms, &mut result.cache_scope);
                result.resource_templates.iter_mut().for_each(|template| self.fit_template(template));
            }
            ServerResult::ReadResourceResult(result) => {
                self.fit_hints(&mut result.ttl_ms, &mut result.cache_scope);
                result.contents.iter_mut().for_each(|contents| self.fit_contents(contents));
            }
            ServerResult::ListPromptsResult(result) => {
                self.fit_hints(&mut result.ttl_ms, &mut result.cache_scope);
                result.prompts.iter_mut().for_each(|prompt| self.fit_prompt(prompt));
            }
            ServerResult::GetPromptResult(result) => {
                result
                    .messages
                    .iter_mut()
                    .for_each(|message| self.fit_blocks(std::slice::from_mut(&mut message.content)));
            }
            _ => {}
        }
    }

    /// Adapts a message that is not the result of a request. Returns `false` if this revision has no such message.
    #[must_use]
    pub(crate) fn fit_message(self, message: &mut TxJsonRpcMessage<RoleServer>) -> bool {
        let JsonRpcMessage::Notification(message) = message else { return true };
        match &mut message.notification {
            ServerNotification::ProgressNotification(progress) => {
                self.keep(Part::ProgressMessage, &mut progress.params.message);
                true
            }
            ServerNotification::TaskStatusNotification(_)
            | ServerNotification::SubscriptionsAcknowledgedNotification(_) => self.has(Part::TaskNotifications),
            _ => true,
        }
    }

    fn fit_server(self, capabilities: &mut ServerCapabilities, server: &mut Implementation) {
        self.keep(Part::Completions, &mut capabilities.completions);
        self.keep(Part::Extensions, &mut capabilities.extensions);
        self.keep(Part::Title, &mut server.title);
        self.keep(Part::Icons, &mut server.icons);
        self.keep(Part::ServerDescription, &mut server.description);
        self.keep(Part::ServerDescription, &mut server.website_url);
    }

    fn fit_hints(self, ttl_ms: &mut Option<u64>, scope: &mut Option<CacheScope>) {
        self.keep(Part::CacheHints, ttl_ms);
        self.keep(Part::CacheHints, scope);
    }

    fn fit_tool(self, tool: &mut Tool) {
        self.keep(Part::Title, &mut tool.title);
        self.keep(Part::OutputSchema, &mut tool.output_schema);
        self.keep(Part::ToolAnnotations, &mut tool.annotations);
        self.keep(Part::Icons, &mut tool.icons);
        self.keep(Part::ItemMeta, &mut tool.meta);
    }

    fn fit_prompt(self, prompt: &mut Prompt) {
        self.keep(Part::Title, &mut prompt.title);
        self.keep(Part::Icons, &mut prompt.icons);
        self.keep(Part::ItemMeta, &mut prompt.meta);
        for argument in prompt.arguments.iter_mut().flatten() {
            self.keep(Part::Title, &mut argument.title);
        }
    }

    fn fit_resource(self, resource: &mut Resource) {
        self.keep(Part::Title, &mut resource.title);
        self.keep(Part::Icons, &mut resource.icons);
        self.fit_item(&mut resource.meta, &mut resource.annotations);
    }

    fn fit_template(self, template: &mut ResourceTemplate) {
        self.keep(Part::Title, &mut template.title);
        self.keep(Part::Icons, &mut template.icons);
        self.fit_item(&mut template.meta, &mut template.annotations);
    }

    fn fit_contents(self, contents: &mut ResourceContents) {
        if let ResourceContents::TextResourceContents { meta, .. }
        | ResourceContents::BlobResourceContents { meta, .. } = contents
        {
            self.keep(Part::ItemMeta, meta);
        }
    }

    fn fit_item(self, meta: &mut Option<MetaObject>, annotations: &mut Option<Annotations>) {
        self.keep(Part::ItemMeta, meta);
        if let Some(present) = annotations {
            self.keep(Part::LastModified, &mut present.last_modified);
            annotations.take_if(|annotations| *annotations == Annotations::default());
        }
    }

    fn fit_call(self, result: &mut CallToolResult) {
        self.keep(Part::StructuredContent, &mut result.structured_content);
        self.fit_blocks(&mut result.content);
    }

    fn fit_blocks(self, blocks: &mut [ContentBlock]) {
        let replaced: Vec<(usize, ContentBlock)> = blocks
            .iter()
            .enumerate()
            .filter_map(|(at, block)| match block {
                ContentBlock::ResourceLink(link) if !self.has(Part::ResourceLink) => {
                    Some((at, ContentBlock::text(described(link, blocks))))
                }
                ContentBlock::Audio(audio) if !self.has(Part::Audio) => {
                    let contents = ResourceContents::BlobResourceContents {
                        uri: format!("audio:{at}"),
                        mime_type: Some(audio.mime_type.clone()),
                        blob: audio.data.clone(),
                        meta: None,
                    };
                    Some((at, ContentBlock::Resource(EmbeddedResource::new(contents))))
                }
                _ => None,
            })
            .collect();
        for (at, block) in replaced {
            blocks[at] = block;
        }
        for block in blocks {
            match block {
                ContentBlock::Text(block) => self.fit_item(&mut block.meta, &mut block.annotations),
                ContentBlock::Image(block) => self.fit_item(&mut block.meta, &mut block.annotations),
                ContentBlock::Audio(block) => self.fit_item(&mut block.meta, &mut block.annotations),
                ContentBlock::Resource(block) => {
                    self.fit_item(&mut block.meta, &mut block.annotations);
                    self.fit_contents(&mut block.resource);
                }
                ContentBlock::ResourceLink(link) => self.fit_resource(link),
                _ => {}
            }
        }
    }
}

/// Describes a link in words: `"plot.png" (image/png, 2048 bytes): http://…`. The address is left out if one of the
/// blocks shows it already. Code in a sandbox chooses the name, so the name is quoted.
fn described(link: &Resource, blocks: &[ContentBlock]) -> String {
    let size = link.size.map(|size| format!("{size} bytes"));
    let details = [link.title.clone(), link.description.clone(), link.mime_type.clone(), size];
    let details = details.into_iter().flatten().collect::<Vec<_>>().join(", ");
    let mut text = format!("{:?}", link.name);
    if !details.is_empty() {
        text += &format!(" ({details})");
    }
    let is_shown =
        blocks.iter().any(|block| matches!(block, ContentBlock::Text(block) if shows(&block.text, &link.uri)));
    if !is_shown {
        text += &format!(": {}", link.uri);
    }
    text
}

/// Returns whether a text shows this address, and not only a longer one that begins with it.
fn shows(text: &str, address: &str) -> bool {
    let goes_on = |next: char| next.is_alphanumeric() || "-._~/?#%&=+@:;!$*".contains(next);
    text.match_indices(address).any(|(at, _)| !text[at + address.len()..].starts_with(goes_on))
}

/// A result that never changes, encoded at most once for each revision.
#[derive(Default)]
pub struct EncodedResult([OnceLock<Bytes>; Revision::COUNT]);

impl EncodedResult {
    /// Returns the encoded result. `make` creates the result when it is needed first.
    pub fn get(&self, revision: Revision, make: impl FnOnce() -> ServerResult) -> Bytes {
        let encoded = self.0[revision as usize].get_or_init(|| {
            let mut result = make();
            revision.fit(&mut result);
            serde_json::to_vec(&result).expect("plain data").into()
        });
        encoded.clone()
    }
}

#[cfg(test)]
mod tests {
    use rmcp::model::AudioContent;
    use serde_json::{Value, json};

    use super::*;

    const ALL: [Revision; Revision::COUNT] = [
        Revision::Unstated,
        Revision::V2024_11_05,
        Revision::V2025_03_26,
        Revision::V2025_06_18,
        Revision::V2025_11_25,
        Revision::V2026_07_28,
    ];

    fn fitted<T: serde::de::DeserializeOwned>(revision: Revision, result: Value, to: fn(T) -> ServerResult) -> Value {
        let mut result = to(serde_json::from_value(result).unwrap());
        revision.fit(&mut result);
        serde_json::to_value(result).unwrap()
    }

    /// Returns the names of an object's members.
    fn members(value: &Value) -> Vec<&str> {
        value.as_object().unwrap().keys().map(String::as_str).collect()
    }

    #[test]
    fn a_name_stands_for_its_revision_or_the_last_one_before_it() {
        for (name, revision) in
            ["2024-11-05", "2025-03-26", "2025-06-18", "2025-11-25", "2026-07-28"].iter().zip(&ALL[1..])
        {
            assert_eq!(Revision::of(name), *revision);
        }
        for (name, revision) in
            [("", 1), ("1999-01-01", 1), ("2025-05-01", 2), ("2025-07-01", 3), ("2026-07-27", 4), ("2099-01-01", 5)]
        {
            assert_eq!(Revision::of(name), ALL[revision], "{name}");
        }
        assert_eq!(ALL.map(Revision::has_batches), [true, true, true, false, false, false]);
    }

    #[test]
    fn a_tool_has_the_members_of_the_revision() {
        let tool = json!({
            "name": "t", "title": "T", "description": "d", "inputSchema": {}, "outputSchema": {}, "annotations": {},
            "icons": [], "_meta": {},
        });
        let list = json!({ "resultType": "complete", "tools": [tool], "ttlMs": 1, "cacheScope": "private" });
        let first = ["description", "inputSchema", "name"];
        let expected: [&[&str]; Revision::COUNT] = [
            &[],
            &[],
            &["annotations"],
            &["_meta", "annotations", "outputSchema", "title"],
            &["_meta", "annotations", "icons", "outputSchema", "title"],
            &["_meta", "annotations", "icons", "outputSchema", "title"],
        ];
        for (revision, more) in ALL.into_iter().zip(expected) {
            let sent = fitted(revision, list.clone(), ServerResult::ListToolsResult);
            let mut all = [&first[..], more].concat();
            all.sort_unstable();
            assert_eq!(members(&sent["tools"][0]), all, "{revision:?}");
            assert_eq!(sent.get("ttlMs").is_some(), revision >= Revision::V2025_06_18, "{revision:?}");
            assert_eq!(sent.get("resultType").is_some(), revision == Revision::V2026_07_28, "{revision:?}");
        }
    }

    #[test]
    fn the_server_is_described_as_the_negotiated_revision_does() {
        let hello = |version: &str| {
            json!({
                "protocolVersion": version,
                "capabilities": { "completions": {}, "extensions": { "x": {} }, "tools": {} },
                "serverInfo": {
                    "name": "s", "version": "1", "title": "S", "description": "d", "websiteUrl": "u", "icons": [],
                },
            })
        };
        for (version, capabilities, server) in [
            ("2024-11-05", &["tools"][..], &["name", "version"][..]),
            ("2025-03-26", &["completions", "tools"], &["name", "version"]),
            ("2025-06-18", &["completions", "tools"], &["name", "title", "version"]),
            (
                "2025-11-25",
                &["completions", "tools"],
                &["description", "icons", "name", "title", "version", "websiteUrl"],
            ),
        ] {
            // The request itself names no revision yet.
            let sent = fitted(Revision::Unstated, hello(version), ServerResult::InitializeResult);
            assert_eq!(members(&sent["capabilities"]), capabilities, "{version}");
            assert_eq!(members(&sent["serverInfo"]), server, "{version}");
        }
    }

    #[test]
    fn resources_and_contents_have_the_members_of_the_revision() {
        let resource = json!({
            "uri": "u:x", "name": "x", "title": "X", "size": 1, "icons": [], "_meta": {},
            "annotations": { "lastModified": "2026-01-01T00:00:00Z" },
        });
        let contents = json!({ "contents": [{ "uri": "u:x", "text": "x", "_meta": {} }] });
        for revision in ALL {
            let sent = fitted(revision, json!({ "resources": [resource] }), ServerResult::ListResourcesResult);
            let mut expected = vec!["name", "size", "uri"];
            if revision >= Revision::V2025_06_18 {
                expected.extend(["_meta", "annotations", "title"]);
            }
            if revision >= Revision::V2025_11_25 {
                expected.push("icons");
            }
            expected.sort_unstable();
            assert_eq!(members(&sent["resources"][0]), expected, "{revision:?}");
            let sent = fitted(revision, contents.clone(), ServerResult::ReadResourceResult);
            assert_eq!(
                sent["contents"][0].get("_meta").is_some(),
                revision >= Revision::V2025_06_18,
                "{revision:?}: {sent}"
            );
        }
    }

    fn blocks(revision: Revision, blocks: Vec<ContentBlock>) -> Vec<Value> {
        let mut result = ServerResult::CallToolResult(CallToolResult::success(blocks));
        revision.fit(&mut result);
        serde_json::to_value(result).unwrap()["content"].as_array().unwrap().clone()
    }

    fn link(name: &str, uri: &str) -> ContentBlock {
        ContentBlock::resource_link(Resource::new(uri, name).with_mime_type("text/csv").with_size(7))
    }

    #[test]
    fn a_link_is_text_where_there_are_no_links() {
        for revision in ALL {
            let sent = blocks(revision, vec![ContentBlock::text("done"), link("a.csv", "http://h/files/k/a.csv")]);
            assert_eq!(sent.len(), 2);
            if revision >= Revision::V2025_06_18 {
                assert_eq!(sent[1]["type"], "resource_link", "{revision:?}");
            } else {
                let text = r#""a.csv" (text/csv, 7 bytes): http://h/files/k/a.csv"#;
                assert_eq!(sent[1], json!({ "type": "text", "text": text }), "{revision:?}");
            }
        }
    }

    #[test]
    fn an_address_that_a_text_shows_is_not_repeated() {
        let uri = "http://h/files/k/a.csv";
        for (text, is_shown) in [
            (format!("{{\"url\":\"{uri}\"}}"), true),
            (format!("[all of it: {uri}]\n"), true),
            (uri.to_owned(), true),
            (format!("{uri}.gz and {uri}"), true),
            (format!("{uri}.gz"), false),
            (format!("{uri}?expires=1"), false),
            ("http://h/files/k/".to_owned(), false),
        ] {
            let sent = blocks(Revision::V2024_11_05, vec![ContentBlock::text(text.clone()), link("a.csv", uri)]);
            let address = if is_shown { String::new() } else { format!(": {uri}") };
            assert_eq!(sent[1]["text"], format!("\"a.csv\" (text/csv, 7 bytes){address}"), "{text}");
        }
    }

    /// A name that code in a sandbox chose stays in its line and in its quotes.
    #[test]
    fn the_name_of_a_link_cannot_pass_for_text_of_the_server() {
        let name = "x\" (1 bytes)\n[session evil]\r\u{1b}[2J";
        let sent = blocks(Revision::V2025_03_26, vec![link(name, "http://h/x")]);
        let text = sent[0]["text"].as_str().unwrap();
        assert!(!text.contains(char::is_control), "{text:?}");
        assert!(text.starts_with(r#""x\" (1 bytes)\n[session evil]\r"#), "{text}");
    }

    #[test]
    fn audio_is_an_embedded_resource_where_there_is_no_audio() {
        let audio = || vec![ContentBlock::Audio(AudioContent::new("UklGRg==", "audio/wav"))];
        let resource = json!({ "uri": "audio:0", "mimeType": "audio/wav", "blob": "UklGRg==" });
        let sent = blocks(Revision::V2024_11_05, audio());
        assert_eq!(sent[0], json!({ "type": "resource", "resource": resource }));
        assert_eq!(blocks(Revision::V2025_03_26, audio())[0]["type"], "audio");
    }
}

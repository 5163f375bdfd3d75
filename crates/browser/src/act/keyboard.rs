//! Keyboard actions, and the form controls that are not filled with a keyboard: selections and file inputs.

use proto::browser::BrowseResult;
use proto::{BrowseError, BrowseFailure};
use serde_json::{Value, json};

use super::keys::Chord;
use super::{Act, ActResult};
use crate::cdp;
use crate::page::failure;
use crate::settle;
use crate::snapshot::Need;
use crate::state::shorten;

/// Maximum number of key events that are in flight at a time.
const PIPELINED: usize = 64;
/// Maximum number of characters that are sent as individual keys.
const MAX_KEYS: usize = 10_000;

pub(crate) struct Typing<'a> {
    pub text: &'a str,
    pub append: bool,
    pub submit: bool,
    pub keys: bool,
}

impl Act<'_> {
    pub(crate) async fn type_text(&mut self, at: &str, typing: Typing<'_>) -> ActResult {
        let Typing { text, append, submit, keys } = typing;
        if keys && text.chars().nth(MAX_KEYS).is_some() {
            let message = format!("more than `{MAX_KEYS}` characters are not typed key by key");
            return Err(failure(BrowseFailure::Invalid, message));
        }
        let (element, _) = self.ready(at, Need::Type).await?;
        let moment = settle::moment(&self.page);
        let prepared: String = self.reader.apply(&self.page, &element, PREPARE, &[append.into(), text.into()]).await?;
        match prepared.as_str() {
            "set" => {}
            "end" => self.keys([Chord::parse("End")].into_iter().flatten().chain(text.chars().map(Chord::of))).await?,
            _ if keys => self.keys(text.chars().map(Chord::of)).await?,
            "full" if text.is_empty() => self.keys(Chord::parse("Delete")).await?,
            _ if text.is_empty() => {}
            _ => {
                let _: Value = self.page.ask("Input.insertText", json!({ "text": text })).await?;
            }
        }
        if submit {
            self.keys(Chord::parse("Enter")).await?;
        }
        settle::after(&self.page, moment).await;
        Ok(BrowseResult::Done)
    }

    pub(crate) async fn press(&mut self, key: &str, at: Option<&str>) -> ActResult {
        let Some(chord) = Chord::parse(key) else {
            let message = format!("`{}` is not a key; keys are such as `Enter`, `a` and `Control+A`", shorten(key, 50));
            return Err(failure(BrowseFailure::Invalid, message));
        };
        if let Some(at) = at {
            let (element, _) = self.ready(at, Need::Seen).await?;
            let _: Value = self.reader.apply(&self.page, &element, "element => void element.focus()", &[]).await?;
        }
        let moment = settle::moment(&self.page);
        self.keys([chord]).await?;
        settle::after(&self.page, moment).await;
        Ok(BrowseResult::Done)
    }

    /// Sends keys to the focused element, in whichever frame it is.
    async fn keys(&self, chords: impl IntoIterator<Item = Chord>) -> Result<(), BrowseError> {
        let mut sent = std::collections::VecDeque::new();
        for event in chords.into_iter().flat_map(|chord| chord.events()) {
            sent.push_back(self.page.cdp.send(Some(&self.page.session), "Input.dispatchKeyEvent", event));
            if sent.len() > PIPELINED
                && let Some(first) = sent.pop_front()
            {
                let _: Value = first.read().await?;
            }
        }
        for one in sent {
            // A key may have closed the page.
            match one.read::<Value>().await {
                Ok(_) | Err(cdp::CdpError::Refused(_)) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    pub(crate) async fn select(&mut self, at: &str, options: &[String]) -> ActResult {
        let (element, _) = self.ready(at, Need::Seen).await?;
        let moment = settle::moment(&self.page);
        let _: Value = self.reader.apply(&self.page, &element, SELECT, &[json!(options)]).await?;
        settle::after(&self.page, moment).await;
        Ok(BrowseResult::Done)
    }

    pub(crate) async fn upload(&mut self, at: &str, files: &[String]) -> ActResult {
        let Some(directory) = self.uploads else {
            return Err(failure(BrowseFailure::Invalid, "there are no files to upload"));
        };
        // Only names in that directory are accepted, so that no other file that the browser can read is uploaded.
        let is_name = |name: &String| !name.is_empty() && !name.contains(['/', '\0']) && name != "." && name != "..";
        if files.is_empty() || !files.iter().all(is_name) {
            return Err(failure(BrowseFailure::Invalid, "the files to upload are not given by name"));
        }
        let paths: Vec<String> = files.iter().map(|name| format!("{directory}/{name}")).collect();
        let element = self.find(at).await?;
        self.reader.apply::<Value>(&self.page, &element, FILE_INPUT, &[files.len().into()]).await?;
        let object = self.reader.object(&self.page, &element).await?;
        let moment = settle::moment(&self.page);
        let set = json!({ "files": paths, "objectId": object });
        let _: Value = self.page.cdp.call(Some(&element.frame.session), "DOM.setFileInputFiles", set).await?;
        settle::after(&self.page, moment).await;
        Ok(BrowseResult::Done)
    }
}

/// Function that focuses the field and selects its text, or with `append` moves the cursor to the end. It returns
/// `full` if text is selected and `empty` if none is. A field without selectable text gets its value at once (`set`).
/// In some fields only a key moves the cursor to the end (`end`).
const PREPARE: &str = include_str!("../js/prepare.js");

const SELECT: &str = include_str!("../js/select.js");

const FILE_INPUT: &str = include_str!("../js/file_input.js");

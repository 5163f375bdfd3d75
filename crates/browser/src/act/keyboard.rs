//! Keyboard actions, and the two form controls that are not filled with a keyboard.

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

/// Sets the focus and the selection to where the text belongs, and selects the existing text unless `append` is set.
/// Returns `full` if text is selected and `empty` if none is. A field without selectable text gets its value at once
/// (`set`). In some fields only a key moves the cursor to the end (`end`).
const PREPARE: &str = r#"(element, append, text) => {
    const wrong = what => { throw new sandpool.Failure('not_ready', what); };
    const field = element.localName === 'label' && element.control || element;
    if (field.matches(':disabled')) wrong('it is disabled');
    if (field.readOnly) wrong('it is read-only');
    // The page may move the focus on to another field; but where it does not move at all, the text is not for what has it now.
    const active = () => {
        let active = document.activeElement;
        for (let root; (root = active && sandpool.root(active)) && root.activeElement; ) active = root.activeElement;
        return active;
    };
    const focus = holder => {
        const before = active();
        holder.focus();
        const now = active();
        if (now !== holder && (now === before || now === document.body)) wrong('it does not take the focus');
    };
    if (field.localName === 'select') wrong('it is a list of options; select one of them');
    if (field.localName === 'input') {
        if (['button', 'checkbox', 'file', 'hidden', 'image', 'radio', 'reset', 'submit'].includes(field.type))
            wrong(`it is a ${field.type} input, not one for text`);
        if (['color', 'date', 'datetime-local', 'month', 'range', 'time', 'week'].includes(field.type)) {
            focus(field);
            field.value = text;
            if (field.value !== text) wrong(`it does not take that text as a ${field.type}`);
            field.dispatchEvent(new Event('input', {bubbles: true, composed: true}));
            field.dispatchEvent(new Event('change', {bubbles: true}));
            return 'set';
        }
    }
    if (field.localName === 'input' || field.localName === 'textarea') {
        focus(field);
        if (!append) return field.select(), field.value === '' ? 'empty' : 'full';
        if (field.selectionEnd === null) return field.value === '' ? 'empty' : 'end';
        field.setSelectionRange(field.value.length, field.value.length);
        return 'empty';
    }
    if (!field.isContentEditable) wrong('it is not a field for text');
    let holder = field;
    while (holder.parentElement?.isContentEditable) holder = holder.parentElement;
    focus(holder);
    const selection = getSelection();
    selection.selectAllChildren(field);
    if (append) selection.collapseToEnd();
    return selection.isCollapsed ? 'empty' : 'full';
}"#;

const SELECT: &str = r#"(element, wanted) => {
    const list = element.localName === 'label' && element.control || element;
    if (list.localName !== 'select') throw new sandpool.Failure('not_ready', 'it is not a select; click it and its option');
    if (list.matches(':disabled')) throw new sandpool.Failure('not_ready', 'it is disabled');
    if (wanted.length > 1 && !list.multiple) throw new sandpool.Failure('not_ready', 'it takes one option only');
    const plain = text => text.replace(/\s+/g, ' ').trim();
    const options = [...list.options];
    const chosen = wanted.map(one => options.find(option => option.value === one) ?? options.find(option => plain(option.label) === plain(one)));
    const missing = wanted.filter((one, index) => !chosen[index]);
    if (missing.length) {
        const some = options.slice(0, 20).map(option => plain(option.label).slice(0, 50)).join(', ');
        throw new sandpool.Failure('not_ready', `it has no option ${missing.map(one => one.slice(0, 50)).join(', ')}; it has ${some}`);
    }
    if (chosen.some(option => option.disabled)) throw new sandpool.Failure('not_ready', 'the option is disabled');
    list.focus();
    for (const option of options) option.selected = chosen.includes(option);
    list.dispatchEvent(new Event('input', {bubbles: true, composed: true}));
    list.dispatchEvent(new Event('change', {bubbles: true}));
}"#;

const FILE_INPUT: &str = "(element, count) => {
    if (element.localName !== 'input' || element.type !== 'file') throw new sandpool.Failure('not_ready', 'it is not a file input');
    if (element.matches(':disabled')) throw new sandpool.Failure('not_ready', 'it is disabled');
    if (count > 1 && !element.multiple) throw new sandpool.Failure('not_ready', 'it takes one file only');
}";

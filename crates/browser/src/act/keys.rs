//! Keys by name, on a US keyboard.

use serde_json::{Value, json};

/// A key, with the modifiers that are held down.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Chord {
    modifiers: u8,
    key: String,
    code: String,
    number: u32,
    text: Option<String>,
}

const ALT: u8 = 1;
const CONTROL: u8 = 2;
const META: u8 = 4;
const SHIFT: u8 = 8;

/// Names of keys, each with the key code that old pages read.
const NAMED: &[(&str, u32)] = &[
    ("Enter", 13),
    ("Tab", 9),
    ("Escape", 27),
    ("Backspace", 8),
    ("Delete", 46),
    ("Insert", 45),
    ("ArrowLeft", 37),
    ("ArrowUp", 38),
    ("ArrowRight", 39),
    ("ArrowDown", 40),
    ("Home", 36),
    ("End", 35),
    ("PageUp", 33),
    ("PageDown", 34),
    ("Space", 32),
    ("F1", 112),
    ("F2", 113),
    ("F3", 114),
    ("F4", 115),
    ("F5", 116),
    ("F6", 117),
    ("F7", 118),
    ("F8", 119),
    ("F9", 120),
    ("F10", 121),
    ("F11", 122),
    ("F12", 123),
];

/// The characters of each key without and with shift, its code, and its key code number.
const PUNCTUATION: &[(char, char, &str, u32)] = &[
    ('-', '_', "Minus", 189),
    ('=', '+', "Equal", 187),
    ('[', '{', "BracketLeft", 219),
    (']', '}', "BracketRight", 221),
    ('\\', '|', "Backslash", 220),
    (';', ':', "Semicolon", 186),
    ('\'', '"', "Quote", 222),
    ('`', '~', "Backquote", 192),
    (',', '<', "Comma", 188),
    ('.', '>', "Period", 190),
    ('/', '?', "Slash", 191),
];

const ABOVE_DIGITS: &str = ")!@#$%^&*(";

impl Chord {
    /// Parses a key such as `Enter`, `a` or `Control+Shift+A`.
    pub(super) fn parse(text: &str) -> Option<Self> {
        let mut modifiers = 0;
        let mut rest = text;
        // The last part may itself be a plus sign.
        while let Some((name, after)) =
            rest.split_once('+').filter(|(name, after)| !name.is_empty() && !after.is_empty())
        {
            modifiers |= match name.to_ascii_lowercase().as_str() {
                "alt" => ALT,
                "control" | "ctrl" | "controlormeta" => CONTROL,
                "meta" | "cmd" | "command" => META,
                "shift" => SHIFT,
                _ => return None,
            };
            rest = after;
        }
        let mut chars = rest.chars();
        match (chars.next(), chars.next()) {
            (Some(one), None) if modifiers & (ALT | CONTROL | META) != 0 && one.is_ascii_uppercase() => {
                // `Control+A` means the key by its printed label, without shift.
                Some(Self::of(one.to_ascii_lowercase()).with(modifiers))
            }
            (Some(one), None) => Some(Self::of(one).with(modifiers)),
            _ => Self::named(rest).map(|chord| chord.with(modifiers)),
        }
    }

    fn named(name: &str) -> Option<Self> {
        let alias = match name.to_ascii_lowercase().as_str() {
            "return" => "Enter",
            "esc" => "Escape",
            "del" => "Delete",
            "left" => "ArrowLeft",
            "up" => "ArrowUp",
            "right" => "ArrowRight",
            "down" => "ArrowDown",
            _ => name,
        };
        let &(name, number) = NAMED.iter().find(|(name, _)| name.eq_ignore_ascii_case(alias))?;
        let (key, text) = match name {
            "Enter" => (name, Some("\r")),
            "Space" => (" ", Some(" ")),
            _ => (name, None),
        };
        Some(Self { modifiers: 0, key: key.into(), code: name.into(), number, text: text.map(Into::into) })
    }

    /// Returns the key that types a character.
    pub(super) fn of(one: char) -> Self {
        let text = Some(one.to_string());
        let made = |code: String, number, shifted| {
            let modifiers = if shifted { SHIFT } else { 0 };
            Self { modifiers, key: one.to_string(), code, number, text: text.clone() }
        };
        match one {
            '\n' | '\r' => {
                Self { modifiers: 0, key: "Enter".into(), code: "Enter".into(), number: 13, text: Some("\r".into()) }
            }
            '\t' => Self { modifiers: 0, key: "Tab".into(), code: "Tab".into(), number: 9, text: None },
            ' ' => made("Space".into(), 32, false),
            'a'..='z' => made(format!("Key{}", one.to_ascii_uppercase()), one.to_ascii_uppercase() as u32, false),
            'A'..='Z' => made(format!("Key{one}"), one as u32, true),
            '0'..='9' => made(format!("Digit{one}"), one as u32, false),
            _ => {
                if let Some(digit) = ABOVE_DIGITS.find(one) {
                    return made(format!("Digit{digit}"), 48 + digit as u32, true);
                }
                let known = PUNCTUATION.iter().find(|(plain, shifted, ..)| one == *plain || one == *shifted);
                known.map_or_else(
                    || made(String::new(), 0, false),
                    |&(_, shifted, code, number)| made(code.into(), number, one == shifted),
                )
            }
        }
    }

    fn with(mut self, modifiers: u8) -> Self {
        self.modifiers |= modifiers;
        if self.modifiers & SHIFT != 0 && self.key.len() == 1 {
            self.key = self.key.to_ascii_uppercase();
            self.text = self.text.map(|text| text.to_ascii_uppercase());
        }
        if self.modifiers & (ALT | CONTROL | META) != 0 {
            // This is a command and types no text.
            self.text = None;
        }
        self
    }

    /// Returns the key-down and the key-up event.
    pub(super) fn events(&self) -> [Value; 2] {
        let kind = if self.text.is_some() { "keyDown" } else { "rawKeyDown" };
        let event = |kind: &str, text: Option<&str>| {
            let mut event = json!({
                "type": kind, "modifiers": self.modifiers, "key": self.key, "code": self.code,
                "windowsVirtualKeyCode": self.number, "nativeVirtualKeyCode": self.number,
            });
            if let Some(text) = text {
                event["text"] = text.into();
                event["unmodifiedText"] = text.into();
            }
            event
        };
        [event(kind, self.text.as_deref()), event("keyUp", None)]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shown(text: &str) -> Option<(u8, String, String, u32, Option<String>)> {
        Chord::parse(text).map(|chord| (chord.modifiers, chord.key, chord.code, chord.number, chord.text))
    }

    #[test]
    fn keys_are_known_by_their_names() {
        let key = |modifiers, key: &str, code: &str, number, text: Option<&str>| {
            Some((modifiers, key.to_owned(), code.to_owned(), number, text.map(str::to_owned)))
        };
        assert_eq!(shown("Enter"), key(0, "Enter", "Enter", 13, Some("\r")));
        assert_eq!(shown("a"), key(0, "a", "KeyA", 65, Some("a")));
        assert_eq!(shown("Shift+a"), key(SHIFT, "A", "KeyA", 65, Some("A")));
        assert_eq!(shown("Control+A"), key(CONTROL, "a", "KeyA", 65, None));
        assert_eq!(shown("Control+Shift+A"), key(CONTROL | SHIFT, "A", "KeyA", 65, None));
        assert_eq!(shown("ctrl+c"), key(CONTROL, "c", "KeyC", 67, None));
        assert_eq!(shown("+"), key(SHIFT, "+", "Equal", 187, Some("+")));
        assert_eq!(shown("Control++"), key(CONTROL | SHIFT, "+", "Equal", 187, None));
        assert_eq!(shown("%"), key(SHIFT, "%", "Digit5", 53, Some("%")));
        assert_eq!(shown("é"), key(0, "é", "", 0, Some("é")));
        assert_eq!(shown("arrowdown"), key(0, "ArrowDown", "ArrowDown", 40, None));
        for wrong in ["", "Entr", "Hyper+a", "Control+", "ab"] {
            assert_eq!(shown(wrong), None, "{wrong}");
        }
    }
}

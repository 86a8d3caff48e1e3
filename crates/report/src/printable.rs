//! Text that came from elsewhere (a file, another rank, an argument), as a terminal may be given it.

use std::borrow::Cow;
use std::fmt::Write;

/// One line of text in which nothing commands the terminal: control characters, and those that reorder or hide what stands next to
/// them, are written out (`\x1b`, `\n`, `\u{202e}`).
pub fn printable(text: &str) -> Cow<'_, str> {
    if !text.chars().any(commands) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for c in text.chars() {
        match c {
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            // Writing to a String cannot fail.
            c if c.is_ascii() && commands(c) => drop(write!(out, "\\x{:02x}", u32::from(c))),
            c if commands(c) => drop(write!(out, "\\u{{{:x}}}", u32::from(c))),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// Lines as they are printed, each of them [`printable`]. Of sequences that begin with an escape those stay that colour a table of ours,
/// where `color` says that there are such.
pub fn printable_lines(text: &str, color: bool) -> Cow<'_, str> {
    if !text.chars().any(|c| c != '\n' && commands(c)) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 8);
    for line in text.split_inclusive('\n') {
        let (line, end) = line.strip_suffix('\n').map_or((line, ""), |line| (line, "\n"));
        let mut rest = line;
        while let Some(at) = rest.find('\u{1b}').filter(|_| color) {
            out.push_str(&printable(&rest[..at]));
            let own = COLORS.iter().find(|sequence| rest[at..].starts_with(**sequence));
            let length = own.map_or(1, |sequence| sequence.len());
            let (sequence, behind) = rest[at..].split_at(length);
            out.push_str(&own.map_or_else(|| printable(sequence), |own| Cow::Borrowed(*own)));
            rest = behind;
        }
        out.push_str(&printable(rest));
        out.push_str(end);
    }
    Cow::Owned(out)
}

/// A JSON document in which nothing commands a terminal: what JSON leaves as it is inside strings is escaped as JSON escapes.
pub fn printable_json(document: &str) -> Cow<'_, str> {
    if !document.chars().any(|c| c != '\n' && commands(c)) {
        return Cow::Borrowed(document);
    }
    let mut out = String::with_capacity(document.len() + 8);
    for c in document.chars() {
        match c {
            '\n' => out.push(c),
            // All of them are below U+10000.
            c if commands(c) => drop(write!(out, "\\u{:04x}", u32::from(c))),
            c => out.push(c),
        }
    }
    Cow::Owned(out)
}

/// What tables are coloured with: bold, dim, green, red and their ends.
const COLORS: [&str; 6] =
    ["\u{1b}[1m", "\u{1b}[2m", "\u{1b}[0m", "\u{1b}[38;5;10m", "\u{1b}[38;5;9m", "\u{1b}[39m"];

/// Whether a terminal acts on a character instead of showing it: control characters, separators of lines, marks and overrides of the
/// direction of text, and what has no width.
fn commands(c: char) -> bool {
    c.is_control()
        || matches!(
            c,
            '\u{61c}' | '\u{200b}'..='\u{200f}' | '\u{2028}'..='\u{202e}' | '\u{2060}'..='\u{206f}' | '\u{feff}'
        )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn what_commands_a_terminal_is_written_out() {
        assert_eq!(printable("q, ключ, 4 × 8 – «k»"), "q, ключ, 4 × 8 – «k»");
        assert_eq!(printable("a\u{1b}[31mb\u{7}\n\r\tc\u{7f}"), "a\\x1b[31mb\\x07\\n\\r\\tc\\x7f");
        assert_eq!(printable("\u{9b}2J\u{202e}x\u{200b}"), "\\u{9b}2J\\u{202e}x\\u{200b}");
        let text = "\u{1b}[1mrank\u{1b}[0m \u{1b}]0;title\u{7}\nnext\u{1b}";
        assert_eq!(printable_lines(text, true), "\u{1b}[1mrank\u{1b}[0m \\x1b]0;title\\x07\nnext\\x1b");
        assert_eq!(printable_lines(text, false), "\\x1b[1mrank\\x1b[0m \\x1b]0;title\\x07\nnext\\x1b");
    }

    proptest! {
        #[test]
        fn nothing_is_left_and_nothing_is_lost(text in "(?s).{0,60}") {
            for shown in [printable(&text), printable_json(&text.replace('\n', " "))] {
                prop_assert!(!shown.chars().any(commands), "{shown:?}");
            }
            prop_assert!(!printable_lines(&text, false).chars().any(|c| c != '\n' && commands(c)));
            prop_assert_eq!(printable_lines(&text, false).matches('\n').count(), text.matches('\n').count());
            let document = serde_json::to_string(&text).unwrap();
            let back: String = serde_json::from_str(&printable_json(&document)).unwrap();
            prop_assert_eq!(back, text);
        }
    }
}

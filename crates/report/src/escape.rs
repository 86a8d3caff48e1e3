//! Text that becomes part of HTML, SVG or a script.

use std::borrow::Cow;

use serde_json::Value;

/// Text for the inside of an element or of a quoted attribute.
pub(crate) fn escape(text: &str) -> Cow<'_, str> {
    if !text.contains(['&', '<', '>', '"', '\'']) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for character in text.chars() {
        match character {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '"' => out.push_str("&quot;"),
            '\'' => out.push_str("&#39;"),
            other => out.push(other),
        }
    }
    Cow::Owned(out)
}

/// JSON for the inside of a script element. A label may say `</script>` or `<!--`; no `<` is left, and none is lost, as
/// JSON spells it in a string as `\u003c` just as well.
pub(super) fn script_json(value: &Value) -> String {
    value.to_string().replace('<', "\\u003c")
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn script_json_reads_back_and_cannot_end_the_script(text in "(</script>|<!--|\\PC){0,20}") {
            let value = serde_json::json!({ "label": text });
            let json = script_json(&value);
            prop_assert!(!json.contains('<'));
            prop_assert_eq!(serde_json::from_str::<Value>(&json).unwrap(), value);
        }

        #[test]
        fn escaped_text_has_no_markup(text in "[&<>\"'a-c]{0,20}") {
            let escaped = escape(&text).into_owned();
            prop_assert!(!escaped.contains(['<', '>', '"', '\'']));
            let back = escaped.replace("&lt;", "<").replace("&gt;", ">").replace("&quot;", "\"").replace("&#39;", "'");
            prop_assert_eq!(back.replace("&amp;", "&"), text);
        }
    }
}

//! A command line that the parser refuses, printed as one sentence like every other error.

use counterpoint_console::{CliError, UsageFault};

/// The argument parser's error as one sentence: its first paragraph and its tips on one line, without the usage text.
pub(crate) fn usage_error(error: &clap::Error) -> CliError {
    let rendered = error.render().to_string();
    let rendered = rendered.strip_prefix("error: ").unwrap_or(&rendered);
    let mut parts = Vec::new();
    for paragraph in rendered.split("\n\n") {
        let line = paragraph.split_whitespace().collect::<Vec<_>>().join(" ");
        if !line.is_empty() && !line.starts_with("Usage:") && !line.starts_with("For more information") {
            parts.push(line);
        }
    }
    CliError::usage(UsageFault::Parser { text: in_words(parts.join("; ")) })
}

/// Replaces the standard library's messages for malformed numbers by ours.
fn in_words(text: String) -> String {
    const WORDS: [(&str, &str); 4] = [
        ("invalid digit found in string", "it must be a whole number"),
        ("cannot parse integer from empty string", "it must be a whole number"),
        ("number too large to fit in target type", "it is too large"),
        ("number too small to fit in target type", "it is too small"),
    ];
    WORDS.iter().fold(text, |text, (theirs, ours)| text.replace(theirs, ours))
}

//! What made a report: the command line, the version, the machine and the time.

use std::fs;
use std::time::SystemTime;

use counterpoint_report::Origin;

use crate::program;

/// Of this process, now.
pub fn here() -> Origin {
    let host = fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
    let host = if host.trim().is_empty() { "an unknown machine" } else { host.trim() };
    Origin {
        command: command(program::arguments().into_iter().map(|word| word.to_string_lossy().into_owned())),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        date: humantime::format_rfc3339_seconds(SystemTime::now()).to_string(),
        host: host.to_owned(),
    }
}

/// A command line of this program as a shell takes it.
fn command(words: impl Iterator<Item = String>) -> String {
    // A word with a NUL cannot have been given.
    let quoted = |word: String| shlex::try_quote(&word).map(|quoted| quoted.into_owned()).unwrap_or(word);
    let words: Vec<String> = ["counterpoint".to_owned()].into_iter().chain(words.map(quoted)).collect();
    words.join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn words_are_quoted_where_a_shell_would_split_them() {
        let words = ["plan", "--mask", "varlen-causal:0,3", "--report", "my page.html"].map(str::to_owned);
        let text = command(words.into_iter());
        assert_eq!(shlex::split(&text).unwrap().len(), 6, "{text}");
        assert!(text.starts_with("counterpoint plan --mask"), "{text}");
    }
}

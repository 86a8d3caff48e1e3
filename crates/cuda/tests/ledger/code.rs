//! Digests of kernels' code without comments and spaces.

use counterpoint_cuda::KernelSource;
use sha2::{Digest, Sha256};

/// 64 bits of the SHA-256 of all code that a kernel is compiled from, in hexadecimal.
pub(super) fn digest(source: &KernelSource) -> String {
    let mut hash = Sha256::new();
    let arch = source.arch().to_string();
    let headers = source.headers();
    let parts = [("arch", arch.as_str()), ("source", source.text())];
    for (name, text) in parts.into_iter().chain(headers) {
        for part in [name, &tokens(text)] {
            hash.update((part.len() as u64).to_le_bytes());
            hash.update(part.as_bytes());
        }
    }
    hash.finalize()[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

/// A text without comments, and with one space where there were several. Lines stay, since directives end with them.
fn tokens(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(next) = rest.chars().next() {
        if rest.starts_with("//") {
            rest = &rest[rest.find('\n').unwrap_or(rest.len())..];
        } else if let Some(comment) = rest.strip_prefix("/*") {
            rest = comment.find("*/").map_or("", |end| &comment[end + 2..]);
            out.push(' ');
        } else if next == '"' || next == '\'' {
            let end = literal(rest, next);
            out.push_str(&rest[..end]);
            rest = &rest[end..];
        } else {
            out.push(next);
            rest = &rest[next.len_utf8()..];
        }
    }
    let lines = out.lines().map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "));
    lines.filter(|line| !line.is_empty()).collect::<Vec<_>>().join("\n")
}

/// The bytes of the literal that a text begins with. A separator of digits (`1'000`) begins none that ends on its line, and is one byte.
fn literal(text: &str, quote: char) -> usize {
    let mut escaped = false;
    for (at, next) in text.char_indices().skip(1) {
        match next {
            '\n' => return 1,
            _ if escaped => escaped = false,
            '\\' => escaped = true,
            _ if next == quote => return at + 1,
            _ => {}
        }
    }
    1
}

#[test]
fn comments_and_spaces_do_not_count_and_nothing_else() {
    let same = ["int  x = 1; // one\n\n/* two\nlines */ int y;", "int x = 1;\n int\ty;"];
    assert_eq!(tokens(same[0]), "int x = 1;\nint y;");
    assert_eq!(tokens(same[0]), tokens(same[1]));
    let texts = ["int x = 1'000; // c", "asm(\"// %0\\\" /*\" : x); /* c */", "char c = '\"'; // \""];
    let kept = ["int x = 1'000;", "asm(\"// %0\\\" /*\" : x);", "char c = '\"';"];
    assert_eq!(texts.map(tokens), kept);
}

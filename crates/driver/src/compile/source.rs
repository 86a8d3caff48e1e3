//! The translation unit of a kernel with its parameters chosen, and the headers on which its machine code depends.

use super::headers::{HeaderSet, closure};
use crate::arch::Arch;

/// A kernel with all its parameters chosen: what is compiled, and cached, as one.
///
/// A launcher writes a short translation unit that includes a kernel's header and instantiates one entry point:
///
/// ```
/// use counterpoint_driver::{Arch, Header, HeaderSet, KernelSource};
///
/// const HEADERS: HeaderSet = HeaderSet::new(&[Header { name: "scale.cuh", text: "inline float scaled(float x, float by) { return x * by; }" }]);
///
/// let source = KernelSource::new("scale", Arch::SM_80)
///     .with_headers(HEADERS)
///     .define("BY", 2)
///     .line("#include \"scale.cuh\"")
///     .line("extern \"C\" __global__ void scale(float* x) { x[threadIdx.x] = scaled(x[threadIdx.x], BY); }");
/// assert!(source.text().starts_with("#define BY 2\n#include"));
/// assert_eq!(source.headers().len(), 1);
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelSource {
    name: String,
    arch: Arch,
    text: String,
    headers: HeaderSet,
}

impl KernelSource {
    /// A source with no text yet, which includes nothing. `name` is that of its one `extern "C"` entry point, and says what was chosen, such as
    /// `attention_forward_bf16_128`.
    pub fn new(name: impl Into<String>, arch: Arch) -> Self {
        Self { name: name.into(), arch, text: String::new(), headers: HeaderSet::EMPTY }
    }

    /// The same, which may include these headers.
    #[must_use]
    pub fn with_headers(mut self, headers: HeaderSet) -> Self {
        self.headers = headers;
        self
    }

    /// Adds `#define NAME VALUE`.
    #[must_use]
    pub fn define(self, name: &str, value: impl std::fmt::Display) -> Self {
        self.line(format_args!("#define {name} {value}"))
    }

    /// Adds a line, or several.
    #[must_use]
    pub fn line(mut self, line: impl std::fmt::Display) -> Self {
        use std::fmt::Write;
        // Writing to a string cannot fail.
        let _ = writeln!(self.text, "{line}");
        self
    }

    /// The entry point.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// What it is compiled for.
    pub fn arch(&self) -> Arch {
        self.arch
    }

    /// The same for another architecture.
    #[must_use]
    pub fn for_arch(mut self, arch: Arch) -> Self {
        self.arch = arch;
        self
    }

    /// The translation unit.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// The headers of its set that it includes, directly or through others, as names and texts: with its own text, all that its machine
    /// code depends on but the compiler and its options.
    pub fn headers(&self) -> Vec<(&'static str, &'static str)> {
        closure(&self.text, self.headers.headers()).iter().map(|header| (header.name, header.text)).collect()
    }
}

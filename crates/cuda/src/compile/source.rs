//! The translation unit of a kernel with its parameters chosen, and the headers on which its machine code depends.

use super::headers::{HEADERS, closure};
use crate::arch::Arch;

/// A kernel with all its parameters chosen: what is compiled, and cached, as one.
///
/// A launcher writes a short translation unit that includes a kernel's header and instantiates one entry point:
///
/// ```
/// use counterpoint_cuda::{Arch, KernelSource};
///
/// let source = KernelSource::new("scale_bf16", Arch::SM_80)
///     .define("ELEMENT_BF16", 1)
///     .line("#include \"types.cuh\"")
///     .line("extern \"C\" __global__ void scale_bf16(counterpoint::Element* x, float by) {")
///     .line("  x[threadIdx.x] = counterpoint::to_element(by * counterpoint::to_float(x[threadIdx.x]));")
///     .line("}");
/// assert!(source.text().starts_with("#define ELEMENT_BF16 1\n#include"));
/// ```
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct KernelSource {
    name: String,
    arch: Arch,
    text: String,
}

impl KernelSource {
    /// A source with no text yet. `name` is that of its one `extern "C"` entry point, and says what was chosen, such as
    /// `attention_forward_bf16_128`.
    pub fn new(name: impl Into<String>, arch: Arch) -> Self {
        Self { name: name.into(), arch, text: String::new() }
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

    /// The headers of ours that it includes, directly or through others, as names and texts: with its own text, all that its machine
    /// code depends on but the compiler and its options.
    pub fn headers(&self) -> Vec<(&'static str, &'static str)> {
        closure(&self.text, HEADERS).iter().map(|header| (header.name, header.text)).collect()
    }
}

//! Layouts of types that host and kernels share, and the source that holds both to them.

use std::fmt::Write;

use crate::headers::kernel_source;
use crate::{Arch, KernelSource};

/// The layout of a type that host and kernels share, as the host has it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SharedLayout {
    /// The header that declares the kernels' side.
    pub header: &'static str,
    /// The type's name there, in the namespace `counterpoint`.
    pub name: &'static str,
    /// Its size.
    pub bytes: usize,
    /// Its alignment.
    pub alignment: usize,
    /// Name, offset and size of each field.
    pub fields: Vec<(&'static str, usize, usize)>,
}

impl SharedLayout {
    /// A source that compiles only if the kernels' side of all `layouts` is the same.
    pub fn assertions(layouts: &[Self], arch: Arch) -> KernelSource {
        // NVRTC has no <stddef.h> and no __builtin_offsetof; this is its front end's own.
        let mut source = kernel_source("shared_layouts", arch)
            .line("#define OFFSET_OF(type, field) __INTADDR__(&((type*)0)->field)");
        for Self { header, name, bytes, alignment, fields } in layouts {
            let mut text = format!("#include \"{header}\"\nnamespace counterpoint {{\n");
            let _ = writeln!(text, "static_assert(sizeof({name}) == {bytes}, \"size of {name}\");");
            let _ = writeln!(text, "static_assert(alignof({name}) == {alignment}, \"alignment of {name}\");");
            for (field, offset, bytes) in fields {
                let _ = writeln!(
                    text,
                    "static_assert(OFFSET_OF({name}, {field}) == {offset} && sizeof({name}::{field}) == \
                     {bytes}, \"{name}::{field}\");"
                );
            }
            source = source.line(text + "}");
        }
        source.line("extern \"C\" __global__ void shared_layouts() {}")
    }
}

/// The layout of a `#[repr(C)]` struct whose fields have the same names on both sides:
/// `shared_layout!("types.cuh", Name { first, second })`. Every field must be named.
macro_rules! shared_layout {
    ($header:literal, $kind:ident { $($field:ident),* $(,)? }) => {{
        #[allow(dead_code)]
        fn fields_are_all_named(value: $kind) {
            let $kind { $($field: _),* } = value;
        }
        fn bytes_of_field<T, F>(_: fn(&T) -> &F) -> usize {
            size_of::<F>()
        }
        $crate::layout::SharedLayout {
            header: $header,
            name: stringify!($kind),
            bytes: size_of::<$kind>(),
            alignment: align_of::<$kind>(),
            fields: vec![$((
                stringify!($field),
                std::mem::offset_of!($kind, $field),
                bytes_of_field(|value: &$kind| &value.$field),
            )),*],
        }
    }};
}
pub(crate) use shared_layout;

#[cfg(test)]
mod tests {
    use counterpoint_tiles::TileRun;

    use super::*;

    #[test]
    fn assertions_name_every_field() {
        let layout = shared_layout!("h.cuh", TileRun { start, end, bound_begin, bound_end });
        assert_eq!(layout.fields[3], ("bound_end", 12, 4));
        let source = SharedLayout::assertions(&[layout], Arch::SM_80);
        for line in [
            "#include \"h.cuh\"",
            "static_assert(sizeof(TileRun) == 16, \"size of TileRun\");",
            "static_assert(OFFSET_OF(TileRun, bound_end) == 12 && sizeof(TileRun::bound_end) == 4, \
             \"TileRun::bound_end\");",
        ] {
            assert!(source.text().lines().any(|found| found == line), "{}", source.text());
        }
    }
}

use std::fmt::Write;

use counterpoint_tiles::{Tile, TileBound, TileMerge, TileRun, TurnSpan};

use crate::{Arch, KernelSource, TensorMap};

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
        let mut source = KernelSource::new("shared_layouts", arch)
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
        $crate::kernel::SharedLayout {
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

/// All types that host and kernels share. A test compiles their assertions.
pub fn shared_layouts() -> Vec<SharedLayout> {
    let schedule = [
        shared_layout!(
            "attention/tile_schedule.cuh",
            Tile { start, end, run_begin, run_end, partial, blocks, number, reserved }
        ),
        shared_layout!("attention/tile_schedule.cuh", TileRun { start, end, bound_begin, bound_end }),
        shared_layout!(
            "attention/tile_schedule.cuh",
            TileBound { q_start, q_end, k_start, k_end, diag_min, diag_max, reserved }
        ),
        shared_layout!("attention/tile_schedule.cuh", TileMerge { start, end, slot_begin, slot_end }),
        shared_layout!("attention/tile_schedule.cuh", TurnSpan { first, end, turn, counter }),
    ];
    // Each launcher's module adds its own arguments here.
    let kernels = [
        super::foreign_meeting::layouts(),
        super::signal_litmus::layouts(),
        super::attention_backward::layouts(),
        super::attention_delta::layouts(),
        super::attention_finish::layouts(),
        super::attention_forward::layouts(),
        super::attention_merge::layouts(),
        super::column_sum::layouts(),
        super::gemm::layouts(),
        super::link_copy::layouts(),
        super::link_meeting::layouts(),
        super::link_reduce::layouts(),
        super::staged_reduce::layouts(),
        super::portable_backward::layouts(),
        super::portable_backward_query::layouts(),
        super::portable_forward::layouts(),
        super::rms_norm::layouts(),
        super::row_pieces::layouts(),
        super::row_check::layouts(),
        super::row_copy::layouts(),
        super::row_merge::layouts(),
        super::row_reduce::layouts(),
        super::user_kernel::layouts(),
        super::wait_limit::layouts(),
    ];
    schedule.into_iter().chain([TensorMap::layout()]).chain(kernels.into_iter().flatten()).collect()
}

#[cfg(test)]
mod tests {
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

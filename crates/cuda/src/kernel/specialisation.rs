use super::{
    attention_backward, attention_delta, attention_forward, attention_merge, cast, head_resize, link_copy,
    link_litmus, link_reduce, portable_backward, portable_backward_query, portable_forward, row_check,
    row_copy, row_merge, row_reduce,
};
use crate::{Arch, KernelSource};

/// One of the kernels that ship: its source with all parameters chosen, and what its machine code must be like.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Specialisation {
    /// What is compiled.
    pub source: KernelSource,
    /// The unit that does its matrix products.
    pub matrix_unit: MatrixUnit,
    /// Registers of a thread that its launch leaves it: it must not have been compiled to more.
    pub register_limit: u32,
}

/// The unit of a multiprocessor that multiplies matrices, and so the instruction that must be found in the machine code.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum MatrixUnit {
    /// The kernel multiplies none.
    None,
    /// mma.sync: `HMMA`.
    Warp,
    /// wgmma: `HGMMA`.
    Warpgroup,
}

/// All kernels that ship, of all launchers.
pub fn specialisations() -> Vec<Specialisation> {
    // Each launcher's module adds its own here. Those that only move memory are the same source on every architecture.
    let helpers = [Arch::SM_80, Arch::SM_90A].into_iter().flat_map(|arch| {
        [
            attention_delta::specialisations(arch),
            attention_merge::specialisations(arch),
            cast::specialisations(arch),
            head_resize::specialisations(arch),
            row_check::specialisations(arch),
            row_copy::specialisations(arch),
            row_merge::specialisations(arch),
            row_reduce::specialisations(arch),
        ]
    });
    let attention = [
        attention_backward::specialisations(),
        attention_forward::specialisations(),
        portable_forward::specialisations(),
        portable_backward::specialisations(),
        portable_backward_query::specialisations(),
    ];
    let links =
        [link_copy::specialisations(), link_reduce::specialisations(), link_litmus::specialisations()];
    helpers.flatten().chain(attention.into_iter().chain(links).flatten()).collect()
}

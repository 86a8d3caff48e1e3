//! The list of all kernels that ship, each instantiation with the instructions and registers that it must have.

use super::{
    attention_backward, attention_delta, attention_finish, attention_forward, attention_merge, bit_check,
    cast, column_max, column_sum, count_up, foreign_barrier, gemm, head_resize, link_cast, link_copy,
    link_litmus, link_reduce, link_rows, portable_backward, portable_backward_query, portable_forward,
    random_fill, rms_norm, rms_norm_backward, row_check, row_copy, row_merge, row_reduce, signal_litmus,
    signal_raise, signal_wait, staged_reduce, start_hold, start_litmus,
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
            attention_finish::specialisations(arch),
            attention_merge::specialisations(arch),
            bit_check::specialisations(arch),
            cast::specialisations(arch),
            column_max::specialisations(arch),
            column_sum::specialisations(arch),
            count_up::specialisations(arch),
            head_resize::specialisations(arch),
            random_fill::specialisations(arch),
            rms_norm::specialisations(arch),
            rms_norm_backward::specialisations(arch),
            row_check::specialisations(arch),
            row_copy::specialisations(arch),
            row_merge::specialisations(arch),
            row_reduce::specialisations(arch),
            signal_raise::specialisations(arch),
            signal_wait::specialisations(arch),
            start_hold::specialisations(arch),
            foreign_barrier::specialisations(arch),
        ]
    });
    let products = [
        attention_backward::specialisations(),
        attention_forward::specialisations(),
        gemm::specialisations(),
        portable_forward::specialisations(),
        portable_backward::specialisations(),
        portable_backward_query::specialisations(),
    ];
    let links = [
        link_cast::specialisations(),
        link_copy::specialisations(),
        link_reduce::specialisations(),
        link_rows::specialisations(),
        staged_reduce::specialisations(),
        link_litmus::specialisations(),
        signal_litmus::specialisations(),
        start_litmus::specialisations(),
    ];
    helpers.flatten().chain(products.into_iter().chain(links).flatten()).collect()
}

/// Those that a GPU whose kernels are compiled for `arch` takes, for it. What is not listed for it is listed for the least
/// architecture that runs it.
pub fn specialisations_for(arch: Arch) -> Vec<Specialisation> {
    let all = specialisations();
    let listed = |unit: MatrixUnit| {
        all.iter().any(|kernel| kernel.matrix_unit == unit && kernel.source.arch() == arch)
    };
    let (helpers, portable) = (listed(MatrixUnit::None), listed(MatrixUnit::Warp) || arch.is_hopper());
    let takes = |kernel: &Specialisation| {
        let own = match kernel.matrix_unit {
            MatrixUnit::None => helpers,
            MatrixUnit::Warp => portable,
            MatrixUnit::Warpgroup => true,
        };
        kernel.source.arch() == if own { arch } else { Arch::SM_80 }
    };
    let kernels: Vec<_> = all.iter().filter(|kernel| takes(kernel)).cloned().collect();
    let retarget = |kernel: Specialisation| Specialisation { source: kernel.source.for_arch(arch), ..kernel };
    kernels.into_iter().map(retarget).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Capability;

    #[test]
    fn every_gpu_has_all_kinds() {
        for (major, minor, warpgroup) in
            [(8, 0, false), (8, 9, false), (9, 0, true), (10, 0, false), (12, 0, false)]
        {
            let capability = Capability { major, minor };
            for (arch, warpgroup) in [(Arch::of(capability), warpgroup), (Arch::portable(capability), false)]
            {
                let kernels = specialisations_for(arch);
                assert!(kernels.iter().all(|kernel| kernel.source.arch() == arch));
                let has = |unit| kernels.iter().any(|kernel| kernel.matrix_unit == unit);
                assert!(has(MatrixUnit::None));
                assert_eq!(
                    (has(MatrixUnit::Warpgroup), has(MatrixUnit::Warp)),
                    (warpgroup, !warpgroup),
                    "{arch}"
                );
            }
        }
    }
}

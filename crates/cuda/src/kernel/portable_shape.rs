//! What the portable attention kernels are instantiated for: padded head sizes, types, and GPUs by their shared memory.

use super::{AttentionFault, AttentionProblem, ElementType, MatrixUnit, Specialisation};
use crate::{Arch, KernelSource};

/// Padded head dimensions of the portable kernels: a head is computed as the smallest that holds it.
const HEAD_DIMS: [u32; 5] = [64, 96, 128, 192, 256];

/// The kinds of GPUs that the kernels are made for: what they are compiled for, and shared memory of a CTA in bytes. Those are
/// compute capability 8.0, all other 8.x, and 9.0; newer ones compile what the list of one of them has.
const TARGETS: [(Arch, usize); 3] =
    [(Arch::SM_80, 163 << 10), (Arch::SM_80, 99 << 10), (Arch::SM_90, 227 << 10)];

/// Heads, element type, softcap and shared memory of a CTA: what the kernels are chosen by.
pub(super) type Traits = ((u32, u32), ElementType, bool, usize);

/// Those of a problem on a device whose CTAs have at most `shared_bytes` of shared memory, or why no kernel is made for its heads.
pub(super) fn traits_of(shared_bytes: usize, problem: &AttentionProblem) -> Result<Traits, AttentionFault> {
    let dims = padded_dims(problem.head_dim, problem.head_dim_v)?;
    Ok((dims, problem.element, problem.softcap.is_some(), shared_bytes))
}

/// Every combination with what it is compiled for. Those that differ in shared memory alone follow each other.
pub(super) fn every_traits() -> Vec<(Arch, Traits)> {
    let dims = HEAD_DIMS.into_iter().map(|dim| (dim, dim)).chain([(192, 128)]);
    let mut all = Vec::new();
    for dims in dims {
        for element in ElementType::ALL {
            for softcap in [false, true] {
                all.extend(TARGETS.map(|(arch, bytes)| (arch, (dims, element, softcap, bytes))));
            }
        }
    }
    all
}

/// What ships of a kernel: each choice that `of` makes, for the GPUs that make it. `source` gives a choice's source, the
/// threads of its CTA, and how many CTAs a multiprocessor holds.
pub(super) fn specialisations_of<Choice: PartialEq + Copy>(
    of: impl Fn(Traits) -> Choice,
    source: impl Fn(Choice, Arch) -> (KernelSource, u32, u32),
) -> Vec<Specialisation> {
    let mut choices: Vec<_> = every_traits().into_iter().map(|(arch, traits)| (arch, of(traits))).collect();
    choices.dedup();
    let one = |(arch, choice)| {
        let (source, threads, ctas) = source(choice, arch);
        let register_limit = (65536 / (threads * ctas)).min(255);
        Specialisation { source, matrix_unit: MatrixUnit::Warp, register_limit }
    };
    choices.into_iter().map(one).collect()
}

/// Whether a multiprocessor whose CTAs have at most `limit` bytes of shared memory holds `ctas` of `shared_bytes` each.
/// The system takes 1 KB of every CTA's.
pub(super) const fn fits(shared_bytes: u32, ctas: u32, limit: usize) -> bool {
    (shared_bytes as usize + 1024) * ctas as usize <= limit + 1024
}

/// The padded dimensions (of q and k, of v) of a kernel for these heads, or why there is none.
///
/// v is padded like k, except that heads of 192 have a kernel of their own for v of 128 (as latent attention uses them).
pub(super) fn padded_dims(head_dim: usize, head_dim_v: usize) -> Result<(u32, u32), AttentionFault> {
    let largest = HEAD_DIMS[HEAD_DIMS.len() - 1];
    for (field, dim) in [("head_dim", head_dim), ("head_dim_v", head_dim_v)] {
        if dim == 0 || dim % 8 != 0 || dim > largest as usize {
            return Err(AttentionFault::HeadDim { field, dim, largest });
        }
    }
    let most = head_dim.max(head_dim_v) as u32;
    let padded = HEAD_DIMS.into_iter().find(|&dim| dim >= most).unwrap_or(largest);
    Ok((padded, if padded == 192 && head_dim_v <= 128 { 128 } else { padded }))
}

/// Why a problem has no kernel, apart from the dimensions of its heads.
pub(super) fn check(problem: &AttentionProblem) -> Result<(), AttentionFault> {
    let AttentionProblem { heads_q, heads_kv, .. } = *problem;
    if heads_kv == 0 || heads_q == 0 || heads_q % heads_kv != 0 {
        return Err(AttentionFault::Heads { heads_q, heads_kv });
    }
    if !problem.scale.is_finite() {
        return Err(AttentionFault::Scale { scale: problem.scale });
    }
    if let Some(softcap) = problem.softcap
        && !(softcap.is_finite() && softcap > 0.0)
    {
        return Err(AttentionFault::Softcap { softcap });
    }
    Ok(())
}

/// The grid for `items`: one block each, which the hardware hands out as blocks finish; or, with a margin, as many blocks as
/// fit on the other multiprocessors, each with every n-th item.
pub(super) fn grid(items: u64, blocks_per_sm: u32, sm_count: u32, sm_margin: u32) -> u32 {
    let items = items.min(i32::MAX as u64) as u32;
    match sm_margin {
        0 => items,
        margin => items.min(blocks_per_sm.max(1) * sm_count.saturating_sub(margin).max(1)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn heads_are_padded_to_the_next_kernel() {
        assert_eq!(padded_dims(8, 8), Ok((64, 64)));
        assert_eq!(padded_dims(72, 104), Ok((128, 128)));
        assert_eq!(padded_dims(192, 128), Ok((192, 128)));
        assert_eq!(padded_dims(192, 136), Ok((192, 192)));
        assert_eq!(padded_dims(200, 256), Ok((256, 256)));
        assert!(padded_dims(100, 64).unwrap_err().to_string().starts_with("head_dim is 100"));
        assert!(padded_dims(64, 264).unwrap_err().to_string().starts_with("head_dim_v is 264"));
    }

    #[test]
    fn multiprocessors_hold_what_fits() {
        assert!(fits(227 << 10, 1, 227 << 10) && !fits((227 << 10) + 1, 1, 227 << 10));
        assert!(fits(113 << 10, 2, 227 << 10) && !fits((113 << 10) + 1, 2, 227 << 10));
    }

    #[test]
    fn a_margin_leaves_multiprocessors_free() {
        assert_eq!(grid(1000, 2, 132, 0), 1000);
        assert_eq!(grid(1000, 2, 132, 32), 200);
        assert_eq!(grid(10, 2, 132, 32), 10);
        assert_eq!(grid(10, 2, 132, 200), 2);
    }
}

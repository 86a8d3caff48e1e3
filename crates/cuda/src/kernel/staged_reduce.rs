//! The launcher of `staged_reduce.cuh`: sums of what copy engines brought, on a few SMs.

use counterpoint_schedule::Accumulate;

use super::link_barrier::{LINK_RANKS, LINK_TENSORS};
use super::link_reduce::{
    DeviceLists, LinkReduce, LinkReduceSpec, SHARED_BYTES, source_of, specialisations_of, threads,
};
use super::row_reduce::ReduceTypes;
use super::{RowMove, Specialisation, StartMark};
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, Function, KernelSource, Launch, Stream};

/// Teams of a block that add pieces in turn.
const TEAMS: u32 = 2;

/// Partial results in a GPU's own memory summed (or averaged) in f32 by a few of its multiprocessors, for tensors of one pattern,
/// prepared to run many times. The bits are those of [`RowReduce`](super::RowReduce) and [`LinkReduce`].
#[derive(Debug)]
pub struct StagedReduce {
    function: Function,
    lists: DeviceLists,
    tensors: usize,
    accumulate: Accumulate,
}

/// `StagedCall` of the kernel.
#[derive(Clone, Copy)]
#[repr(C)]
struct StagedCall {
    sources: [u64; LINK_RANKS * LINK_TENSORS],
    own: [u64; LINK_TENSORS],
}

impl StagedReduce {
    /// Whether there is a kernel for partial results of so many `peers` in so many tensors, of this device and these types.
    pub fn takes(
        device: &Device,
        types: ReduceTypes,
        row_elements: u64,
        [peers, tensors]: [usize; 2],
    ) -> bool {
        let ReduceTypes { partial, wire, sum, .. } = types;
        let fits = peers <= LINK_RANKS && tensors <= LINK_TENSORS;
        device.arch().is_hopper() && fits && LinkReduce::takes(partial, wire, sum, row_elements)
    }

    /// Compiles or finds the kernel, so that [`StagedReduce::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, types: ReduceTypes) -> Result<(), CudaError> {
        device.function(&source(device.arch(), types)).map(|_| ())
    }

    /// Makes the reduction of `moves` ready for a kernel of at most `num_sms` blocks, each of which takes a multiprocessor. The lists
    /// are uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(
        stream: &Stream,
        spec: &LinkReduceSpec,
        moves: &[RowMove],
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let function = stream.device().function(&source(stream.device().arch(), spec.types))?;
        let lists = DeviceLists::new(stream, spec, moves, num_sms)?;
        Ok(Self { function, lists, tensors: spec.tensors.len(), accumulate: spec.accumulate })
    }

    /// Whether it can be launched with tensors at these addresses, which the copy engine reads.
    pub fn reads(addresses: impl IntoIterator<Item = u64>) -> bool {
        addresses.into_iter().all(|address| address.is_multiple_of(16))
    }

    /// Enqueues the reduction. `source` gives the address of a peer's partial results: (peer, tensor).
    ///
    /// # Safety
    /// As [`RowCopy::launch`](super::RowCopy::launch); all addresses are such as [`StagedReduce::reads`].
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        peers: usize,
        source: impl Fn(usize, usize) -> u64,
        results: &[u64],
        started: &StartMark,
    ) -> Result<(), CudaError> {
        let mut call = StagedCall { sources: [0; LINK_RANKS * LINK_TENSORS], own: [0; LINK_TENSORS] };
        for tensor in 0..self.tensors {
            call.own[tensor] = results[tensor];
            for peer in 0..peers.min(LINK_RANKS) {
                call.sources[peer * LINK_TENSORS + tensor] = source(peer, tensor);
            }
        }
        let launch = Launch::linear(self.lists.block_count, threads(TEAMS)).shared_bytes(SHARED_BYTES);
        let accumulate = u32::from(self.accumulate == Accumulate::Continue);
        let [pieces, fetches, blocks] = self.lists.addresses();
        let arguments = (call, pieces, fetches, blocks, accumulate);
        // SAFETY: the arguments are those of the kernel in `source`, the lists live as long as this value, whose memory is freed only
        // after what is enqueued; the rest is the caller's promise.
        unsafe { self.function.launch_signalling(stream, &launch, &arguments, started.take().as_ref()) }
    }
}

fn source(arch: Arch, types: ReduceTypes) -> KernelSource {
    source_of(arch, types, TEAMS, ["staged_reduce", "StagedCall"])
}

/// The types that collectives use; others are compiled when they are asked for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    specialisations_of(TEAMS, |types| source(Arch::SM_90A, types))
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!("staged_reduce.cuh", StagedCall { sources, own })]
}

//! The launchers of `link_rows.cuh`: group-reduces over NVLink that merge by logarithms, or round on their way.

use counterpoint_schedule::Accumulate;

use super::link_barrier::{LINK_TENSORS, LinkCall};
use super::operand_rows::OperandRows;
use super::row_merge::{self, RowMergeSpec};
use super::row_reduce::{self, ReduceTypes, RowReduceSpec};
use super::{MatrixUnit, RowMove, RowsFault, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Event, Function, KernelSource, Launch, Stream};

/// `kLinkRowThreads`, and the registers that a block of so many leaves each.
const THREADS: u32 = 512;
const WARPS: u64 = THREADS as u64 / 32;
const REGISTERS: u32 = 128;

/// Partial results of attention, one pair (out, lse), merged straight from the memories of GPUs that reach each other, prepared to run many
/// times. Ranks pass a barrier inside the kernel; operands are merged in the order of their ranks.
#[derive(Debug)]
pub struct LinkMerge {
    function: Function,
    pieces: DeviceBuffer,
    operands: DeviceBuffer,
    count: u32,
    blocks: u32,
    spec: RowMergeSpec,
}

impl LinkMerge {
    /// Compiles or finds the kernel, so that [`LinkMerge::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, types: ReduceTypes) -> Result<(), CudaError> {
        device.function(&merge_source(device.arch(), types.normalised())).map(|_| ())
    }

    /// Makes the merge of `moves`, whose peers are ranks, ready for a kernel of at most `num_sms` blocks. The lists are uploaded by
    /// `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(
        stream: &Stream,
        spec: &RowMergeSpec,
        moves: &[RowMove],
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&merge_source(device.arch(), spec.types.normalised()))?;
        let (pieces, operands) = row_merge::lists(spec, moves);
        let count = pieces.len() as u32;
        Ok(Self {
            function,
            pieces: DeviceBuffer::from_slice(stream, &pieces)?,
            operands: DeviceBuffer::from_slice(stream, &operands)?,
            count,
            blocks: blocks(spec.steps(count), num_sms),
            spec: *spec,
        })
    }

    /// Enqueues the merge of the pair that `call` names. `started` is marked once all its blocks have begun.
    ///
    /// # Safety
    /// As [`LinkCopy::launch`](super::LinkCopy::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        call: &LinkCall,
        started: Option<&Event>,
    ) -> Result<(), CudaError> {
        let RowMergeSpec { heads, dim, accumulate, .. } = self.spec;
        // What others announce is aligned.
        let packed = self.spec.packs() && call.own_address(0).is_multiple_of(16);
        let arguments = (
            *call,
            self.pieces.address(),
            self.operands.address(),
            self.count,
            heads,
            dim,
            u32::from(accumulate == Accumulate::Continue),
            u32::from(packed),
        );
        let launch = Launch::linear(self.blocks, THREADS);
        // SAFETY: the arguments are those of the kernel in `merge_source`; the rest is the caller's promise.
        unsafe { self.function.launch_signalling(stream, &launch, &arguments, started) }
    }
}

/// Partial results of rows summed (or averaged) in whatever type, likewise, for tensors of one pattern and the same types.
#[derive(Debug)]
pub struct LinkSum {
    function: Function,
    pieces: DeviceBuffer,
    operands: DeviceBuffer,
    lists: LinkRowLists,
    blocks: u32,
    accumulate: Accumulate,
    /// Whether rows of each are multiples of what the kernel packs.
    packs: Vec<bool>,
}

/// `LinkRowList` of the kernel.
#[derive(Clone, Copy, Debug, Default)]
#[repr(C)]
struct LinkRowList {
    begin: u32,
    count: u32,
}

/// `LinkRowLists` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct LinkRowLists {
    at: [LinkRowList; LINK_TENSORS],
}

impl LinkSum {
    /// Compiles or finds the kernel, so that [`LinkSum::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, types: ReduceTypes) -> Result<(), CudaError> {
        device.function(&sum_source(device.arch(), types.normalised())).map(|_| ())
    }

    /// Makes the reduction of `moves`, whose peers are ranks, ready for a kernel of at most `num_sms` blocks: of at least one tensor and at
    /// most [`LINK_TENSORS`], which differ in their rows alone. The lists are uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the lists do not fit into memory.
    pub fn new(
        stream: &Stream,
        tensors: &[RowReduceSpec],
        moves: &[RowMove],
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let refuse =
            |fault: RowsFault| CudaError::Launch { kernel: "link_sum".to_owned(), reason: fault.into() };
        let first = tensors.first().ok_or_else(|| refuse(RowsFault::NoTensor))?;
        let function = device.function(&sum_source(device.arch(), first.types.normalised()))?;
        if tensors.len() > LINK_TENSORS {
            return Err(refuse(RowsFault::TooManyTensors { most: LINK_TENSORS }));
        }
        if tensors.iter().any(|tensor| tensor.types != first.types) {
            return Err(refuse(RowsFault::OtherTypes));
        }
        let (mut pieces, mut operands) = (Vec::new(), Vec::new());
        let mut lists = LinkRowLists { at: [LinkRowList::default(); LINK_TENSORS] };
        let mut most = 0;
        for (list, spec) in lists.at.iter_mut().zip(tensors) {
            let rows = OperandRows::of_moves(moves, spec.rows, spec.accumulate == Accumulate::Start);
            let (own, terms) = row_reduce::lists(spec, &rows, num_sms);
            *list = LinkRowList { begin: pieces.len() as u32, count: own.len() as u32 };
            most = most.max(own.len() as u64);
            pieces.extend(own.into_iter().map(|piece| piece.behind(operands.len() as u32)));
            operands.extend(terms);
        }
        Ok(Self {
            function,
            pieces: DeviceBuffer::from_vec(stream, pieces)?,
            operands: DeviceBuffer::from_vec(stream, operands)?,
            lists,
            blocks: blocks(most, num_sms),
            accumulate: first.accumulate,
            packs: tensors.iter().map(RowReduceSpec::packs).collect(),
        })
    }

    /// Enqueues the reduction. `started` is marked once all its blocks have begun.
    ///
    /// # Safety
    /// As [`LinkCopy::launch`](super::LinkCopy::launch).
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        call: &LinkCall,
        started: Option<&Event>,
    ) -> Result<(), CudaError> {
        let is_packed = |tensor: usize| self.packs[tensor] && call.own_address(tensor).is_multiple_of(16);
        let packed =
            (0..self.packs.len()).fold(0u32, |bits, tensor| bits | u32::from(is_packed(tensor)) << tensor);
        let accumulate = u32::from(self.accumulate == Accumulate::Continue);
        let arguments =
            (*call, self.pieces.address(), self.operands.address(), self.lists, accumulate, packed);
        let launch = Launch::linear(self.blocks, THREADS);
        // SAFETY: the arguments are those of the kernel in `sum_source`; the rest is the caller's promise.
        unsafe { self.function.launch_signalling(stream, &launch, &arguments, started) }
    }
}

/// Blocks of a launch whose warps take so many steps.
fn blocks(steps: u64, num_sms: u32) -> u32 {
    (steps.div_ceil(WARPS).min(u64::from(num_sms)) as u32).max(1)
}

fn merge_source(arch: Arch, types: ReduceTypes) -> KernelSource {
    let name = format!("link_merge_{}", types.name());
    kernel_source(&name, arch)
        .line("#include \"link_rows.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(kLinkRowThreads)")
        .line(format_args!("{name}(const __grid_constant__ LinkCall call, const RowMergePiece* pieces,"))
        .line("    const RowMergeOperand* operands, u32 count, u32 heads, u32 dim, u32 accumulate, u32 packed) {")
        .line(format_args!(
            "  link_merge<{}>(call, pieces, operands, count, heads, dim, accumulate, packed);",
            types.cpp()
        ))
        .line("}")
}

fn sum_source(arch: Arch, types: ReduceTypes) -> KernelSource {
    let name = format!("link_sum_{}", types.name());
    kernel_source(&name, arch)
        .line("#include \"link_rows.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(kLinkRowThreads)")
        .line(format_args!("{name}(const __grid_constant__ LinkCall call, const RowReducePiece* pieces,"))
        .line("    const RowReduceOperand* operands, const __grid_constant__ LinkRowLists lists, u32 accumulate,")
        .line("    u32 packed) {")
        .line(format_args!(
            "  link_sum<{}>(call, pieces, operands, lists, accumulate, packed);",
            types.cpp()
        ))
        .line("}")
}

/// The types that attention uses; others are compiled when they are asked for.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let types = ReduceTypes::shipped();
    let rounded = types.iter().filter(|types| !types.partial.survives(types.wire));
    let sources = types.iter().map(|&types| merge_source(Arch::SM_90A, types));
    let sources = sources.chain(rounded.map(|&types| sum_source(Arch::SM_90A, types)));
    let specialisation =
        |source| Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: REGISTERS };
    sources.map(specialisation).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("link_rows.cuh", LinkRowList { begin, count }),
        shared_layout!("link_rows.cuh", LinkRowLists { at }),
    ]
}

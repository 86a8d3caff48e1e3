//! The launcher of `link_cast` in `link_rows.cuh`: group-casts over NVLink whose elements are rounded on their way, or whose rows are no
//! multiples of 16 bytes.

use super::link_barrier::{LINK_TENSORS, LinkCall};
use super::row_copy::{RowCopyTensor, pieces_of_all};
use super::row_steps::RowMove;
use super::scalar::Scalar;
use super::{MatrixUnit, RowsFault, Specialisation};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, Device, DeviceBuffer, Event, Function, KernelSource, Launch, Stream};

/// `kLinkRowThreads`, and the registers that a block of so many leaves each.
const THREADS: u32 = 512;
const WARPS: u32 = THREADS / 32;
const REGISTERS: u32 = 128;

/// Rows fetched straight from the memories of GPUs that reach each other, prepared to run many times. Ranks pass a barrier inside the kernel.
#[derive(Debug)]
pub struct LinkCast {
    function: Function,
    pieces: DeviceBuffer,
    count: u32,
    blocks: u32,
    /// `LinkElements` of the kernel, two bits a tensor.
    elements: u32,
}

impl LinkCast {
    /// Compiles or finds the kernel, so that [`LinkCast::new`] need not.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn load(device: &Device, tensors: &[RowCopyTensor]) -> Result<(), CudaError> {
        device.function(&source(device.arch(), wire_of(tensors)?)).map(|_| ())
    }

    /// Makes the casts of `moves`, whose peers are ranks, ready for a kernel of at most `num_sms` blocks: of at most [`LINK_TENSORS`] tensors
    /// that travel in one type. The list is uploaded by `stream`, which is waited for.
    ///
    /// # Errors
    /// When the kernel cannot be compiled, or the list does not fit into memory.
    pub fn new(
        stream: &Stream,
        tensors: &[RowCopyTensor],
        moves: &[RowMove],
        num_sms: u32,
    ) -> Result<Self, CudaError> {
        let device = stream.device();
        let function = device.function(&source(device.arch(), wire_of(tensors)?))?;
        let pieces = pieces_of_all(tensors, moves, LINK_TENSORS as u16, num_sms);
        let count = pieces.len() as u32;
        let bits = (0..).step_by(2).zip(tensors).map(|(bit, tensor)| elements_of(tensor) << bit);
        Ok(Self {
            function,
            pieces: DeviceBuffer::from_vec(stream, pieces)?,
            count,
            blocks: count.div_ceil(WARPS).min(num_sms).max(1),
            elements: bits.sum(),
        })
    }

    /// Enqueues the cast. `started` is marked once all its blocks have begun.
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
        let arguments = (*call, self.pieces.address(), self.count, self.elements);
        let launch = Launch::linear(self.blocks, THREADS);
        // SAFETY: the arguments are those of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch_signalling(stream, &launch, &arguments, started) }
    }
}

/// What the elements that are rounded are rounded to; f32, to which none is, where there are none.
fn wire_of(tensors: &[RowCopyTensor]) -> Result<Scalar, CudaError> {
    let refuse =
        |fault: RowsFault| CudaError::Launch { kernel: "link_cast".to_owned(), reason: fault.into() };
    if tensors.len() > LINK_TENSORS {
        return Err(refuse(RowsFault::TooManyTensors { most: LINK_TENSORS }));
    }
    let mut wires = tensors.iter().filter(|tensor| tensor.is_rounded()).map(|tensor| tensor.wire);
    let first = wires.next().unwrap_or(Scalar::F32);
    match wires.all(|wire| wire == first) {
        true => Ok(first),
        false => Err(refuse(RowsFault::OtherWires)),
    }
}

/// `LinkElements` of a tensor.
fn elements_of(tensor: &RowCopyTensor) -> u32 {
    match (tensor.is_rounded(), tensor.scalar) {
        (false, _) => 0,
        (true, Scalar::Bf16) => 1,
        (true, Scalar::F16) => 2,
        (true, Scalar::F32) => 3,
    }
}

fn source(arch: Arch, wire: Scalar) -> KernelSource {
    let name = format!("link_cast_through_{}", wire.name());
    kernel_source(&name, arch)
        .line("#include \"link_rows.cuh\"")
        .line("using namespace counterpoint;")
        .line("extern \"C\" __global__ void __launch_bounds__(kLinkRowThreads)")
        .line(format_args!(
            "{name}(const __grid_constant__ LinkCall call, const RowCopyPiece* pieces, u32 count,"
        ))
        .line("    u32 elements) {")
        .line(format_args!("  link_cast<{}>(call, pieces, count, elements);", wire.cpp()))
        .line("}")
}

/// All there are.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let specialisation = |wire| Specialisation {
        source: source(Arch::SM_90A, wire),
        matrix_unit: MatrixUnit::None,
        register_limit: REGISTERS,
    };
    Scalar::ALL.into_iter().map(specialisation).collect()
}

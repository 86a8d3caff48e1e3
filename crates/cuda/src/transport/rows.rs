//! What a rank does with the rows that it receives.

use std::sync::Arc;

use counterpoint_exec::collective::{Collective, Reduction};
use counterpoint_mask::Range;
use counterpoint_plan::DType;
use counterpoint_schedule::{BufferSpec, ReduceOp};

use crate::kernel::{
    LinkOperands, LinkReduceSpec, ReduceTypes, RowCopy, RowCopyTensor, RowMerge, RowMergeSpec, RowMove,
    RowReduce, RowReduceSpec, Scalar, StagedReduce, StartMark,
};
use crate::{CallFault, CudaError, Device, Stream};
use counterpoint_exec::{CollectiveFault, WireTensor};

/// What one peer has for this rank: rows of its tensors, and the own rows that they belong to, in order.
pub(super) struct Incoming<'a> {
    pub(super) from: &'a [Range],
    pub(super) to: &'a [Range],
}

/// The kernels of one collective on one rank, with their lists of rows on the device.
pub(super) enum RowWork {
    Copy(RowCopy),
    /// One a tensor.
    Reduce(Vec<RowReduce>),
    /// All tensors at once on a few multiprocessors, and the others where an address is odd.
    Few(StagedReduce, Vec<RowReduce>),
    /// One a pair (out, lse).
    Merge(Vec<RowMerge>),
}

/// Whether there are kernels for the tensors of a collective; if not, why.
pub(super) fn check(collective: &Collective, outputs: &[BufferSpec]) -> Result<(), CollectiveFault> {
    let Some(reduction) = &collective.reduction else {
        return collective.contract.tensors.iter().try_for_each(|tensor| copy_tensor(tensor).map(|_| ()));
    };
    for (index, (tensor, output)) in collective.contract.tensors.iter().zip(outputs).enumerate() {
        types(tensor, reduction, output)?;
        let is_lse = reduction.op == ReduceOp::Lse && index % 2 == 1;
        if is_lse && (tensor.dtype, output.dtype) != (DType::F32, DType::F32) {
            return Err(CollectiveFault::LseDType { name: output.name.clone() });
        }
    }
    Ok(())
}

fn scalar(dtype: DType) -> Result<Scalar, CollectiveFault> {
    Scalar::of(dtype).ok_or(CollectiveFault::CudaDType { dtype })
}

fn copy_tensor(tensor: &WireTensor) -> Result<RowCopyTensor, CollectiveFault> {
    if tensor.dtype == tensor.wire {
        return Ok(unconverted(tensor));
    }
    let row_elements = tensor.row_elements as u64;
    Ok(RowCopyTensor { scalar: scalar(tensor.dtype)?, row_elements, wire: scalar(tensor.wire)? })
}

/// Tensors of a group-cast that was checked.
pub(super) fn copy_tensors(collective: &Collective) -> Result<Vec<RowCopyTensor>, CudaError> {
    let refuse = |fault: CollectiveFault| refused(collective, fault.into());
    collective.contract.tensors.iter().map(copy_tensor).collect::<Result<_, _>>().map_err(refuse)
}

/// A tensor whose elements stay as they are, so that only the number of bytes counts.
pub(super) fn unconverted(tensor: &WireTensor) -> RowCopyTensor {
    let scalar = if tensor.dtype.size() == 2 { Scalar::Bf16 } else { Scalar::F32 };
    let row_elements = tensor.row_elements as u64 * (tensor.dtype.size() as u64).div_ceil(4);
    RowCopyTensor { scalar, row_elements, wire: scalar }
}

/// Whether elements lose something on the wire.
pub(super) fn is_rounded(tensor: &WireTensor) -> bool {
    match (Scalar::of(tensor.dtype), Scalar::of(tensor.wire)) {
        (Some(scalar), Some(wire)) => !scalar.survives(wire),
        _ => tensor.dtype != tensor.wire,
    }
}

/// Bytes of one row of each tensor.
pub(super) fn row_bytes(collective: &Collective) -> Vec<u64> {
    let tensors = collective.contract.tensors.iter();
    tensors.map(|tensor| (tensor.row_elements * tensor.dtype.size()) as u64).collect()
}

pub(super) fn types(
    tensor: &WireTensor,
    reduction: &Reduction,
    output: &BufferSpec,
) -> Result<ReduceTypes, CollectiveFault> {
    Ok(ReduceTypes {
        partial: scalar(tensor.dtype)?,
        wire: scalar(tensor.wire)?,
        sum: scalar(reduction.dtype)?,
        result: scalar(output.dtype)?,
    })
}

/// Compiles or finds the kernels of a collective that was checked, so that its first run need not.
pub(super) fn load(
    device: &Device,
    collective: &Collective,
    outputs: &[BufferSpec],
) -> Result<(), CudaError> {
    let refuse = |fault: CollectiveFault| refused(collective, fault.into());
    let tensors = &collective.contract.tensors;
    let Some(reduction) = &collective.reduction else {
        return RowCopy::load(device, &copy_tensors(collective)?);
    };
    // Logarithms are merged by the kernel of the tensor before them.
    let step = if reduction.op == ReduceOp::Lse { 2 } else { 1 };
    tensors.iter().zip(outputs).step_by(step).try_for_each(|(tensor, output)| {
        let types = types(tensor, reduction, output).map_err(refuse)?;
        match reduction.op {
            ReduceOp::Lse => RowMerge::load(device, types),
            ReduceOp::Sum | ReduceOp::Avg => RowReduce::load(device, types),
        }
    })
}

impl RowWork {
    /// Makes the lists for what `parts` have for this rank, on `setup`, which is waited for. Sums keep to `sms` multiprocessors, where
    /// that is said.
    pub(super) fn new(
        setup: &Stream,
        collective: &Collective,
        outputs: &[BufferSpec],
        parts: &[Incoming<'_>],
        sms: Option<u32>,
    ) -> Result<Self, CudaError> {
        let moves: Vec<RowMove> = parts
            .iter()
            .enumerate()
            .flat_map(|(peer, part)| {
                part.from.iter().zip(part.to).map(move |(&from, &to)| RowMove { peer, from, to })
            })
            .collect();
        let tensors = &collective.contract.tensors;
        Ok(match &collective.reduction {
            None => Self::Copy(RowCopy::new(setup, &copy_tensors(collective)?, &moves)?),
            Some(reduction) if reduction.op == ReduceOp::Lse => {
                let pairs = tensors.chunks_exact(2).zip(outputs.chunks_exact(2));
                let merge = |(pair, output): (&[WireTensor], &[BufferSpec])| {
                    let spec = merge_spec(collective, reduction, [&pair[0], &pair[1]], &output[0])?;
                    RowMerge::new(setup, &spec, &moves)
                };
                Self::Merge(pairs.map(merge).collect::<Result<_, _>>()?)
            }
            Some(reduction) => {
                let specs = sum_specs(collective, reduction, outputs)?;
                let reduce = |spec| RowReduce::new(setup, spec, &moves);
                let each = specs.iter().map(reduce).collect::<Result<_, _>>()?;
                let few = sms.zip(few_spec(setup.device(), collective, reduction, outputs, parts.len()));
                match few {
                    Some((sms, spec)) => Self::Few(StagedReduce::new(setup, &spec, &moves, sms)?, each),
                    None => Self::Reduce(each),
                }
            }
        })
    }

    /// Enqueues them. `input` gives the address of a peer's tensor: (index of its part, tensor). Sums keep to `sms`
    /// multiprocessors, where that is said. The first kernel marks `started`.
    pub(super) fn launch(
        &self,
        stream: &Stream,
        sms: Option<u32>,
        input: impl Fn(usize, usize) -> u64,
        outputs: &[u64],
        started: &StartMark,
    ) -> Result<(), CudaError> {
        // SAFETY: `Post::check_peer` has compared the shapes of both sides, `Collective`'s checks have seen that rows are inside
        // the tensors, and events order everyone else's use of them (see the head of `transport`).
        unsafe {
            match self {
                Self::Copy(copy) => copy.launch(stream, &input, outputs, started),
                Self::Reduce(reductions) => {
                    let mut tensors = reductions.iter().zip(outputs).enumerate();
                    tensors.try_for_each(|(tensor, (reduction, &output))| {
                        reduction.launch(stream, sms, |peer| input(peer, tensor), output, started)
                    })
                }
                Self::Few(few, each) => {
                    let peers = each.iter().map(RowReduce::peers).max().unwrap_or(0);
                    let sources =
                        (0..peers).flat_map(|peer| (0..each.len()).map(move |tensor| (peer, tensor)));
                    let sources = sources.map(|(peer, tensor)| input(peer, tensor));
                    if StagedReduce::reads(sources.chain(outputs.iter().copied())) {
                        return few.launch(stream, peers, input, outputs, started);
                    }
                    let mut tensors = each.iter().zip(outputs).enumerate();
                    tensors.try_for_each(|(tensor, (reduction, &output))| {
                        reduction.launch(stream, sms, |peer| input(peer, tensor), output, started)
                    })
                }
                Self::Merge(merges) => {
                    let mut pairs = merges.iter().zip(outputs.chunks_exact(2)).enumerate();
                    pairs.try_for_each(|(pair, (merge, output))| {
                        let source = |peer| (input(peer, 2 * pair), input(peer, 2 * pair + 1));
                        merge.launch(stream, source, (output[0], output[1]), started)
                    })
                }
            }
        }
    }
}

/// The merge of one pair (out, lse) of a collective into `result`.
pub(super) fn merge_spec(
    collective: &Collective,
    reduction: &Reduction,
    [out, lse]: [&WireTensor; 2],
    result: &BufferSpec,
) -> Result<RowMergeSpec, CudaError> {
    let refuse = |fault: CollectiveFault| refused(collective, fault.into());
    let heads = lse.row_elements;
    Ok(RowMergeSpec {
        accumulate: reduction.accumulate,
        types: types(out, reduction, result).map_err(refuse)?,
        rows: result.rows(),
        heads: heads as u32,
        dim: (out.row_elements / heads.max(1)) as u32,
    })
}

/// The sums of a collective, one for each tensor.
pub(super) fn sum_specs(
    collective: &Collective,
    reduction: &Reduction,
    outputs: &[BufferSpec],
) -> Result<Vec<RowReduceSpec>, CudaError> {
    let refuse = |fault: CollectiveFault| refused(collective, fault.into());
    let spec = |(tensor, output): (&WireTensor, &BufferSpec)| {
        Ok(RowReduceSpec {
            op: reduction.op,
            accumulate: reduction.accumulate,
            types: types(tensor, reduction, output).map_err(refuse)?,
            rows: output.rows(),
            row_elements: tensor.row_elements as u64,
            divisors: divisors(reduction),
        })
    };
    collective.contract.tensors.iter().zip(outputs).map(spec).collect()
}

/// What one launch on a few multiprocessors sums, where there is a kernel for it.
fn few_spec(
    device: &Device,
    collective: &Collective,
    reduction: &Reduction,
    outputs: &[BufferSpec],
    peers: usize,
) -> Option<LinkReduceSpec> {
    let tensors = &collective.contract.tensors;
    let first = types(tensors.first()?, reduction, outputs.first()?).ok()?;
    let takes = |(tensor, output): (&WireTensor, &BufferSpec)| {
        let alike = types(tensor, reduction, output) == Ok(first);
        alike && StagedReduce::takes(device, first, tensor.row_elements as u64, [peers, tensors.len()])
    };
    let rows =
        tensors.iter().zip(outputs).map(|(tensor, output)| (output.rows(), tensor.row_elements as u64));
    tensors.iter().zip(outputs).all(takes).then(|| LinkReduceSpec {
        op: reduction.op,
        accumulate: reduction.accumulate,
        types: first,
        operands: LinkOperands::Announced,
        tensors: rows.collect(),
        divisors: divisors(reduction),
    })
}

/// Why a call of a collective cannot be enqueued.
pub(super) fn refused(collective: &Collective, fault: CallFault) -> CudaError {
    CudaError::Launch { kernel: collective.contract.kind.clone(), reason: fault.into() }
}

/// By what each row of a mean is divided.
pub(super) fn divisors(reduction: &Reduction) -> Option<Arc<[u32]>> {
    (reduction.op == ReduceOp::Avg).then(|| reduction.operands.as_slice().into())
}

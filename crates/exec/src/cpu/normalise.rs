//! RMSNorm and its gradients on the CPU backend: from a Program's buffers to the kernels' rows.

use counterpoint_cpu_kernels::{
    KernelElement, RmsNormArgs, RmsNormBackwardArgs, rms_norm, rms_norm_backward,
};
use counterpoint_schedule::{RmsNorm, RmsNormBackward};
use rayon::ThreadPool;

use super::compute::{Access, elements, elements_mut, pieces};
use crate::ExecError;

pub(super) fn normalise_rows<T: KernelElement>(
    op: &RmsNorm,
    access: &Access<'_>,
    workers: &ThreadPool,
) -> Result<(), ExecError> {
    let src = access.read_blocks(&op.src)?;
    let [weight, residual] = [op.weight, op.residual].map(|id| id.map(|id| access.read(id)).transpose());
    let (weight, residual) = (weight?, residual?);
    let (mut sum, mut out) = (access.write(op.sum)?, access.write(op.out)?);
    let args = RmsNormArgs {
        src: pieces::<T>(&op.src, &src),
        columns: out.shape()[1],
        residual: residual.as_ref().map(|residual| elements(residual)),
        sum: elements_mut(&mut sum),
        weight: weight.as_ref().map(|weight| elements(weight)),
        epsilon: op.epsilon,
        out: elements_mut(&mut out),
    };
    rms_norm(args, workers);
    Ok(())
}

pub(super) fn normalise_backward<T: KernelElement>(
    op: &RmsNormBackward,
    access: &Access<'_>,
    workers: &ThreadPool,
) -> Result<(), ExecError> {
    let (dout, sum) = (access.read(op.dout)?, access.read(op.sum)?);
    let (weight, dweight) = op.weight.unzip();
    let [weight, dsum] = [weight, op.dsum].map(|id| id.map(|id| access.read(id)).transpose());
    let (weight, dsum) = (weight?, dsum?);
    let mut dweight = dweight.map(|id| access.write(id)).transpose()?;
    let mut dh = access.write(op.dh)?;
    let args = RmsNormBackwardArgs::<T> {
        dout: elements(&dout),
        sum: elements(&sum),
        columns: sum.shape()[1],
        weight: weight.as_ref().zip(dweight.as_mut()).map(|(from, to)| (elements(from), elements_mut(to))),
        dsum: dsum.as_ref().map(|dsum| elements(dsum)),
        epsilon: op.epsilon,
        dh: elements_mut(&mut dh),
    };
    rms_norm_backward(args, workers);
    Ok(())
}

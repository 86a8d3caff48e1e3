//! Tensors that a call cannot use: an error before anything is asked of the driver, and the next call is right.

use counterpoint_exec::{ExecError, ForwardTensors, Ticket};
use counterpoint_mask::Mask;
use counterpoint_plan::DType;
use counterpoint_reference::selftest::SelfCheck;

use super::calls::{Case, failed, group};
use counterpoint_cuda::{CudaBuffer, CudaError, CudaMachine, Device, DeviceBuffer, DriverCalls};

/// Tensors of another shape or type, on another GPU, that share memory with a result; memory that is too short or begins at an odd address.
///
/// # Errors
/// When the machine cannot run attention at all.
pub(super) fn refusals(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    const SEED: u64 = 13;
    let case = Case::new(machine, Mask::causal(640), 1, SEED)?;
    let group = group(machine, 1)?;
    let calls = case.prepare(&group)?;
    let tensors = case.tensors(&group)?;
    let own = &tensors[0];
    own.give_late()?;
    let out = own.forward().out;
    let on = |device: &Device, shape: &[usize], dtype: DType| -> Result<CudaBuffer, ExecError> {
        let bytes = shape.iter().product::<usize>() * dtype.size();
        DeviceBuffer::new(device, bytes)
            .and_then(|memory| CudaBuffer::new(memory, shape, dtype))
            .map_err(failed)
    };
    let device = out.memory().device();
    let mut short = out.shape().to_vec();
    short[0] -= 1;
    let mut bad = vec![on(device, &short, out.dtype())?, on(device, out.shape(), DType::F32)?];
    bad.extend(machine.devices().get(1).map(|other| on(other, out.shape(), out.dtype())).transpose()?);
    // Of the memory that is read.
    let shared = own.forward().lse.memory().clone();
    let (mut accepted, mut asked) = (0, 0);
    for bad in &bad {
        let refused =
            || calls.ranks()[0].forward(&ForwardTensors { out: bad, ..own.forward() }, None).map(drop);
        let (refused, calls) = DriverCalls::of(refused).map_err(failed)?;
        accepted += usize::from(!matches!(refused, Err(ExecError::Tensor { .. })));
        asked += calls.total();
    }
    let twice = ForwardTensors {
        out: own.forward().out,
        lse: own.forward().lse,
        q: own.forward().out,
        ..own.forward()
    };
    accepted += usize::from(!matches!(calls.ranks()[0].forward(&twice, None), Err(ExecError::Tensor { .. })));
    let too_long = CudaBuffer::new(shared.clone(), &[shared.len() + 1], DType::Bf16);
    accepted += usize::from(!matches!(too_long, Err(CudaError::OutOfBounds { .. })));
    let odd = shared.slice(8..shared.len()).and_then(|memory| CudaBuffer::new(memory, &[4, 4], DType::Bf16));
    accepted += usize::from(!matches!(odd, Err(CudaError::Misaligned { .. })));
    let forward = calls.ranks()[0].forward(&own.forward(), Some(own.callers()))?;
    let backward = calls.ranks()[0].backward(&own.backward(), Some(own.callers()))?;
    [forward, backward].iter().try_for_each(Ticket::wait)?;
    let unlike = case.unlike(&tensors)?;
    drop((calls, tensors));
    group.close()?;
    Ok(vec![
        SelfCheck::of("tensors that cannot be used and were accepted".to_owned(), SEED, accepted as f64, 0.0),
        SelfCheck::of("calls of the driver for refused tensors".to_owned(), SEED, asked as f64, 0.0),
        SelfCheck::of("a call after refused ones: with other bits".to_owned(), SEED, unlike as f64, 0.0),
    ])
}

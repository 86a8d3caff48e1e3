//! What a library that calls this one relies on: its current context is left as it was, dropping waits for nothing, and a run that is
//! enqueued waits for nothing and makes nothing.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::{Backend, DeviceFault, ExecError, Machine, Pass, Prepared, World, WorldConfig};
use counterpoint_mask::{Documents, Mask};
use counterpoint_reference::selftest::SelfCheck;
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, lower_attention_backward, lower_attention_forward,
};

use super::calls::{failed, selftest_calls};
use super::staged::StagedAttention;
use counterpoint_cuda::kernel::StartHold;
use counterpoint_cuda::{
    CudaBackend, CudaError, CudaMachine, CudaTransport, Device, DeviceBuffer, DriverCalls, PinnedBuffer,
    Stream, StreamPriority,
};

/// Contexts, drops and enqueued runs of one rank, counted by what the driver is asked; and many masks one after the other, which
/// must not take more and more memory.
///
/// # Errors
/// When the machine cannot run attention at all.
pub fn selftest_callers(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    let device = &machine.devices()[0];
    let mut checks = vec![context(device).map_err(failed)?];
    checks.extend(drops(device).map_err(failed)?);
    checks.extend(enqueued(machine)?);
    checks.extend(many_masks(machine)?);
    checks.extend(selftest_calls(machine)?);
    Ok(checks)
}

/// Whether a thread without a current context has none after calls.
fn context(device: &Device) -> Result<SelfCheck, CudaError> {
    let current = DriverCalls::current_context;
    let contexts = thread::scope(|scope| {
        let calls = || -> Result<[usize; 2], CudaError> {
            let before = current()?;
            let stream = Stream::new(device, StreamPriority::Low)?;
            let buffer = DeviceBuffer::from_slice(&stream, &[1u32; 100])?;
            buffer.fill(&stream, 0)?;
            stream.synchronize()?;
            Ok([before, current()?])
        };
        scope.spawn(calls).join().unwrap_or(Ok([0, 1]))
    })?;
    let name = "the caller's current context is another after calls".to_owned();
    Ok(SelfCheck::of(name, 0, f64::from(u8::from(contexts[0] != contexts[1])), 0.0))
}

/// Memory that is dropped while a kernel in front of its use still runs: nothing is asked of the driver, and nobody has it before.
fn drops(device: &Device) -> Result<Vec<SelfCheck>, CudaError> {
    const BYTES: usize = 3 << 20;
    let device = &device.for_world();
    let stream = Stream::new(device, StreamPriority::Low)?;
    let hold = StartHold::new(device)?;
    hold.launch(&stream, Duration::from_millis(300))?;
    let (buffer, pinned) = (DeviceBuffer::new(device, BYTES)?, PinnedBuffer::new(device, BYTES)?);
    buffer.copy_from_pinned(&stream, &pinned, 0)?;
    let address = buffer.address();
    let began = Instant::now();
    let ((), calls) = DriverCalls::of(|| drop((buffer, pinned)))?;
    let next = DeviceBuffer::new(device, BYTES)?;
    let took = began.elapsed();
    let early = usize::from(next.address() == address) + usize::from(took > Duration::from_millis(200));
    stream.synchronize()?;
    let again = DeviceBuffer::new(device, BYTES)?;
    let late = usize::from(again.address() != address);
    Ok(vec![
        SelfCheck::of("calls of the driver when memory is dropped".to_owned(), 0, calls.total() as f64, 0.0),
        SelfCheck::of("memory lent again while it is used, or waited for".to_owned(), 0, early as f64, 0.0),
        SelfCheck::of("memory not lent again after its use".to_owned(), 0, late as f64, 0.0),
    ])
}

type Rank = Prepared<CudaBackend, CudaTransport>;

/// A forward and a backward of one rank, ready to run.
fn passes(machine: &CudaMachine, mask: Mask, seed: u64) -> Result<[Rank; 2], ExecError> {
    let StagedAttention { spec, plan, inputs } =
        StagedAttention::new(Ok(mask), 1, 1, seed, Pass::ForwardBackward)?;
    // Filling results with NaN before they are written is waited for.
    let config = WorldConfig { limit: Duration::from_secs(30), poison: false, ..WorldConfig::default() };
    let world = World::new(1, config);
    let alone = || ExecError::Device { rank: 0, place: "a world".to_owned(), reason: DeviceFault::NoRank };
    let prepare = |program| -> Result<Rank, ExecError> {
        let (backend, transport) = machine.connect(&world)?.pop().ok_or_else(alone)?;
        Prepared::new(program, backend, transport)
    };
    let policy = OverlapPolicy::default();
    let mut forward = prepare(lower_attention_forward(&plan, 0, &spec, policy, KeyBlocks::Unaligned))?;
    let reduction = GradientReduction::Deterministic;
    let mut backward = prepare(lower_attention_backward(&plan, 0, &spec, policy, reduction))?;
    for (name, tensor) in
        [("q", Some(inputs.q)), ("k", Some(inputs.k)), ("v", Some(inputs.v)), ("dout", inputs.dout)]
    {
        let Some(tensor) = tensor else { continue };
        let buffer = forward.backend().upload(name, tensor)?;
        for pass in [&mut forward, &mut backward] {
            if pass.takes(name) {
                pass.bind(name, buffer.clone())?;
            }
        }
    }
    forward.start(Instant::now())?;
    forward.finish()?;
    for name in ["out", "lse"] {
        if let Some(buffer) = forward.buffer(name).cloned().filter(|_| backward.takes(name)) {
            backward.bind(name, buffer)?;
        }
    }
    backward.start(Instant::now())?;
    backward.finish()?;
    Ok([forward, backward])
}

/// What the driver is asked while a forward and a backward are enqueued.
fn enqueued(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    const RUNS: usize = 101;
    let mut checks = Vec::new();
    for (mut pass, name) in passes(machine, mask(&[2048])?, 7)?.into_iter().zip(["forward", "backward"]) {
        let mut worst = [0, 0];
        for _ in 0..RUNS {
            let (started, calls) = DriverCalls::of(|| pass.start(Instant::now())).map_err(failed)?;
            started?;
            pass.finish()?;
            worst = [worst[0].max(calls.synchronizations()), worst[1].max(calls.allocations())];
        }
        for (what, count) in ["waits for the device", "things made"].into_iter().zip(worst) {
            let name = format!("{what} while a {name} is enqueued");
            checks.push(SelfCheck::of(name, 0, count as f64, 0.0));
        }
    }
    Ok(checks)
}

/// What many masks, prepared, run and dropped one after the other, have made and not given back.
fn many_masks(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    const MASKS: usize = 60;
    const WARM: usize = 20;
    let mut prepared = 0..MASKS;
    let mut next = || -> Result<(), ExecError> {
        let number = prepared.next().unwrap_or(0);
        let rows = 512 + 128 * (number * 7 % 11);
        let cut = rows / 2 + number % 64;
        passes(machine, mask(&[cut, rows - cut])?, number as u64).map(drop)
    };
    // What is made once: kernels are loaded, and events are kept to be used again.
    (0..WARM).try_for_each(|_| next())?;
    let (made, calls) = DriverCalls::of(|| (WARM..MASKS).try_for_each(|_| next())).map_err(failed)?;
    made?;
    let pairs = [
        ("memory of the device", "cuMemAlloc_v2", "cuMemFree_v2"),
        ("pinned memory", "cuMemHostAlloc", "cuMemFreeHost"),
        ("streams", "cuStreamCreateWithPriority", "cuStreamDestroy_v2"),
        ("events", "cuEventCreate", "cuEventDestroy_v2"),
    ];
    let check = |(what, make, end): (&str, &str, &str)| {
        let left = calls.of_function(make).abs_diff(calls.of_function(end));
        SelfCheck::of(format!("{what} that {} masks leave behind", MASKS - WARM), 0, left as f64, 0.0)
    };
    Ok(pairs.into_iter().map(check).collect())
}

fn mask(documents: &[usize]) -> Result<Mask, ExecError> {
    let lengths = Documents::from_lengths(documents.iter().copied()).and_then(Mask::causal);
    lengths
        .map_err(|error| failed(CudaError::Launch { kernel: "attention".to_owned(), reason: error.into() }))
}

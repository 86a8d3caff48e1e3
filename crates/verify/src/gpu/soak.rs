//! Thousands of masks on one group of ranks that share a GPU: what they leave behind.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::ExecError;
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::selftest::{SelfCheck, Soak};

use super::calls::{failed, group};
use counterpoint_cuda::{CudaError, CudaMachine, DriverCalls};

/// Once masks of all sizes have come, those that follow make nothing new, whatever the order in which ranks drop them, and no drop
/// waits.
///
/// # Errors
/// When the machine cannot run attention at all.
pub(super) fn soak(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    const RANKS: usize = 4;
    const WARM: usize = 100;
    const MASKS: usize = 10_000;
    const SEED: u64 = 20;
    /// How many masks are on their way at once has ever new mosts, each rarer than the one before. What is allocated and made for them grows
    /// by quarters: a few slabs, blocks that are longer than those, and a shelf of events. Whatever is made for each mask is thousands.
    const MOST_MADE: [(&str, &str, f64); 5] = [
        ("kernels loaded", "cuModuleLoadData", 16.0),
        ("allocations of the device's memory", "cuMemAlloc_v2", 24.0),
        ("allocations of pinned memory", "cuMemHostAlloc", 8.0),
        ("events", "cuEventCreate", 400.0),
        ("streams", "cuStreamCreateWithPriority", 0.0),
    ];
    /// How long other parts of the self-test may take to give memory of the GPU back.
    const OTHERS_END: Duration = Duration::from_secs(20);
    const MOST_BYTES: f64 = 64.0 * 1024.0 * 1024.0;
    let group = group(machine, RANKS)?;
    let soak = Soak::new(&AttentionSpec::new(4, 2, 64, DType::Bf16), RANKS, 64, 600..=1500, 128, SEED)?;
    let counted = |part: &mut dyn FnMut()| DriverCalls::of(part).map(|((), calls)| calls);
    let used = || -> Result<f64, CudaError> {
        let memory = machine.devices()[0].memory()?;
        Ok((memory.total - memory.free) as f64)
    };
    let run = |masks| -> Result<(usize, Vec<DriverCalls>), ExecError> {
        let (wrong, calls) = soak.run(&group, masks, counted)?;
        Ok((wrong, calls.into_iter().collect::<Result<_, _>>().map_err(failed)?))
    };
    let (mut wrong, _) = run(0..WARM)?;
    let before = used().map_err(failed)?;
    let (wrong_after, calls) = run(WARM..MASKS)?;
    let mut grown = used().map_err(failed)? - before;
    let began = Instant::now();
    while grown > MOST_BYTES && began.elapsed() < OTHERS_END {
        thread::sleep(Duration::from_millis(200));
        grown = grown.min(used().map_err(failed)? - before);
    }
    wrong += wrong_after;
    group.close()?;
    let sum = |count: &dyn Fn(&DriverCalls) -> usize| calls.iter().map(count).sum::<usize>() as f64;
    let of = |what: &str| format!("{what}, {MASKS} masks on {RANKS} ranks");
    let drops =
        |calls: &DriverCalls| calls.of_function("cuMemFree_v2") + calls.of_function("cuCtxSynchronize");
    let known =
        MOST_MADE.iter().map(|(_, function, _)| sum(&|calls| calls.of_function(function))).sum::<f64>();
    let others = sum(&DriverCalls::allocations) - known;
    let made = MOST_MADE.iter().map(|(what, function, most)| {
        let made = sum(&|calls| calls.of_function(function));
        SelfCheck::of(of(&format!("{what} after the first {WARM}")), SEED, made, *most)
    });
    let mut checks = vec![
        SelfCheck::of(of("wrong elements"), SEED, wrong as f64, 0.0),
        SelfCheck::of(of(&format!("other things made after the first {WARM}")), SEED, others, 0.0),
        SelfCheck::of(of(&format!("bytes of the GPU more than after {WARM}")), SEED, grown, MOST_BYTES),
        SelfCheck::of(of("memory freed, or the device waited for"), SEED, sum(&drops), 0.0),
    ];
    checks.extend(made);
    Ok(checks)
}

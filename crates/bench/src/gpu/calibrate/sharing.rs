//! How many SMs a collective takes from a concurrent product, measured for `doctor --calibrate`.

use std::time::Duration;

use counterpoint_choose::{GroupSearcher, LinkUse, ProductStart, TunedPass};
use counterpoint_cost::{ProblemSize, WorkerSharing};
use counterpoint_exec::{ExecError, ProgramFault};
use counterpoint_measure::{MeasureError, MeasuredClock, Processes, Repeats};
use counterpoint_plan::{DType, GemmCollective, LinearDirection};
use counterpoint_schedule::OverlapPolicy;

use counterpoint_cuda::CudaMachine;

/// The layer whose products and reductions are timed. Both take some 200 microseconds a group on GPUs of today: what one takes from the
/// other is a tenth of what they take side by side, and nothing compared with the noise of a product that is longer.
const SIZE: ProblemSize = ProblemSize { m: 16384, n: 8192, k: 1024 };

/// How many multiprocessors a collective takes from a product that runs concurrently with it: those by which a forward in two groups is
/// slower than by the times of its parts. What was assumed stays where nothing overlaps.
pub(super) fn measure(machine: &CudaMachine, assumed: WorkerSharing) -> Result<WorkerSharing, ExecError> {
    let ranks = machine.devices().len();
    let spec = GemmCollective::ReduceScatter.layer(SIZE, DType::Bf16);
    let searcher = GroupSearcher {
        spec,
        tp_size: ranks,
        direction: LinearDirection::Forward,
        wave: SIZE.m.div_ceil(ranks).div_ceil(4),
        most_groups: 2,
        trials: 0,
        starts: ProductStart::AfterCommunication,
        link: LinkUse::Shared,
        overlapped_speed: 1.0,
    };
    let policy = OverlapPolicy::KERNEL_BARRIER;
    let timing = Repeats { limit: Duration::from_secs(20), warmups: 2, iterations: 7, enough: Duration::MAX };
    let processes = Processes::One;
    let mut clock =
        MeasuredClock { machine, processes, spec, pass: TunedPass::Forward, ranks, policy, timing };
    let failed = |error: MeasureError| match error {
        MeasureError::Run(error) => error,
        other => ExecError::Program {
            program: "calibration".to_owned(),
            rank: 0,
            reason: ProgramFault::NotPlanned { reason: other.to_string() },
        },
    };
    let speed = searcher.overlapped_speed(&mut clock).map_err(failed)?;
    Ok(speed.map_or(assumed, |speed| WorkerSharing { communication: taken(speed, &assumed), ..assumed }))
}

/// The workers that are missing to a computation at such a part of its usual speed. At most those that the kernels of a collective hold,
/// as `assumed`: what a computation loses to it beyond these, as where both use the memory, no margin gives back.
fn taken(speed: f64, assumed: &WorkerSharing) -> usize {
    let missing = (1.0 - speed) * assumed.workers as f64;
    (missing.round() as usize).clamp(1, assumed.communication.max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_says_who_is_missing() {
        let assumed = WorkerSharing::H200;
        for communication in [1, 8, 16] {
            assert_eq!(taken(assumed.speed_without(communication), &assumed), communication);
        }
        assert_eq!([1.0, 0.74, 0.0].map(|speed| taken(speed, &assumed)), [1, 16, 16]);
    }
}

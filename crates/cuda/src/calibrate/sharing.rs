use std::time::Duration;

use counterpoint_exec::{ExecError, MeasureError, MeasuredClock, Repeats};
use counterpoint_plan::{DType, GemmCollective, GroupSearcher, LinkUse, ProductStart, WorkerSharing};
use counterpoint_schedule::{OverlapPolicy, StartOrder};

use crate::CudaMachine;

/// The layer whose products and reductions are timed. Both take some 200 microseconds a group on GPUs of today: what one takes from the
/// other is a tenth of what they take side by side, and nothing beside the noise of a product that is longer.
const SHAPE: [usize; 3] = [16384, 8192, 1024];

/// How many multiprocessors a collective takes from a product that runs beside it: those by which a forward in two groups is
/// slower than by the times of its parts. What was assumed stays where nothing overlaps.
pub(super) fn measure(machine: &CudaMachine, assumed: WorkerSharing) -> Result<WorkerSharing, ExecError> {
    let ranks = machine.devices().len();
    let spec = GemmCollective::ReduceScatter.layer(SHAPE, DType::Bf16);
    let searcher = GroupSearcher {
        spec,
        tp_size: ranks,
        wave: SHAPE[0].div_ceil(ranks).div_ceil(4),
        most_groups: 2,
        starts: ProductStart::AfterCommunication,
        link: LinkUse::Shared,
        speed_beside: 1.0,
    };
    let policy = OverlapPolicy::new(StartOrder::KernelBarrier);
    let timing = Repeats { limit: Duration::from_secs(20), warmups: 2, iterations: 7 };
    let mut clock = MeasuredClock { machine, spec, ranks, policy, timing };
    let failed = |error: MeasureError| match error {
        MeasureError::Run(error) => error,
        other => ExecError::Program { program: "calibration".to_owned(), rank: 0, reason: other.to_string() },
    };
    let speed = searcher.speed_beside(&mut clock).map_err(failed)?;
    Ok(speed
        .map_or(assumed, |speed| WorkerSharing { communication: taken(speed, assumed.workers), ..assumed }))
}

/// Of `workers`, those that are missing to a computation at such a part of its usual speed.
fn taken(speed: f64, workers: usize) -> usize {
    let missing = (1.0 - speed) * workers as f64;
    (missing.round() as usize).clamp(1, workers.saturating_sub(1).max(1))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_speed_says_who_is_missing() {
        for communication in [1, 8, 16, 40] {
            let speed = WorkerSharing::H200.speed_without(communication);
            assert_eq!(taken(speed, WorkerSharing::H200.workers), communication);
        }
        assert_eq!([taken(1.0, 132), taken(0.0, 132), taken(0.5, 1)], [1, 131, 1]);
    }
}

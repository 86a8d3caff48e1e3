//! Overlap policies by their measured speed on one causal problem, for `doctor --calibrate`.

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_cost::{CostModel, PolicyMeasurement};
use counterpoint_exec::{
    ExecError, Measurement, Pass, ProgramFault, RunConfig, random_inputs, run_attention_on,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, Topology};
use counterpoint_report::median;
use counterpoint_schedule::OverlapPolicy;

use counterpoint_cuda::CudaMachine;

/// Rows of a rank.
const ROWS: usize = 8192;

/// What is tried: every order of starts, with and without multiprocessors left to communication.
const POLICIES: [&str; 6] = [
    "sequential",
    "concurrent",
    "kernel-barrier",
    "concurrent+sm-margin=16",
    "kernel-barrier+sm-margin=16",
    "concurrent+partition=16",
];

/// Seconds and overlap of causal attention, forward and backward, in two remote stages, so that there is something to hide.
/// Policies that this machine refuses are left out. The fastest first.
pub(super) fn measure(
    machine: &CudaMachine,
    cost: &CostModel,
    report: &mut dyn FnMut(&str),
) -> Result<Vec<PolicyMeasurement>, ExecError> {
    let ranks = machine.devices().len();
    let spec = AttentionSpec::new(32, 8, 128, DType::Bf16);
    let refused = |reason: String| ExecError::Program {
        program: "calibration".to_owned(),
        rank: 0,
        reason: ProgramFault::NotPlanned { reason },
    };
    let mask = Mask::causal(ROWS * ranks).map_err(|error| refused(error.to_string()))?;
    let config = PlanConfig {
        topology: Topology::flat(ranks),
        stages: StageCount::Fixed(2).into(),
        cost: *cost,
        ..PlanConfig::new(ranks)
    };
    let plan = plan_mask(&mask, &spec, &config).map_err(|error| refused(error.to_string()))?;
    let inputs = random_inputs(&mask, &spec, 11, Pass::ForwardBackward);
    let policies = POLICIES.iter().filter_map(|text| text.parse::<OverlapPolicy>().ok());
    let mut measured = Vec::new();
    for policy in policies {
        report(&format!("overlap policy {policy}"));
        let config = RunConfig {
            policy: policy.into(),
            measurement: Measurement { warmups: 2, samples: 7, ..Measurement::default() },
            ..RunConfig::default()
        }
        .with_poison(false);
        let run = match run_attention_on(machine, &plan, &spec, &inputs, &config) {
            Ok(run) => run,
            Err(ExecError::Policy { reason, .. }) => {
                report(&format!("overlap policy {policy}: {reason}"));
                continue;
            }
            Err(error) => return Err(error),
        };
        let overlaps =
            [Some(run.forward.overlap()), run.backward.as_ref().map(|backward| backward.overlap())];
        let overlaps = overlaps.into_iter().flatten();
        // Of both passes: hidden over hideable.
        let (hidden, hideable) = overlaps.fold((0.0, 0.0), |(hidden, hideable), overlap| {
            let most = overlap.communication_seconds.min(overlap.compute_seconds);
            (hidden + overlap.communication_seconds - overlap.exposed_seconds, hideable + most)
        });
        let efficiency = if policy.overlaps() { hidden / f64::max(hideable, f64::MIN_POSITIVE) } else { 0.0 };
        let seconds = median(&run.forward_seconds) + median(&run.backward_seconds);
        measured.push(PolicyMeasurement { policy: policy.to_string(), seconds, efficiency });
    }
    measured.sort_by(|a, b| a.seconds.total_cmp(&b.seconds));
    Ok(measured)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_policy_is_one() {
        let parsed: Vec<OverlapPolicy> = POLICIES.iter().filter_map(|text| text.parse().ok()).collect();
        assert_eq!(parsed.len(), POLICIES.len());
    }
}

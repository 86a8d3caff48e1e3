//! Linear layers whose sums NCCL forms itself, against f64: twice each, because NCCL connects ranks in the first sum of a size.

use std::time::Duration;

use counterpoint_exec::{LinearConfig, LinearOutputs, Machine, RunConfig, random_linear_inputs};
use counterpoint_plan::{Activations, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_reference::selftest::{SelfCheck, Subject, SubjectError};
use counterpoint_reference::{LinearSample, SumRounding, check_linear};
use counterpoint_schedule::{OverlapPolicy, WeightGradient};

use super::CudaSubject;

const LIMIT: Duration = Duration::from_secs(20);
/// Ranks whose sums have the bits of any order.
const ANY_ORDER: usize = 2;

/// Layers over all GPUs of a machine whose transport is by NCCL's own sums: both kinds, in every way that the transport has.
pub fn selftest_library_sums(subject: &CudaSubject) -> Vec<SelfCheck> {
    let ranks = subject.machine().devices().len();
    let ways = subject.machine().linear(ranks).overlaps;
    let policies: Vec<OverlapPolicy> = ways.into_iter().map(OverlapPolicy::from).collect();
    let mut checks = Vec::new();
    for kind in [LinearKind::Column, LinearKind::Row] {
        for activations in [Activations::Replicated, Activations::SequenceParallel] {
            let spec = LinearSpec {
                kind,
                activations,
                tokens: 768 * ranks,
                in_features: 256 * ranks,
                out_features: 384 * ranks,
                has_bias: false,
                dtype: DType::Bf16,
            };
            let mut first = None;
            for &policy in &policies {
                let groups = if policy.overlaps_by_groups() { 3 } else { 1 };
                let name = format!("{kind} {activations} ranks={ranks} groups={groups} {policy}");
                let layer = Layer { spec, ranks, groups, policy };
                checks.extend(layer.examine(subject, &name, &mut first));
            }
        }
    }
    checks
}

struct Layer {
    spec: LinearSpec,
    ranks: usize,
    groups: usize,
    policy: OverlapPolicy,
}

impl Layer {
    /// Compares with f64, and where no order of a sum rounds otherwise with the bits of the `first` way.
    fn examine(
        &self,
        subject: &CudaSubject,
        name: &str,
        first: &mut Option<LinearOutputs>,
    ) -> Vec<SelfCheck> {
        const SEED: u64 = 10;
        let (plan, outputs) = match self.run(subject, SEED) {
            Ok(run) => run,
            Err(error) => return vec![SelfCheck::failed(name.to_owned(), SEED, error.to_string())],
        };
        let inputs = random_linear_inputs(&self.spec, None, SEED, true);
        let (gradient, whole, rounding) =
            (WeightGradient::Written, LinearSample::Whole, SumRounding::EverySum);
        let mut checks = vec![match check_linear(&plan, &inputs, gradient, &outputs, whole, rounding) {
            Ok(share) => SelfCheck::of(name.to_owned(), SEED, share, 1.0),
            Err(reason) => SelfCheck::failed(name.to_owned(), SEED, reason.to_string()),
        }];
        match first {
            Some(first) if self.ranks <= ANY_ORDER => {
                let tensors = |of: &LinearOutputs| (of.y.clone(), of.dx.clone(), of.dweight.clone());
                let unlike = usize::from(tensors(first) != tensors(&outputs));
                checks.push(SelfCheck::of(
                    format!("same bits without overlap: {name}"),
                    SEED,
                    unlike as f64,
                    0.0,
                ));
            }
            Some(_) => {}
            None => *first = Some(outputs),
        }
        checks
    }

    /// The second run.
    fn run(&self, subject: &CudaSubject, seed: u64) -> Result<(LinearPlan, LinearOutputs), SubjectError> {
        let plan = LinearPlan::new(self.spec, self.ranks, WaveGroups::Fixed(self.groups));
        let plan = plan.expect("features and tokens are multiples of the ranks");
        let inputs = random_linear_inputs(&self.spec, None, seed, true);
        let run = RunConfig { policy: self.policy.into(), ..RunConfig::default() }
            .with_poison(true)
            .with_limit(LIMIT);
        let config = LinearConfig { weight_gradient: WeightGradient::Written, run };
        subject.run_linear(&plan, &inputs, &config)?;
        let outputs = subject.run_linear(&plan, &inputs, &config)?;
        Ok((plan, outputs))
    }
}

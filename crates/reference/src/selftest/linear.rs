//! The selftest of tensor-parallel linear layers: random ones against f64, and their bits against one without overlap.

use std::fmt::Write;
use std::time::Duration;

use counterpoint_exec::{LinearConfig, LinearInputs, LinearOutputs, RunConfig, random_linear_inputs};
use counterpoint_plan::{Activations, DType, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_schedule::{Mover, OverlapPolicy, StartOrder, WeightGradient, WorkerShare};

use super::examine::unlike_elements;
use super::{Extent, SelfCheck, Share, Subject};
use crate::draw::Draw;
use crate::{LinearSample, SumRounding, check_linear};

/// A layer and how it is run.
struct LinearCase {
    seed: u64,
    plan: LinearPlan,
    main_grad: Option<DType>,
    config: LinearConfig,
}

/// Random linear layers on a device: both kinds, sequence parallel or not, biases, all fates of the gradient of the weight, groups,
/// policies and margins, tokens and features that no tile divides, at most `most_ranks` ranks. Every element is compared with
/// f64; then the same layer runs in one group with no overlap, and must have the same bits. `checked` hears of every check, with
/// how many cases there are.
pub fn selftest_linear(
    subject: &dyn Subject,
    extent: Extent,
    share: Share,
    most_ranks: usize,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Vec<SelfCheck> {
    let count = match extent {
        Extent::Full => 96,
        Extent::Quick => 16,
    };
    let mut checks = Vec::new();
    for seed in (0..count).filter(|seed| share.takes(*seed as usize)) {
        let case = LinearCase::random(seed, subject.dtypes(), &subject.movers(), most_ranks);
        for check in case.examine(subject) {
            checked(&check, share.count(count as usize));
            checks.push(check);
        }
    }
    checks
}

impl LinearCase {
    fn random(seed: u64, dtypes: &[DType], movers: &[Mover], most_ranks: usize) -> Self {
        let mut draw = Draw::new(seed ^ 0x11ea);
        let tp_size = draw.within(1, most_ranks);
        let dtype = draw.pick(dtypes);
        let kind = draw.pick(&[LinearKind::Column, LinearKind::Row]);
        let activations = draw.pick(&[Activations::Replicated, Activations::SequenceParallel]);
        // Few tokens, some that fill tiles, some that do not.
        let tokens = match draw.below(4) {
            0 => draw.within(1, 40),
            1 => 128 * tp_size * draw.within(1, 2),
            _ => draw.sized(40, 700),
        };
        let features = |draw: &mut Draw| match draw.below(5) {
            0 => draw.within(1, 20),
            1 => draw.within(1, 300),
            // Groups of columns that are whole tiles.
            2 => 256 * draw.within(1, 2),
            _ => 8 * draw.within(1, 50),
        };
        let (mut in_features, mut out_features) = (features(&mut draw), features(&mut draw));
        match kind {
            LinearKind::Column => out_features = out_features.next_multiple_of(tp_size),
            LinearKind::Row => in_features = in_features.next_multiple_of(tp_size),
        }
        let has_bias = draw.chance(50);
        let spec = LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype };
        let groups = draw.pick(&[1, 2, 3, 5]);
        let accumulator = dtype.accumulator();
        let main_grad = draw.pick(&[None, Some(accumulator), Some(dtype)]);
        let weight_gradient = match (draw.below(3), main_grad) {
            (0, _) => WeightGradient::Deferred,
            (1, Some(dtype)) => WeightGradient::Replaced(dtype),
            (_, Some(dtype)) => WeightGradient::Accumulated(dtype),
            (1, None) => WeightGradient::Frozen,
            (_, None) => WeightGradient::Written,
        };
        let start = draw.pick(&StartOrder::ALL);
        let workers =
            if draw.chance(30) { WorkerShare::Margin(draw.within(1, 4)) } else { WorkerShare::Common };
        let mover = draw.pick(movers);
        let policy = OverlapPolicy { workers, mover, ..OverlapPolicy::new(start) };
        let policy = policy.into();
        let run = RunConfig { policy, ..RunConfig::default() }
            .with_poison(true)
            .with_limit(Duration::from_secs(30));
        // Groups of columns begin where kernels can begin to read.
        let in_columns = draw.chance(30) && spec.travelling_columns() >= 8 * groups;
        let groups = if in_columns { WaveGroups::Columns(groups) } else { WaveGroups::Fixed(groups) };
        let plan = LinearPlan::new(spec, tp_size, groups);
        let plan = plan.expect("what is drawn divides and is not 0");
        Self { seed, plan, main_grad, config: LinearConfig { weight_gradient, run } }
    }

    fn describe(&self) -> String {
        let LinearPlan { spec, tp_size, .. } = &self.plan;
        let LinearSpec { kind, activations, tokens, in_features, out_features, has_bias, dtype } = spec;
        let words = format!("{kind} {activations} {dtype}");
        let mut text = format!("{words} {tokens} tokens {in_features} to {out_features}");
        if *has_bias {
            text.push_str(" bias");
        }
        let _ = match (self.config.weight_gradient, self.main_grad) {
            (WeightGradient::Written, _) => Ok(()),
            (WeightGradient::Frozen, _) => write!(text, " frozen"),
            (WeightGradient::Deferred, None) => write!(text, " deferred"),
            (WeightGradient::Deferred, Some(dtype)) => write!(text, " deferred into {dtype}"),
            (WeightGradient::Accumulated(dtype), _) => write!(text, " into {dtype}"),
            (WeightGradient::Replaced(dtype), _) => write!(text, " over {dtype}"),
        };
        if *tp_size > 1 {
            let groups = match self.plan.column_sizes().len() {
                0 => WaveGroups::Fixed(self.plan.groups()),
                columns => WaveGroups::Columns(columns),
            };
            let _ = write!(text, " ranks={tp_size} groups={groups} {}", self.config.run.policy);
        }
        text
    }

    fn examine(&self, subject: &dyn Subject) -> Vec<SelfCheck> {
        let (name, seed) = (self.describe(), self.seed);
        let inputs = random_linear_inputs(&self.plan.spec, self.main_grad, seed, true);
        let outputs = match subject.run_linear(&self.plan, &inputs, &self.config) {
            Ok(outputs) => outputs,
            Err(error) => return vec![SelfCheck::failed(name, seed, error.to_string())],
        };
        let gradient = self.config.weight_gradient;
        let (sample, rounding) = (LinearSample::Whole, SumRounding::Partials);
        let check = match check_linear(&self.plan, &inputs, gradient, &outputs, sample, rounding) {
            Ok(share) => SelfCheck::of(name, seed, share, 1.0),
            Err(reason) => SelfCheck::failed(name, seed, reason.to_string()),
        };
        vec![check, self.compare_bits(subject, &inputs, &outputs)]
    }

    /// The same layer in one group and one thing after the other.
    fn compare_bits(
        &self,
        subject: &dyn Subject,
        inputs: &LinearInputs,
        outputs: &LinearOutputs,
    ) -> SelfCheck {
        let name = format!("same bits without overlap: {}", self.describe());
        let LinearPlan { spec, tp_size, .. } = self.plan;
        let plan = match LinearPlan::new(spec, tp_size, WaveGroups::Fixed(1)) {
            Ok(plan) => plan,
            Err(error) => return SelfCheck::failed(name, self.seed, error.to_string()),
        };
        let mut config = self.config.clone();
        config.run.policy = OverlapPolicy::SEQUENTIAL.into();
        let plain = match subject.run_linear(&plan, inputs, &config) {
            Ok(plain) => plain,
            Err(error) => return SelfCheck::failed(name, self.seed, error.to_string()),
        };
        let tensors =
            |of: &LinearOutputs| [Some(of.y.clone()), of.dx.clone(), of.dweight.clone(), of.dbias.clone()];
        let names = ["y", "dx", "dweight", "dbias"];
        let (mut count, mut different) = (0, Vec::new());
        for (name, (a, b)) in names.iter().zip(tensors(outputs).iter().zip(&tensors(&plain))) {
            let unlike = match (a, b) {
                (Some(a), Some(b)) => unlike_elements(a, b),
                (None, None) => 0,
                _ => 1,
            };
            count += unlike;
            if unlike > 0 {
                different.push(format!("{unlike} elements of {name}"));
            }
        }
        let check = SelfCheck::of(name, self.seed, count as f64, 0.0);
        if check.passed { check } else { SelfCheck { reason: Some(different.join(", ")), ..check } }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::CpuSubject;
    use crate::selftest::spoiled::{Spoiled, shift};
    use counterpoint_exec::HostData;

    fn failures(spoil: impl Fn(&mut LinearOutputs, usize)) -> Vec<SelfCheck> {
        let checks = selftest_linear(&Spoiled::linear(spoil), Extent::Quick, Share::ALL, 4, |_, _| ());
        assert_eq!(checks.len(), 32);
        checks.into_iter().filter(|check| !check.passed).collect()
    }

    #[test]
    fn the_cpu_passes_every_check() {
        let checks = selftest_linear(&CpuSubject, Extent::Quick, Share::ALL, 4, |_, _| ());
        let wrong: Vec<_> = checks.iter().filter(|check| !check.passed).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
    }

    #[test]
    fn one_wrong_element_of_any_tensor_is_found() {
        for spoil in [
            (|outputs, _| shift(&mut outputs.y, 4.0)) as fn(&mut LinearOutputs, usize),
            |outputs, _| outputs.dx.iter_mut().for_each(|tensor| shift(tensor, 4.0)),
            |outputs, _| outputs.dweight.iter_mut().for_each(|tensor| shift(tensor, 8.0)),
            |outputs, _| shift(&mut outputs.y, f64::NAN),
            |outputs, _| outputs.dx = None,
        ] {
            let found = failures(spoil);
            assert!(found.len() > 8, "{}", found.len());
        }
    }

    #[test]
    fn bits_that_change_are_found() {
        let found = failures(|outputs, run| {
            if run % 2 == 1
                && let HostData::F32(values) = outputs.y.data_mut()
            {
                values[0] = f32::from_bits(values[0].to_bits() ^ 1);
            }
        });
        assert!(found.len() > 2);
        assert!(found.iter().all(|check| check.name.starts_with("same bits")), "{found:#?}");
    }

    const MOVERS: &[Mover] = &Mover::ALL;

    #[test]
    fn cases_have_what_matters() {
        let case = |seed| LinearCase::random(seed, &[DType::Bf16, DType::F16], MOVERS, 4).describe();
        let cases: Vec<String> = (0..96).map(case).collect();
        for feature in [
            "column replicated",
            "column sequence-parallel",
            "row replicated",
            "row sequence-parallel",
            "bias",
            "frozen",
            "deferred",
            "deferred into",
            " into f32",
            " into bf16",
            "ranks=2",
            "ranks=3",
            "ranks=4",
            "groups=5",
            "sm-margin",
            "kernel-barrier",
            "copy-engine",
            "fused",
        ] {
            let count = cases.iter().filter(|case| case.contains(feature)).count();
            assert!(count >= 2, "{feature}: {count}");
        }
    }
}

//! Random layers of a mixture of experts.

use std::sync::Arc;
use std::time::Duration;

use counterpoint_exec::{
    ExpertInputs, ExpertOptions, ExpertOverlap, ExpertPass, ExpertPasses, HostTensor, WorldConfig,
    random_tensor,
};
use counterpoint_plan::{
    DType, ExpertCapacity, ExpertGroups, ExpertKind, ExpertSpec, RandomRouting, Routing,
};
use counterpoint_schedule::{Mover, OverlapPolicy, StartOrder, WeightGradient, WorkerShare};

use super::{Extent, SelfCheck, Share, Subject};
use crate::draw::Draw;
use crate::{LinearSample, check_experts};

/// A layer, its routing and how it is run.
struct ExpertCase {
    seed: u64,
    routing: Arc<Routing>,
    options: ExpertOptions,
    /// How both of its passes are run.
    pass: ExpertPass,
    inputs: ExpertInputs,
}

/// Random layers of experts on a device: dispatch and combine, skewed choices, experts without rows, ranks without tokens, dropped rows,
/// all fates of the gradients, groups, policies and margins, features that no tile divides, at most `most_ranks` ranks. Every element is
/// compared with f64; then the same layer runs in one group with no overlap, and must have the same bits.
pub fn selftest_experts(
    subject: &dyn Subject,
    extent: Extent,
    share: Share,
    most_ranks: usize,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Vec<SelfCheck> {
    let count = match extent {
        Extent::Full => 48,
        Extent::Quick => 8,
    };
    let mut checks = Vec::new();
    for seed in (0..count).filter(|seed| share.takes(*seed as usize)) {
        let case = ExpertCase::random(seed, subject.dtypes(), &subject.movers(), most_ranks);
        for check in case.examine(subject) {
            checked(&check, share.count(count as usize));
            checks.push(check);
        }
    }
    checks
}

impl ExpertCase {
    fn random(seed: u64, dtypes: &[DType], movers: &[Mover], most_ranks: usize) -> Self {
        let mut draw = Draw::new(seed ^ 0xe4e7);
        let ranks = draw.within(1, most_ranks);
        let experts = ranks * draw.within(1, 4);
        let choices = draw.within(1, experts.min(4));
        let tokens = match draw.within(1, 10) {
            1 => 0,
            // Experts with several tiles of rows.
            2 => draw.within(300, 700),
            _ => draw.within(1, 200),
        };
        let skew = draw.pick(&[0.0, 1.0, 4.0]);
        let routing = Routing::random(RandomRouting { experts, choices, ranks, tokens, skew, seed });
        let mut routing = routing.expect("what is drawn divides");
        if draw.chance(30) {
            routing = routing.within((ranks * tokens * choices).div_ceil(experts)).0;
        }
        let features = |draw: &mut Draw| match draw.within(1, 10) {
            1..=3 => draw.within(1, 60),
            4..=6 => 64 * draw.within(1, 4),
            _ => 8 * draw.within(1, 30),
        };
        let dtype = draw.pick(dtypes);
        let kind = draw.pick(&[ExpertKind::Dispatch, ExpertKind::Combine]);
        let (in_features, out_features) = (features(&mut draw), features(&mut draw));
        let spec = ExpertSpec { kind, in_features, out_features, dtype };
        let gradient = draw.pick(&[
            WeightGradient::Frozen,
            WeightGradient::Written,
            WeightGradient::Accumulated(dtype.accumulator()),
            WeightGradient::Accumulated(dtype),
        ]);
        let movers: Vec<Mover> = movers.iter().copied().filter(|mover| !mover.rules().in_kernels).collect();
        let workers =
            if draw.chance(30) { WorkerShare::Margin(draw.within(1, 4)) } else { WorkerShare::Common };
        let (start, mover) = (draw.pick(&StartOrder::ALL), draw.pick(&movers));
        let policy = OverlapPolicy { workers, mover, ..OverlapPolicy::new(start) };
        let groups = ExpertGroups { count: draw.within(1, 4), growth: draw.pick(&[100, 50, 200]) };
        let pass = ExpertPass { policy, groups };
        let options = ExpertOptions {
            spec,
            experts,
            gradient,
            capacity: ExpertCapacity::default(),
            overlap: ExpertOverlap::Passes(ExpertPasses { forward: pass, backward: pass }),
        };
        let inputs = inputs(&spec, &routing, gradient, seed);
        Self { seed, routing: Arc::new(routing), options, pass, inputs }
    }

    fn describe(&self) -> String {
        let ExpertOptions { spec, experts, gradient, .. } = self.options;
        let ExpertSpec { kind, in_features, out_features, dtype } = spec;
        let (rows, ranks) = (self.routing.rows(), self.routing.ranks());
        let empty = rows.iter().filter(|rows| **rows == 0).count();
        let rows: usize = rows.iter().sum();
        let gradient = match gradient {
            WeightGradient::Accumulated(dtype) => format!(" into {dtype}"),
            WeightGradient::Frozen => " frozen".to_owned(),
            WeightGradient::Written | WeightGradient::Replaced(_) | WeightGradient::Deferred => String::new(),
        };
        let ExpertPass { policy, groups } = self.pass;
        format!(
            "experts {kind} {dtype} {rows} rows of {experts} experts ({empty} empty) {in_features} to {out_features}{gradient} \
             ranks={ranks} groups={groups} {policy}"
        )
    }

    fn examine(&self, subject: &dyn Subject) -> Vec<SelfCheck> {
        let config =
            || WorldConfig { limit: Duration::from_secs(30), poison: true, ..WorldConfig::default() };
        let (name, seed, inputs) = (self.describe(), self.seed, &self.inputs);
        let run = |options| subject.run_experts(options, &self.routing, inputs, config());
        let outputs = match run(self.options) {
            Ok(outputs) => outputs,
            Err(error) => return vec![SelfCheck::failed(name, seed, error.to_string())],
        };
        let bits = format!("same bits without overlap: {name}");
        let spec = &self.options.spec;
        let check = match check_experts(spec, &self.routing, inputs, &outputs, LinearSample::Whole) {
            Ok(()) => SelfCheck::of(name, seed, 0.0, 1.0),
            Err(error) => SelfCheck::failed(name, seed, error.to_string()),
        };
        let alone = ExpertPass { policy: OverlapPolicy::SEQUENTIAL, groups: ExpertGroups::default() };
        let alone = ExpertOverlap::Passes(ExpertPasses { forward: alone, backward: alone });
        let plain = ExpertOptions { overlap: alone, ..self.options };
        let bits = match run(plain) {
            Ok(plain) if plain == outputs => SelfCheck::of(bits, seed, 0.0, 0.0),
            Ok(_) => SelfCheck::failed(bits, seed, "other bits".to_owned()),
            Err(error) => SelfCheck::failed(bits, seed, error.to_string()),
        };
        vec![check, bits]
    }
}

fn inputs(spec: &ExpertSpec, routing: &Routing, gradient: WeightGradient, seed: u64) -> ExpertInputs {
    let ExpertSpec { kind, in_features, out_features, dtype } = *spec;
    let rows = routing.rows();
    let tensors = |columns: usize, are_rows: bool, stream: u64| -> Vec<HostTensor> {
        let tensor = |rank: usize| {
            let experts = routing.experts_of(rank);
            let count = match are_rows {
                true => rows[experts.start..experts.end].iter().sum(),
                false => routing.tokens(rank),
            };
            random_tensor(vec![count, columns], dtype, 1000 * seed + 100 * stream + rank as u64)
        };
        (0..routing.ranks()).map(tensor).collect()
    };
    let weights = |dtype, stream: u64| {
        random_tensor(vec![routing.experts() * out_features, in_features], dtype, 1000 * seed + 100 * stream)
    };
    ExpertInputs {
        x: tensors(in_features, kind == ExpertKind::Combine, 1),
        weight: weights(dtype, 2),
        dy: Some(tensors(out_features, kind == ExpertKind::Dispatch, 3)),
        main_grad: match gradient {
            WeightGradient::Accumulated(dtype) => Some(weights(dtype, 4)),
            _ => None,
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::selftest::CpuSubject;

    #[test]
    fn the_cpu_passes_every_check() {
        let checks = selftest_experts(&CpuSubject, Extent::Full, Share::ALL, 4, |_, _| ());
        assert_eq!(checks.len(), 96);
        let wrong: Vec<_> = checks.iter().filter(|check| !check.passed).collect();
        assert!(wrong.is_empty(), "{wrong:#?}");
        let count = |words: &str| checks.iter().filter(|check| check.name.contains(words)).count();
        for words in [
            "dispatch",
            "combine",
            "(0 empty)",
            "(1 empty)",
            " 0 rows",
            "frozen",
            "into",
            "signals",
            "sm-margin",
        ] {
            assert!(count(words) > 0, "{words}");
        }
    }
}

//! The attention problems of the selftest: all head sizes and types, the edges of kernels, and random ones by seed.

use std::fmt::Write;
use std::time::Duration;

use counterpoint_choose::{DispatchAlgorithm, PassStages, PlanConfig, QueryExchange, StageCount};
use counterpoint_exec::{AttentionInputs, Pass, RunConfig, random_inputs};
use counterpoint_mask::{Mask, MaskType};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, KEY_BLOCK};
use counterpoint_schedule::{OverlapPolicy, StartOrder, WorkerShare};

use super::random_mask;
use crate::draw::Draw;

/// How much a selftest examines.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Extent {
    /// Everything, hundreds of masks.
    Full,
    /// A small set that ends soon even under a sanitizer.
    Quick,
}

/// One attention problem and how it is run.
#[derive(Clone, Debug)]
pub struct Case {
    /// Says what is special about it.
    pub name: String,
    /// Of the inputs and, where the case is random, of everything.
    pub seed: u64,
    /// Who sees whom.
    pub mask: Mask,
    /// Heads, sizes, type, options.
    pub spec: AttentionSpec,
    /// Ranks, chunks, stages.
    pub plan: PlanConfig,
    /// Policy and determinism.
    pub run: RunConfig,
    /// With gradients or without.
    pub pass: Pass,
}

/// Head sizes that kernels are made for, and some that must be padded to one.
const HEAD_DIMS: [usize; 8] = [64, 128, 96, 192, 256, 40, 72, 8];
const HEADS: [(usize, usize); 7] = [(1, 1), (2, 2), (4, 1), (4, 2), (6, 2), (8, 1), (8, 8)];
/// Unmasked pairs times heads times `head_dim` of a random case: what the dense reference does in a second or so.
const WORK: usize = 24 << 20;

impl Case {
    /// All cases of an extent, for a device that takes these types. The same on every machine.
    pub fn all(extent: Extent, dtypes: &[DType]) -> Vec<Case> {
        let mut cases = Vec::new();
        sizes(extent, dtypes, &mut cases);
        corners(extent, dtypes, &mut cases);
        statistics(extent, dtypes, &mut cases);
        if extent == Extent::Full {
            many_tiles(dtypes, &mut cases);
        }
        hosted(extent, dtypes, &mut cases);
        staged(extent, dtypes, &mut cases);
        let count = match extent {
            Extent::Full => 240,
            Extent::Quick => 6,
        };
        cases.extend((0..count).map(|seed| Case::random(1000 + seed, dtypes)));
        cases
    }

    /// A case with everything drawn from the seed.
    pub fn random(seed: u64, dtypes: &[DType]) -> Self {
        let mut draw = Draw::new(seed);
        let dtype = draw.pick(dtypes);
        let (heads_q, heads_kv) = draw.pick(&HEADS);
        // The sizes that most models have are drawn most often.
        let head_dim = if draw.chance(60) { draw.pick(&[64, 128]) } else { draw.pick(&HEAD_DIMS) };
        let softcap = if draw.chance(20) { draw.pick(&[1.5, 30.0]) } else { 0.0 };
        let seqlen_sink = if draw.chance(20) { draw.within(1, 3) } else { 0 };
        let longest = ((WORK / (heads_q * head_dim)) as f64).sqrt() as usize;
        let longest = longest.clamp(64, 1400);
        // A few tiles most often, sometimes a handful of rows.
        let length = |draw: &mut Draw| {
            if draw.chance(30) { draw.sized(1, longest) } else { draw.within(longest / 4, longest) }
        };
        let seqlen_q = length(&mut draw);
        let kind = draw.below(10);
        let mask = match kind {
            0 => random_mask::documents(seqlen_q, draw.within(1, 12), &mut draw),
            1 => {
                let width = draw.sized(1, seqlen_q);
                random_mask::window(seqlen_q, width)
            }
            2..=5 => random_mask::grid(seqlen_q, seqlen_q, 8, &mut draw),
            _ => {
                let seqlen_k = length(&mut draw);
                let pieces = draw.pick(&[2, 8, 20]);
                random_mask::grid(seqlen_q, seqlen_k, pieces, &mut draw)
            }
        };
        let scale = match draw.below(12) {
            0 => -1.0,
            1 => 12.0,
            _ => 1.0,
        } / (head_dim as f64).sqrt();
        let spec = AttentionSpec {
            scale,
            softcap,
            seqlen_sink,
            ..AttentionSpec::new(heads_q, heads_kv, head_dim, dtype)
        };
        let cp_size = if draw.chance(50) { 1 } else { draw.within(2, 4) };
        let dispatch = draw.pick(&[
            DispatchAlgorithm::Affinity,
            DispatchAlgorithm::MinHeap,
            DispatchAlgorithm::Sequential,
            DispatchAlgorithm::Zigzag,
        ]);
        let mut count =
            || if draw.chance(40) { StageCount::Auto } else { StageCount::Fixed(draw.within(0, 3)) };
        let stages = PassStages { forward: count(), backward: count() };
        let chunk_size = Some(draw.sized(8, 128));
        let start = draw.pick(&StartOrder::ALL);
        let workers =
            if draw.chance(20) { WorkerShare::Margin(draw.within(1, 4)) } else { WorkerShare::Common };
        let deterministic = draw.chance(30);
        let gradient_shares = draw.pick(&[GradientShares::Accumulators, GradientShares::Elements]);
        let (max_logits, dlse) = (draw.chance(30), draw.chance(30));
        let spec = AttentionSpec { gradient_shares, max_logits, dlse, ..spec };
        Case {
            name: "random".to_owned(),
            seed,
            mask,
            spec,
            plan: PlanConfig { chunk_size, dispatch, stages, ..PlanConfig::new(cp_size) },
            run: RunConfig {
                policy: OverlapPolicy { workers, ..OverlapPolicy::new(start) }.into(),
                deterministic,
                ..run_config()
            },
            pass: if draw.chance(80) { Pass::ForwardBackward } else { Pass::Forward },
        }
    }

    fn single_rank(name: &str, seed: u64, mask: Mask, spec: AttentionSpec) -> Self {
        Case {
            name: name.to_owned(),
            seed,
            mask,
            spec,
            plan: PlanConfig::new(1),
            run: run_config(),
            pass: Pass::ForwardBackward,
        }
    }

    /// Random normal inputs.
    pub fn inputs(&self) -> AttentionInputs {
        random_inputs(&self.mask, &self.spec, self.seed, self.pass)
    }

    /// What it is, for people: name, sizes and whatever is not the default.
    pub fn describe(&self) -> String {
        let spec = &self.spec;
        let dtype = spec.dtype.to_string();
        let dims = match (spec.head_dim, spec.head_dim_v) {
            (dim, dim_v) if dim == dim_v => format!("hd{dim}"),
            (dim, dim_v) => format!("hd{dim}/{dim_v}"),
        };
        let mut text = format!(
            "{} {dtype} {dims} {}:{} {}x{}",
            self.name,
            spec.heads_q,
            spec.heads_kv,
            self.mask.seqlen_q(),
            self.mask.seqlen_k()
        );
        let mut add = |words: std::fmt::Arguments<'_>| {
            let _ = write!(text, " {words}");
        };
        if spec.softcap > 0.0 {
            add(format_args!("softcap={}", spec.softcap));
        }
        if spec.seqlen_sink > 0 {
            add(format_args!("sink={}", spec.seqlen_sink));
        }
        if spec.max_logits {
            add(format_args!("max-logits"));
        }
        if spec.dlse {
            add(format_args!("dlse"));
        }
        let usual = 1.0 / (spec.head_dim as f64).sqrt();
        if spec.scale != usual {
            add(format_args!("scale={:.3}", spec.scale));
        }
        let ranks = self.plan.topology.world_size;
        if ranks > 1 {
            add(format_args!("ranks={ranks}"));
            if self.plan.stages != PassStages::AUTO {
                add(format_args!("stages={}", self.plan.stages));
            }
            add(format_args!("{}", self.run.policy));
        }
        if self.run.deterministic {
            add(format_args!("deterministic"));
        }
        if self.pass == Pass::Forward {
            add(format_args!("forward"));
        }
        text
    }
}

/// A run with its outputs poisoned. No case takes long, so neither does the wait for one that hangs.
fn run_config() -> RunConfig {
    RunConfig::default().with_poison(true).with_limit(Duration::from_secs(30))
}

/// Every type with every head size: each is a kernel of its own.
fn sizes(extent: Extent, dtypes: &[DType], cases: &mut Vec<Case>) {
    let (rows, columns, dims) = match extent {
        Extent::Full => (290, 330, &HEAD_DIMS[..]),
        Extent::Quick => (150, 170, &[64, 128, 40][..]),
    };
    for &dtype in dtypes {
        for (at, &head_dim) in dims.iter().enumerate() {
            let seed = cases.len() as u64;
            let (heads_q, heads_kv) = [(2, 2), (4, 2), (4, 1)][at % 3];
            let mask = random_mask::grid(rows, columns, 5, &mut Draw::new(seed));
            cases.push(Case::single_rank(
                "size",
                seed,
                mask,
                AttentionSpec::new(heads_q, heads_kv, head_dim, dtype),
            ));
            if extent == Extent::Full {
                let causal = random_mask::single(rows, rows, MaskType::Causal);
                let mut causal = Case::single_rank(
                    "size",
                    seed,
                    causal,
                    AttentionSpec::new(heads_q, heads_kv, head_dim, dtype),
                );
                causal.run.deterministic = true;
                cases.push(causal);
            }
        }
        if extent == Extent::Full {
            let seed = cases.len() as u64;
            for (head_dim, head_dim_v) in [(192, 128), (64, 128), (128, 64)] {
                let mask = random_mask::grid(rows, columns, 5, &mut Draw::new(seed));
                let spec = AttentionSpec { head_dim_v, ..AttentionSpec::new(4, 2, head_dim, dtype) };
                cases.push(Case::single_rank("value size", seed, mask, spec));
            }
        }
    }
}

/// The largest logits and the gradient of lse: every size of heads, heads that share a tile or not, rows that see nothing, a sink, a
/// softcap, a scale below zero, one rank and several, stages with a state and without.
fn statistics(extent: Extent, dtypes: &[DType], cases: &mut Vec<Case>) {
    let Some(&dtype) = dtypes.first() else { return };
    let head_dims: &[usize] = match extent {
        Extent::Quick => &[64, 128],
        Extent::Full => &[40, 64, 96, 128, 192, 256],
    };
    for (at, &head_dim) in head_dims.iter().enumerate() {
        for (which, heads) in [(2, 2), (4, 2), (8, 2), (8, 1)].into_iter().enumerate() {
            let seed = 900 + cases.len() as u64;
            let mask = match which {
                // Long enough that few tiles are split along their keys.
                0 => random_mask::single(130, 4200, MaskType::Full),
                1 => random_mask::grid(333, 410, 7, &mut Draw::new(seed)),
                2 => random_mask::documents(900, 7, &mut Draw::new(seed)),
                _ => random_mask::single(333, 200, MaskType::Causal),
            };
            let usual = AttentionSpec::new(heads.0, heads.1, head_dim, dtype);
            let spec = match (at + which) % 4 {
                0 => AttentionSpec { softcap: 2.0, ..usual },
                1 => AttentionSpec { seqlen_sink: 2, ..usual },
                2 => AttentionSpec { scale: -0.3, ..usual },
                _ => usual,
            };
            let spec = AttentionSpec { max_logits: true, dlse: true, ..spec };
            let mut case = Case::single_rank("statistics", seed, mask, spec);
            case.run.deterministic = which == 2 && at % 2 == 0;
            cases.push(case.clone());
            if case.mask.seqlen_q() == case.mask.seqlen_k() {
                case.plan = PlanConfig {
                    chunk_size: Some(64),
                    stages: StageCount::Fixed(at % 3).into(),
                    ..PlanConfig::new(2 + at % 2)
                };
                cases.push(case);
            }
        }
    }
}

/// What kernels get wrong at their edges.
fn corners(extent: Extent, dtypes: &[DType], cases: &mut Vec<Case>) {
    let Some(&dtype) = dtypes.first() else { return };
    let base = 500;
    let mut add = |name: &str, mask: Mask, spec: AttentionSpec| {
        let seed = base + cases.len() as u64;
        cases.push(Case::single_rank(name, seed, mask, spec));
    };
    let usual = AttentionSpec::new(2, 1, 64, dtype);
    let wide = AttentionSpec::new(4, 2, 128, dtype);
    for (name, mask_type) in [
        ("full", MaskType::Full),
        ("causal", MaskType::Causal),
        ("inv_causal", MaskType::InvCausal),
        ("bi_causal", MaskType::BiCausal),
    ] {
        add(name, random_mask::single(200, 333, mask_type), usual);
        // Taller than wide: early rows of a causal slice see nothing, a band is empty.
        add(name, random_mask::single(333, 200, mask_type), usual);
    }
    add("nothing to see", random_mask::nothing(150, 140), usual);
    let sink = AttentionSpec { seqlen_sink: 2, ..usual };
    add("nothing but a sink", random_mask::nothing(150, 140), sink);
    add("sink", random_mask::grid(150, 160, 6, &mut Draw::new(1)), sink);
    add(
        "softcap",
        random_mask::grid(150, 160, 6, &mut Draw::new(2)),
        AttentionSpec { softcap: 2.0, ..usual },
    );
    add("one pair", random_mask::single(1, 1, MaskType::Full), usual);
    add("one row", random_mask::single(1, 700, MaskType::Full), wide);
    add("one column", random_mask::single(300, 1, MaskType::Full), wide);
    if extent == Extent::Quick {
        return;
    }
    add("scale 0", random_mask::single(150, 160, MaskType::Causal), AttentionSpec { scale: 0.0, ..usual });
    add("one row", random_mask::single(1, 4099, MaskType::Causal), AttentionSpec::new(8, 1, 128, dtype));
    add("many slices", random_mask::grid(300, 300, 60, &mut Draw::new(3)), wide);
    add("tiny documents", random_mask::documents(400, 90, &mut Draw::new(4)), wide);
    add("exact tiles", random_mask::single(256, 256, MaskType::Causal), wide);
    add("one past a tile", random_mask::single(257, 129, MaskType::Full), wide);
    add("one before a tile", random_mask::single(127, 255, MaskType::Full), wide);
    add(
        "three query heads a key head",
        random_mask::grid(200, 210, 4, &mut Draw::new(5)),
        AttentionSpec::new(6, 2, 128, dtype),
    );
    add(
        "sixteen query heads a key head",
        random_mask::documents(150, 5, &mut Draw::new(6)),
        AttentionSpec::new(16, 1, 64, dtype),
    );
    add("window of one", random_mask::window(500, 1), usual);
    add("window past a tile", random_mask::window(700, 130), wide);
}

/// The case of rows with some keys for which their queries travel, while others of their keys travel to them.
const IN_PART: &str = "queries travel to some keys";

/// Rows that see everything, whose queries travel to the keys: all of the sequence or its end, with a sink or without.
fn hosted(extent: Extent, dtypes: &[DType], cases: &mut Vec<Case>) {
    let masks = [
        ("few queries travel", random_mask::single(40, 900, MaskType::Full)),
        ("a last block travels", random_mask::with_last_block(600, 24, MaskType::Full, &mut Draw::new(8))),
        ("a last block travels", random_mask::with_last_block(777, 9, MaskType::Causal, &mut Draw::new(9))),
        (IN_PART, random_mask::grid(900, 900, 9, &mut Draw::new(2))),
    ];
    for (at, &dtype) in dtypes.iter().enumerate() {
        for (which, (name, mask)) in masks.iter().enumerate() {
            let (head_dim, seqlen_sink) = [(64, 0), (128, 2), (40, 1)][(at + which) % 3];
            let usual = AttentionSpec::new(4, 2, head_dim, dtype);
            let spec = AttentionSpec { seqlen_sink, max_logits: true, dlse: true, ..usual };
            let mut case = Case::single_rank(name, 800 + which as u64, mask.clone(), spec);
            case.plan = PlanConfig {
                chunk_size: Some(64),
                stages: StageCount::Fixed(2).into(),
                query_exchange: QueryExchange::FewestBytes,
                ..PlanConfig::new((2 + which).min(4))
            };
            case.run.policy = OverlapPolicy::new(StartOrder::ALL[which % StartOrder::ALL.len()]).into();
            cases.push(case.clone());
            if extent == Extent::Full {
                case.run.deterministic = true;
                case.spec = AttentionSpec { softcap: 3.0, ..case.spec };
                cases.push(case);
            }
        }
    }
}

/// Ranks in deterministic mode, whose bits are compared between numbers of stages: rows that chunks and blocks of keys divide, which
/// may arrive while an only stage runs, and rows that nothing divides.
fn staged(extent: Extent, dtypes: &[DType], cases: &mut Vec<Case>) {
    let dtypes = if extent == Extent::Quick { &dtypes[..dtypes.len().min(1)] } else { dtypes };
    for (at, &dtype) in dtypes.iter().enumerate() {
        let masks = [
            random_mask::documents(6 * KEY_BLOCK, 5, &mut Draw::new(10)),
            random_mask::single(6 * KEY_BLOCK, 6 * KEY_BLOCK, MaskType::Causal),
            random_mask::grid(611, 611, 6, &mut Draw::new(11)),
        ];
        for (which, mask) in masks.into_iter().enumerate() {
            let head_dim = [64, 128, 40][(at + which) % 3];
            let seed = 850 + which as u64;
            let mut case =
                Case::single_rank("ranks in order", seed, mask, AttentionSpec::new(4, 2, head_dim, dtype));
            case.plan = PlanConfig {
                chunk_size: Some(if which < 2 { KEY_BLOCK } else { 97 }),
                stages: StageCount::Fixed(0).into(),
                ..PlanConfig::new(3)
            };
            case.run.deterministic = true;
            cases.push(case);
        }
    }
}

/// More tiles than a large GPU has multiprocessors, so that persistent kernels take a second one and a third.
fn many_tiles(dtypes: &[DType], cases: &mut Vec<Case>) {
    let Some(&dtype) = dtypes.first() else { return };
    let long = [
        ("many tiles", random_mask::window(6000, 40), AttentionSpec::new(16, 2, 64, dtype)),
        (
            "many tiles",
            random_mask::documents(5000, 120, &mut Draw::new(7)),
            AttentionSpec::new(16, 4, 128, dtype),
        ),
        (
            "few tiles, many keys",
            random_mask::single(70, 9000, MaskType::Full),
            AttentionSpec::new(4, 1, 128, dtype),
        ),
    ];
    for (at, (name, mask, spec)) in long.into_iter().enumerate() {
        let mut case = Case::single_rank(name, 900 + at as u64, mask, spec);
        cases.push(case.clone());
        case.run.deterministic = true;
        cases.push(case);
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_choose::plan_mask;
    use counterpoint_plan::RankPlan;

    use super::*;

    #[test]
    fn rows_are_hosted_in_part() {
        let mut cases = Vec::new();
        hosted(Extent::Full, &[DType::Bf16, DType::F16], &mut cases);
        let found = cases.iter().filter(|case| case.name == IN_PART);
        for case in found.clone() {
            let plan = plan_mask(&case.mask, &case.spec, &case.plan).unwrap();
            assert!(plan.ranks.iter().any(RankPlan::is_hosted_in_part), "{:?}", case.spec);
        }
        assert_eq!(found.count(), 4);
    }
}

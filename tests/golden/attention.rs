//! Attention: random masks and plans, their Programs, and results of some of them.

use counterpoint::choose::{
    DispatchAlgorithm, PlanConfig, QueryExchange, StageCount, plan_cross_attention, plan_mask,
};
use counterpoint::exec::{AttentionInputs, AttentionOutputs, RunConfig, run_attention};
use counterpoint::mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint::plan::{AttentionSpec, DType, GradientShares, KEY_BLOCK, Plan, Topology};
use counterpoint::schedule::{
    GradientReduction, KeyBlocks, OverlapPolicy, lower_attention_backward, lower_attention_forward,
};

use crate::case::{Case, DTYPES, POLICIES};
use crate::draw::Draw;
use crate::plan_text;
use crate::tensor::{Elements, bits, tensor};

/// Cases of attention.
pub(crate) const COUNT: usize = 180;
/// Of how many cases one is run.
const RUN_EVERY: usize = 4;

struct Attention {
    mask: Mask,
    spec: AttentionSpec,
    config: PlanConfig,
    policy: OverlapPolicy,
    deterministic: bool,
    /// Queries and keys dispatched each by a solve of its own.
    cross: bool,
    text: String,
}

pub(crate) fn case(index: usize) -> Case {
    let problem = Attention::random(index);
    let plan = problem.plan();
    let mut case = Case::new(format!("attention {index:03}"), problem.text.clone());
    case.part("plan", plan_text::plan(&plan));
    let (blocks, reduction) = if problem.deterministic {
        (KeyBlocks::Aligned, GradientReduction::Deterministic)
    } else {
        (KeyBlocks::Unaligned, GradientReduction::PerStage)
    };
    let (spec, policy) = (&problem.spec, problem.policy);
    for rank in 0..plan.cp_size() {
        let forward = lower_attention_forward(&plan, rank, spec, policy, blocks);
        case.part(&format!("forward {rank}"), plan_text::program(&forward));
        let backward = lower_attention_backward(&plan, rank, spec, policy, reduction);
        case.part(&format!("backward {rank}"), plan_text::program(&backward));
    }
    if index.is_multiple_of(RUN_EVERY) {
        case.outputs_of_this_machine(|margin| problem.run(&plan, index as u64, margin));
    }
    case
}

impl Attention {
    fn random(index: usize) -> Self {
        let mut draw = Draw::new(0xa77e_0000 + index as u64);
        let draw = &mut draw;
        // Those that run stay small.
        let longest = if index.is_multiple_of(RUN_EVERY) { 420 } else { 1600 };
        let world_size = draw.pick(&[1, 2, 2, 3, 4, 4, 5, 8]);
        // All work in one launch, whose keys arrive while it computes, is to be had where ranks own whole blocks of keys.
        let at_once = draw.percent(25);
        let seqlen_q = match at_once {
            true => KEY_BLOCK * world_size * draw.within(1, (longest / KEY_BLOCK / world_size).max(1)),
            false => draw.within(longest / 4, longest),
        };
        let (kind, mask) = mask(seqlen_q, (!at_once).then_some(longest), draw);
        let cross = !at_once && draw.percent(10);
        let heads = draw.pick(&[(1, 1), (2, 2), (4, 2), (8, 2)]);
        let (head_dim, head_dim_v) = draw.pick(&[(64, 64), (128, 128), (16, 16), (16, 24)]);
        let dtype = DTYPES[index / RUN_EVERY % DTYPES.len()];
        let spec = AttentionSpec {
            heads_q: heads.0,
            heads_kv: heads.1,
            head_dim,
            head_dim_v,
            dtype,
            scale: 0.125,
            softcap: if draw.percent(20) { 8.0 } else { 0.0 },
            seqlen_sink: if draw.percent(20) { draw.within(1, 3) } else { 0 },
            gradient_shares: if draw.percent(70) {
                GradientShares::Accumulators
            } else {
                GradientShares::Elements
            },
            max_logits: false,
            dlse: false,
        };
        let nodes = if !at_once && draw.percent(25) { draw.within(1, world_size) } else { 1 };
        let topology = Topology { world_size, ranks_per_node: world_size.div_ceil(nodes) };
        // Two thirds leave nothing to choose by predicted times, so that they hold whatever becomes of predictions.
        let given = at_once || !draw.percent(40);
        let (dispatch, stages, query_exchange) = if given {
            (
                draw.pick(&[
                    DispatchAlgorithm::MinHeap,
                    DispatchAlgorithm::Sequential,
                    DispatchAlgorithm::Zigzag,
                ]),
                StageCount::Fixed(if at_once { 0 } else { draw.within(1, 5) }),
                draw.pick(&[QueryExchange::Never, QueryExchange::Never, QueryExchange::FewestBytes]),
            )
        } else {
            (
                DispatchAlgorithm::Affinity,
                StageCount::Auto,
                draw.pick(&[QueryExchange::Never, QueryExchange::Auto]),
            )
        };
        let chunk_size = if at_once { KEY_BLOCK } else { draw.pick(&[16, 33, 64, 128]) };
        let config = PlanConfig {
            chunk_size: Some(chunk_size),
            dispatch,
            stages: stages.into(),
            query_exchange,
            topology,
            ..PlanConfig::new(world_size)
        };
        let policy_text = draw.pick(&POLICIES);
        let deterministic = draw.percent(40);
        let text = format!(
            "{kind} {seqlen_q}x{}{}, {world_size} ranks on {nodes} nodes, chunks of {}, {}, {} stages, queries {}, \
             policy {policy_text}, {} {}:{} heads of {head_dim}/{head_dim_v}{}{}{}{}",
            mask.seqlen_k(),
            if cross { " cross" } else { "" },
            chunk_size,
            match dispatch {
                DispatchAlgorithm::Affinity => "affinity",
                DispatchAlgorithm::MinHeap => "min-heap",
                DispatchAlgorithm::Sequential => "sequential",
                DispatchAlgorithm::Zigzag => "zigzag",
            },
            match stages {
                StageCount::Auto => "chosen".to_owned(),
                StageCount::Fixed(stages) => stages.to_string(),
            },
            match query_exchange {
                QueryExchange::Auto => "chosen",
                QueryExchange::FewestBytes => "by bytes",
                QueryExchange::Never => "stay",
            },
            crate::case::dtype_name(dtype),
            heads.0,
            heads.1,
            if spec.softcap > 0.0 { ", softcap" } else { "" },
            if spec.seqlen_sink > 0 { ", sink" } else { "" },
            if spec.gradient_shares == GradientShares::Elements { ", rounded partial gradients" } else { "" },
            if deterministic { ", deterministic" } else { "" },
        );
        Self { mask, spec, config, policy: policy_text.parse().unwrap(), deterministic, cross, text }
    }

    fn plan(&self) -> Plan {
        let Self { mask, spec, config, .. } = self;
        let plan = match self.cross {
            true => plan_cross_attention(mask, spec, config),
            false => plan_mask(mask, spec, config),
        };
        plan.unwrap().over_nodes(&config.topology)
    }

    /// Bits of all results.
    fn run(&self, plan: &Plan, seed: u64, margin: usize) -> String {
        let (mask, spec) = (&self.mask, &self.spec);
        let make = |shape: &[usize], dtype: DType, stream: u64| {
            tensor(shape, dtype, Elements::Real, seed * 16 + stream)
        };
        let (q_rows, k_rows) = (mask.seqlen_q(), mask.seqlen_k());
        let sink_shape = [spec.seqlen_sink, spec.heads_q];
        let inputs = AttentionInputs {
            q: make(&[q_rows, spec.heads_q, spec.head_dim], spec.dtype, 0),
            k: make(&[k_rows, spec.heads_kv, spec.head_dim], spec.dtype, 1),
            v: make(&[k_rows, spec.heads_kv, spec.head_dim_v], spec.dtype, 2),
            sink: (spec.seqlen_sink > 0).then(|| make(&sink_shape, spec.dtype.accumulator(), 3)),
            dout: Some(make(&[q_rows, spec.heads_q, spec.head_dim_v], spec.dtype, 4)),
            dlse: None,
        };
        let policy = crate::case::on_cpu(self.policy, margin).into();
        let config = RunConfig { policy, deterministic: self.deterministic, ..RunConfig::default() };
        let AttentionOutputs { out, lse, dq, dk, dv, dsink, .. } =
            run_attention(plan, spec, &inputs, &config).unwrap().outputs;
        let all =
            [("out", Some(out)), ("lse", Some(lse)), ("dq", dq), ("dk", dk), ("dv", dv), ("dsink", dsink)];
        all.iter().filter_map(|(name, tensor)| tensor.as_ref().map(|tensor| bits(name, tensor))).collect()
    }
}

/// A random mask and what kind it is. Keys are as many as queries unless another length, up to `longest`, is allowed.
fn mask(seqlen_q: usize, longest: Option<usize>, draw: &mut Draw) -> (&'static str, Mask) {
    const TYPES: [MaskType; 4] = [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];
    match draw.within(0, 5) {
        0 => {
            let mask_type = draw.pick(&[MaskType::Full, MaskType::Causal]);
            let all = Range::new(0, seqlen_q);
            let slices = vec![AttnSlice::new(all, all, mask_type)];
            ("one document", Mask::new(seqlen_q, seqlen_q, slices).unwrap())
        }
        1 => {
            let cuts = draw.cuts(seqlen_q, 8);
            let documents = cuts.windows(2).map(|ends| {
                let rows = Range::new(ends[0], ends[1]);
                AttnSlice::new(rows, rows, MaskType::Causal)
            });
            ("documents", Mask::new(seqlen_q, seqlen_q, documents.collect()).unwrap())
        }
        2 | 3 => {
            // Some rows see everything, the others a window.
            let (mut slices, mut row) = (Vec::new(), 0);
            while row < seqlen_q {
                let wide = draw.percent(30);
                let rows = if wide { draw.within(1, 6) } else { draw.within(10, 80) };
                let q = Range::new(row, (row + rows).min(seqlen_q));
                let start = if wide { 0 } else { q.start.saturating_sub(draw.within(0, 60)) };
                let end = if wide { seqlen_q } else { q.end };
                slices.push(AttnSlice::new(q, Range::new(start, end), MaskType::Full));
                row = q.end;
            }
            ("wide rows", Mask::new(seqlen_q, seqlen_q, slices).unwrap())
        }
        _ => {
            let other = longest.filter(|_| draw.percent(50));
            let seqlen_k = other.map_or(seqlen_q, |longest| draw.within(longest / 4, longest));
            let mut slices = Vec::new();
            let (pieces_q, pieces_k) = (draw.within(1, 7), draw.within(1, 7));
            for rows in draw.cuts(seqlen_q, pieces_q).windows(2) {
                for columns in draw.cuts(seqlen_k, pieces_k).windows(2) {
                    if draw.percent(70) {
                        let (q, k) = (Range::new(rows[0], rows[1]), Range::new(columns[0], columns[1]));
                        slices.push(AttnSlice::new(q, k, draw.pick(&TYPES)));
                    }
                }
            }
            ("grid", Mask::new(seqlen_q, seqlen_k, slices).unwrap())
        }
    }
}

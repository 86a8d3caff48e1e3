use std::fmt;

use counterpoint_mask::{AttnSlice, Band, Mask, Range};
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    AttentionSpec, CostModel, DType, Dispatch, DispatchAlgorithm, GradientShares, GroupPart, HostedWork,
    Link, OwnedSplit, Plan, PlanConfig, QueryExchange, RankPlan, RemoteSplit, StageCount, StagePlan,
    TileCost, Topology, TwoLevelExchange, TwoLevelPart,
};

/// A SHA-256 of everything that a plan depends on, or of a plan itself ([`Plan::fingerprint`]): content, never object
/// identity. Equal content has equal fingerprints in every process and on every machine, so ranks that plan apart can
/// compare theirs and find out that they disagree before they wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of what [`Plan::new`] would plan.
    pub fn of(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        if mask.seqlen_q() != mask.seqlen_k() {
            // One plan, so one fingerprint.
            return Self::of_cross_attention(mask, spec, config);
        }
        Self::of_inputs(Task::SelfAttention, mask, spec, config)
    }

    /// The fingerprint of what [`Plan::cross_attention`] would plan.
    pub fn of_cross_attention(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        Self::of_inputs(Task::CrossAttention, mask, spec, config)
    }

    /// The fingerprint of what [`Plan::for_mask_on`] would plan on `base`. Of that plan it sees the dispatch, and of
    /// `config` all but the chunk size and the algorithm, which are not looked at there.
    pub fn of_mask_on(base: &Plan, mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        Self::of_inputs(Task::OnDispatch(&base.q_dispatch, &base.k_dispatch), mask, spec, config)
    }

    fn of_inputs(task: Task<'_>, mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        let mut words = Words::default();
        let PlanConfig { chunk_size, dispatch, stages, query_exchange, topology, cost } = *config;
        match task {
            Task::SelfAttention | Task::CrossAttention => {
                words.word(if matches!(task, Task::SelfAttention) { 0 } else { 1 });
                // 0 is not a chunk size, so it can stand for "chosen automatically".
                words.size(chunk_size.unwrap_or(0));
                words.algorithm(dispatch);
            }
            Task::OnDispatch(q_dispatch, k_dispatch) => {
                words.word(2);
                words.dispatch(q_dispatch);
                words.dispatch(k_dispatch);
            }
        }
        words.mask(mask);
        words.spec(spec);
        words.stage_count(stages);
        words.query_exchange(query_exchange);
        words.topology(&topology);
        words.cost(&cost);
        words.finish()
    }

    /// The 32 bytes of the hash.
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

impl Plan {
    /// The fingerprint of the plan's content: all dispatches, parts, work and stages of all ranks. Ranks that each planned
    /// for themselves, or were shipped a plan, compare theirs before the first collective.
    pub fn fingerprint(&self) -> Fingerprint {
        let Plan { q_dispatch, k_dispatch, ranks, two_level } = self;
        let mut words = Words::default();
        words.word(3);
        words.dispatch(q_dispatch);
        words.dispatch(k_dispatch);
        words.size(ranks.len());
        ranks.iter().for_each(|rank| words.rank(rank));
        words.size(usize::from(two_level.is_some()));
        if let Some(TwoLevelExchange { forward, backward, whole }) = two_level {
            forward.iter().chain(backward).for_each(|stages| words.two_level(stages));
            words.two_level(whole);
        }
        words.finish()
    }
}

/// Which of the plans of a mask, with what only that one depends on.
#[derive(Clone, Copy, Debug)]
enum Task<'a> {
    SelfAttention,
    CrossAttention,
    OnDispatch(&'a Dispatch, &'a Dispatch),
}

/// The hash is fed 64-bit little-endian words, every list after its length. Fields are taken apart by name, so that a new
/// one cannot be forgotten here.
#[derive(Default)]
struct Words(Sha256);

impl Words {
    fn word(&mut self, word: u64) {
        self.0.update(word.to_le_bytes());
    }

    fn size(&mut self, size: usize) {
        self.word(size as u64);
    }

    fn real(&mut self, real: f64) {
        self.word(real.to_bits());
    }

    fn finish(self) -> Fingerprint {
        Fingerprint(self.0.finalize().into())
    }

    fn range(&mut self, range: &Range) {
        let Range { start, end } = *range;
        self.size(start);
        self.size(end);
    }

    fn ranges(&mut self, ranges: &[Range]) {
        self.size(ranges.len());
        ranges.iter().for_each(|range| self.range(range));
    }

    fn ranks(&mut self, ranks: &[u32]) {
        self.size(ranks.len());
        ranks.iter().for_each(|&rank| self.word(u64::from(rank)));
    }

    fn mask(&mut self, mask: &Mask) {
        self.size(mask.seqlen_q());
        self.size(mask.seqlen_k());
        self.size(mask.slices().len());
        for slice in mask.slices() {
            let AttnSlice { q_range, k_range, mask_type } = slice;
            self.range(q_range);
            self.range(k_range);
            self.word(*mask_type as u64);
        }
    }

    fn spec(&mut self, spec: &AttentionSpec) {
        let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, dtype, .. } = *spec;
        let AttentionSpec { scale, softcap, seqlen_sink, gradient_shares, .. } = *spec;
        for size in [heads_q, heads_kv, head_dim, head_dim_v, seqlen_sink] {
            self.size(size);
        }
        self.word(match dtype {
            DType::F64 => 0,
            DType::F32 => 1,
            DType::Bf16 => 2,
            DType::F16 => 3,
        });
        self.real(scale);
        self.real(softcap);
        self.word(match gradient_shares {
            GradientShares::Elements => 0,
            GradientShares::Accumulators => 1,
        });
    }

    fn algorithm(&mut self, algorithm: DispatchAlgorithm) {
        self.word(match algorithm {
            DispatchAlgorithm::Affinity => 0,
            DispatchAlgorithm::MinHeap => 1,
            DispatchAlgorithm::Sequential => 2,
            DispatchAlgorithm::Zigzag => 3,
        });
    }

    fn stage_count(&mut self, stages: StageCount) {
        // 0 is not a number of stages.
        self.size(match stages {
            StageCount::Auto => 0,
            StageCount::Fixed(stages) => stages,
        });
    }

    fn query_exchange(&mut self, query_exchange: QueryExchange) {
        self.word(match query_exchange {
            QueryExchange::Auto => 0,
            QueryExchange::FewestBytes => 1,
            QueryExchange::Never => 2,
        });
    }

    fn topology(&mut self, topology: &Topology) {
        let Topology { world_size, ranks_per_node } = *topology;
        self.size(world_size);
        self.size(ranks_per_node);
    }

    fn cost(&mut self, cost: &CostModel) {
        let CostModel {
            forward_flops_per_second,
            backward_flops_per_second,
            matmul_flops_per_second,
            memory_bytes_per_second,
            launch_seconds,
            link,
            network,
            // Decides no plan: it says how Programs of one are predicted.
            sharing: _,
            tiles,
        } = *cost;
        for real in [
            forward_flops_per_second,
            backward_flops_per_second,
            matmul_flops_per_second,
            memory_bytes_per_second,
            launch_seconds,
        ] {
            self.real(real);
        }
        for Link { alpha_seconds, bytes_per_second } in [link, network] {
            self.real(alpha_seconds);
            self.real(bytes_per_second);
        }
        self.size(tiles.map_or(0, |tiles| tiles.workers));
        for kernel in tiles.iter().flat_map(|tiles| [&tiles.forward, &tiles.backward]) {
            self.tile_cost(kernel);
        }
    }

    fn tile_cost(&mut self, kernel: &TileCost) {
        let TileCost {
            tile_rows,
            block,
            staged_block,
            pack,
            block_columns,
            bounded_columns,
            tile_columns,
            staggered_columns,
            start_seconds,
            slowdown,
            slowdown_seconds,
        } = *kernel;
        [tile_rows, block, staged_block, pack].into_iter().for_each(|size| self.size(size));
        for real in [
            block_columns,
            bounded_columns,
            tile_columns,
            staggered_columns,
            start_seconds,
            slowdown,
            slowdown_seconds,
        ] {
            self.real(real);
        }
    }

    fn dispatch(&mut self, dispatch: &Dispatch) {
        self.size(dispatch.seqlen());
        self.size(dispatch.chunk_size());
        self.size(dispatch.cp_size());
        (0..dispatch.cp_size()).for_each(|rank| self.ranks(dispatch.chunks(rank)));
    }

    fn rank(&mut self, plan: &RankPlan) {
        let RankPlan { rank, q_ranges, k_ranges, q_rows, k_rows, area, forward, backward, hosted } = plan;
        self.size(*rank);
        self.ranges(q_ranges);
        self.ranges(k_ranges);
        self.size(*q_rows);
        self.size(*k_rows);
        self.word(*area);
        for stages in [forward, backward] {
            self.size(stages.len());
            stages.iter().for_each(|stage| self.stage(stage));
        }
        self.size(usize::from(hosted.is_some()));
        if let Some(HostedWork { part, q_ranges, q_rows, bands, area }) = hosted {
            self.part(part);
            self.ranges(q_ranges);
            self.size(*q_rows);
            self.bands(bands);
            self.word(*area);
        }
    }

    fn stage(&mut self, stage: &StagePlan) {
        let StagePlan { part, recv_ranges, own_rows, key_rows, bands, area } = stage;
        self.part(part);
        self.ranges(recv_ranges);
        self.size(*own_rows);
        self.size(*key_rows);
        self.bands(bands);
        self.word(*area);
    }

    fn bands(&mut self, bands: &[Band]) {
        self.size(bands.len());
        for Band { q_range, k_range, diag_min, diag_max } in bands {
            self.range(q_range);
            self.range(k_range);
            self.word(*diag_min as u64);
            self.word(*diag_max as u64);
        }
    }

    fn two_level(&mut self, stages: &[TwoLevelPart]) {
        self.size(stages.len());
        for TwoLevelPart { inter, near, forward, inter_rows } in stages {
            [inter, near, forward].into_iter().for_each(|part| self.part(part));
            self.size(*inter_rows);
        }
    }

    fn part(&mut self, GroupPart { owned, remote }: &GroupPart) {
        self.size(owned.len());
        for OwnedSplit { rows, ranks } in owned {
            self.range(rows);
            self.ranks(ranks);
        }
        self.size(remote.len());
        for RemoteSplit { rows, rank } in remote {
            self.range(rows);
            self.word(u64::from(*rank));
        }
    }
}

//! What a pass of a tensor-parallel linear layer is expected to take in each of the ways in which it can be run, by what its parts take.

use counterpoint_cost::{CostModel, ProblemSize};
use counterpoint_plan::{
    Activations, GROUP_TILE_ROWS, GemmCollective, LinearDirection, LinearKind, LinearPlan, LinearSpec,
    Topology, WaveGroups,
};
use counterpoint_schedule::{GroupTiming, PassOverlap, PassTiming, SUMMING_WORKERS};

use super::gemm_exchange::GemmExchange;
use super::groups::{MOST_GROUPS, wave_step};
use super::wave_costs::{LinkUse, PassCurves};

/// A pass of a layer on its ranks.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct LinearPass {
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks of the tensor-parallel group, and their nodes.
    pub topology: Topology,
    /// Which pass.
    pub direction: LinearDirection,
}

/// How much longer a product takes concurrently with copies, and one whose rows travel while it is computed.
const SLOWER_UNDER_COPIES: f64 = 1.02;
const SLOWER_FUSED: f64 = 1.04;
/// By how much of the time that copies take they hold up what a product sends concurrently with them, for engines leave kernels little of a
/// link: measured on two H200s, 36 of 180 us.
const HELD_UP: f64 = 0.2;

/// Kernels that take multiprocessors from products cost more than those: of ways without them, which were measured on H200s, one that is
/// predicted to be slower by less than this is taken.
pub(super) const WORKERS_COST: f64 = 1.1;

/// The parts of a pass, in seconds.
struct Parts {
    /// The product of `y` or `dx`.
    product: f64,
    /// The gradient of the weight, where the pass computes it.
    weight_gradient: f64,
    /// Sums, by kernels and by copy engines.
    sums: [f64; 2],
    /// Of these, the way back to all ranks.
    spread: [f64; 2],
    /// Rows of an operand of the product on their way to all ranks.
    operand: f64,
    /// Rows that only the gradient of the weight needs, by kernels and by copy engines.
    inputs: [f64; 2],
}

/// A way to run a pass, its best groups, and what that is predicted to take.
pub(super) struct Candidate {
    pub(super) overlap: PassOverlap,
    pub(super) groups: WaveGroups,
    seconds: f64,
}

impl Candidate {
    /// The one that is expected to end first; of equal times the first one, and none of none.
    pub(super) fn soonest<'a>(candidates: impl Iterator<Item = &'a Self> + Clone) -> Option<&'a Self> {
        let has_better = candidates.clone().any(|candidate| candidate.overlap.spares_workers());
        let rated = |candidate: &Self| match has_better && candidate.overlap.takes_workers() {
            true => candidate.seconds * WORKERS_COST,
            false => candidate.seconds,
        };
        candidates.min_by(|a, b| rated(a).total_cmp(&rated(b)))
    }
}

impl Parts {
    fn groups(&self) -> usize {
        if self.sums[1] > self.weight_gradient { 2 } else { 1 }
    }
}

impl LinearPass {
    /// Each of the ways that a machine has and that this pass can take, in their order; none where nothing travels.
    pub(super) fn candidates(
        &self,
        ways: &[PassOverlap],
        whole: &LinearPlan,
        cost: &CostModel,
    ) -> Vec<Candidate> {
        // One kernel that takes rows as they arrive is looked at behind the others.
        let gathers = self.collective() == Some(GemmCollective::AllGather);
        let ways = ways.iter().filter(|way| !(gathers && way.is_one_kernel()));
        ways.filter_map(|way| self.candidate(*way, whole, cost)).collect()
    }

    /// Rows of the groups in which a pass is expected to end first whose product takes rows as they arrive; `None` where it does not in this
    /// way.
    pub(super) fn groups_as_rows_arrive(&self, way: PassOverlap, cost: &CostModel) -> Option<Vec<usize>> {
        let gathers = self.collective() == Some(GemmCollective::AllGather) && way.is_one_kernel();
        let PassTiming::ByGroups(timing) = way.timing() else { return None };
        if !gathers {
            return None;
        }
        let whole = LinearPlan::new(self.spec, self.topology.world_size, WaveGroups::Fixed(1)).ok()?;
        self.by_groups((timing, way.workers()), &whole, cost).map(|(groups, _)| groups)
    }

    /// The best groups of a way to run it, with what that takes; `None` where it cannot be run so, or there is nothing that travels.
    fn candidate(&self, overlap: PassOverlap, whole: &LinearPlan, cost: &CostModel) -> Option<Candidate> {
        let (groups, seconds) = match overlap.timing() {
            PassTiming::InSequence => (WaveGroups::Fixed(1), self.in_sequence(cost)?),
            PassTiming::OneKernelWithCollective => (WaveGroups::Fixed(1), self.one_kernel(cost)?),
            PassTiming::UnderCopyEngines => {
                (WaveGroups::Fixed(self.groups_under_copy_engines(cost)), self.under_copy_engines(cost)?)
            }
            PassTiming::ByGroups(timing) => {
                let (groups, seconds) = self.by_groups((timing, overlap.workers()), whole, cost)?;
                (WaveGroups::Sizes(groups), seconds)
            }
        };
        Some(Candidate { overlap, groups, seconds })
    }

    /// What it takes so, in its best groups; `None` where it cannot be run so, or there is nothing that travels.
    pub fn seconds(&self, overlap: PassOverlap, cost: &CostModel) -> Option<f64> {
        let groups = WaveGroups::Fixed(1);
        let whole = LinearPlan::new(self.spec, self.topology.world_size, groups).ok()?;
        self.candidate(overlap, &whole, cost).map(|candidate| candidate.seconds)
    }

    /// Rows of the groups in which it ends first where collectives run concurrently with products, and what it takes then.
    fn by_groups(
        &self,
        (timing, workers): (GroupTiming, usize),
        whole: &LinearPlan,
        cost: &CostModel,
    ) -> Option<(Vec<usize>, f64)> {
        let collective = self.collective()?;
        let Parts { weight_gradient, inputs, .. } = self.parts(collective, cost);
        let speed_without = |workers| cost.sharing.map_or(1.0, |sharing| sharing.speed_without(workers));
        // What all computation lacks, and what it lacks under communication.
        let (always, overlapped) = match (workers, timing.yields_workers) {
            (0, _) => (1.0, 1.0),
            (_, false) => (speed_without(workers), 1.0),
            // Sums and the way back of those before start together, each on workers of its own.
            (_, true) if collective == GemmCollective::AllReduce => (1.0, speed_without(2 * workers)),
            (_, true) => (1.0, speed_without(workers)),
        };
        let (spec, tp_size) = (&self.spec, self.topology.world_size);
        let product = |rows: usize| {
            cost.launch_seconds + cost.matmul_seconds(spec.product_of(self.direction, rows, tp_size)) / always
        };
        let columns = spec.travelling_columns();
        let travel = |rows: usize| self.travel_seconds(rows, columns, cost);
        let after = if weight_gradient > 0.0 { cost.launch_seconds + weight_gradient / always } else { 0.0 };
        let own = whole.tokens_of(0).len();
        let together = 2.0 * (own * columns * spec.dtype.size()) as f64 / cost.memory_bytes_per_second;
        let curves = PassCurves {
            product: &product,
            travel: &travel,
            back: &travel,
            after,
            join: cost.launch_seconds + together,
            starts: timing.starts,
            link: LinkUse::Shared,
            overlapped_speed: overlapped,
        };
        let step = match self.takes_whole_tiles(cost) {
            true => wave_step(whole).next_multiple_of(GROUP_TILE_ROWS),
            false => wave_step(whole),
        };
        let costs = curves.costs(whole, self.direction, step)?;
        // Rows that the gradient of the weight needs are on the link first, so sums are early enough behind the product of dx where they
        // fit under that gradient.
        let [inputs, _] = inputs;
        let sums = travel(own);
        let most = match inputs > 0.0 {
            true if sums <= after => 1,
            true => 2,
            false => MOST_GROUPS,
        };
        let groups = costs.fastest(most);
        let seconds = costs.seconds(&groups);
        let seconds = if inputs > 0.0 { seconds.max(inputs + after.max(sums)) } else { seconds };
        Some((whole.rows_of_waves(step, &groups), seconds))
    }

    /// Seconds in which so many rows of each rank go to all others, or partial sums of them come from these.
    fn travel_seconds(&self, rows: usize, columns: usize, cost: &CostModel) -> f64 {
        let Topology { world_size, ranks_per_node } = self.topology;
        let near = ranks_per_node.min(world_size);
        let bytes = |ranks: usize| (rows * ranks * columns * self.spec.dtype.size()) as u64;
        let (near, far) = (bytes(near.saturating_sub(1)), bytes(world_size - near));
        f64::max(cost.link.seconds(near), cost.network.seconds(far))
    }

    /// What it takes one after the other.
    fn in_sequence(&self, cost: &CostModel) -> Option<f64> {
        let Parts { product, weight_gradient, sums, operand, inputs, .. } =
            self.parts(self.collective()?, cost);
        Some(product + weight_gradient + sums[0] + operand + inputs[0])
    }

    /// What it takes where the kernel that makes or takes rows moves them; `None` where there is no such kernel.
    fn one_kernel(&self, cost: &CostModel) -> Option<f64> {
        let collective = self.collective().filter(|collective| self.has_whole_tiles(*collective))?;
        let Parts { product, weight_gradient, spread, inputs, .. } = self.parts(collective, cost);
        // Sums for everyone leave under the gradient of the weight, where there is one.
        let (collective, spread, after) = match collective {
            GemmCollective::AllReduce if weight_gradient > 0.0 => (
                GemmCollective::ReduceScatter,
                0.0,
                f64::max(weight_gradient * SLOWER_UNDER_COPIES, spread[1]),
            ),
            _ => (collective, spread[0], weight_gradient),
        };
        let fused = self.exchange(collective).seconds(cost).fused;
        // Sums are made with the rank's own tiles, which are the last ones, so they leave no earlier.
        let ranks = self.topology.world_size as f64;
        let last = f64::max(product / ranks, spread);
        let first = f64::max(fused, product - product / ranks + last) * SLOWER_FUSED;
        Some(f64::max(first + HELD_UP * inputs[1], inputs[1]) + after)
    }

    /// What it takes where copy engines move rows concurrently with its products; `None` where it has no sums or no second product.
    fn under_copy_engines(&self, cost: &CostModel) -> Option<f64> {
        let parts = self.parts(self.collective()?, cost);
        let Parts { product, weight_gradient, sums, inputs, .. } = parts;
        let first = f64::max(product * if inputs[1] > 0.0 { SLOWER_UNDER_COPIES } else { 1.0 }, inputs[1]);
        (sums[1] > 0.0 && weight_gradient > 0.0)
            .then(|| first + f64::max(weight_gradient * SLOWER_UNDER_COPIES, sums[1] / parts.groups() as f64))
    }

    /// Groups of tokens in which it is best run under copy engines: what does not fit under the gradient of the weight begins under the
    /// product of `dx`.
    fn groups_under_copy_engines(&self, cost: &CostModel) -> usize {
        self.collective().map_or(1, |collective| self.parts(collective, cost).groups())
    }

    /// Whether there is a kernel for the product and its sums: rows of each rank are whole tiles, or equal slices of one.
    fn has_whole_tiles(&self, collective: GemmCollective) -> bool {
        const SLICES: [usize; 3] = [16, 32, 64];
        let tokens = self.spec.tokens;
        let tp_size = self.topology.world_size;
        let own = tokens / tp_size;
        let tiled = own.is_multiple_of(GROUP_TILE_ROWS) || SLICES.contains(&own);
        collective == GemmCollective::AllGather || (tokens.is_multiple_of(tp_size) && tiled)
    }

    /// Whether groups of tokens are to be whole tiles: a kernel computes whole ones of each piece of rows, and a group of sums has a piece of
    /// every rank's, which no copy brings together.
    pub(super) fn takes_whole_tiles(&self, cost: &CostModel) -> bool {
        cost.sharing.is_some() && self.collective() != Some(GemmCollective::AllGather)
    }

    /// What travels under the first product; `None` where nothing does.
    fn collective(&self) -> Option<GemmCollective> {
        let is_alone = self.topology.world_size <= 1;
        GemmCollective::of_pass(&self.spec, self.direction).filter(|_| !is_alone)
    }

    /// The first product and what travels concurrently with it.
    fn exchange(&self, collective: GemmCollective) -> GemmExchange {
        let ranks = self.topology.world_size;
        let product = self.spec.product_of(self.direction, self.spec.tokens, ranks);
        GemmExchange { collective, ranks, product, element_bytes: self.spec.dtype.size() }
    }

    fn parts(&self, collective: GemmCollective, cost: &CostModel) -> Parts {
        let LinearSpec { tokens, dtype, .. } = self.spec;
        let exchange = self.exchange(collective);
        let ProblemSize { n, k, .. } = exchange.product;
        let product = cost.matmul_seconds(exchange.product);
        let weight_gradient = match self.direction {
            LinearDirection::Backward { weight_gradient: true } => {
                cost.matmul_seconds(ProblemSize { m: k, n, k: tokens })
            }
            _ => 0.0,
        };
        let tp_size = self.topology.world_size;
        let own_rows = tokens.div_ceil(tp_size);
        let own = own_rows as f64;
        let row = |columns: usize| (columns * dtype.size()) as f64;
        let to_others = |columns: usize| own * (tp_size as f64 - 1.0) * row(columns);
        let by_kernels = |columns: usize| cost.launch_seconds + self.travel_seconds(own_rows, columns, cost);
        let engine = cost.engine_link();
        let by_engines = |columns: usize| engine.alpha_seconds + to_others(columns) / engine.bytes_per_second;
        let sum_rate = SUMMING_WORKERS as f64 * cost.sum_rate();
        let adding = own * (tp_size as f64 + 1.0) * row(n) / sum_rate;
        let (sums, spread) = match collective {
            GemmCollective::ReduceScatter => ([by_kernels(n), by_engines(n) + adding], [0.0; 2]),
            GemmCollective::AllReduce => {
                let spread = [by_kernels(n), by_engines(n)];
                ([2.0 * spread[0], 2.0 * spread[1] + adding], spread)
            }
            GemmCollective::AllGather => ([0.0; 2], [0.0; 2]),
        };
        let operand = if collective == GemmCollective::AllGather { by_kernels(k) } else { 0.0 };
        let regathers = self.spec.kind == LinearKind::Column
            && self.spec.activations == Activations::SequenceParallel
            && matches!(self.direction, LinearDirection::Backward { weight_gradient: true });
        let inputs = if regathers { [by_kernels(n), by_engines(n)] } else { [0.0; 2] };
        Parts { product, weight_gradient, sums, spread, operand, inputs }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_cost::{Link, WorkerSharing};
    use counterpoint_plan::DType;
    use counterpoint_schedule::RankTransport;

    use super::*;

    /// What GPUs of one node have, under a policy of this name.
    fn way(policy: &str) -> PassOverlap {
        let ways = RankTransport::Nvlink.pass_overlaps(true, 16);
        ways.into_iter().find(|way| way.policy().to_string() == policy).unwrap()
    }

    fn fused() -> PassOverlap {
        way("concurrent+fused")
    }

    fn copy_engine() -> PassOverlap {
        way("concurrent+sm-margin=4+copy-engine")
    }

    fn ways() -> [PassOverlap; 3] {
        [PassOverlap::SEQUENTIAL, fused(), copy_engine()]
    }

    fn fastest(pass: LinearPass, ways: &[PassOverlap]) -> PassOverlap {
        pass.fastest(ways, &CostModel::H200).unwrap().0
    }

    fn pass(
        kind: LinearKind,
        activations: Activations,
        direction: LinearDirection,
        [tokens, hidden, local]: [usize; 3],
    ) -> LinearPass {
        let (in_features, out_features) = match kind {
            LinearKind::Column => (hidden, 4 * local),
            LinearKind::Row => (4 * local, hidden),
        };
        let dtype = DType::Bf16;
        let spec =
            LinearSpec { kind, activations, tokens, in_features, out_features, has_bias: false, dtype };
        LinearPass { spec, topology: Topology::flat(4), direction }
    }

    const BACKWARD: LinearDirection = LinearDirection::Backward { weight_gradient: true };

    /// The sums of dx fit under the gradient of the weight; where there is none they are best made in the product.
    #[test]
    fn sums_hide_under_the_gradient_of_the_weight() {
        for activations in [Activations::Replicated, Activations::SequenceParallel] {
            for shape in [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]] {
                let found = fastest(pass(LinearKind::Column, activations, BACKWARD, shape), &ways());
                assert_eq!(found, copy_engine(), "{activations:?} {shape:?}");
            }
            let frozen = LinearDirection::Backward { weight_gradient: false };
            let found = pass(LinearKind::Column, activations, frozen, [8192, 8192, 7168]);
            assert_eq!(fastest(found, &ways()), fused());
        }
    }

    /// Sums to everyone take longer than the gradient, sums to their owners do not.
    #[test]
    fn what_does_not_fit_begins_earlier() {
        let groups = |activations| {
            pass(LinearKind::Column, activations, BACKWARD, [8192, 8192, 7168])
                .groups_under_copy_engines(&CostModel::H200)
        };
        assert_eq!([Activations::Replicated, Activations::SequenceParallel].map(groups), [2, 1]);
    }

    /// Where fused kernels and copy engines are at hand, kernels that take multiprocessors from products are not taken for what was measured
    /// to be fastest with the former.
    #[test]
    fn kernels_under_products_are_for_those_who_have_nothing_better() {
        let ways = RankTransport::Nvlink.pass_overlaps(true, 16);
        assert_eq!((ways[..3].to_vec(), ways.len()), (super::tests::ways().to_vec(), 6));
        let cost = CostModel { sharing: Some(WorkerSharing::H200), ..CostModel::H200 };
        for activations in [Activations::Replicated, Activations::SequenceParallel] {
            for shape in [[2048, 12288, 12288], [8192, 8192, 7168], [16384, 8192, 7168]] {
                let backward = pass(LinearKind::Column, activations, BACKWARD, shape);
                assert_eq!(backward.fastest(&ways, &cost).unwrap().0, copy_engine(), "{shape:?}");
                let forward = pass(LinearKind::Row, activations, LinearDirection::Forward, shape);
                assert_eq!(forward.fastest(&ways, &cost).unwrap().0, fused(), "{shape:?}");
            }
        }
    }

    /// Rows that are no tiles of their owner are summed by no kernel that multiplies.
    #[test]
    fn rows_that_are_no_tiles_are_not_fused() {
        for (tokens, fits) in [(8192, true), (8200, false), (8191, false), (4 * 32, true), (4 * 48, false)] {
            let pass =
                pass(LinearKind::Column, Activations::SequenceParallel, BACKWARD, [tokens, 8192, 7168]);
            assert_eq!(pass.seconds(fused(), &CostModel::H200).is_some(), fits, "{tokens}");
            assert!(pass.seconds(copy_engine(), &CostModel::H200).is_some());
        }
    }

    /// A machine without copy engines or kernels with device-side barriers has what it has.
    #[test]
    fn only_what_a_machine_has_is_chosen() {
        let pass = pass(LinearKind::Column, Activations::Replicated, BACKWARD, [8192, 8192, 7168]);
        for ways in [&ways()[..2], &ways()[..1]] {
            assert_eq!(fastest(pass, ways), ways[ways.len() - 1]);
        }
    }

    /// Forwards, and the backward whose dy travels, have one product that hides all.
    #[test]
    fn one_product_and_its_rows_are_one_kernel() {
        for (kind, activations, direction) in [
            (LinearKind::Column, Activations::SequenceParallel, LinearDirection::Forward),
            (LinearKind::Row, Activations::SequenceParallel, LinearDirection::Forward),
            (LinearKind::Row, Activations::Replicated, LinearDirection::Forward),
            (LinearKind::Row, Activations::SequenceParallel, BACKWARD),
        ] {
            let pass = pass(kind, activations, direction, [8192, 8192, 7168]);
            assert_eq!(fastest(pass, &ways()), fused(), "{kind:?} {direction:?}");
        }
    }

    /// Nothing travels where all ranks have all tokens already, or there is one rank.
    #[test]
    fn what_does_not_travel_needs_no_overlap() {
        let forward =
            pass(LinearKind::Column, Activations::Replicated, LinearDirection::Forward, [512, 256, 256]);
        let one = LinearPass {
            topology: Topology::flat(1),
            ..pass(LinearKind::Row, Activations::Replicated, BACKWARD, [512, 256, 256])
        };
        for pass in [forward, one] {
            assert!(ways().iter().all(|way| pass.seconds(*way, &CostModel::H200).is_none()));
            assert_eq!(fastest(pass, &ways()), PassOverlap::SEQUENTIAL);
        }
    }

    /// Copy engines that nobody measured are no faster than the link that was, and those that were measured are what they are.
    #[test]
    fn engines_take_what_the_link_takes() {
        let pass = pass(LinearKind::Column, Activations::Replicated, BACKWARD, [8192, 8192, 7168]);
        let mut cost = CostModel::H200;
        let seconds = |cost: &CostModel| pass.seconds(copy_engine(), cost).unwrap();
        let fast = seconds(&cost);
        cost.link.bytes_per_second = 25e9;
        let bytes = 3.0 * 2048.0 * 8192.0 * 2.0;
        assert!(seconds(&cost) > bytes / cost.engine_link().bytes_per_second, "{}", seconds(&cost));
        assert!(seconds(&cost) > 1.5 * fast, "{} {fast}", seconds(&cost));
        assert_eq!(
            cost.engine_link().bytes_per_second,
            cost.link.bytes_per_second,
            "nobody measured that they are faster"
        );
        let unmeasured = seconds(&cost);
        cost.engine = Some(Link { alpha_seconds: 25e-6, bytes_per_second: 20e9 });
        assert!(seconds(&cost) > bytes / 20e9 && seconds(&cost) > unmeasured, "{}", seconds(&cost));
    }

    /// A link that is slow hides under nothing, and no way is faster than its bytes.
    #[test]
    fn a_slow_link_is_waited_for() {
        let mut cost = CostModel::H200;
        cost.link.bytes_per_second = 1e9;
        let pass =
            pass(LinearKind::Row, Activations::Replicated, LinearDirection::Forward, [4096, 4096, 4096]);
        let bytes = 2.0 * 3.0 * 1024.0 * 4096.0 * 2.0;
        for way in [PassOverlap::SEQUENTIAL, fused()] {
            assert!(pass.seconds(way, &cost).unwrap() > bytes / 1e9, "{way:?}");
        }
    }
}

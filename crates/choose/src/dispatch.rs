//! The dispatch: all of them are planned and simulated, forward and backward, but those whose slowest rank alone takes longer.

use std::sync::{Mutex, PoisonError};

use counterpoint_cost::CostModel;
use counterpoint_mask::Mask;
use counterpoint_plan::{
    AttentionSpec, ChunkWork, Dispatch, Plan, PlanError, Planning, RankPlan, Topology, chunk_work,
    received_rows,
};
use counterpoint_schedule::{GradientReduction, OpCost, OverlapPolicy, RankTransport, Timeline};

use crate::config::{DispatchAlgorithm, PlanConfig, QueryExchange};
use crate::hosted_cost::HostedCost;
use crate::hosts::over_nodes;
use crate::owners::{dispatch, dispatch_keys, dispatch_queries};
use crate::pass_stages::PassStages;
use crate::planner::{check, may_host, owners_of, plan_hosting_within, plan_mask_within, plan_stages_within};
use crate::policies::{PolicyChoice, policies_of};
use crate::prediction::Trial;
use crate::remembered::{KnownSeconds, RememberedCost};
use crate::{ChooseError, DeviceModel};

/// Every dispatch, in the order in which they are tried.
pub const DISPATCHES: [DispatchAlgorithm; 4] = [
    DispatchAlgorithm::Affinity,
    DispatchAlgorithm::Zigzag,
    DispatchAlgorithm::MinHeap,
    DispatchAlgorithm::Sequential,
];

/// Up to so many ranks dispatches are compared: of more the pieces of plans take gigabytes. There the first is taken.
pub const MOST_COMPARED_RANKS: usize = 256;

/// Predictions that differ by less say nothing: of dispatches that take no longer by this part than the best, the one that moves the
/// fewest bytes is kept, and of several the first.
const LEAST_GAIN: f64 = 0.008;

/// Queries travel where a forward and a backward are predicted to take less by this part together.
const LEAST_GAIN_OF_HOSTS: f64 = 0.01;
/// A pass that then takes longer does so by at most this part of what the other one gains.
const MOST_LOSS_OF_A_PASS: f64 = 0.65;
/// On several nodes all dispatches are looked at where queries that travel were seen to take at most so much longer, and none that without any
/// takes more than this.
const NEAR: f64 = 1.15;

/// A dispatch, and what a forward and a backward with it are predicted to take.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DispatchCandidate {
    /// The dispatch.
    pub algorithm: DispatchAlgorithm,
    /// Seconds of both passes; `None` where it was left out: what its slowest rank computes or receives alone takes longer than the best.
    pub seconds: Option<f64>,
}

/// The dispatch of a problem, with all that it was chosen from.
#[derive(Clone, Debug, PartialEq)]
pub struct DispatchChoice {
    /// In the order in which they were tried.
    pub candidates: Vec<DispatchCandidate>,
    /// The one that is kept. Candidates are compared without queries that travel; where some do, it may be another than the quickest of them.
    pub chosen: DispatchAlgorithm,
}

/// A plan with the dispatch that is predicted to end a forward and a backward first, together, on the kind of device that `model`
/// describes. Rows cross between nodes in two steps where there are several.
///
/// Who computes what decides about bits, so of `config` neither the stages nor the cost is looked at for the choice, and the same
/// problem has the same dispatch on every machine of a kind. The plan itself has the stages and follows the cost of `config`, whose
/// dispatch is not looked at. Nor do queries travel by what was measured: with [`QueryExchange::Auto`] they do where the simulator
/// expects both passes together to be faster by 1 %, and one that is slower to lose at most 0.65 of what the other gains, even if hosts of few rows take as
/// much longer than predicted as they were ever seen to. Plans take at most `available` bytes. Neither the plan nor the choice depends on `planning`: with
/// helpers, candidates that may be needed are tried side by side.
///
/// # Errors
/// As [`plan_mask_within`].
pub fn plan_attention(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    model: &DeviceModel,
    available: u64,
    planning: &Planning<'_>,
) -> Result<(Plan, DispatchChoice), ChooseError> {
    if config.query_exchange == QueryExchange::Auto
        && (2..=MOST_COMPARED_RANKS).contains(&config.topology.world_size)
    {
        return where_queries_travel(mask, spec, config, model, available, planning);
    }
    let plan = |config: &PlanConfig| plan_mask_within(mask, spec, config, available, planning);
    let staged =
        |plan: Plan, config: &PlanConfig| plan_stages_within(&plan, mask, spec, config, available, planning);
    let ranks = config.topology.world_size;
    if !(2..=MOST_COMPARED_RANKS).contains(&ranks) {
        let modelled = PlanConfig { dispatch: DISPATCHES[0], cost: model.cost, ..*config };
        let planned = match config.query_exchange {
            // Neither do measurements decide here.
            QueryExchange::Auto => staged(plan(&modelled)?, config)?,
            _ => plan(&PlanConfig { cost: config.cost, ..modelled })?,
        };
        let planned = over_nodes(planned, spec, &modelled);
        return Ok((planned, DispatchChoice { candidates: Vec::new(), chosen: DISPATCHES[0] }));
    }
    check(mask, spec, config)?;
    let compared = PlanConfig { stages: PassStages::AUTO, cost: model.cost, ..*config };
    let attempt = |candidate: usize| -> Result<Tried, ChooseError> {
        let planned = plan(&PlanConfig { dispatch: DISPATCHES[candidate], ..compared })?;
        Tried::new(candidate, over_nodes(planned, spec, &compared), spec, &compared, planning)
    };
    let mut ahead = Ahead::new(&Bounds::new(mask, spec, &compared), attempt, planning)?;
    let mut candidates = Vec::with_capacity(DISPATCHES.len());
    let mut tried: Vec<Tried> = Vec::with_capacity(DISPATCHES.len());
    // Of candidates that give all rows to the same ranks as another one, that one.
    let mut copies = Vec::new();
    for (candidate, algorithm) in DISPATCHES.into_iter().enumerate() {
        let mut seconds = None;
        let bound = &ahead.bounds[candidate];
        if let Some(same) = tried.iter().find(|one| bound.is_of(&one.plan)) {
            copies.push((candidate, same.candidate));
        } else if bound.seconds < least(&tried) {
            let one = ahead.tried[candidate].take().unwrap_or_else(|| attempt(candidate))?;
            seconds = Some(one.seconds);
            tried.push(one);
        }
        candidates.push(DispatchCandidate { algorithm, seconds });
    }
    let limit = closeness(&config.topology) * least(&tried);
    tried.retain(|one| one.seconds <= limit);
    if tried.len() > 1 {
        // Policies bring more to one dispatch than to another.
        let seconds = planning.map(tried.len(), |at| tried[at].by_policies(spec, &compared, planning))?;
        for (one, seconds) in tried.iter_mut().zip(seconds) {
            one.seconds = seconds?;
            candidates[one.candidate].seconds = Some(one.seconds);
        }
    }
    for (copy, of) in copies {
        candidates[copy].seconds = candidates[of].seconds;
    }
    let least = least(&tried);
    let close = tried.into_iter().filter(|one| one.seconds <= least * (1.0 + LEAST_GAIN));
    let best = close.min_by_key(|one| received_bytes(&one.plan, spec));
    let chosen = best.as_ref().map_or(DISPATCHES[0], |one| DISPATCHES[one.candidate]);
    let wanted = PlanConfig { dispatch: chosen, ..*config };
    let planned = match best.map(|one| one.plan) {
        Some(planned) if wanted.stages == compared.stages && wanted.cost == compared.cost => planned,
        // Rows stay where they are.
        Some(planned) => staged(planned, &wanted)?.over_nodes(&config.topology),
        None => over_nodes(plan(&wanted)?, spec, &compared),
    };
    Ok((planned, DispatchChoice { candidates, chosen }))
}

/// With queries that travel where the planner finds some and the simulator agrees, on any dispatch: which one is the quickest where rows
/// are offloaded is often another than without.
fn where_queries_travel(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    model: &DeviceModel,
    available: u64,
    planning: &Planning<'_>,
) -> Result<(Plan, DispatchChoice), ChooseError> {
    let never = PlanConfig { query_exchange: QueryExchange::Never, ..*config };
    let (kept, choice) = plan_attention(mask, spec, &never, model, available, planning)?;
    let compared =
        PlanConfig { stages: PassStages::AUTO, cost: model.cost, dispatch: choice.chosen, ..*config };
    let owners = owners_of(&kept, mask, spec, &compared)?;
    // Most masks have no such rows, which is soon seen.
    if !may_host(&kept, &owners, mask, spec, &compared, LEAST_GAIN_OF_HOSTS) {
        return Ok((kept, choice));
    }
    let passes = |plan: &Plan| passes_with_hosts(plan, spec, &compared, planning);
    let staged = |plan: &Plan, config| plan_stages_within(plan, mask, spec, config, available, planning);
    let mut dispatches = vec![choice.chosen];
    dispatches.extend(DISPATCHES.into_iter().filter(|dispatch| *dispatch != choice.chosen));
    let mut without = None;
    let mut best: Option<(f64, Plan, DispatchAlgorithm)> = None;
    // What the planner expects to end first is not always what the simulator does: what moves the fewest bytes is looked at too.
    let ways = dispatches.iter().flat_map(|&dispatch| {
        [QueryExchange::Auto, QueryExchange::FewestBytes].map(|query_exchange| (dispatch, query_exchange))
    });
    let mut looked_at: Vec<Plan> = Vec::new();
    let without_hosts = |dispatch| choice.candidates.iter().find(|one| one.algorithm == dispatch)?.seconds;
    let fewest_seconds = without_hosts(choice.chosen);
    let is_near = |dispatch| {
        let ratio = without_hosts(dispatch).zip(fewest_seconds).map(|(one, fewest)| one / fewest);
        config.topology.nodes() > 1 && ratio.is_some_and(|ratio| ratio <= NEAR)
    };
    // What is taken where queries travel, at least so far, over what is taken where none do.
    let mut nearest = f64::INFINITY;
    for (dispatch, query_exchange) in ways {
        // The others are worth their time where rows that travel are, or nearly are.
        let is_other = best.is_none() && ![choice.chosen, DISPATCHES[0]].contains(&dispatch);
        let is_worth_it =
            query_exchange == QueryExchange::FewestBytes && nearest <= NEAR && is_near(dispatch);
        if is_other && !is_worth_it {
            continue;
        }
        let known = (dispatch == choice.chosen).then(|| owners.clone());
        let config = PlanConfig { dispatch, query_exchange, ..compared };
        let Some(hosting) = plan_hosting_within(known, mask, spec, &config, available, planning)? else {
            continue;
        };
        let hosting = over_nodes(hosting, spec, &compared);
        if looked_at.contains(&hosting) {
            continue;
        }
        let without = match without {
            Some(without) => without,
            None => *without.insert(passes(&staged(&kept, &compared)?.over_nodes(&config.topology))?),
        };
        let with = passes(&hosting)?;
        let seconds = with.iter().sum::<f64>();
        nearest = nearest.min(seconds / without.iter().sum::<f64>());
        let limit = without.iter().sum::<f64>() * (1.0 - LEAST_GAIN_OF_HOSTS);
        if is_kept(without, with, best.as_ref().map_or(limit, |best| best.0)) {
            best = Some((seconds, hosting.clone(), dispatch));
        }
        looked_at.push(hosting);
    }
    let Some((seconds, mut hosting, chosen)) = best else { return Ok((kept, choice)) };
    if config.topology.nodes() > 1 {
        // What hides under computation may be quicker in the way that links alone are slower in.
        let other = Plan { queries_go_straight: !hosting.queries_go_straight, ..hosting.clone() };
        let other = other.over_nodes(&config.topology);
        if is_kept(without.unwrap_or_default(), passes(&other)?, seconds) {
            hosting = other;
        }
    }
    let planned = staged(&hosting, config)?.over_nodes(&config.topology);
    Ok((planned, DispatchChoice { chosen, ..choice }))
}

/// Whether what passes take with hosts is no more than `most` together, and none loses too much to what they take without.
fn is_kept(without: [f64; 2], with: [f64; 2], most: f64) -> bool {
    let gains: [f64; 2] = std::array::from_fn(|pass| without[pass] - with[pass]);
    let (less, more) = (gains[0].min(gains[1]), gains[0].max(gains[1]));
    -less <= MOST_LOSS_OF_A_PASS * more && with.iter().sum::<f64>() <= most
}

/// What is known of candidates before they are compared one after the other.
struct Ahead {
    bounds: Vec<Bound>,
    /// Those that were tried: with helpers all that may be needed, else none.
    tried: Vec<Option<Result<Tried, ChooseError>>>,
}

impl Ahead {
    fn new(
        bounds: &Bounds<'_>,
        attempt: impl Fn(usize) -> Result<Tried, ChooseError> + Sync,
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        // The first is always needed, whatever is known of it.
        let bound = |candidate: usize| match candidate {
            0 => (Bound::NONE, planning.has_helpers().then(|| attempt(0))),
            _ => (bounds.of(DISPATCHES[candidate]), None),
        };
        let (bounds, mut tried): (Vec<_>, Vec<_>) =
            planning.map(DISPATCHES.len(), bound)?.into_iter().unzip();
        if let Some(Ok(first)) = &tried[0] {
            let is_open = |at: &usize| !bounds[*at].is_of(&first.plan) && bounds[*at].seconds < first.seconds;
            let open: Vec<usize> = (1..DISPATCHES.len()).filter(is_open).collect();
            let attempts = planning.map(open.len(), |at| attempt(open[at]))?;
            open.into_iter().zip(attempts).for_each(|(candidate, one)| tried[candidate] = Some(one));
        }
        Ok(Self { bounds, tried })
    }
}

/// A dispatch that was planned and simulated.
struct Tried {
    /// Index into the candidates.
    candidate: usize,
    /// Of a forward and a backward.
    seconds: f64,
    plan: Plan,
    /// Of its operations.
    known: Mutex<KnownSeconds>,
}

/// What all ranks receive in a forward and a backward.
fn received_bytes(plan: &Plan, spec: &AttentionSpec) -> u64 {
    let of_rank = |rank: &RankPlan| {
        rank.recv_rows() * spec.exchanged_key_bytes() + rank.query_recv_rows() * spec.exchanged_query_bytes()
    };
    plan.ranks.iter().map(of_rank).sum()
}

/// The fewest seconds of those that were tried.
fn least(tried: &[Tried]) -> f64 {
    tried.iter().map(|one| one.seconds).fold(f64::INFINITY, f64::min)
}

impl Tried {
    /// Takes what runs side by side where nothing says otherwise.
    fn new(
        candidate: usize,
        plan: Plan,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, ChooseError> {
        let (policy, how) = (OverlapPolicy::default(), GradientReduction::default());
        let trial = Trial::new(&plan, spec, &config.topology);
        let cost = RememberedCost::new(&config.cost, &plan, KnownSeconds::default(), planning);
        let passes = planning.map(2, |pass| match pass {
            0 => trial.forward(policy, &cost),
            _ => trial.backward(policy, how, &cost),
        })?;
        let passes = passes.into_iter().collect::<Result<Vec<Timeline>, _>>()?;
        planning.check()?;
        let (seconds, known) = (passes.iter().map(Timeline::makespan).sum(), Mutex::new(cost.into_known()));
        Ok(Self { candidate, seconds, plan, known })
    }

    /// Seconds by the policies that would be chosen where every transport of such nodes is there: who computes what must not depend on
    /// the transport.
    fn by_policies(
        &self,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<f64, ChooseError> {
        let cost = &config.cost;
        if cost.sharing.is_none() {
            // Nothing takes workers from anything, so no policy ends sooner.
            return Ok(self.seconds);
        }
        let known = std::mem::take(&mut *self.known.lock().unwrap_or_else(PoisonError::into_inner));
        let cost = RememberedCost::new(cost, &self.plan, known, planning);
        Ok(policies(&self.plan, spec, config, &cost, planning)?.seconds())
    }
}

/// Seconds of a forward and of a backward by the policies that would be chosen, with hosts that take as long as any were seen to.
fn passes_with_hosts(
    plan: &Plan,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<[f64; 2], ChooseError> {
    let cost = HostedCost::new(&config.cost, plan);
    let cost = RememberedCost::new(&cost, plan, KnownSeconds::default(), planning);
    let choice = policies(plan, spec, config, &cost, planning)?;
    let backward = choice.backward.as_ref().map_or(0.0, |backward| backward.chosen().seconds);
    Ok([choice.forward.chosen().seconds, backward])
}

fn policies(
    plan: &Plan,
    spec: &AttentionSpec,
    config: &PlanConfig,
    cost: &RememberedCost<'_, impl OpCost + Sync + ?Sized>,
    planning: &Planning<'_>,
) -> Result<PolicyChoice, ChooseError> {
    let topology = &config.topology;
    let trial = Trial::new(plan, spec, topology);
    let transports = modelled_transports(topology, &config.cost);
    policies_of(&trial, Some(GradientReduction::default()), transports, cost, planning)
}

/// How much longer than the best a dispatch may take without a policy of its own, and still be the best with one: a margin can halve
/// what the network takes.
fn closeness(topology: &Topology) -> f64 {
    if topology.nodes() > 1 { 2.0 } else { 1.25 }
}

/// Transports of the device that is modelled: one whose kernels compute tiles is a GPU.
pub fn modelled_transports(topology: &Topology, cost: &CostModel) -> &'static [RankTransport] {
    match cost.tiles {
        Some(_) => RankTransport::of_gpus(topology),
        None => &[RankTransport::Cpu],
    }
}

/// What no run of a dispatch takes less than.
struct Bound {
    /// Of a forward and a backward.
    seconds: f64,
    /// Who owns queries and keys, where a plan leaves it at that.
    owners: Option<[Dispatch; 2]>,
}

impl Bound {
    /// Nothing is known.
    const NONE: Self = Self { seconds: 0.0, owners: None };

    /// Whether `plan` gives all rows to the same ranks.
    fn is_of(&self, plan: &Plan) -> bool {
        let same = |[queries, keys]: &[Dispatch; 2]| *queries == plan.q_dispatch && *keys == plan.k_dispatch;
        self.owners.as_ref().is_some_and(same)
    }
}

/// What no run of a dispatch takes less than, before it is planned: what its slowest rank computes, what its busiest link carries.
struct Bounds<'a> {
    work: ChunkWork,
    chunk_size_k: usize,
    spec: &'a AttentionSpec,
    config: &'a PlanConfig,
    is_cross: bool,
}

impl<'a> Bounds<'a> {
    fn new(mask: &Mask, spec: &'a AttentionSpec, config: &'a PlanConfig) -> Self {
        let work = chunk_work(mask, config.chunk_size_for(mask.seqlen_q()));
        let chunk_size_k = config.chunk_size_for(mask.seqlen_k());
        Self { work, chunk_size_k, spec, config, is_cross: mask.seqlen_q() != mask.seqlen_k() }
    }

    fn of(&self, algorithm: DispatchAlgorithm) -> Bound {
        let Self { work, config, .. } = self;
        if config.query_exchange != QueryExchange::Never {
            // Other work is made of it.
            return Bound::NONE;
        }
        let ranks = config.topology.world_size;
        let (queries, keys) = match self.is_cross {
            true => {
                let queries = dispatch_queries(work, ranks, algorithm);
                let keys = dispatch_keys(work, &queries, self.chunk_size_k);
                (queries, keys)
            }
            false => {
                let both = dispatch(work, ranks, algorithm);
                (both.clone(), both)
            }
        };
        let received = received_rows(work, &queries, &keys).into_iter().max().unwrap_or(0);
        let area = |rank| queries.chunks(rank).iter().map(|&chunk| work.area(chunk as usize)).sum::<u64>();
        let area = (0..ranks).map(area).max().unwrap_or(0);
        let seconds = self.pair_seconds(area).max(self.receive_seconds(received));
        Bound { seconds, owners: Some([queries, keys]) }
    }

    /// Keys and values travel in both passes, over all links that there are.
    fn receive_seconds(&self, rows: u64) -> f64 {
        let CostModel { link, network, .. } = &self.config.cost;
        let rate = link.bytes_per_second + network.bytes_per_second;
        2.0 * rows as f64 * self.spec.kv_row_bytes() as f64 / rate
    }

    /// A forward and a backward of so many pairs, were they all that kernels do.
    fn pair_seconds(&self, area: u64) -> f64 {
        let (spec, cost) = (self.spec, &self.config.cost);
        spec.flops_forward(area) / cost.forward_flops_per_second
            + spec.flops_backward(area) / cost.backward_flops_per_second
    }
}

//! A solved plan as a value: what `counterpoint.Plan` is about, without ranks.

use std::sync::Arc;
use std::time::Instant;

use counterpoint_choose::{
    ChooseError, DispatchAlgorithm, PassStages, PlanConfig, QueryExchange, StageCount,
};
use counterpoint_exec::{AttentionTask, Pass};
use counterpoint_plan::{
    AttentionSpec, CancellationToken, GradientShares, Plan, PlanError, PlanSummary, Planning,
};
use counterpoint_report::{Figures, HtmlReport, MaskDrawing, Style, TimelinePair, plan_table};
use counterpoint_schedule::{
    GradientReduction, KeyBlocks, PassPolicies, Program, SimulateError, lower_attention_backward,
    lower_attention_forward, simulate,
};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::{PyBytes, PyType};
use serde::de::DeserializeOwned;

use crate::borrow::dtype_of;
use crate::described::Planner;
use crate::error::{Raised, engine, raise};
use crate::integers::described;
use crate::interrupt::interruptible;
use crate::mask::Mask;
use crate::site::{Asked, Choices, Problem, Site};
use crate::timeline::Timeline;

/// A plan with its mask, problem and configuration. Pure: the same in every process that solves it with the same arguments.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Solution {
    pub(crate) content: Arc<Content>,
}

#[derive(Clone)]
pub(crate) struct Content {
    pub(crate) mask: Arc<counterpoint_mask::Mask>,
    pub(crate) spec: AttentionSpec,
    pub(crate) config: PlanConfig,
    pub(crate) plan: Plan,
    pub(crate) choices: Choices,
    /// Whether gradients have the same bits every time.
    pub(crate) deterministic: bool,
    /// That it took.
    pub(crate) seconds: f64,
}

/// Calls planning off, from any thread.
#[pyclass(frozen, module = "counterpoint._native")]
pub(crate) struct Cancellation {
    token: CancellationToken,
}

#[pymethods]
impl Cancellation {
    /// One that calls nothing off yet.
    #[new]
    fn new() -> Self {
        Self { token: CancellationToken::new() }
    }

    /// Planning with it ends soon, with an error.
    fn cancel(&self) {
        self.token.cancel();
    }

    /// Whether `cancel` was called.
    #[getter]
    fn cancelled(&self) -> bool {
        self.token.is_cancelled()
    }
}

/// A name of the command line as the value it stands for.
fn named<T: DeserializeOwned>(py: Python<'_>, argument: &str, name: &str, known: &str) -> PyResult<T> {
    serde_json::from_value(serde_json::Value::String(name.to_owned()))
        .map_err(|_| raise(py, "PlanError", &format!("{argument} is {name:?}; it must be {known}"), &[]))
}

impl Raised for serde_json::Error {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

/// All that a plan follows from.
struct PlanInputs {
    mask: Arc<counterpoint_mask::Mask>,
    spec: AttentionSpec,
    config: PlanConfig,
    on: Option<Arc<Content>>,
    dispatch: Asked<DispatchAlgorithm>,
    overlap: Asked<PassPolicies>,
    deterministic: bool,
}

impl PlanInputs {
    fn problem(&self) -> Problem<'_> {
        let Self { mask, spec, config, deterministic, .. } = self;
        Problem { mask, spec, config: *config, backward: reduction(*deterministic) }
    }

    fn on(&self) -> Option<(&Plan, DispatchAlgorithm)> {
        self.on.as_ref().map(|on| (&on.plan, on.choices.dispatch))
    }

    /// The plan that the group has already, or one that is made.
    fn found_or_made(
        self,
        py: Python<'_>,
        planner: &Planner<'_>,
        cancellation: Option<&Cancellation>,
    ) -> PyResult<Arc<Content>> {
        let fingerprint = engine(py, || {
            let asked = (self.dispatch, self.overlap, self.deterministic);
            Ok::<_, ChooseError>(self.problem().fingerprint(self.on(), &asked))
        })?;
        if let Some(content) = planner.plans().and_then(|mut plans| plans.find(&fingerprint)) {
            return Ok(content);
        }
        let (site, threads) = (planner.site().clone(), planner.planning_threads());
        let token = cancellation.map(|cancellation| cancellation.token.clone()).unwrap_or_default();
        let until = token.clone();
        let solve = move || {
            let helped = threads.as_ref().map_or(Planning::ALONE, |threads| threads.planning());
            self.solve(&site, &helped.until(&until))
        };
        // Whoever has a token waits on a thread on which Python handles no signals.
        let content = match cancellation {
            Some(_) => engine(py, solve)?,
            None => interruptible(py, solve, |_| token.cancel())?,
        };
        let content = Arc::new(content);
        Ok(match planner.plans() {
            Some(mut plans) => plans.keep(fingerprint, content),
            None => content,
        })
    }

    fn solve(self, site: &Site, planning: &Planning<'_>) -> Result<Content, ChooseError> {
        let began = Instant::now();
        let (plan, choices) = self.problem().solve(site, self.on(), self.dispatch, self.overlap, planning)?;
        let seconds = began.elapsed().as_secs_f64();
        let Self { mask, spec, config, deterministic, .. } = self;
        Ok(Content { mask, spec, config, plan, choices, deterministic, seconds })
    }
}

#[pymethods]
impl Solution {
    /// Plans `mask` for the ranks of a group, with the threads that they plan with, or by a group's description. `on` is another plan of the same ranks, whose dispatch is kept. Ends
    /// early where a handler of a signal raises, or `cancellation` is cancelled. `dispatch` and `overlap` are names, "predicted"
    /// for what is predicted to end first, or "auto" for that where the comparison pays.
    #[new]
    #[pyo3(signature = (mask, planner, *, heads_q, heads_k, head_dim, head_dim_v, dtype, scale, softcap, sink_rows, chunk, dispatch, stages, queries, overlap, deterministic, on, cancellation))]
    fn new(
        py: Python<'_>,
        mask: &Mask,
        planner: Planner<'_>,
        heads_q: usize,
        heads_k: usize,
        head_dim: usize,
        head_dim_v: usize,
        dtype: &str,
        scale: f64,
        softcap: f64,
        sink_rows: usize,
        chunk: Option<usize>,
        dispatch: &str,
        stages: &Bound<'_, PyAny>,
        queries: Option<&str>,
        overlap: &str,
        deterministic: bool,
        on: Option<&Solution>,
        cancellation: Option<&Cancellation>,
    ) -> PyResult<Self> {
        const DISPATCHES: &str =
            "\"auto\", \"predicted\", \"affinity\", \"min-heap\", \"sequential\" or \"zigzag\"";
        let site = planner.site();
        let dispatch = Asked::named(dispatch, |name| named(py, "dispatch", name, DISPATCHES))?;
        let overlap = Asked::named(overlap, |text| {
            text.parse::<PassPolicies>().map_err(|error| raise(py, "PolicyError", &format!("{error}"), &[]))
        })?;
        let query_exchange = match (queries, dispatch) {
            (Some(queries), _) => named(py, "queries", queries, "\"never\", \"auto\" or \"fewest_bytes\"")?,
            (None, Asked::Predicted) if on.is_none() && site.transport.merges_on_device() => {
                QueryExchange::Auto
            }
            // Looking for hosts would take longer than the rest of the plan.
            (None, _) => QueryExchange::Never,
        };
        let stages = match (stages.extract::<usize>(), stages.extract::<String>()) {
            (Ok(stages), _) => StageCount::Fixed(stages).into(),
            (_, Ok(text)) => {
                text.parse::<PassStages>().map_err(|error| raise(py, "PlanError", &error.to_string(), &[]))?
            }
            _ => {
                let found = described(stages);
                let message = format!("stages must be \"auto\" or a number of at least 0, not {found}");
                return Err(raise(py, "PlanError", &message, &[]));
            }
        };
        let spec = AttentionSpec {
            heads_q,
            heads_kv: heads_k,
            head_dim,
            head_dim_v,
            dtype: dtype_of(dtype)?,
            scale,
            softcap,
            seqlen_sink: sink_rows,
            gradient_shares: GradientShares::default(),
            max_logits: false,
            dlse: false,
        };
        let config = PlanConfig {
            chunk_size: chunk,
            stages,
            query_exchange,
            topology: site.topology,
            cost: site.cost,
            ..PlanConfig::new(site.topology.world_size)
        };
        let on = on.map(|on| on.content.clone());
        let mask = mask.native.clone();
        let wanted = PlanInputs { mask, spec, config, on, dispatch, overlap, deterministic };
        Ok(Self { content: wanted.found_or_made(py, &planner, cancellation)? })
    }

    /// The same whose forwards give the largest score of each head too, or whose backwards take the gradient of lse.
    #[pyo3(signature = (*, max_logits, dlse))]
    fn asking(&self, max_logits: bool, dlse: bool) -> Self {
        let content = (*self.content).clone();
        let spec = AttentionSpec { max_logits, dlse, ..content.spec };
        Self { content: Arc::new(Content { spec, ..content }) }
    }

    /// The inverse of `to_bytes`.
    #[classmethod]
    fn from_bytes(cls: &Bound<'_, PyType>, bytes: PyBackedBytes) -> PyResult<Self> {
        let content = engine(cls.py(), || Content::from_bytes(&bytes))?;
        Ok(Self { content: Arc::new(content) })
    }

    /// All of it.
    fn to_bytes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let bytes = engine(py, || self.content.to_bytes())?;
        Ok(PyBytes::new(py, &bytes))
    }

    /// The mask.
    #[getter]
    fn mask(&self) -> Mask {
        Mask::of(self.content.mask.clone())
    }

    /// Number of ranks.
    #[getter]
    fn ranks(&self) -> usize {
        self.content.plan.ranks.len()
    }

    /// Whether gradients have the same bits every time.
    #[getter]
    fn deterministic(&self) -> bool {
        self.content.deterministic
    }

    /// Rows of a chunk.
    #[getter]
    fn chunk(&self) -> usize {
        self.content.plan.q_dispatch.chunk_size()
    }

    /// Global rows that a rank owns, as (start, end), in the order of its local rows. `role` is "q" or "k".
    fn ranges(&self, rank: usize, role: &str) -> PyResult<Vec<(usize, usize)>> {
        let ranks = &self.content.plan.ranks;
        let Some(rank) = ranks.get(rank) else {
            return Err(pyo3::exceptions::PyIndexError::new_err(format!("rank {rank} of {}", ranks.len())));
        };
        let ranges = if role == "k" { &rank.k_ranges } else { &rank.q_ranges };
        Ok(ranges.iter().map(|range| (range.start, range.end)).collect())
    }

    /// Whether queries and keys are dispatched alike.
    #[getter]
    fn self_attention(&self) -> bool {
        self.content.plan.q_dispatch == self.content.plan.k_dispatch
    }

    /// Bytes that are equal for equal plans, in every process.
    #[getter]
    fn fingerprint(&self, py: Python<'_>) -> PyResult<String> {
        engine(py, || Ok::<_, PlanError>(self.content.plan.fingerprint().to_string()))
    }

    /// `PlanSummary` as JSON, as `counterpoint plan --json` prints it.
    fn summary_json(&self, py: Python<'_>) -> PyResult<String> {
        let Content { mask, spec, plan, seconds, .. } = &*self.content;
        engine(py, || serde_json::to_string(&PlanSummary::new(plan, mask, spec, *seconds)))
    }

    /// What was chosen, and from what, as JSON.
    fn choices_json(&self, py: Python<'_>) -> PyResult<String> {
        engine(py, || serde_json::to_string(&self.content.choices.to_json()))
    }

    /// A table of ranks for terminals.
    fn table(&self) -> String {
        plan_table(&self.content.plan, None, &Style::PLAIN)
    }

    /// What the simulator expects of forward and backward, on the ranks of the plan's machine.
    fn predict(&self, py: Python<'_>) -> PyResult<(Timeline, Timeline)> {
        let (forward, backward) = engine(py, || self.simulate())?;
        Ok((Timeline { native: forward }, Timeline { native: backward }))
    }

    /// The mask in the colours of the ranks, as SVG text.
    #[pyo3(signature = (*, small=false))]
    fn svg(&self, py: Python<'_>, small: bool) -> PyResult<String> {
        let Content { mask, plan, .. } = &*self.content;
        let drawing = MaskDrawing { title: "Attention mask by rank", mask, plan: Some(plan) };
        engine(py, || Ok::<_, PlanError>(if small { drawing.render_small() } else { drawing.render() }))
    }

    /// The page that `--report` writes: predicted timelines, and measured ones where there are.
    fn html(
        &self,
        py: Python<'_>,
        title: &str,
        setup: Vec<(String, String)>,
        forward: Option<&Timeline>,
        backward: Option<&Timeline>,
    ) -> PyResult<String> {
        let Content { mask, spec, plan, seconds, .. } = &*self.content;
        let measured = (forward.map(|timeline| &timeline.native), backward.map(|timeline| &timeline.native));
        engine(py, || {
            let predicted = self.simulate()?;
            let pair = |predicted, measured| Some(TimelinePair { predicted: Some(predicted), measured });
            let figures = Figures {
                setup,
                plan_seconds: Some(*seconds),
                comm: Some(PlanSummary::new(plan, mask, spec, *seconds).comm),
                kv_row_bytes: Some(spec.kv_row_bytes() as u64),
                forward_flops: Some(spec.flops_forward(mask.area())),
                backward_flops: Some(spec.flops_backward(mask.area())),
            };
            let (forward, backward) = (pair(&predicted.0, measured.0), pair(&predicted.1, measured.1));
            let (check, origin) = (None, None);
            let report = HtmlReport { title, mask, plan, figures, forward, backward, check, origin };
            Ok::<_, SimulateError>(report.render())
        })
    }
}

impl Solution {
    fn simulate(
        &self,
    ) -> Result<(counterpoint_schedule::Timeline, counterpoint_schedule::Timeline), SimulateError> {
        let Content { config, plan, .. } = &*self.content;
        let ranks = || 0..plan.ranks.len();
        let forward = ranks().map(|rank| self.content.forward_program(rank));
        let backward = ranks().map(|rank| self.content.backward_program(rank));
        let run = |programs: Vec<_>| simulate(&programs, &config.topology, &config.cost);
        Ok((run(forward.collect())?, run(backward.collect())?))
    }
}

/// How gradients travel.
fn reduction(deterministic: bool) -> GradientReduction {
    if deterministic { GradientReduction::Deterministic } else { GradientReduction::PerStage }
}

impl Content {
    /// What is made ready of it.
    pub(crate) fn task(&self) -> AttentionTask<'_> {
        let Self { plan, spec, choices, deterministic, .. } = self;
        AttentionTask::new(plan, spec, Pass::ForwardBackward, choices.policies, *deterministic)
    }

    /// A rank's forward.
    pub(crate) fn forward_program(&self, rank: usize) -> Program {
        let blocks = if self.deterministic { KeyBlocks::Aligned } else { KeyBlocks::Unaligned };
        lower_attention_forward(&self.plan, rank, &self.spec, self.choices.policies.forward, blocks)
    }

    /// A rank's backward.
    pub(crate) fn backward_program(&self, rank: usize) -> Program {
        let (policy, how) = (self.choices.policies.backward, reduction(self.deterministic));
        lower_attention_backward(&self.plan, rank, &self.spec, policy, how)
    }

    /// Rows of queries of a rank.
    pub(crate) fn q_rows(&self, rank: usize) -> usize {
        self.plan.ranks[rank].q_rows
    }

    /// Rows of keys of a rank.
    pub(crate) fn k_rows(&self, rank: usize) -> usize {
        self.plan.ranks[rank].k_rows
    }
}

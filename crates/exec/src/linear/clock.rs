use std::sync::Arc;
use std::time::Duration;

use counterpoint_plan::{DType, GemmCollective, LinearPlan, LinearSpec, PassClock, PlanError};
use counterpoint_schedule::{
    BufferRole, BufferSpec, OverlapPolicy, Program, Timeline, lower_collective, lower_join,
    lower_linear_forward, lower_product, travel_seconds,
};
use thiserror::Error;

use crate::host_element::with_host_element;
use crate::{Backend, ExecError, HostElement, HostTensor, Machine, Prepared, World, WorldConfig};

/// How things are timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repeats {
    /// Limit of every wait.
    pub limit: Duration,
    /// Runs before those that count.
    pub warmups: usize,
    /// Runs that count, at least 1; a time is their median.
    pub iterations: usize,
}

/// Measured times of a layer's forward and of its parts, on the ranks of a machine.
pub struct MeasuredClock<'a, M> {
    /// The machine.
    pub machine: &'a M,
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks that share it.
    pub ranks: usize,
    /// How communication is brought to run under computation.
    pub policy: OverlapPolicy,
    /// How things are timed.
    pub timing: Repeats,
}

/// Why a time cannot be measured.
#[derive(Debug, Error)]
#[non_exhaustive]
pub enum MeasureError {
    /// A layer that cannot be split.
    #[error(transparent)]
    Plan(#[from] PlanError),
    /// The run failed.
    #[error(transparent)]
    Run(#[from] ExecError),
}

impl<M: Machine> PassClock for MeasuredClock<'_, M> {
    type Error = MeasureError;

    fn product(&mut self, rows: usize) -> Result<f64, MeasureError> {
        let LinearSpec { tokens, dtype, .. } = self.spec;
        let size = self.spec.product_size(rows, self.ranks);
        self.seconds(|rank| lower_product([rank, self.ranks], size, tokens, dtype, self.policy))
    }

    fn travel(&mut self, rows: usize) -> Result<[f64; 2], MeasureError> {
        let Some(collective) = GemmCollective::of(&self.spec) else { return Ok([0.0; 2]) };
        let case = CollectiveShape {
            collective,
            ranks: self.ranks,
            rows,
            columns: self.spec.travelling_columns(),
            dtype: self.spec.dtype,
        };
        let times = case.measure(self.machine, &self.timing)?;
        Ok([median(times.iter().map(|times| times[0])), median(times.iter().map(|times| times[1]))])
    }

    fn join(&mut self) -> Result<f64, MeasureError> {
        let shape = [self.spec.tokens.div_ceil(self.ranks), self.spec.travelling_columns()];
        self.seconds(|rank| lower_join([rank, self.ranks], shape, self.spec.dtype))
    }

    fn pass(&mut self, plan: &LinearPlan) -> Result<f64, MeasureError> {
        self.seconds(|rank| lower_linear_forward(plan, rank, self.policy))
    }
}

impl<M: Machine> MeasuredClock<'_, M> {
    fn seconds(&self, lower: impl Fn(usize) -> Program) -> Result<f64, MeasureError> {
        let (timelines, _) = run(self.machine, self.ranks, &self.timing, lower)?;
        Ok(median(timelines.iter().map(Timeline::duration)))
    }
}

/// A collective of tokens by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveShape {
    /// Which.
    pub collective: GemmCollective,
    /// Ranks.
    pub ranks: usize,
    /// Rows that each rank owns.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Element type.
    pub dtype: DType,
}

impl CollectiveShape {
    /// Bytes of all ranks' rows, which is the size of the collective as nccl-tests counts it.
    pub fn bytes(&self) -> u64 {
        (self.ranks * self.rows * self.columns * self.dtype.size()) as u64
    }

    /// Bytes that the link of each rank carries over those of the collective: what makes bus bandwidth of a rate.
    pub fn bus_factor(&self) -> f64 {
        let once = (self.ranks - 1) as f64 / self.ranks as f64;
        if self.collective == GemmCollective::AllReduce { 2.0 * once } else { once }
    }

    /// Times it: of every counted run, a rank's mean seconds of the gather or reduction, and of an all-reduce's way back.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when an element is not what it must be; whatever ends a run.
    pub fn measure<M: Machine>(&self, machine: &M, timing: &Repeats) -> Result<Vec<[f64; 2]>, ExecError> {
        let Self { collective, ranks, rows, columns, dtype } = *self;
        let lower = |rank| lower_collective(collective, [rank, ranks], [rows, columns], dtype);
        let (timelines, prepared) = run(machine, ranks, timing, lower)?;
        for rank in &prepared {
            let missing = || ExecError::Tensor { name: "to".to_owned(), reason: "is missing".to_owned() };
            let found = rank.backend().download(rank.buffer("to").ok_or_else(missing)?)?.to_f64();
            let wrong = self.wrong(rank.program().rank, &found);
            if wrong > 0 {
                let reason = format!(
                    "has {wrong} wrong elements after {} of {rows} rows a rank on rank {}",
                    collective.name(),
                    rank.program().rank
                );
                return Err(ExecError::Tensor { name: "to".to_owned(), reason });
            }
        }
        Ok(timelines.iter().map(|timeline| travel_seconds(collective, timeline)).collect())
    }

    /// Elements of a rank's result that are not what they must be.
    fn wrong(&self, rank: usize, found: &[f64]) -> usize {
        let own = self.rows * self.columns;
        let sum = |at: usize| (0..self.ranks).map(|from| pattern(at, from)).sum::<f64>();
        let expected = |at: usize| match self.collective {
            GemmCollective::AllGather => pattern(at % own, at / own),
            GemmCollective::ReduceScatter => sum(rank * own + at),
            GemmCollective::AllReduce => sum(at),
        };
        found.iter().enumerate().filter(|&(at, &value)| value != expected(at)).count()
    }
}

/// Element `at` of a rank's input. Small whole numbers, whose sums every type holds exactly.
fn pattern(at: usize, rank: usize) -> f64 {
    ((at * 5 + at / 7 + rank * 3) % 4) as f64
}

type Ranks<M> = Vec<Prepared<<M as Machine>::Backend, <M as Machine>::Transport>>;

/// Runs every rank's Program on inputs that are [`pattern`]s; the timelines of the counted runs.
fn run<M: Machine>(
    machine: &M,
    ranks: usize,
    timing: &Repeats,
    lower: impl Fn(usize) -> Program,
) -> Result<(Vec<Timeline>, Ranks<M>), ExecError> {
    let config = WorldConfig { limit: timing.limit, poison: false, ..WorldConfig::default() };
    let world: Arc<World> = World::new(ranks, config);
    let programs: Vec<Program> = (0..ranks).map(lower).collect();
    let bytes = programs.iter().flat_map(|program| &program.buffers).map(BufferSpec::bytes);
    machine.check_memory(bytes.fold(0, u64::saturating_add), 0)?;
    let ends = programs.into_iter().zip(machine.connect(&world)?);
    let mut prepared: Ranks<M> = ends
        .map(|(program, (backend, transport))| Prepared::new(program, backend, transport))
        .collect::<Result<_, _>>()?;
    for rank in &mut prepared {
        let inputs = rank.program().buffers.iter().filter(|spec| spec.role == BufferRole::Input);
        for spec in inputs.cloned().collect::<Vec<_>>() {
            let tensor = tensor(&spec, rank.program().rank);
            let buffer = rank.backend().upload(&spec.name, tensor)?;
            rank.bind(&spec.name, buffer)?;
        }
    }
    for _ in 0..timing.warmups {
        Prepared::run_ranks(&mut prepared)?;
    }
    let timelines = (0..timing.iterations.max(1)).map(|_| Prepared::run_ranks(&mut prepared));
    Ok((timelines.collect::<Result<_, _>>()?, prepared))
}

fn tensor(spec: &BufferSpec, rank: usize) -> HostTensor {
    let elements: usize = spec.shape.iter().product();
    with_host_element!(spec.dtype, T => {
        let values = (0..elements).map(|at| <T as HostElement>::from_f64(pattern(at, rank)));
        HostTensor::from_vec(spec.shape.clone(), values.collect::<Vec<T>>())
    })
}

fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len() / 2).copied().unwrap_or(0.0)
}

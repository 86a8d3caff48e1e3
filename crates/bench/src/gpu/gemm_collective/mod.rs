//! Timing products with their collectives among the GPUs of this process, compared with cuBLASLt and NCCL one after the other, and
//! checking what came out.

mod host_barrier;
mod judge;
mod rank;

use std::thread;
use std::time::Duration;

use counterpoint_choose::LayerGroups;
use counterpoint_exec::{ExecError, GemmCollectiveSpec, Prepared, World, WorldConfig};
use counterpoint_schedule::OverlapPolicy;

use self::host_barrier::HostBarrier;
use self::judge::judge;
use self::rank::{Rank, RankTimes};
use counterpoint_cuda::NcclRank;
use counterpoint_cuda::exec_error;
use counterpoint_cuda::kernel::{ElementType, GemmLibrary};
use counterpoint_cuda::{CudaBackend, CudaError, CudaMachine, CudaTransport};

/// GPUs with a rank each, and NCCL among them.
pub struct GemmCollectiveBench {
    machine: CudaMachine,
    nccl: Vec<NcclRank>,
    libraries: Vec<GemmLibrary>,
    limit: Duration,
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmCollectiveTimes {
    /// Seconds of one run under each policy, by sample: of the slowest rank.
    pub policies: Vec<Vec<f64>>,
    /// Likewise cuBLASLt, then NCCL.
    pub library: Vec<f64>,
    /// cuBLASLt alone.
    pub product: Vec<f64>,
    /// NCCL alone.
    pub collective: Vec<f64>,
    /// Under each policy the relative error of a sample of elements against f64.
    pub errors: Vec<f64>,
    /// Likewise the largest share of an element's bound.
    pub of_bound: Vec<f64>,
    /// The relative error of cuBLASLt and NCCL.
    pub library_error: f64,
    /// Under each policy, elements of the sample that differ from those under the first one.
    pub different: Vec<u64>,
}

/// How often a case is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmCollectiveRuns {
    /// Runs of one sample, one after the other.
    pub iterations: usize,
    /// Samples.
    pub samples: usize,
}

type Ranked = Prepared<CudaBackend, CudaTransport>;

impl GemmCollectiveBench {
    /// Connects the GPUs of a machine, a rank each. Each wait lasts `limit` at most.
    ///
    /// # Errors
    /// When there are fewer, or no cuBLASLt or NCCL.
    pub fn new(machine: CudaMachine, limit: Duration) -> Result<Self, CudaError> {
        let config = WorldConfig { limit, ..WorldConfig::default() };
        let world = World::new(machine.devices().len(), config);
        let nccl = NcclRank::among_threads(machine.devices(), &world)?;
        let libraries = machine.devices().iter().map(GemmLibrary::open).collect::<Result<_, _>>()?;
        Ok(Self { machine, nccl, libraries, limit })
    }

    /// The GPUs.
    pub fn machine(&self) -> &CudaMachine {
        &self.machine
    }

    /// Times and checks one case under several policies, those that overlap a product with its own collective in these groups.
    /// `between` is called behind each sample, while no rank runs: for others that are interleaved with these.
    ///
    /// # Errors
    /// Whatever ends a run; [`ExecError::Tensor`] for a type that GPUs do not multiply.
    pub fn measure(
        &self,
        spec: &GemmCollectiveSpec,
        policies: &[OverlapPolicy],
        groups: &LayerGroups,
        runs: GemmCollectiveRuns,
        between: &mut (dyn FnMut() + Send),
    ) -> Result<GemmCollectiveTimes, ExecError> {
        let element = match spec.dtype {
            counterpoint_plan::DType::F16 => ElementType::F16,
            _ => ElementType::Bf16,
        };
        let prepared: Vec<Vec<Ranked>> = self.prepare(spec, policies, groups)?;
        let failed = |rank: usize| move |error| exec_error(rank, "a benchmark", error);
        let mut ranks = Vec::new();
        for (rank, programs) in prepared.into_iter().enumerate() {
            ranks.push(Rank::new(self, spec, element, rank, programs).map_err(failed(rank))?);
        }
        let barrier = HostBarrier::new(ranks.len(), self.limit);
        // One rank calls it.
        let mut between = Some(between);
        let results: Vec<Option<RankTimes>> = thread::scope(|scope| {
            let barrier = &barrier;
            let threads: Vec<_> = ranks
                .iter_mut()
                .map(|rank| {
                    let between = between.take();
                    scope.spawn(move || {
                        rank.run(barrier, runs, between).map_err(|error| barrier.give_up(error)).ok()
                    })
                })
                .collect();
            let joined = threads.into_iter().enumerate().map(|(rank, thread)| {
                thread.join().unwrap_or_else(|_| {
                    let place = "a benchmark".to_owned();
                    barrier.give_up(ExecError::RankPanicked { rank, place, message: "see above".to_owned() });
                    None
                })
            });
            joined.collect()
        });
        // Of the first that failed: the others only say that one has.
        barrier.first_error().map_or(Ok(()), Err)?;
        let results: Vec<RankTimes> = results.into_iter().flatten().collect();
        let slowest = |contender: usize| -> Vec<f64> {
            (0..runs.samples)
                .map(|at| results.iter().map(|times| times.seconds[contender][at]).fold(0.0, f64::max))
                .collect()
        };
        let judged = judge(spec, element, &results);
        let count = policies.len();
        Ok(GemmCollectiveTimes {
            policies: (0..count).map(slowest).collect(),
            library: slowest(count),
            product: slowest(count + 1),
            collective: slowest(count + 2),
            errors: judged[..count].iter().map(|judged| judged.relative).collect(),
            of_bound: judged[..count].iter().map(|judged| judged.of_bound).collect(),
            library_error: judged[count].relative,
            different: (0..count)
                .map(|at| {
                    let differ = |times: &RankTimes| {
                        let pairs = times.rows[at].iter().flatten().zip(times.rows[0].iter().flatten());
                        pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).count() as u64
                    };
                    results.iter().map(differ).sum()
                })
                .collect(),
        })
    }

    /// The Programs of every rank, by rank and policy.
    fn prepare(
        &self,
        spec: &GemmCollectiveSpec,
        policies: &[OverlapPolicy],
        groups: &LayerGroups,
    ) -> Result<Vec<Vec<Ranked>>, ExecError> {
        let mut by_rank: Vec<Vec<Ranked>> = (0..spec.ranks).map(|_| Vec::new()).collect();
        for policy in policies {
            let config = WorldConfig { limit: self.limit, poison: false, ..WorldConfig::default() };
            let ranks = spec.prepare_groups(&self.machine, groups.clone(), *policy, config)?;
            for (rank, prepared) in ranks.into_iter().enumerate() {
                by_rank[rank].push(prepared);
            }
        }
        Ok(by_rank)
    }
}

const SEED: u64 = 100;

fn weight_seed(rank: usize) -> u64 {
    2 * SEED + rank as u64
}

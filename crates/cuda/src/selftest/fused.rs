//! Products whose rows travel while they are computed, called again and again with random delays.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::selftest::{Extent, SelfCheck};
use counterpoint_exec::{
    Backend, ExecError, GemmCollective, GemmCollectiveSpec, GemmOverlap, HostTensor, Prepared, WorldConfig,
    all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter, random_tensor,
};
use counterpoint_plan::{DType, WaveGroups};
use counterpoint_schedule::{Mover, OverlapPolicy, StartOrder};
use half::bf16;

use crate::backend::exec_error;
use crate::kernel::GEMM_DESTINATIONS;
use crate::{CudaBackend, CudaBuffer, CudaError, CudaMachine, CudaTransport, DeviceBuffer};

/// Rows of each rank: two tiles, and a slice of one.
pub(super) const ROWS: usize = 256;
const SLICE: usize = 32;
/// Columns and terms: few tiles, so that calls follow each other closely.
const COLUMNS: usize = 256;
const TERMS: usize = 128;
/// Calls whose results are kept until they are looked at.
const BATCH: usize = 100;
/// What delays a rank, at most.
const NOISE_BYTES: usize = 8 << 20;
const LIMIT: Duration = Duration::from_secs(20);

/// Each collective with its product, thousands of calls on two inputs in turn; before every other call a rank is held up for a random
/// time. Every element of every call must have the bits of the product and the collective one after the other: what is a call
/// too old or too new has not.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_fused(machine: &CudaMachine, extent: Extent) -> Result<Vec<SelfCheck>, ExecError> {
    let batches = match extent {
        Extent::Full => 200,
        Extent::Quick => 5,
    };
    let policy = OverlapPolicy { mover: Mover::Fused, ..OverlapPolicy::default() };
    let way = Way { name: "fused", policy, groups: WaveGroups::Fixed(1) };
    let all = GemmCollective::ALL.map(|collective| (collective, ROWS));
    // A gather of less than a tile is not fused.
    let slices =
        [GemmCollective::ReduceScatter, GemmCollective::AllReduce].map(|collective| (collective, SLICE));
    let cases = all.into_iter().chain(slices);
    cases.map(|case| examine(machine, case, &way, batches)).collect()
}

/// How a product and its collective are run.
pub(super) struct Way {
    pub(super) name: &'static str,
    pub(super) policy: OverlapPolicy,
    pub(super) groups: WaveGroups,
}

/// One collective's calls, so many batches of them.
pub(super) fn examine(
    machine: &CudaMachine,
    (collective, own_rows): (GemmCollective, usize),
    way: &Way,
    batches: usize,
) -> Result<SelfCheck, ExecError> {
    let ranks = machine.devices().len().min(GEMM_DESTINATIONS);
    let m = own_rows * ranks;
    let spec = GemmCollectiveSpec { collective, ranks, m, n: COLUMNS, k: TERMS, dtype: DType::Bf16 };
    let rows = if collective == GemmCollective::AllGather { own_rows } else { m };
    let tensor = |rows, seed| random_tensor(vec![rows, TERMS], DType::Bf16, seed);
    let weights: Vec<HostTensor> = (0..ranks).map(|rank| tensor(COLUMNS, 900 + rank as u64)).collect();
    let inputs: [Vec<HostTensor>; 2] =
        [0, 100].map(|turn| (0..ranks).map(|rank| tensor(rows, turn + rank as u64)).collect());
    let apart = GemmOverlap::Policy(OverlapPolicy::new(StartOrder::Sequential));
    let world = WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() };
    let expected = inputs.each_ref().map(|x| match collective {
        GemmCollective::ReduceScatter => gemm_reduce_scatter(machine, x, &weights, apart, &world),
        GemmCollective::AllReduce => gemm_all_reduce(machine, x, &weights, apart, &world),
        GemmCollective::AllGather => all_gather_gemm(machine, x, &weights, apart, &world),
    });
    let [first, second] = expected;
    let expected = [first?, second?];
    let prepared = spec.prepare_groups(machine, way.groups.clone(), way.policy, world)?;
    let wrong = thread::scope(|scope| {
        let threads: Vec<_> = prepared
            .into_iter()
            .enumerate()
            .map(|(rank, prepared)| {
                let (weight, x) = (&weights[rank], [&inputs[0][rank], &inputs[1][rank]]);
                let expected = [&expected[0][rank], &expected[1][rank]];
                scope.spawn(move || Caller::new(rank, prepared, weight, x)?.run(expected, batches))
            })
            .collect();
        let joined = threads.into_iter().enumerate().map(|(rank, thread)| {
            thread.join().unwrap_or_else(|_| {
                let place = "a selftest".to_owned();
                Err(ExecError::RankPanicked { rank, place, message: "see above".to_owned() })
            })
        });
        joined.sum::<Result<u64, ExecError>>()
    })?;
    let calls = batches * BATCH;
    let name = format!(
        "{calls} products of {m} rows with {}, {}, on {ranks} GPUs, random delays, wrong elements",
        collective.name(),
        way.name
    );
    Ok(SelfCheck::of(name, 0, wrong as f64, 0.0))
}

/// One rank.
struct Caller {
    rank: usize,
    prepared: Prepared<CudaBackend, CudaTransport>,
    x: [CudaBuffer; 2],
    /// The results of a batch.
    kept: DeviceBuffer,
    noise: DeviceBuffer,
    /// Of the generator that delays come from.
    state: u64,
}

impl Caller {
    fn new(
        rank: usize,
        mut prepared: Prepared<CudaBackend, CudaTransport>,
        weight: &HostTensor,
        [first, second]: [&HostTensor; 2],
    ) -> Result<Self, ExecError> {
        let backend = prepared.backend().clone();
        prepared.bind("weight", backend.upload("weight", weight.clone())?)?;
        let x = [backend.upload("x", first.clone())?, backend.upload("x", second.clone())?];
        let bytes = prepared.buffer("y").map_or(0, |y| y.memory().len());
        let failed = |error: CudaError| exec_error(rank, "a selftest", error);
        let kept = DeviceBuffer::new(backend.device(), BATCH * bytes).map_err(failed)?;
        let noise = DeviceBuffer::new(backend.device(), NOISE_BYTES).map_err(failed)?;
        Ok(Self { rank, prepared, x, kept, noise, state: 0x9e37_79b9_7f4a_7c15 ^ rank as u64 })
    }

    /// Elements that are not what they should be.
    fn run(&mut self, expected: [&HostTensor; 2], batches: usize) -> Result<u64, ExecError> {
        let bits = expected.map(|tensor| -> Vec<u16> {
            tensor.as_slice::<bf16>().unwrap_or(&[]).iter().map(|element| element.to_bits()).collect()
        });
        let mut wrong = 0;
        for _ in 0..batches {
            for call in 0..BATCH {
                self.call(call)?;
            }
            self.prepared.finish()?;
            let setup = self.prepared.backend().setup();
            let kept: Vec<u16> = self
                .kept
                .download(setup, 0, self.kept.len() / size_of::<u16>())
                .map_err(|error| exec_error(self.rank, "a selftest", error))?;
            for (call, found) in kept.chunks_exact(bits[0].len().max(1)).enumerate() {
                wrong += found.iter().zip(&bits[call % 2]).filter(|(a, b)| a != b).count() as u64;
            }
        }
        // A result of another size would have been compared with nothing.
        Ok(if self.kept.len() == BATCH * bits[0].len() * size_of::<u16>() { wrong } else { u64::MAX })
    }

    fn call(&mut self, call: usize) -> Result<(), ExecError> {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        let Self { rank, prepared, x, kept, noise, state } = self;
        let failed = |error: CudaError| exec_error(*rank, "a selftest", error);
        let queue = prepared.streams()[0].queue().clone();
        if *state & 1 == 1 {
            let bytes = (*state >> 32) as usize % NOISE_BYTES;
            noise.slice(0..bytes).and_then(|noise| noise.fill(&queue, 0)).map_err(failed)?;
        }
        prepared.bind("x", x[call % 2].clone())?;
        prepared.start(Instant::now())?;
        let Some(y) = prepared.buffer("y") else { return Ok(()) };
        kept.copy_from(&queue, call * y.memory().len(), y.memory()).map_err(failed)
    }
}

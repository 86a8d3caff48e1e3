//! Fused GEMMs with collectives, called again and again with random delays.

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_cost::ProblemSize;
use counterpoint_exec::{
    Backend, ExecError, GemmCollectiveSpec, GemmOverlap, HostTensor, Prepared, TensorFault, WorldConfig,
    all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter, random_tensor,
};
use counterpoint_plan::{DType, GemmCollective, WaveGroups};
use counterpoint_reference::selftest::SelfCheck;
use counterpoint_schedule::OverlapPolicy;

use counterpoint_bench::gpu::collective::Delays;
use counterpoint_cuda::exec_error;
use counterpoint_cuda::kernel::{BitCheck, GEMM_DESTINATIONS};
use counterpoint_cuda::{
    CudaBackend, CudaBuffer, CudaError, CudaMachine, CudaTransport, DeviceBuffer, Event, Stream,
};

/// A product's rows of each rank, N and K: few tiles, so that calls follow each other closely. In the second a rank's
/// rows are a single tile's, and N and K end inside of one; in the third they are a slice of one.
pub(super) const SHAPES: [[usize; 3]; 3] = [[256, 256, 128], [128, 1000, 200], [32, 256, 128]];
/// Some more with one collective: sums that others get while their owner computes; rows that are too many to leave at once, and so many
/// columns that all rows of most of them are computed together; slices of wide tiles; and products whose k is in parts.
const MORE: [([usize; 3], GemmCollective); 8] = [
    ([1024, 4096, 128], GemmCollective::AllReduce),
    ([1024, 256, 1152], GemmCollective::AllGather),
    ([1024, 14336, 1152], GemmCollective::AllGather),
    ([32, 20480, 1024], GemmCollective::ReduceScatter),
    ([32, 512, 4096], GemmCollective::ReduceScatter),
    ([32, 512, 4096], GemmCollective::AllReduce),
    ([32, 512, 4096], GemmCollective::AllGather),
    ([128, 512, 4096], GemmCollective::ReduceScatter),
];
/// Calls after which the host waits, and so notices what failed.
const BATCH: usize = 1000;
/// What delays a rank, at most: it fills memory meanwhile.
const NOISE_BYTES: usize = 8 << 20;
/// Of every wait. NCCL needs more than 20 s to connect four ranks while all else begins.
const LIMIT: Duration = Duration::from_secs(60);

/// Each collective with its product, `calls` times in each shape on two inputs in turn; before every other call a rank is held up for
/// a random time. Every element of every call, compared on the device, must have the bits of the product and the collective one
/// after the other: what is a call too old or too new has not.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_fused(machine: &CudaMachine, calls: usize) -> Result<Vec<SelfCheck>, ExecError> {
    let policy = OverlapPolicy::FUSED;
    let variant = Variant { name: "fused", policy, groups: WaveGroups::Fixed(1) };
    let cases =
        SHAPES.into_iter().flat_map(|shape| GemmCollective::NAMES.map(|(_, collective)| (shape, collective)));
    cases
        .chain(MORE)
        .map(|(shape, collective)| examine(machine, shape, collective, &variant, calls))
        .collect()
}

/// How a product and its collective are run.
pub(super) struct Variant<'a> {
    pub(super) name: &'a str,
    pub(super) policy: OverlapPolicy,
    pub(super) groups: WaveGroups,
}

/// One collective's calls in one shape.
pub(super) fn examine(
    machine: &CudaMachine,
    [own, n, k]: [usize; 3],
    collective: GemmCollective,
    variant: &Variant<'_>,
    calls: usize,
) -> Result<SelfCheck, ExecError> {
    let ranks = machine.devices().len().min(GEMM_DESTINATIONS);
    let m = own * ranks;
    let spec = GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n, k }, dtype: DType::Bf16 };
    let rows = if collective == GemmCollective::AllGather { own } else { m };
    let tensor = |rows, seed| random_tensor(vec![rows, k], DType::Bf16, seed);
    let weights: Vec<HostTensor> = (0..ranks).map(|rank| tensor(n, 900 + rank as u64)).collect();
    let inputs: [Vec<HostTensor>; 2] =
        [0, 100].map(|turn| (0..ranks).map(|rank| tensor(rows, turn + rank as u64)).collect());
    let apart = GemmOverlap::Policy(OverlapPolicy::SEQUENTIAL);
    let world = WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() };
    let expected = inputs.each_ref().map(|x| match collective {
        GemmCollective::ReduceScatter => gemm_reduce_scatter(machine, x, &weights, apart, &world),
        GemmCollective::AllReduce => gemm_all_reduce(machine, x, &weights, apart, &world),
        GemmCollective::AllGather => all_gather_gemm(machine, x, &weights, apart, &world),
    });
    let [first, second] = expected;
    let expected = [first?, second?];
    let prepared = spec.prepare_groups(machine, variant.groups.clone(), variant.policy, world)?;
    let wrong = thread::scope(|scope| {
        let threads: Vec<_> = prepared
            .into_iter()
            .enumerate()
            .map(|(rank, prepared)| {
                let (weight, x) = (&weights[rank], [&inputs[0][rank], &inputs[1][rank]]);
                let expected = [&expected[0][rank], &expected[1][rank]];
                scope.spawn(move || Caller::new(rank, prepared, weight, x, expected)?.run(calls))
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
    let name = format!(
        "{calls} products of {m} x {n} x {k} with {}, {}, on {ranks} GPUs, random delays, wrong words",
        collective.name(),
        variant.name
    );
    Ok(SelfCheck::of(name, 0, wrong as f64, 0.0))
}

/// One rank.
struct Caller {
    rank: usize,
    prepared: Prepared<CudaBackend, CudaTransport>,
    /// Two inputs, and what must come of each.
    x: [CudaBuffer; 2],
    expected: [CudaBuffer; 2],
    check: BitCheck,
    noise: DeviceBuffer,
    delays: Delays,
    /// Of each stream: what of a call is on it has run, or may begin.
    marks: Vec<Event>,
}

impl Caller {
    fn new(
        rank: usize,
        mut prepared: Prepared<CudaBackend, CudaTransport>,
        weight: &HostTensor,
        x: [&HostTensor; 2],
        expected: [&HostTensor; 2],
    ) -> Result<Self, ExecError> {
        let backend = prepared.backend().clone();
        prepared.bind("weight", backend.upload("weight", weight.clone())?)?;
        let both = |name: &str, [first, second]: [&HostTensor; 2]| -> Result<[CudaBuffer; 2], ExecError> {
            Ok([backend.upload(name, first.clone())?, backend.upload(name, second.clone())?])
        };
        let failed = |error: CudaError| exec_error(rank, "a selftest", error);
        Ok(Self {
            rank,
            x: both("x", x)?,
            expected: both("expected", expected)?,
            check: BitCheck::new(backend.setup()).map_err(failed)?,
            noise: DeviceBuffer::new(backend.device(), NOISE_BYTES).map_err(failed)?,
            delays: Delays::of_rank(rank),
            marks: prepared.streams().iter().map(|_| backend.create_event()).collect::<Result<_, _>>()?,
            prepared,
        })
    }

    /// Words that are not what they should be.
    fn run(&mut self, calls: usize) -> Result<u64, ExecError> {
        for call in 0..calls {
            self.call(call % 2)?;
            if call % BATCH == BATCH - 1 {
                self.prepared.finish()?;
            }
        }
        self.prepared.finish()?;
        let setup = self.prepared.backend().setup();
        self.check.unlike(setup).map_err(|error| exec_error(self.rank, "a selftest", error))
    }

    fn call(&mut self, which: usize) -> Result<(), ExecError> {
        let Self { rank, prepared, x, expected, check, noise, delays, marks } = self;
        let failed = |error: CudaError| exec_error(*rank, "a selftest", error);
        let queues: Vec<Stream> = prepared.streams().iter().map(|stream| stream.queue().clone()).collect();
        let Some((queue, others)) = queues.split_first() else { return Ok(()) };
        if let Some(bytes) = delays.next(NOISE_BYTES) {
            noise.slice(0..bytes).and_then(|noise| noise.fill(queue, 0)).map_err(failed)?;
        }
        prepared.bind("x", x[which].clone())?;
        prepared.start(Instant::now())?;
        let y = prepared.buffer("y").ok_or_else(|| ExecError::tensor("y", TensorFault::NotAnOutput))?;
        let compare = || {
            for (other, mark) in others.iter().zip(&marks[1..]) {
                mark.record(other)?;
                queue.wait(mark)?;
            }
            check.compare(queue, y.memory(), expected[which].memory())?;
            // The next call begins after that, on all streams.
            marks[0].record(queue)?;
            others.iter().try_for_each(|other| other.wait(&marks[0]))
        };
        compare().map_err(failed)
    }
}

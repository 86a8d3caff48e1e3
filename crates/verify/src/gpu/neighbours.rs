//! Kernels of another library that run concurrently with calls of a group. They hold multiprocessors until those of their peers run, as
//! NCCL's do, and begin before a call on one rank and behind it on another.

use std::sync::Arc;
use std::thread;
use std::time::Duration;

use counterpoint_cost::ProblemSize;
use counterpoint_exec::{
    Backend, Call, ExecError, GemmCollectiveSpec, HostTensor, Prepared, TensorFault, Ticket, WorldConfig,
    random_tensor,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{DType, GemmCollective, WaveGroups};
use counterpoint_reference::selftest::{SelfCheck, unlike_elements};
use counterpoint_schedule::OverlapPolicy;

use super::calls::{Case, failed, group};
use counterpoint_bench::gpu::collective::Delays;
use counterpoint_cuda::kernel::{ForeignBarrier, ForeignBarrierPhase, GEMM_DESTINATIONS, StartHold};
use counterpoint_cuda::{
    CudaBackend, CudaError, CudaMachine, CudaStream, CudaTransport, Device, PinnedBuffer, Stream,
    StreamPriority, exec_error,
};

/// Multiprocessors that the neighbour's kernels hold, about as many as NCCL's.
const BLOCKS: usize = 16;
/// Of every wait, the neighbour's too.
const LIMIT: Duration = Duration::from_secs(30);
/// Rounds after which the host waits.
const BATCH: usize = 50;
/// How long a call or a neighbour is held, at most.
const MOST_DELAY: Duration = Duration::from_micros(150);

/// Forwards and backwards of attention, each concurrently with a phase of the neighbour's kernels: in a random order on every rank, with
/// random delays, ordered with nothing. And, where each rank has a GPU, fused GEMMs with collectives, which are ordered with the
/// neighbour's stream ([`GroupRank::order_with`](counterpoint_exec::GroupRank::order_with)). No wait may reach its limit in all `rounds`,
/// and bits are as without a neighbour.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_neighbours(machine: &CudaMachine, rounds: usize) -> Result<Vec<SelfCheck>, ExecError> {
    let mut checks = attention(machine, rounds)?;
    if machine.devices().len() > 1 {
        for (_, collective) in GemmCollective::NAMES {
            checks.extend(products(machine, collective, rounds)?);
        }
    }
    Ok(checks)
}

/// Words of the device-side barrier of the neighbour's kernels, in memory that all GPUs reach.
struct Words {
    memory: PinnedBuffer,
    peers: usize,
}

impl Words {
    fn new(device: &Device, peers: usize) -> Result<Self, CudaError> {
        Ok(Self { memory: PinnedBuffer::new(device, (BLOCKS + 1) * peers * size_of::<u64>())?, peers })
    }

    /// Peers that gave up waiting for another.
    fn missed(&self) -> Result<usize, CudaError> {
        let mut missed = vec![0u64; self.peers];
        self.memory.read(BLOCKS * self.peers * size_of::<u64>(), &mut missed)?;
        Ok(missed.iter().filter(|phase| **phase > 0).count())
    }
}

/// The neighbour on one rank's GPU.
struct Neighbour<'a> {
    words: &'a Words,
    peer: usize,
    kernel: ForeignBarrier,
    hold: StartHold,
    stream: Stream,
    phase: u64,
}

impl<'a> Neighbour<'a> {
    fn new(words: &'a Words, device: &Device, peer: usize) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::High)?;
        let (kernel, hold) = (ForeignBarrier::new(device)?, StartHold::new(device)?);
        Ok(Self { words, peer, kernel, hold, stream, phase: 0 })
    }

    /// Enqueues its next phase, so long from now.
    fn enqueue(&mut self, delay: Duration) -> Result<(), CudaError> {
        self.phase += 1;
        let Words { memory, peers } = self.words;
        let started = memory.device_address();
        let missed = started + (BLOCKS * peers * size_of::<u64>()) as u64;
        let (phase, peer, peers) = (self.phase, self.peer, *peers);
        let round = ForeignBarrierPhase { started, missed, limit: LIMIT, phase, peer, peers };
        self.hold.launch(&self.stream, delay)?;
        // SAFETY: the words outlive the streams, which are waited for; all peers have as many blocks.
        unsafe { self.kernel.launch(&self.stream, &round, BLOCKS as u32) }
    }
}

/// Random choices of one rank, or of all alike.
struct Choices(Delays);

impl Choices {
    fn of(seed: usize) -> Self {
        Self(Delays::of_rank(seed))
    }

    fn delay(&mut self) -> Duration {
        let nanoseconds = self.0.next(MOST_DELAY.as_nanos() as usize).unwrap_or(0);
        Duration::from_nanos(nanoseconds as u64)
    }

    fn toss(&mut self) -> bool {
        self.0.next(2).is_some()
    }
}

fn attention(machine: &CudaMachine, rounds: usize) -> Result<Vec<SelfCheck>, ExecError> {
    const SEED: u64 = 9;
    let ranks = machine.devices().len().max(2);
    let case = Case::new(machine, Mask::causal(640 * ranks), ranks, SEED)?;
    let words = Words::new(&machine.devices()[0], ranks).map_err(failed)?;
    let group = group(machine, ranks)?;
    let calls = case.prepare(&group)?;
    let tensors = case.tensors(&group)?;
    tensors.iter().try_for_each(|tensors| tensors.give_late())?;
    let of_rank = |rank: usize| -> Result<(), ExecError> {
        let (calls, tensors) = (&calls.ranks()[rank], &tensors[rank]);
        let device = group.ranks()[rank].backend().device();
        let mut neighbour = Neighbour::new(&words, device, rank).map_err(failed)?;
        let hold = StartHold::new(device).map_err(failed)?;
        let mut choices = Choices::of(rank);
        let mut last: Option<Ticket<CudaBackend>> = None;
        for round in 0..rounds {
            for is_forward in [true, false] {
                let comes_first = choices.toss();
                if comes_first {
                    neighbour.enqueue(choices.delay()).map_err(failed)?;
                }
                hold.launch(tensors.stream(), choices.delay()).map_err(failed)?;
                last = Some(match is_forward {
                    true => calls.forward(&tensors.forward(), Some(tensors.callers()))?,
                    false => calls.backward(&tensors.backward(), Some(tensors.callers()))?,
                });
                if !comes_first {
                    neighbour.enqueue(choices.delay()).map_err(failed)?;
                }
            }
            if round % BATCH == BATCH - 1 {
                last.as_ref().map_or(Ok(()), Ticket::wait)?;
            }
        }
        last.as_ref().map_or(Ok(()), Ticket::wait)?;
        neighbour.stream.synchronize().map_err(failed)
    };
    on_ranks(ranks, of_rank)?;
    group.poll()?;
    let unlike = case.unlike(&tensors)?;
    let missed = words.missed().map_err(failed)?;
    drop((calls, tensors));
    group.close()?;
    let gpus = machine.devices().len();
    let of = |what: &str| {
        format!(
            "{rounds} forwards and backwards concurrently with a neighbour's kernels, {ranks} ranks on {gpus} GPUs: {what}"
        )
    };
    Ok(vec![
        SelfCheck::of(of("elements with other bits"), SEED, unlike as f64, 0.0),
        SelfCheck::of(of("neighbours that waited in vain"), SEED, missed as f64, 0.0),
    ])
}

/// Products that are one kernel with their collective, which may hold all multiprocessors: all ranks call them and the neighbour in one
/// order, and name its stream.
fn products(
    machine: &CudaMachine,
    collective: GemmCollective,
    rounds: usize,
) -> Result<Vec<SelfCheck>, ExecError> {
    const OWN: usize = 256;
    const N: usize = 1024;
    const K: usize = 512;
    let ranks = machine.devices().len().min(GEMM_DESTINATIONS);
    let m = OWN * ranks;
    let spec =
        GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n: N, k: K }, dtype: DType::Bf16 };
    let rows = if collective == GemmCollective::AllGather { OWN } else { m };
    let tensor = |rows, seed| random_tensor(vec![rows, K], DType::Bf16, seed);
    let policy = OverlapPolicy::FUSED;
    let config = WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() };
    let prepared = spec.prepare_groups(machine, WaveGroups::Fixed(1), policy, config)?;
    let words = Words::new(&machine.devices()[0], ranks).map_err(failed)?;
    let unlike = thread::scope(|scope| {
        let started: Vec<_> = prepared
            .into_iter()
            .enumerate()
            .map(|(rank, prepared)| {
                let (x, weight) = (tensor(rows, rank as u64), tensor(N, 900 + rank as u64));
                let words = &words;
                scope.spawn(move || product_of_rank(prepared, x, weight, words, rounds))
            })
            .collect();
        let joined = started
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| thread.join().unwrap_or_else(|_| died(rank)));
        joined.sum::<Result<usize, ExecError>>()
    })?;
    let missed = words.missed().map_err(failed)?;
    let of = |what: &str| {
        let name = collective.name();
        format!("{rounds} products with {name} ordered with a neighbour's kernels on {ranks} GPUs: {what}")
    };
    Ok(vec![
        SelfCheck::of(of("elements with other bits"), 0, unlike as f64, 0.0),
        SelfCheck::of(of("neighbours that waited in vain"), 0, missed as f64, 0.0),
    ])
}

/// One rank's. Elements of the last result that the first, which had no neighbour, has otherwise.
fn product_of_rank(
    prepared: Prepared<CudaBackend, CudaTransport>,
    x: HostTensor,
    weight: HostTensor,
    words: &Words,
    rounds: usize,
) -> Result<usize, ExecError> {
    let rank = prepared.backend().rank();
    let failed = |error: CudaError| exec_error(rank, "a selftest", error);
    let mut neighbour = Neighbour::new(words, prepared.backend().device(), rank).map_err(failed)?;
    // Made behind the neighbour, and so gone before it, whatever ends this: the rank asks the streams that it has borrowed.
    let mut prepared = prepared;
    let backend = prepared.backend().clone();
    for (name, tensor) in [("x", x), ("weight", weight)] {
        prepared.bind(name, backend.upload(name, tensor)?)?;
    }
    prepared.own_outputs()?;
    let result = || {
        let missing = || ExecError::tensor("y", TensorFault::NotAnOutput);
        backend.download(prepared.buffer("y").ok_or_else(missing)?)
    };
    Call::new(&prepared, &[], None)?.enqueue()?.wait()?;
    let right = result()?;
    // SAFETY: the rank goes with `prepared` and `backend`, which go before the neighbour.
    let stream: Arc<CudaStream> = unsafe { backend.borrow_stream(neighbour.stream.raw()) };
    prepared.group_rank().order_with(stream);
    // In one order on all ranks, with delays of each.
    let (mut order, mut delays) = (Choices::of(1000), Choices::of(rank));
    for round in 0..rounds {
        let comes_first = order.toss();
        if comes_first {
            neighbour.enqueue(delays.delay()).map_err(failed)?;
        }
        let ticket = Call::new(&prepared, &[], None)?.enqueue()?;
        if !comes_first {
            neighbour.enqueue(delays.delay()).map_err(failed)?;
        }
        if round % BATCH == BATCH - 1 {
            ticket.wait()?;
        }
    }
    Call::new(&prepared, &[], None)?.enqueue()?.wait()?;
    neighbour.stream.synchronize().map_err(failed)?;
    let found = result()?;
    Ok(unlike_elements(&found, &right))
}

/// Each rank on a thread of its own.
fn on_ranks(ranks: usize, of_rank: impl Fn(usize) -> Result<(), ExecError> + Sync) -> Result<(), ExecError> {
    thread::scope(|scope| {
        let of_rank = &of_rank;
        let started: Vec<_> = (0..ranks).map(|rank| scope.spawn(move || of_rank(rank))).collect();
        let ended: Vec<Result<(), ExecError>> = started
            .into_iter()
            .enumerate()
            .map(|(rank, thread)| thread.join().unwrap_or_else(|_| died(rank)))
            .collect();
        ended.into_iter().collect()
    })
}

fn died<T>(rank: usize) -> Result<T, ExecError> {
    let place = "a selftest".to_owned();
    Err(ExecError::RankPanicked { rank, place, message: "see above".to_owned() })
}

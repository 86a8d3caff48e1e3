//! Timing group collectives among GPUs, of this process or of several, and checking what they moved.

mod repeat;

use std::sync::Barrier;
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::Duration;

use counterpoint_exec::{
    Backend, CollectiveCall, CollectiveContext, Ends, ExecError, Machine, OpPlace, Transport, World,
    WorldConfig,
};
use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{
    Accumulate, BufferId, BufferRole, BufferSpec, GroupCast, GroupReduce, OverlapPolicy, ReduceOp,
    StreamKind, StreamSpec,
};

use counterpoint_cuda::exec_error;
use counterpoint_cuda::kernel::{CheckedRows, RowCheck, RowContents, RowOrigin, Scalar};
use counterpoint_cuda::{CudaBackend, CudaBuffer, CudaError, CudaStream, DeviceBuffer, Event};

pub use repeat::{Delays, repeat_collective};

/// What is timed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BenchCollective {
    /// Rows to other ranks.
    GroupCast,
    /// Partial results of rows, summed into what their owner has.
    GroupReduce,
}

/// One case.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CollectiveCase {
    /// What.
    pub collective: BenchCollective,
    /// Ranks.
    pub ranks: usize,
    /// Element type of all tensors, and on the wire.
    pub dtype: DType,
    /// Elements of a row.
    pub row_elements: usize,
    /// Rows of one tensor that each rank sends, and receives.
    pub rows: usize,
    /// Rows of a split: rows of as many more lie between two that are sent.
    pub split_rows: usize,
    /// Runs before those that count.
    pub warmups: usize,
    /// Runs of one time.
    pub iterations: usize,
    /// Times.
    pub samples: usize,
    /// Limit of every wait.
    pub limit: Duration,
}

impl BenchCollective {
    /// Tensors that travel together, as keys and values do.
    pub const TENSORS: usize = 2;
}

impl CollectiveCase {
    /// Bytes that each rank sends.
    pub fn bytes(&self) -> u64 {
        (BenchCollective::TENSORS * self.rows * self.row_elements * self.dtype.size()) as u64
    }

    /// Elements that each rank sends.
    pub fn elements(&self) -> u64 {
        (BenchCollective::TENSORS * self.rows * self.row_elements) as u64
    }

    /// Every rank's part. A rank's splits go to the others in turn; between two lie rows that stay. They arrive in the order in
    /// which they were sent, those of one step by rank.
    fn parts(&self) -> Vec<GroupPart> {
        let Self { ranks, rows, split_rows, .. } = *self;
        let lengths = (0..rows).step_by(split_rows).map(|start| split_rows.min(rows - start));
        let lengths: Vec<usize> = lengths.collect();
        // Who split `step` of a rank goes to: never itself, and in each step another rank's to everyone.
        let target = |rank: usize, step: usize| (rank + 1 + step % (ranks - 1).max(1)) % ranks;
        let part = |rank: usize| {
            let targets: Vec<u32> = (0..lengths.len()).map(|step| target(rank, step) as u32).collect();
            let input = lengths
                .iter()
                .zip(&targets)
                .flat_map(|(&length, to)| [(length, std::slice::from_ref(to)), (length, &[][..])]);
            let output = lengths.iter().enumerate().map(|(step, &length)| {
                let from = (0..ranks).find(|&from| target(from, step) == rank).unwrap_or(rank);
                (length, from as u32)
            });
            GroupPart::from_splits(input, output)
        };
        (0..ranks).map(part).collect()
    }
}

/// What came of a case.
#[derive(Clone, Debug, PartialEq)]
pub struct CollectiveTimes {
    /// Seconds of one run, a value for each sample: from the first run's start to the last one's end on the device of the
    /// slowest rank, over their number.
    pub seconds: Vec<f64>,
    /// Elements that were not what they should be, before and after the timed runs.
    pub wrong: u64,
}

impl CollectiveTimes {
    /// What came of a case, from what came of it on some of the ranks and on the others.
    #[must_use]
    pub fn join(self, other: &Self) -> Self {
        let seconds = self.seconds.iter().zip(&other.seconds).map(|(own, other)| own.max(*other));
        Self { seconds: seconds.collect(), wrong: self.wrong + other.wrong }
    }
}

/// Times a collective on the ranks of a machine that are in this process; all its processes call it. Ranks enqueue from threads
/// of their own; what was received is checked, element by element, before and after.
///
/// # Errors
/// Whatever ends a run.
pub fn bench_collective<M: Machine<Backend = CudaBackend> + Sync>(
    machine: &M,
    case: &CollectiveCase,
) -> Result<CollectiveTimes, ExecError> {
    let results = on_ranks(machine, case, |rank, gate| rank.run(gate))?;
    let all = results.iter().skip(1).fold(results.first().cloned(), |all, times| Some(all?.join(times)));
    Ok(all.unwrap_or(CollectiveTimes { seconds: Vec::new(), wrong: 0 }))
}

/// What `run` gives for each rank that is in this process, from a thread of its own.
fn on_ranks<M: Machine<Backend = CudaBackend> + Sync, R: Send>(
    machine: &M,
    case: &CollectiveCase,
    run: impl Fn(&Rank<'_, M>, &Gate<'_, M>) -> Result<R, ExecError> + Sync,
) -> Result<Vec<R>, ExecError> {
    let config = WorldConfig { limit: case.limit, poison: false, ..WorldConfig::default() };
    let world = World::new(case.ranks, config);
    let parts = case.parts();
    let here = machine.ranks_here(case.ranks);
    let gate = Gate { machine, threads: Barrier::new(here.len()), failed: Mutex::new(None) };
    let ends = machine.connect(&world)?;
    thread::scope(|scope| {
        let ranks: Vec<_> = here
            .clone()
            .zip(ends)
            .map(|(rank, ends)| {
                let (parts, gate, run, world) = (&parts, &gate, &run, &world);
                scope.spawn(move || {
                    let ran = Rank::<M>::new(rank, case, parts, &ends).and_then(|rank| run(&rank, gate));
                    // Before the ends go: they may wait for the other ranks.
                    ran.map_err(|error| world.fail(error))
                })
            })
            .collect();
        let joined = here.zip(ranks).map(|(rank, thread)| {
            thread.join().unwrap_or_else(|_| {
                let place = "a benchmark".to_owned();
                Err(ExecError::RankPanicked { rank, place, message: "see above".to_owned() })
            })
        });
        joined.collect::<Vec<_>>().into_iter().collect()
    })
}

/// A barrier of all ranks, those of this process first.
struct Gate<'a, M> {
    machine: &'a M,
    threads: Barrier,
    failed: Mutex<Option<ExecError>>,
}

impl<M: Machine> Gate<'_, M> {
    fn wait(&self) -> Result<(), ExecError> {
        if self.threads.wait().is_leader()
            && let Err(error) = self.machine.barrier("a benchmark")
        {
            self.failed.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
        }
        self.threads.wait();
        self.failed.lock().unwrap_or_else(PoisonError::into_inner).clone().map_or(Ok(()), Err)
    }
}

type Prepared<M> = <<M as Machine>::Transport as Transport<CudaBackend>>::Collective;

/// One rank with its tensors.
struct Rank<'a, M: Machine<Backend = CudaBackend>> {
    rank: usize,
    case: &'a CollectiveCase,
    ends: &'a Ends<M>,
    collective: Prepared<M>,
    place: OpPlace,
    /// Inputs, then outputs.
    buffers: Vec<CudaBuffer>,
    check: RowCheck,
    origins: DeviceBuffer,
}

impl<'a, M: Machine<Backend = CudaBackend>> Rank<'a, M> {
    fn new(
        rank: usize,
        case: &'a CollectiveCase,
        parts: &[GroupPart],
        ends: &'a Ends<M>,
    ) -> Result<Self, ExecError> {
        let CollectiveCase { collective, dtype, row_elements, .. } = *case;
        let (backend, transport) = ends;
        let part = &parts[rank];
        let owned_rows = part.owned.iter().map(|split| split.rows.end).max().unwrap_or(0);
        let remote_rows = part.remote.iter().map(|split| split.rows.end).max().unwrap_or(0);
        let (input_rows, output_rows) = match collective {
            BenchCollective::GroupCast => (owned_rows, remote_rows),
            BenchCollective::GroupReduce => (remote_rows, owned_rows),
        };
        let spec =
            |name: String, rows, role| BufferSpec { name, dtype, shape: vec![rows, row_elements], role };
        let inputs =
            (0..BenchCollective::TENSORS).map(|t| spec(format!("input {t}"), input_rows, BufferRole::Input));
        let outputs = (0..BenchCollective::TENSORS)
            .map(|t| spec(format!("output {t}"), output_rows, BufferRole::Output));
        let specs: Vec<BufferSpec> = inputs.chain(outputs).collect();
        let buffers = specs.iter().map(|spec| backend.allocate(spec)).collect::<Result<Vec<_>, _>>()?;
        let tensors = (0..BenchCollective::TENSORS)
            .map(|t| (BufferId(t), BufferId(BenchCollective::TENSORS + t)))
            .collect();
        let place = OpPlace::new(0, "bench");
        let policy = OverlapPolicy::default();
        let context = CollectiveContext { buffers: &specs, policy: &policy, plan: None, turn: None };
        let prepared = match collective {
            BenchCollective::GroupCast => {
                let op = GroupCast {
                    part: Arc::new(part.clone()),
                    tensors,
                    wire_dtype: dtype,
                    arrive: None,
                    delivery: None,
                };
                transport.prepare_cast(&place, &op, &context)?
            }
            BenchCollective::GroupReduce => {
                let op = GroupReduce {
                    part: Arc::new(part.clone()),
                    tensors,
                    op: ReduceOp::Sum,
                    accumulate: Accumulate::Continue,
                    wire_dtype: dtype,
                    reduce_dtype: DType::F32,
                    arrive: None,
                };
                transport.prepare_reduce(&place, &op, &context)?
            }
        };
        let failed = |error| exec_error(rank, "the preparation of a benchmark", error);
        let scalar = Scalar::of(dtype).unwrap_or(Scalar::F32);
        let check = RowCheck::new(backend.device(), scalar).map_err(failed)?;
        let origins = origins(rank, collective, parts, output_rows);
        let origins = DeviceBuffer::from_slice(backend.setup(), &origins).map_err(failed)?;
        Ok(Self { rank, case, collective: prepared, place, buffers, check, origins, ends })
    }

    fn stream(&self) -> Result<CudaStream, ExecError> {
        let spec = StreamSpec { name: "collectives".to_owned(), kind: StreamKind::Communication };
        self.ends.0.create_stream(&spec, &OverlapPolicy::default())
    }

    /// A call of the collective, as often as wanted.
    fn call<'c>(&'c self, stream: &'c CudaStream) -> CollectiveCall<'c, CudaBackend, Prepared<M>> {
        CollectiveCall {
            backend: &self.ends.0,
            stream,
            place: &self.place,
            collective: &self.collective,
            buffers: &self.buffers,
            barrier: None,
            signal: None,
        }
    }

    fn run(&self, gate: &Gate<'_, M>) -> Result<CollectiveTimes, ExecError> {
        let (backend, transport) = self.ends;
        let failed = |error: CudaError| backend.fail(exec_error(self.rank, "a benchmark", error));
        let stream = self.stream()?;
        let call = self.call(&stream);
        let check = || -> Result<u64, ExecError> {
            self.fill().map_err(failed)?;
            // Nobody's rows are read before they are made.
            gate.wait()?;
            transport.enqueue(&call)?;
            backend.synchronize(&[&stream])?;
            gate.wait()?;
            self.wrong().map_err(failed)
        };
        let mut wrong = check()?;
        (0..self.case.warmups).try_for_each(|_| transport.enqueue(&call))?;
        let event = || Event::timing(backend.device()).map_err(failed);
        let (begin, end) = (event()?, event()?);
        let mut seconds = Vec::with_capacity(self.case.samples);
        for _ in 0..self.case.samples {
            gate.wait()?;
            // The first run connects ranks and is not timed: it waits for the host's threads to come out of the barrier.
            transport.enqueue(&call)?;
            begin.record(stream.queue()).map_err(failed)?;
            (0..self.case.iterations).try_for_each(|_| transport.enqueue(&call))?;
            end.record(stream.queue()).map_err(failed)?;
            backend.synchronize(&[&stream])?;
            let took = end.time_since(&begin).map_err(failed)?;
            seconds.push(took.as_secs_f64() / self.case.iterations as f64);
        }
        gate.wait()?;
        wrong += check()?;
        Ok(CollectiveTimes { seconds, wrong })
    }

    /// Makes all tensors: the inputs what is sent, the outputs what they are before.
    fn fill(&self) -> Result<(), CudaError> {
        let setup = self.ends.0.setup();
        for (at, buffer) in self.buffers.iter().enumerate() {
            let is_received =
                at >= BenchCollective::TENSORS && self.case.collective == BenchCollective::GroupCast;
            match is_received {
                true => buffer.memory().fill(setup, 0xff)?,
                // SAFETY: the buffer lives as long as this value, and its type is the kernel's.
                false => unsafe { self.check.fill(setup, &self.rows(at)) }?,
            }
        }
        setup.synchronize()
    }

    fn wrong(&self) -> Result<u64, CudaError> {
        let contents = match self.case.collective {
            BenchCollective::GroupCast => RowContents::Received,
            BenchCollective::GroupReduce => RowContents::Summed,
        };
        let setup = self.ends.0.setup();
        let each = (BenchCollective::TENSORS..2 * BenchCollective::TENSORS).map(|at| {
            // SAFETY: as in `fill`; there is an origin for every row of an output.
            unsafe { self.check.wrong(setup, &self.rows(at), &self.origins, contents) }
        });
        each.sum()
    }

    fn rows(&self, at: usize) -> CheckedRows {
        let buffer = &self.buffers[at];
        CheckedRows {
            address: buffer.address(),
            rows: buffer.shape()[0] as u64,
            row_elements: self.case.row_elements as u32,
            rank: self.rank as u32,
            index: (at % BenchCollective::TENSORS) as u32,
        }
    }
}

/// Where each row of a rank's outputs comes from.
fn origins(rank: usize, collective: BenchCollective, parts: &[GroupPart], rows: usize) -> Vec<RowOrigin> {
    let mut origins = vec![RowOrigin::NOBODY; rows];
    for peer in 0..parts.len() {
        let (owner, holder) = match collective {
            BenchCollective::GroupCast => (peer, rank),
            BenchCollective::GroupReduce => (rank, peer),
        };
        let owned = parts[owner].owned.iter().filter(|split| split.ranks.contains(&(holder as u32)));
        let held = parts[holder].remote.iter().filter(|split| split.rank as usize == owner);
        for (owned, held) in owned.zip(held) {
            let (from, to) = match collective {
                BenchCollective::GroupCast => (owned.rows, held.rows),
                BenchCollective::GroupReduce => (held.rows, owned.rows),
            };
            for (from, to) in (from.start..from.end).zip(to.start..to.end) {
                origins[to] = RowOrigin::new(peer, from);
            }
        }
    }
    origins
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_rank_sends_and_receives_as_much_and_nothing_to_itself() {
        for ranks in [2, 3, 8] {
            let case = CollectiveCase {
                collective: BenchCollective::GroupCast,
                ranks,
                dtype: DType::Bf16,
                row_elements: 8,
                rows: 100,
                split_rows: 16,
                warmups: 0,
                iterations: 1,
                samples: 1,
                limit: Duration::from_secs(1),
            };
            let parts = case.parts();
            for (rank, part) in parts.iter().enumerate() {
                part.check(rank, ranks, 200, 100).unwrap();
                assert_eq!((part.send_rows(), part.recv_rows()), (100, 100));
                let received = origins(rank, BenchCollective::GroupCast, &parts, 100);
                assert!(received.iter().all(|origin| *origin != RowOrigin::NOBODY));
                assert!(received.iter().all(|origin| origin.rank as usize != rank));
                let summed = origins(rank, BenchCollective::GroupReduce, &parts, 200);
                assert_eq!(summed.iter().filter(|origin| **origin != RowOrigin::NOBODY).count(), 100);
            }
            assert_eq!(case.bytes(), 2 * 100 * 16);
        }
    }
}

//! Checks of failure: ranks that die, stall, lack memory or cannot reach each other; all say so in time, and the next run is right.

use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_exec::{
    AttentionInputs, Backend, Ends, ExecError, FaultInjection, FaultKind, FaultPoint, HostTensor, Machine,
    Pass, Prepared, TensorFault, World, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_reference::selftest::{Extent, SelfCheck, Share};
use counterpoint_schedule::{KeyBlocks, Op, OverlapPolicy, Program, lower_attention_forward};

use super::staged::StagedAttention;
use crate::case_fault::CaseFault;
use counterpoint_cuda::{
    CudaBackend, CudaError, CudaMachine, CudaTransport, Device, DeviceBuffer, Timing, TransportKind,
};

const ROWS: usize = 2048;
/// Limit of every wait of a run that is disturbed.
const LIMIT: Duration = Duration::from_secs(3);
/// Of the others, which compile kernels and connect the ranks of NCCL, while all cores are busy.
const LONG: Duration = Duration::from_secs(60);
/// How much longer a run may take: a stalled rank sleeps on.
const GRACE: Duration = Duration::from_secs(2);

/// A rank dies, or stalls for longer than the limit, before operations of a run picked by the seed, each rank enqueued by a
/// thread of its own: every rank must end within the limit with an error that names that rank - but one that had all it needed
/// may have its results - and the run after it must give the bits of the run before. `checked` hears of every check, with how many there are.
///
/// # Errors
/// When the undisturbed run fails.
pub fn selftest_faults(
    machine: &CudaMachine,
    extent: Extent,
    share: Share,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Result<Vec<SelfCheck>, ExecError> {
    let problem = Problem::new(machine.devices().len().max(2))?;
    let expected = problem.undisturbed(machine)?;
    let (deaths, stalls) = match extent {
        Extent::Full => (6, 2),
        Extent::Quick => (2, 1),
    };
    let kinds = std::iter::repeat_n(FaultKind::Panic, deaths)
        .chain(std::iter::repeat_n(FaultKind::Stall(LIMIT + GRACE / 2), stalls));
    let count = share.count(deaths + stalls);
    let mut checks = Vec::new();
    for (seed, kind) in kinds.enumerate().filter(|(seed, _)| share.takes(*seed)) {
        let check = problem.strike(machine, seed, kind, &expected);
        checked(&check, count);
        checks.push(check);
    }
    Ok(checks)
}

/// The last rank's GPU has no memory left, of which nobody else may want any meanwhile: every rank must say so within the limit, and
/// the run after it must give the bits of the run before. Each rank has a GPU to itself.
///
/// # Errors
/// When the undisturbed run fails.
pub fn selftest_exhaustion(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    let problem = Problem::new(machine.devices().len())?;
    let expected = problem.undisturbed(machine)?;
    let check = problem.exhaust(machine, &expected);
    let name = format!("{}: {}", machine.transport(), check.name);
    Ok(vec![SelfCheck { name, ..check }])
}

/// GPUs that do not reach each other's memory: transports that need it must be refused with their names, and the one that is chosen
/// instead must give the bits of those that reach it. Nothing to check on a single GPU.
///
/// # Errors
/// When the run of GPUs that reach each other fails.
pub fn selftest_isolation(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    if machine.devices().len() < 2 {
        return Ok(Vec::new());
    }
    let problem = Problem::new(machine.devices().len())?;
    let expected = problem.undisturbed(machine)?;
    let name = "GPUs that do not reach each other's memory are named, and take NCCL".to_owned();
    let isolated = machine.devices().iter().map(Device::isolated).collect();
    let check = || -> Result<SelfCheck, CaseFault> {
        let isolated = CudaMachine::new(isolated, Timing::Off)?;
        for transport in [TransportKind::Nvlink, TransportKind::CopyEngine] {
            match isolated.clone().with_transport(transport) {
                Err(CudaError::NoPeerAccess { from: 0, to: 1, .. }) => {}
                Err(reason) => return Err(CaseFault::RefusedOtherwise { transport, reason }),
                Ok(_) => return Err(CaseFault::NotRefused { transport }),
            }
        }
        let results = problem.undisturbed(&isolated)?;
        let unlike = expected.iter().zip(&results).filter(|(a, b)| a != b).count();
        let others = usize::from(isolated.transport() != TransportKind::NCCL);
        Ok(SelfCheck::of(name.clone(), 0, (unlike + others) as f64, 0.0))
    };
    Ok(vec![check().unwrap_or_else(|reason| SelfCheck::failed(name.clone(), 0, reason.to_string()))])
}

/// All memory that a device gives. It is another program's, as it were: the driver has it back when this goes, where a pool of ours would
/// keep it from what makes no memory of its own, such as streams.
fn all_memory(device: &Device) -> Vec<DeviceBuffer> {
    const SMALLEST: usize = 64 << 10;
    let device = &device.for_world();
    let mut all = Vec::new();
    let mut bytes = 64 << 30;
    while bytes >= SMALLEST {
        match DeviceBuffer::new(device, bytes) {
            Ok(buffer) => all.push(buffer),
            Err(_) => bytes /= 2,
        }
    }
    all
}

/// What became of ranks.
struct Outcome {
    ranks: Vec<Result<HostTensor, ExecError>>,
    /// Until the last of them that did not die said so.
    took: Duration,
}

struct Problem {
    programs: Vec<Program>,
    inputs: Vec<AttentionInputs>,
}

impl Problem {
    fn new(ranks: usize) -> Result<Self, ExecError> {
        let StagedAttention { spec, plan, inputs } =
            StagedAttention::new(Mask::causal(ROWS), ranks, 3, 5, Pass::Forward)?;
        let programs = (0..ranks)
            .map(|rank| {
                lower_attention_forward(&plan, rank, &spec, OverlapPolicy::default(), KeyBlocks::Unaligned)
            })
            .collect();
        let inputs = plan.ranks.iter().map(|rank| inputs.of_rank(rank)).collect::<Result<_, _>>()?;
        Ok(Self { programs, inputs })
    }

    /// The results of all ranks.
    fn undisturbed(&self, machine: &CudaMachine) -> Result<Vec<HostTensor>, ExecError> {
        let ends = self.connect(machine, LONG, Vec::new())?;
        self.run(ends).ranks.into_iter().collect()
    }

    fn connect(
        &self,
        machine: &CudaMachine,
        limit: Duration,
        faults: Vec<FaultInjection>,
    ) -> Result<Vec<Ends<CudaMachine>>, ExecError> {
        let config = WorldConfig { limit, faults, ..WorldConfig::default() };
        machine.connect(&World::new(self.programs.len(), config))
    }

    /// What becomes of each rank.
    fn run(&self, ends: Vec<Ends<CudaMachine>>) -> Outcome {
        let (began, said) = (Instant::now(), Mutex::new(Duration::ZERO));
        let ranks = thread::scope(|scope| {
            let said = &said;
            let run = |(rank, (backend, transport)): (usize, Ends<CudaMachine>)| {
                scope.spawn(move || {
                    self.run_rank(rank, backend, transport, || {
                        let mut said = said.lock().unwrap_or_else(PoisonError::into_inner);
                        *said = began.elapsed().max(*said);
                    })
                })
            };
            let threads: Vec<_> = ends.into_iter().enumerate().map(run).collect();
            let join = |(rank, thread): (usize, thread::ScopedJoinHandle<'_, _>)| {
                thread.join().unwrap_or_else(|_| {
                    let (place, message) = ("a selftest".to_owned(), "see above".to_owned());
                    Err(ExecError::RankPanicked { rank, place, message })
                })
            };
            threads.into_iter().enumerate().map(join).collect()
        });
        let took = *said.lock().unwrap_or_else(PoisonError::into_inner);
        Outcome { ranks, took }
    }

    /// Uses up the memory of the last rank's GPU once all are connected: every rank must say that it was that one's.
    fn exhaust(&self, machine: &CudaMachine, expected: &[HostTensor]) -> SelfCheck {
        let victim = self.programs.len() - 1;
        let name = format!("rank {victim} has no memory left: seconds until all ranks say so");
        let Some(device) = machine.devices().get(victim) else {
            return SelfCheck::failed(name, 0, "it shares its GPU".to_owned());
        };
        let fail = |reason: String| SelfCheck::failed(name.clone(), 0, reason);
        let ends = match self.connect(machine, LIMIT, Vec::new()) {
            Ok(ends) => ends,
            Err(error) => return fail(error.to_string()),
        };
        let hog = all_memory(device);
        let Outcome { ranks, took } = self.run(ends);
        drop(hog);
        for (rank, ended) in ranks.iter().enumerate() {
            let said = match ended {
                Err(error) => error.to_string(),
                Ok(_) => "nothing, and had results".to_owned(),
            };
            if !(said.contains(&format!("rank {victim}")) && said.contains("memory")) {
                return fail(format!("rank {rank} said: {said}"));
            }
        }
        match self.undisturbed(machine) {
            Ok(results) if results == expected => {
                SelfCheck::of(name, 0, took.as_secs_f64(), (LIMIT + GRACE).as_secs_f64())
            }
            Ok(_) => fail("the run after it has other bits".to_owned()),
            Err(error) => fail(format!("the run after it failed: {error}")),
        }
    }

    fn run_rank(
        &self,
        rank: usize,
        backend: CudaBackend,
        transport: CudaTransport,
        says: impl Fn(),
    ) -> Result<HostTensor, ExecError> {
        let AttentionInputs { q, k, v, .. } = &self.inputs[rank];
        let mut inputs = Vec::new();
        for (name, tensor) in [("q", q), ("k", k), ("v", v)] {
            let uploaded = backend.upload(name, tensor.clone());
            inputs.push((name, uploaded.map_err(|error| backend.fail(error))?));
        }
        let other = backend.clone();
        let mut prepared = Prepared::new(self.programs[rank].clone(), backend, transport)?;
        let ran = prepared.run(&inputs).and_then(|_| match prepared.buffer("out") {
            Some(out) => other.download(out),
            None => Err(ExecError::tensor("out", TensorFault::NotAnOutput)),
        });
        let ended = ran.map_err(|error| other.fail(error));
        // What is freed from here on may wait for other processes, which the driver serves first.
        says();
        ended
    }

    fn strike(
        &self,
        machine: &CudaMachine,
        seed: usize,
        kind: FaultKind,
        expected: &[HostTensor],
    ) -> SelfCheck {
        let victim = seed % self.programs.len();
        let ops = &self.programs[victim].ops;
        // Nobody waits for what a rank does once it has exchanged all rows.
        let awaited = match kind {
            FaultKind::Panic => ops.len(),
            _ => ops.iter().position(|op| matches!(op.op, Op::GroupCast(_))).map_or(1, |first| first + 1),
        };
        // Spread over them; 7919 is a prime.
        let op = seed * 7919 % awaited;
        let fault = FaultInjection { rank: victim, program: None, at: FaultPoint::Op(op), kind };
        let what = match kind {
            FaultKind::Panic => "dies",
            _ => "stalls",
        };
        let label = &self.programs[victim].ops[op].label;
        let name = format!("rank {victim} {what} before `{label}`: seconds until all ranks say so");
        let Outcome { ranks, took } = match self.connect(machine, LIMIT, vec![fault]) {
            Ok(ends) => self.run(ends),
            Err(error) => return SelfCheck::failed(name, seed as u64, error.to_string()),
        };
        // Whatever else a rank needs of the victim, it has by then.
        let given = ops[..op].iter().filter(|op| matches!(op.op, Op::GroupCast(_))).count();
        let all = ops.iter().filter(|op| matches!(op.op, Op::GroupCast(_))).count();
        for (rank, (ended, expected)) in ranks.iter().zip(expected).enumerate() {
            let wrong = match ended {
                Err(error) if error.to_string().contains(&format!("rank {victim}")) => continue,
                Err(error) => format!("rank {rank} said: {error}"),
                Ok(results) if rank != victim && given == all && results == expected => continue,
                Ok(_) => format!("rank {rank} noticed nothing"),
            };
            return SelfCheck::failed(name, seed as u64, wrong);
        }
        match self.undisturbed(machine) {
            Ok(results) if results == expected => {
                SelfCheck::of(name, seed as u64, took.as_secs_f64(), (2 * LIMIT + GRACE).as_secs_f64())
            }
            Ok(_) => SelfCheck::failed(name, seed as u64, "the run after it has other bits".to_owned()),
            Err(error) => SelfCheck::failed(name, seed as u64, format!("the run after it failed: {error}")),
        }
    }
}

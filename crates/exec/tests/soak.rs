//! A group that lives: thousands of masks prepared, called and dropped, in another order on every rank, and nothing grows. A test
//! program of its own, because it counts what the process has.

use std::collections::VecDeque;
use std::fs;
use std::sync::Arc;
use std::time::Duration;

use counterpoint_exec::{
    AttentionRank, BackwardTensors, CpuBackend, CpuBuffer, CpuMachine, CpuTransport, ForwardTensors, Group,
    GroupRank, HostTensor, Machine, Pass, TcpLoopback, Ticket, WorldConfig,
};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, Plan, PlanConfig};
use counterpoint_schedule::OverlapPolicy;
use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

const RANKS: usize = 4;
const MASKS: usize = 10_000;
/// After so many, nothing grows any more.
const WARM: usize = 100;

#[test]
fn masks_come_and_go_and_nothing_grows() {
    soak(&CpuMachine::new(0, None).unwrap(), MASKS);
    soak(&TcpLoopback::new(None), MASKS / 10);
}

fn soak<M: Machine<Backend = CpuBackend, Transport = CpuTransport>>(machine: &M, masks: usize) {
    let seed = rand::random();
    println!("seed {seed}");
    let config = WorldConfig { limit: Duration::from_secs(60), poison: false, ..WorldConfig::default() };
    let group = Group::connect(machine, RANKS, config).unwrap();
    step_through(&group, 0..WARM, seed);
    let before = Footprint::now();
    step_through(&group, WARM..masks, seed);
    let after = Footprint::now();
    println!("{masks} masks: {before:?} before, {after:?} after");
    assert_eq!(after.threads, before.threads);
    assert_eq!(after.descriptors, before.descriptors);
    // Allocators keep some of what they are given back: a kilobyte a mask would be ten times this.
    assert!(after.resident < before.resident + (16 << 20), "{before:?} {after:?}");
    group.close().unwrap();
}

/// What the process has.
#[derive(Debug)]
struct Footprint {
    threads: usize,
    descriptors: usize,
    resident: usize,
}

impl Footprint {
    fn now() -> Self {
        let entries = |folder: &str| fs::read_dir(folder).unwrap().count();
        // A thread that has been joined may take a moment to go.
        let threads = (0..50).map(|_| {
            std::thread::sleep(Duration::from_millis(4));
            entries("/proc/self/task")
        });
        let pages: usize =
            fs::read_to_string("/proc/self/statm").unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            threads: threads.min().unwrap(),
            descriptors: entries("/proc/self/fd"),
            resident: pages * 4096,
        }
    }
}

/// All ranks call the same plans in the same order, and each prepares and drops as it likes.
fn step_through<M: Machine<Backend = CpuBackend, Transport = CpuTransport>>(
    group: &Group<M>,
    steps: std::ops::Range<usize>,
    seed: u64,
) {
    std::thread::scope(|scope| {
        for rank in group.ranks() {
            let steps = steps.clone();
            scope.spawn(move || {
                let mut rng = ChaCha8Rng::seed_from_u64(seed ^ (rank.rank() as u64 + 1));
                let mut kept: VecDeque<Prepared> = VecDeque::new();
                let mut ahead: VecDeque<Prepared> = VecDeque::new();
                for step in steps.clone() {
                    // Some ranks prepare ahead, as a loader does.
                    let depth = rng.random_range(1..4usize);
                    while ahead.len() < depth && step + ahead.len() < steps.end {
                        ahead.push_back(Prepared::new(rank, step + ahead.len(), seed));
                    }
                    let mut prepared = ahead.pop_front().unwrap();
                    prepared.call();
                    kept.push_back(prepared);
                    while kept.len() > rng.random_range(0..6usize) {
                        let at = rng.random_range(0..kept.len());
                        kept.remove(at).unwrap().end(rng.random());
                    }
                    if step % 16 == 0
                        && let Some(oldest) = kept.front()
                    {
                        oldest.wait();
                    }
                }
            });
        }
    });
    group.synchronize().unwrap();
}

/// A mask of its own, with its tensors.
struct Prepared {
    attention: AttentionRank<CpuBackend, CpuTransport>,
    q: CpuBuffer,
    ones: CpuBuffer,
    out: CpuBuffer,
    lse: CpuBuffer,
    gradients: [CpuBuffer; 3],
    tickets: Vec<Ticket<CpuBackend>>,
}

impl Prepared {
    fn new(rank: &Arc<GroupRank<CpuBackend, CpuTransport>>, step: usize, seed: u64) -> Self {
        // The same on all ranks.
        let mut rng = ChaCha8Rng::seed_from_u64(seed.wrapping_add(step as u64));
        let lengths: Vec<usize> = (0..rng.random_range(1..4)).map(|_| rng.random_range(1..10)).collect();
        let documents = Documents::from_lengths(lengths).unwrap();
        let mask =
            if step.is_multiple_of(3) { Mask::full(documents) } else { Mask::causal(documents) }.unwrap();
        let spec = AttentionSpec::new(2, 2, 4, DType::F32);
        let plan =
            Plan::new(&mask, &spec, &PlanConfig { chunk_size: Some(4), ..PlanConfig::new(RANKS) }).unwrap();
        let pass = if step.is_multiple_of(2) { Pass::ForwardBackward } else { Pass::Forward };
        let attention =
            AttentionRank::prepare(rank, &plan, &spec, pass, OverlapPolicy::default(), false).unwrap();
        let rows = plan.ranks[rank.rank()].q_rows;
        let tensor = |shape: &[usize], value: f32| {
            let elements = vec![value; shape.iter().product()];
            CpuBuffer::new(rank.rank(), "tensor", HostTensor::from_vec(shape.to_vec(), elements))
        };
        let shape = [rows, 2, 4];
        Self {
            attention,
            q: tensor(&shape, 0.5),
            ones: tensor(&shape, 1.0),
            out: tensor(&shape, f32::NAN),
            lse: tensor(&shape[..2], f32::NAN),
            gradients: [0; 3].map(|_| tensor(&shape, f32::NAN)),
            tickets: Vec::new(),
        }
    }

    fn call(&mut self) {
        let Self { attention, q, ones, out, lse, gradients: [dq, dk, dv], tickets } = self;
        let forward = ForwardTensors { q, k: q, v: ones, sink: None, out, lse };
        tickets.push(attention.forward(&forward, None).unwrap());
        let backward =
            BackwardTensors { dout: ones, q, k: q, v: ones, sink: None, out, lse, dq, dk, dv, dsink: None };
        // Where it was prepared.
        tickets.extend(attention.backward(&backward, None));
    }

    fn wait(&self) {
        self.tickets.iter().for_each(|ticket| ticket.wait().unwrap());
    }

    /// Looks at the results, or goes while its calls are under way.
    fn end(self, looks: bool) {
        if looks {
            self.wait();
            let out = self.out.tensor().unwrap();
            let right = out.as_slice::<f32>().unwrap().iter().all(|out| (out - 1.0).abs() < 1e-5);
            assert!(right, "means of ones are ones: {out:?}");
        }
    }
}

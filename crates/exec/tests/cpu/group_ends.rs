//! The ends of groups: those that fail, those that are left, and ranks that do not come.

use std::sync::mpsc;
use std::time::{Duration, Instant};

use counterpoint_exec::{
    Call, CpuBackend, CpuBuffer, CpuMachine, CpuTransport, CpuUserPart, ExecError, Group, HostTensor,
    Machine, TcpLoopback, Ticket, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::DType;
use counterpoint_schedule::{
    BufferRole, Op, OverlapPolicy, Program, ProgramBuilder, StreamKind, UserKernel, UserPart,
};

use rand::{RngExt, SeedableRng};
use rand_chacha::ChaCha8Rng;

use crate::group::{Case, Tensors, spec};

/// Leaving a failed group waits for the operation that was running, so that the next group may write the same tensors.
#[test]
fn a_failed_group_is_left_when_nothing_uses_its_tensors() {
    let (began, begins) = mpsc::channel();
    let slow = move |mut part: CpuUserPart<'_>| {
        began.send(()).unwrap();
        std::thread::sleep(Duration::from_millis(200));
        part.writes[0].as_mut_slice::<f32>().unwrap().fill(1.0);
    };
    let machine = CpuMachine::new(0, None).unwrap().with_kernel("slow", slow);
    let y = CpuBuffer::new(0, "y", HostTensor::zeros(vec![4, 1], DType::F32));
    for _ in 0..3 {
        let group = Group::connect(&machine, 1, WorldConfig::default()).unwrap();
        let prepared = group.prepare(|_| writes_y("slow"), None).unwrap();
        let ticket = Call::new(&prepared[0], &[("y", y.clone())], None).unwrap().enqueue().unwrap();
        begins.recv_timeout(Duration::from_secs(30)).unwrap();
        let given_up = group.fail("enough");
        assert_eq!(ticket.wait(), Err(given_up.clone()));
        assert_eq!(group.close(), Err(given_up));
        assert_eq!(y.tensor().unwrap().to_f64(), [1.0; 4]);
    }
}

/// A Program of one kernel of the caller's, which writes `y [4, 1]`.
fn writes_y(kernel: &str) -> Program {
    let mut p = ProgramBuilder::new(kernel, 0, 1, OverlapPolicy::default());
    let compute = p.stream("compute", StreamKind::Compute);
    let y = p.buffer("y", DType::F32, &[4, 1], BufferRole::Output);
    let parts = vec![UserPart { reads: Vec::new(), writes: vec![y] }];
    let op = Op::UserKernel(UserKernel { kernel: kernel.to_owned(), parts, signal: None });
    p.push(compute, None, kernel, op);
    p.finish()
}

/// A failed group fails its next call at once; ranks leave it and join anew.
#[test]
fn a_group_that_failed_is_left_and_joined_anew() {
    let case = Case::new(&Mask::causal(30).unwrap(), 2, spec(), 3);
    let tensors = case.tensors();
    let limit = Duration::from_secs(30);
    for round in 0..3 {
        let group = Group::local(2, WorldConfig { limit, ..WorldConfig::default() }).unwrap();
        let prepared = case.prepare(&group);
        // Rank 0 is in a call that rank 1 never makes.
        let ticket = prepared.ranks()[0].forward(&tensors[0].forward(), None).unwrap();
        let began = Instant::now();
        let given_up = group.fail(format!("the loss is NaN in step {round}"));
        assert_eq!(
            given_up,
            ExecError::GaveUp { rank: 0, reason: format!("the loss is NaN in step {round}") }
        );
        assert_eq!(ticket.wait(), Err(given_up.clone()));
        assert_eq!(prepared.ranks()[1].forward(&tensors[1].forward(), None).err(), Some(given_up.clone()));
        assert_eq!(group.close(), Err(given_up.clone()));
        assert_eq!(group.poll(), Err(given_up));
        assert!(began.elapsed() < Duration::from_secs(10));
    }
}

/// A rank that drops its group still does what it was given before; who calls it later hears that it left, long before the limit.
#[test]
fn a_rank_that_dropped_its_group_is_named_at_the_next_call() {
    for seed in 0..8 {
        leaves(&CpuMachine::new(0, None).unwrap(), seed);
        leaves(&TcpLoopback::new(None), seed);
    }
}

fn leaves<M>(machine: &M, seed: u64)
where
    M: Machine<Backend = CpuBackend, Transport = CpuTransport>,
{
    let mut random = ChaCha8Rng::seed_from_u64(seed);
    let ranks = random.random_range(2..5);
    let (leaver, calls) = (random.random_range(0..ranks), random.random_range(0..4));
    // Every rank needs every other.
    let case = Case::new(&Mask::full(40).unwrap(), ranks, spec(), seed);
    let limit = Duration::from_secs(120);
    let group = Group::connect(machine, ranks, WorldConfig { limit, ..WorldConfig::default() }).unwrap();
    let mut members: Vec<_> = group.ranks().iter().map(|rank| case.prepare_rank(rank)).collect();
    drop(group);
    let tensors: Vec<Vec<Tensors>> = (0..calls).map(|_| case.tensors()).collect();
    let mut tickets: Vec<Ticket<CpuBackend>> = Vec::new();
    for (rank, member) in members.iter().enumerate() {
        for tensors in &tensors {
            drop(member.forward(&tensors[rank].forward(), None).unwrap());
            tickets.push(member.backward(&tensors[rank].backward(), None).unwrap());
        }
    }
    drop(members.remove(leaver));
    for ticket in &tickets {
        ticket.wait().unwrap_or_else(|error| panic!("seed {seed}: {error}"));
    }
    tensors.iter().for_each(|tensors| case.check(tensors));
    let (later, began) = (case.tensors(), Instant::now());
    let survivors = (0..ranks).filter(|rank| *rank != leaver).zip(&members);
    // All of them call, as one that waits for another does not notice.
    let called: Vec<_> =
        survivors.map(|(rank, member)| member.forward(&later[rank].forward(), None)).collect();
    for called in called {
        let error = called.and_then(|ticket| ticket.wait()).unwrap_err();
        let ExecError::Left { left, rank: noticed, .. } = error else { panic!("seed {seed}: {error}") };
        assert!(left == leaver && noticed != leaver, "seed {seed}: {error}");
        assert!(error.to_string().starts_with(&format!("rank {leaver} left the group; rank ")), "{error}");
    }
    assert!(began.elapsed() < limit / 2, "seed {seed}: {:?}", began.elapsed());
}

/// Who does not come to the end is named within the limit.
#[test]
fn a_rank_that_does_not_call_is_named() {
    let case = Case::new(&Mask::causal(30).unwrap(), 3, spec(), 3);
    let limit = Duration::from_millis(300);
    let group = Group::local(3, WorldConfig { limit, ..WorldConfig::default() }).unwrap();
    let (prepared, tensors) = (case.prepare(&group), case.tensors());
    let tickets: Vec<_> = [0, 2]
        .iter()
        .map(|&rank| prepared.ranks()[rank].forward(&tensors[rank].forward(), None).unwrap())
        .collect();
    let error = tickets[0].wait().unwrap_err();
    let ExecError::Stalled(stall) = &error else { panic!("{error}") };
    assert_eq!(stall.culprit, 1, "{error}");
}

//! Profilers are notified of every operation as it is enqueued, in ranges that nest and end, also where an operation fails.

use std::sync::{Arc, Mutex};
use std::thread::{self, ThreadId};

use counterpoint_exec::{Call, CpuBackend, CpuTransport, ExecError, Prepared, Profiler, World, WorldConfig};
use counterpoint_plan::DType;
use counterpoint_schedule::Op;

use crate::collectives::buffer;
use crate::faults::gather_program;
use crate::programs::Rank;

/// Ranges in the order in which they began, each with the depth of its begin.
#[derive(Default)]
struct Recorder {
    open: Mutex<Vec<(ThreadId, String)>>,
    begun: Mutex<Vec<(usize, String)>>,
    /// A world that fails when a range of this name begins.
    fails: Option<(Arc<World>, &'static str)>,
}

impl Profiler for Recorder {
    fn begin(&self, name: &str) {
        let mut open = self.open.lock().unwrap();
        self.begun.lock().unwrap().push((open.len(), name.to_owned()));
        open.push((thread::current().id(), name.to_owned()));
        if let Some((world, _)) = self.fails.as_ref().filter(|(_, at)| *at == name) {
            world.fail(ExecError::Closed { rank: 1 });
        }
    }

    fn end(&self) {
        let (thread, _) = self.open.lock().unwrap().pop().expect("a range has begun");
        assert_eq!(thread, thread::current().id());
    }
}

impl Recorder {
    /// What has begun since this was last asked; nothing is open.
    fn take(&self) -> Vec<(usize, String)> {
        assert_eq!(*self.open.lock().unwrap(), []);
        std::mem::take(&mut self.begun.lock().unwrap())
    }
}

/// Ranks of the Program that gathers and copies, reported to one profiler.
fn ranks(fails_at: Option<&'static str>) -> (Vec<Rank>, Arc<Recorder>) {
    const RANKS: usize = 2;
    let world = World::new(RANKS, WorldConfig::default());
    let fails = fails_at.map(|name| (world.clone(), name));
    let recorder = Arc::new(Recorder { fails, ..Recorder::default() });
    let workers = CpuBackend::workers(0).unwrap();
    let transports = CpuTransport::local(&world, None).into_iter().enumerate();
    let ranks = transports.map(|(rank, transport)| {
        let backend = CpuBackend::new(&world, rank, workers.clone()).with_profiler(recorder.clone());
        let mut prepared = Rank::new(gather_program(rank, RANKS), backend, transport).unwrap();
        prepared.bind("own", buffer(&[1, 1], DType::F64, &[rank as f64])).unwrap();
        prepared
    });
    (ranks.collect(), recorder)
}

/// What a whole run of these ranks reports: every operation by its label, a collective once for each of its three steps.
fn expected(ranks: &[Rank]) -> Vec<(usize, String)> {
    let mut labels = Vec::new();
    for op in ranks.iter().flat_map(|rank| &rank.program().ops) {
        let times = if matches!(op.op, Op::GroupCast(_)) { 3 } else { 1 };
        labels.extend((0..times).map(|_| (1, op.label.clone())));
    }
    labels.sort_unstable();
    labels
}

#[test]
fn runs_and_calls_are_ranges_around_their_operations() {
    let (mut ranks, recorder) = ranks(None);
    Prepared::run_ranks(&mut ranks).unwrap();
    let check = |ranges: Vec<(usize, String)>| {
        let name = format!("{}, rank 0, 1", ranks[0].program().name);
        assert_eq!(ranges[0], (0, name));
        let mut inner = ranges[1..].to_vec();
        inner.sort_unstable();
        assert_eq!(inner, expected(&ranks));
    };
    check(recorder.take());
    let calls = ranks.iter().map(|rank| Call::new(rank, &[], None).unwrap());
    let tickets = Call::enqueue_ranks(calls.collect()).unwrap();
    check(recorder.take());
    tickets.iter().for_each(|ticket| ticket.wait().unwrap());
    assert_eq!(recorder.take(), []);
}

#[test]
fn a_failure_ends_all_ranges() {
    let (mut ranks, recorder) = ranks(Some("copy"));
    assert_eq!(Prepared::run_ranks(&mut ranks).unwrap_err(), ExecError::Closed { rank: 1 });
    let ranges = recorder.take();
    assert_eq!((ranges[0].0, ranges.last().unwrap()), (0, &(1, "copy".to_owned())));
    assert!(ranges.len() < 1 + expected(&ranks).len(), "nothing is enqueued after the failure: {ranges:?}");
}

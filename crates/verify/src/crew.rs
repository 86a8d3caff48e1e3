//! Who examines what at the same time.

#[cfg(test)]
mod makespan;

use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use counterpoint_console::{self as console, CliError, Ticker};
use counterpoint_reference::selftest::SelfCheck;

use super::ledger::{GroupChecks, Heard, Ledger};
use super::part::{Part, Place, SLOTS, When};
use super::worker::Worker;
use crate::arguments::SelftestArguments;

/// Between looks at processes.
const LOOK: Duration = Duration::from_millis(10);

/// Examines all parts, each in a process of its own, as many at a time as GPUs have slots. An illegal access, which spoils its
/// process, so spoils no other part.
pub(super) fn examine(
    parts: Vec<Part>,
    gpus: usize,
    arguments: &SelftestArguments,
    folder: &Path,
    start: Instant,
    ledger: &mut Ledger,
) -> Result<(), CliError> {
    let count = parts.len();
    let mut crew = Crew { waiting: parts, busy: Vec::new(), free: vec![SLOTS; gpus] };
    let mut workers: Vec<Worker> = Vec::new();
    let mut ticker = Ticker::new("selftest");
    loop {
        while let Some((part, gpus)) = crew.next() {
            match Worker::start(part.clone(), gpus.clone(), arguments, folder) {
                Ok(worker) => workers.push(worker),
                Err(error) => {
                    crew.end(&part, &gpus);
                    let failed = SelfCheck::failed("its process".to_owned(), 0, error.to_string());
                    let lost =
                        |group| GroupChecks::of(group, start.elapsed(), Duration::ZERO, vec![failed.clone()]);
                    let lost = part.groups.iter().copied().map(lost).collect();
                    ticker.aside(|| console::print(&ledger.add(part.share, lost)))?;
                }
            }
        }
        let mut at = 0;
        while at < workers.len() {
            if !workers[at].has_ended() {
                at += 1;
                continue;
            }
            let worker = workers.remove(at);
            crew.end(&worker.part, &worker.gpus);
            let share = worker.part.share;
            ticker.aside(|| console::print(&ledger.add(share, worker.found(start))))?;
        }
        if workers.is_empty() && crew.waiting.is_empty() {
            return Ok(());
        }
        ticker.report(|| {
            let done = count - crew.waiting.len() - workers.len();
            how_far(done, count, &mut workers, ledger.heard())
        });
        thread::sleep(LOOK);
    }
}

/// Parts that are done, checks that were made and groups that are being examined, in a line.
fn how_far(done: usize, parts: usize, workers: &mut [Worker], ended: Heard) -> String {
    let mut all = ended;
    let mut names = Vec::new();
    for worker in workers {
        let (group, heard) = worker.heard();
        all.checks += heard.checks;
        all.failed += heard.failed;
        names.push(group);
    }
    let Heard { checks, failed } = all;
    let checks = console::count(checks, "check");
    let parts = console::count(parts, "part");
    format!("{checks} made, {failed} failed; {done} of {parts} done; examining {}", names.join(", "))
}

/// What waits, and what is taken.
struct Crew {
    waiting: Vec<Part>,
    busy: Vec<Part>,
    /// Slots of each GPU.
    free: Vec<usize>,
}

impl Crew {
    /// The first part that may begin now, with the GPUs whose slots it takes.
    fn next(&mut self) -> Option<(Part, Vec<usize>)> {
        let at = (0..self.waiting.len()).find(|&at| {
            self.may_begin(self.waiting[at].when) && self.room(self.waiting[at].place).is_some()
        })?;
        let gpus = self.room(self.waiting[at].place)?;
        let part = self.waiting.remove(at);
        gpus.iter().for_each(|gpu| self.free[*gpu] -= slots(part.place));
        self.busy.push(part.clone());
        Some((part, gpus))
    }

    fn end(&mut self, part: &Part, gpus: &[usize]) {
        gpus.iter().for_each(|gpu| self.free[*gpu] += slots(part.place));
        if let Some(at) = self.busy.iter().position(|busy| busy == part) {
            self.busy.remove(at);
        }
    }

    fn may_begin(&self, when: When) -> bool {
        let mut unfinished = self.waiting.iter().chain(&self.busy);
        match when {
            When::AtOnce => true,
            When::Compiled => !unfinished.any(Part::compiles),
            When::Last => unfinished.all(|part| part.when == When::Last),
        }
    }

    /// The GPUs that a part would have; `None` while they have no room.
    fn room(&self, place: Place) -> Option<Vec<usize>> {
        match place {
            Place::Host => Some(Vec::new()),
            Place::AnyGpu(slots) => {
                let (gpu, free) = self.free.iter().enumerate().rev().max_by_key(|(_, free)| **free)?;
                (*free >= slots).then(|| vec![gpu])
            }
            Place::AllGpus(slots) => {
                self.free.iter().all(|free| *free >= slots).then(|| (0..self.free.len()).collect())
            }
        }
    }
}

fn slots(place: Place) -> usize {
    match place {
        Place::Host => 0,
        Place::AnyGpu(slots) | Place::AllGpus(slots) => slots,
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_reference::selftest::{Extent, Share};

    use super::super::part::{Machine, parts};
    use super::*;
    use crate::group::Group;
    use counterpoint_console::arguments::Device;

    /// Lets the crew work, the part that began first ending first, and gives all in the order in which they began.
    fn order(gpus: usize, extent: Extent) -> Vec<Part> {
        let machine = Machine { gpus, hopper: true, cores: 64 };
        let waiting = parts(Device::Cuda, machine, extent);
        let count = waiting.len();
        let mut crew = Crew { waiting, busy: Vec::new(), free: vec![SLOTS; gpus] };
        let mut running: Vec<(Part, Vec<usize>)> = Vec::new();
        let mut began = Vec::new();
        while began.len() < count {
            while let Some((part, gpus)) = crew.next() {
                if matches!(part.place, Place::AllGpus(SLOTS)) {
                    assert!(running.iter().all(|(part, _)| slots(part.place) == 0), "{part:?} is alone");
                }
                began.push(part.clone());
                running.push((part, gpus));
            }
            assert!(!running.is_empty(), "nothing runs, {} wait", crew.waiting.len());
            let (part, gpus) = running.remove(0);
            crew.end(&part, &gpus);
        }
        running.iter().for_each(|(part, gpus)| crew.end(part, gpus));
        assert_eq!(crew.free, vec![SLOTS; gpus]);
        assert!(crew.busy.is_empty());
        began
    }

    #[test]
    fn everything_begins_and_what_uses_everything_begins_alone() {
        for (gpus, extent) in [(1, Extent::Full), (2, Extent::Full), (4, Extent::Full), (1, Extent::Quick)] {
            let began = order(gpus, extent);
            let last = began.iter().position(|part| part.when == When::Last).unwrap();
            assert!(began[last..].iter().all(|part| part.when == When::Last));
        }
    }

    #[test]
    fn gpus_are_filled_evenly() {
        let part = |index: usize| Part {
            groups: vec![Group::Gemm],
            share: Share::each(8).nth(index).unwrap(),
            place: Place::AnyGpu(2),
            when: When::AtOnce,
        };
        let mut crew = Crew { waiting: (0..8).map(part).collect(), busy: Vec::new(), free: vec![4, 4] };
        let began: Vec<_> = std::iter::from_fn(|| crew.next()).map(|(_, gpus)| gpus).collect();
        assert_eq!(began, [[0], [1], [0], [1]]);
        assert_eq!(crew.waiting.len(), 4);
    }
}

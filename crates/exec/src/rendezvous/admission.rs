//! Who gets a seat at the store: each rank one process, all of them started with the same. A process that was started with
//! something else may be of another job that has the same address by accident, so it is kept waiting for a moment: where the rank
//! that fits comes meanwhile, the job goes on without the stranger, and where it does not, all are sent what differs.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use super::agreement::first_difference;
use super::{Facet, RendezvousError};
use crate::SeatFault;

/// How long a rank that fits may come after one that does not.
const GRACE: Duration = Duration::from_secs(2);
/// Processes that are kept waiting at the same time.
const MOST_WAITING: usize = 256;

/// The ranks that have seats, and the processes that wait. `C` is a connection.
pub(super) struct Admission<C> {
    world_size: usize,
    /// What rank 0 was started with.
    facets: Vec<Facet>,
    seated: BTreeSet<usize>,
    waiting: Vec<Waiting<C>>,
    /// When those who wait are to be the job's failure.
    due: Option<Instant>,
}

struct Waiting<C> {
    rank: usize,
    facets: Vec<Facet>,
    /// How they differ from those of rank 0.
    difference: SeatFault,
    connection: C,
}

/// What is to be said to processes that have asked for a seat.
#[derive(Debug, PartialEq)]
pub(super) enum Verdict<C> {
    /// It has one.
    Seat { rank: usize, connection: C },
    /// It gets none, for this reason.
    NoSeat { connection: C, reason: SeatFault },
}

impl<C> Admission<C> {
    pub(super) fn new(world_size: usize, facets: Vec<Facet>) -> Self {
        let (seated, waiting) = (BTreeSet::new(), Vec::new());
        Self { world_size, facets: with_size(world_size, facets), seated, waiting, due: None }
    }

    /// Ranks that have had a seat at any time.
    pub(super) fn seated(&self) -> usize {
        self.seated.len()
    }

    /// A process asks for the seat of `rank`.
    pub(super) fn ask(
        &mut self,
        rank: usize,
        facets: Vec<Facet>,
        connection: C,
        now: Instant,
    ) -> Vec<Verdict<C>> {
        let difference = self.difference(rank, &facets);
        if rank >= self.world_size && difference.is_none() {
            let reason = SeatFault::NoSuchRank { world_size: self.world_size, rank };
            return vec![Verdict::NoSeat { connection, reason }];
        }
        if self.seated.contains(&rank) {
            let reason = difference.unwrap_or(SeatFault::Taken { rank });
            return vec![Verdict::NoSeat { connection, reason }];
        }
        if let Some(difference) = difference {
            if self.waiting.len() < MOST_WAITING {
                self.waiting.push(Waiting { rank, facets, difference, connection });
            }
            self.due.get_or_insert(now + GRACE);
            return Vec::new();
        }
        self.seated.insert(rank);
        let mut verdicts = vec![Verdict::Seat { rank, connection }];
        let (others, rest) =
            std::mem::take(&mut self.waiting).into_iter().partition(|other| other.rank == rank);
        self.waiting = rest;
        let others: Vec<Waiting<C>> = others;
        for Waiting { difference: reason, connection, .. } in others {
            verdicts.push(Verdict::NoSeat { connection, reason });
        }
        if self.waiting.is_empty() {
            self.due = None;
        }
        verdicts
    }

    /// When [`Admission::overdue`] is to be asked.
    pub(super) fn due(&self) -> Option<Instant> {
        self.due
    }

    /// The job's failure, once those who wait have waited long enough, and their connections.
    pub(super) fn overdue(&mut self, now: Instant) -> Option<(RendezvousError, Vec<C>)> {
        self.due.take_if(|due| *due <= now)?;
        let waiting = std::mem::take(&mut self.waiting);
        let seated = self.seated.iter().map(|&rank| (rank, self.facets.as_slice()));
        let others = waiting.iter().map(|waiting| (waiting.rank, waiting.facets.as_slice()));
        let error = first_difference(&seated.chain(others).collect::<Vec<_>>())?;
        Some((error, waiting.into_iter().map(|waiting| waiting.connection).collect()))
    }

    /// How a process differs from rank 0.
    fn difference(&self, rank: usize, facets: &[Facet]) -> Option<SeatFault> {
        match first_difference(&[(0, &self.facets), (rank, facets)]) {
            Some(RendezvousError::Disagreement { what, values }) => {
                let mut values = values.into_iter().map(|(value, _)| value);
                let mut next = || values.next().unwrap_or_default();
                Some(SeatFault::StartedWith { what, value: next(), own: next() })
            }
            _ => None,
        }
    }
}

/// What a process was started with, the number of ranks among it.
pub(super) fn with_size(world_size: usize, facets: Vec<Facet>) -> Vec<Facet> {
    let mut all = facets;
    all.push(Facet::new("the number of processes", world_size));
    all
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seed(value: u64) -> Vec<Facet> {
        vec![Facet::new("--seed", value)]
    }

    fn of_seed(value: &str, own: &str) -> SeatFault {
        SeatFault::StartedWith { what: "--seed".to_owned(), value: value.to_owned(), own: own.to_owned() }
    }

    #[test]
    fn each_rank_gets_one_seat() {
        let mut admission = Admission::new(2, seed(0));
        let now = Instant::now();
        for rank in [1, 0] {
            let seat = Verdict::Seat { rank, connection: rank };
            assert_eq!(admission.ask(rank, with_size(2, seed(0)), rank, now), [seat]);
        }
        let second = admission.ask(1, with_size(2, seed(0)), 7, now);
        let reason = SeatFault::Taken { rank: 1 };
        assert_eq!(second, [Verdict::NoSeat { connection: 7, reason }]);
        let second = admission.ask(1, with_size(2, seed(5)), 8, now);
        let reason = of_seed("0", "5");
        assert_eq!(second, [Verdict::NoSeat { connection: 8, reason }]);
        assert_eq!((admission.seated(), admission.due()), (2, None));
        let ninth = admission.ask(9, with_size(2, seed(0)), 9, now);
        let reason = SeatFault::NoSuchRank { world_size: 2, rank: 9 };
        assert_eq!(reason.to_string(), "it has 2 ranks, counted from 0, and none of number 9");
        assert_eq!(ninth, [Verdict::NoSeat { connection: 9, reason }]);
    }

    #[test]
    fn one_of_another_job_waits_until_the_rank_that_fits_is_there() {
        let mut admission = Admission::new(2, seed(0));
        let now = Instant::now();
        admission.ask(0, with_size(2, seed(0)), 0, now);
        assert_eq!(admission.ask(1, with_size(2, seed(5)), 5, now), []);
        assert_eq!(admission.due(), Some(now + GRACE));
        assert_eq!(admission.overdue(now), None);
        let reason = of_seed("0", "5");
        let verdicts = [Verdict::Seat { rank: 1, connection: 1 }, Verdict::NoSeat { connection: 5, reason }];
        assert_eq!(admission.ask(1, with_size(2, seed(0)), 1, now), verdicts);
        assert_eq!((admission.due(), admission.overdue(now + GRACE)), (None, None));
    }

    #[test]
    fn ranks_that_differ_are_the_jobs_failure_after_a_moment() {
        let mut admission = Admission::new(3, seed(0));
        let now = Instant::now();
        admission.ask(0, with_size(3, seed(0)), 0, now);
        admission.ask(1, with_size(4, seed(0)), 1, now);
        let (error, connections) = admission.overdue(now + GRACE).unwrap();
        assert_eq!(connections, [1]);
        let words = "the number of processes is 3 on rank 0 and 4 on rank 1";
        assert!(error.to_string().contains(words), "{error}");
    }
}

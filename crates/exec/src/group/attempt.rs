//! Attempts of ranks to join through a store: numbered by rank 0 alone, each of them with one outcome for all ranks.
//!
//! A rank takes part in the newest attempt, in each at most once, and the first error of any of its ranks ends it for all. So it does
//! not matter how often each has called before, and whether all of these calls got as far as the store.

use std::time::{Duration, Instant};

use super::Store;
use crate::rendezvous::Watch;
use crate::{ExecError, RendezvousError, StoreFault};

/// Where the number of the newest attempt is.
const NEWEST: &str = "counterpoint/attempt";
/// Between two looks into a store: the first, and the longest.
const LOOKS: (Duration, Duration) = (Duration::from_millis(2), Duration::from_millis(50));

/// An attempt of ranks to join. What fails of what a rank does for it, the others hear by [`Attempt::fail`].
#[derive(Clone, Debug)]
pub struct Attempt {
    /// From 1 on; every record in the store is of one attempt, by this in its key.
    number: u64,
    rank: usize,
    world_size: usize,
}

impl Attempt {
    /// Takes part in an attempt of `world_size` ranks as `rank`: rank 0 begins one, the others wait for one in which they have not taken part.
    /// Collective.
    ///
    /// # Errors
    /// The store's; [`RendezvousError::NotJoined`] when rank 0 begins none within `limit`.
    pub fn begin(
        store: &dyn Store,
        rank: usize,
        world_size: usize,
        limit: Duration,
    ) -> Result<Self, ExecError> {
        let of = |number| Self { number, rank, world_size };
        if rank == 0 {
            let attempt = of(newest(store, rank)? + 1);
            store.set(NEWEST, attempt.number.to_string().as_bytes())?;
            return Ok(attempt);
        }
        let mut looks = Looks::until(limit);
        loop {
            let attempt = of(newest(store, rank)?);
            if attempt.number > 0 && store.find(&attempt.key_of("came", rank))?.is_none() {
                attempt.come(store)?;
                return Ok(attempt);
            }
            looks.pause().map_err(|waited| attempt.not_joined(waited, vec![0]))?;
        }
    }

    /// Every rank's bytes, in the order of ranks. All call it, once; where rank 0 has begun anew without an error of this attempt, this rank
    /// follows it.
    ///
    /// # Errors
    /// The store's; the attempt's; [`RendezvousError::NotJoined`] with the ranks that did not come within `limit`.
    pub fn exchange(
        &mut self,
        store: &dyn Store,
        own: &[u8],
        limit: Duration,
    ) -> Result<Vec<Vec<u8>>, ExecError> {
        let (mut looks, mut all) = (Looks::until(limit), Vec::new());
        store.set(&self.key_of("place", self.rank), own)?;
        while all.len() < self.world_size {
            if let Some(place) = store.find(&self.key_of("place", all.len()))? {
                all.push(place);
                continue;
            }
            self.failure(store)?.map_or(Ok(()), Err)?;
            let newest = newest(store, self.rank)?;
            if newest > self.number {
                self.number = newest;
                self.come(store)?;
                store.set(&self.key_of("place", self.rank), own)?;
                all.clear();
            } else if let Err(waited) = looks.pause() {
                let mut missing = Vec::new();
                for rank in all.len()..self.world_size {
                    if store.find(&self.key_of("place", rank))?.is_none() {
                        missing.push(rank);
                    }
                }
                return Err(self.fail(store, self.not_joined(waited, missing)));
            }
        }
        Ok(all)
    }

    /// Ends the attempt for all ranks with an error of this one, wherever in it they wait. Returns the attempt's error, which is another
    /// where that came first.
    pub fn fail(&self, store: &dyn Store, error: ExecError) -> ExecError {
        match self.failure(store) {
            Ok(Some(first)) => first,
            Ok(None) => {
                // Where it cannot be said, the others find out by their limits.
                if let Ok(text) = serde_json::to_vec(&error) {
                    store.set(&self.key("failure"), &text).ok();
                }
                error
            }
            Err(_) => error,
        }
    }

    /// What ends the waits of this attempt before their limit.
    pub(super) fn watch<'a>(&'a self, store: &'a dyn Store) -> impl Watch + 'a {
        move || {
            self.failure(store)?.map_or(Ok(()), Err)?;
            match newest(store, self.rank)? > self.number {
                true => Err(ExecError::GaveUp { rank: 0, reason: "it tries to join anew".to_owned() }),
                false => Ok(()),
            }
        }
    }

    /// What rank 0 sets under `what` in this attempt, once it has.
    pub(super) fn of_rank_0(
        &self,
        store: &dyn Store,
        what: &str,
        limit: Duration,
    ) -> Result<Vec<u8>, ExecError> {
        let (mut looks, watch) = (Looks::until(limit), self.watch(store));
        loop {
            if let Some(value) = store.find(&self.key(what))? {
                return Ok(value);
            }
            watch()?;
            looks.pause().map_err(|waited| self.not_joined(waited, vec![0]))?;
        }
    }

    pub(super) fn rank(&self) -> usize {
        self.rank
    }

    pub(super) fn world_size(&self) -> usize {
        self.world_size
    }

    pub(super) fn key(&self, what: &str) -> String {
        format!("counterpoint/attempt/{}/{what}", self.number)
    }

    fn key_of(&self, what: &str, rank: usize) -> String {
        self.key(&format!("{what}/{rank}"))
    }

    /// Notes that this rank takes part, so that its next call takes another.
    fn come(&self, store: &dyn Store) -> Result<(), ExecError> {
        store.set(&self.key_of("came", self.rank), b"1")
    }

    fn failure(&self, store: &dyn Store) -> Result<Option<ExecError>, ExecError> {
        let text = store.find(&self.key("failure"))?;
        text.map(|text| serde_json::from_slice(&text).map_err(|error| broken(self.rank, error))).transpose()
    }

    fn not_joined(&self, waited: Duration, missing: Vec<usize>) -> ExecError {
        let Self { rank, world_size, .. } = *self;
        RendezvousError::NotJoined { rank, waited, missing, world_size }.into()
    }
}

/// The number of the newest attempt, 0 before the first.
fn newest(store: &dyn Store, rank: usize) -> Result<u64, ExecError> {
    let text = store.find(NEWEST)?;
    text.map_or(Ok(0), |text| serde_json::from_slice(&text).map_err(|error| broken(rank, error)))
}

/// The error of a record that is none.
pub(super) fn broken(rank: usize, error: serde_json::Error) -> ExecError {
    RendezvousError::Broken { rank, reason: StoreFault::value(error) }.into()
}

/// Pauses between looks into a store, up to a limit.
struct Looks {
    began: Instant,
    limit: Duration,
    pause: Duration,
}

impl Looks {
    fn until(limit: Duration) -> Self {
        Self { began: Instant::now(), limit, pause: LOOKS.0 }
    }

    /// Sleeps until the next look; how long it has been where that is beyond the limit.
    fn pause(&mut self) -> Result<(), Duration> {
        let waited = self.began.elapsed();
        if waited > self.limit {
            return Err(waited);
        }
        std::thread::sleep(self.pause);
        self.pause = (2 * self.pause).min(LOOKS.1);
        Ok(())
    }
}

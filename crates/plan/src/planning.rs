//! How a plan is made, which changes nothing of it: threads that the caller lends, and a token that calls the planning off.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use counterpoint_tiles::Interruption;

use crate::PlanError;

/// Threads that a caller lends for planning.
pub trait Helpers: Sync {
    /// Calls `task` once with each number below `tasks`, on any threads and in any order, and returns when all of these calls have. A
    /// task may itself call this.
    fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync));
}

/// Calls planning off, from any thread. Clones are the same token.
#[derive(Clone, Debug, Default)]
pub struct CancellationToken(Arc<AtomicBool>);

impl CancellationToken {
    /// One that calls nothing off yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// Whoever plans with it gives up soon, with [`PlanError::Cancelled`].
    pub fn cancel(&self) {
        self.0.store(true, Ordering::Release);
    }

    /// Whether it has been called off.
    pub fn is_cancelled(&self) -> bool {
        self.0.load(Ordering::Acquire)
    }
}

/// How a plan is made: with whose help, and for how long it is wanted. Of both, not one bit of the plan depends.
#[derive(Clone, Copy, Default)]
pub struct Planning<'a> {
    helpers: Option<&'a dyn Helpers>,
    cancellation: Option<&'a CancellationToken>,
}

impl Planning<'static> {
    /// On the calling thread, to the end.
    pub const ALONE: Self = Self { helpers: None, cancellation: None };
}

impl<'a> Planning<'a> {
    /// With these threads. The calling one waits for them, or is one of them.
    #[must_use]
    pub fn with_helpers(self, helpers: &'a dyn Helpers) -> Self {
        Self { helpers: Some(helpers), ..self }
    }

    /// Until `token` is cancelled.
    #[must_use]
    pub fn until(self, token: &'a CancellationToken) -> Self {
        Self { cancellation: Some(token), ..self }
    }

    /// Whether the plan is not wanted any more: searches end with the best that they have found, which nobody looks at.
    pub fn is_cancelled(&self) -> bool {
        self.cancellation.is_some_and(CancellationToken::is_cancelled)
    }

    /// The same, for passes over tiles.
    pub fn interruption(&self) -> Interruption<'a> {
        self.cancellation.map_or(Interruption::default(), |token| Interruption::by(&token.0))
    }

    /// Whether the plan is still wanted.
    ///
    /// # Errors
    /// [`PlanError::Cancelled`].
    pub fn check(&self) -> Result<(), PlanError> {
        if self.is_cancelled() { Err(PlanError::Cancelled) } else { Ok(()) }
    }

    /// Whether anything is done side by side: what is only done in case it is needed costs nothing then.
    pub fn has_helpers(&self) -> bool {
        self.helpers.is_some()
    }

    /// `work` of every number below `count`, in their order, side by side where there are helpers.
    ///
    /// # Errors
    /// [`PlanError::Cancelled`].
    pub fn map<T: Send>(&self, count: usize, work: impl Fn(usize) -> T + Sync) -> Result<Vec<T>, PlanError> {
        let Some(helpers) = self.helpers.filter(|_| count > 1) else {
            return (0..count).map(|at| self.check().map(|()| work(at))).collect();
        };
        let done: Vec<Mutex<Option<T>>> = (0..count).map(|_| Mutex::new(None)).collect();
        helpers.run(count, &|at| {
            if !self.is_cancelled() {
                let result = work(at);
                *done[at].lock().unwrap_or_else(PoisonError::into_inner) = Some(result);
            }
        });
        self.check()?;
        let taken = done.into_iter().map(|one| one.into_inner().unwrap_or_else(PoisonError::into_inner));
        // What helpers have left out, which they are not to do, is done here.
        Ok(taken.enumerate().map(|(at, result)| result.unwrap_or_else(|| work(at))).collect())
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::AtomicUsize;
    use std::thread;

    use super::*;

    /// A thread for each task.
    struct Threads;

    impl Helpers for Threads {
        fn run(&self, tasks: usize, task: &(dyn Fn(usize) + Sync)) {
            thread::scope(|scope| (0..tasks).for_each(|at| drop(scope.spawn(move || task(at)))));
        }
    }

    #[test]
    fn results_are_in_order_and_nothing_follows_a_cancellation() {
        let squares: Vec<usize> = (0..50).map(|at| at * at).collect();
        for planning in [Planning::ALONE, Planning::ALONE.with_helpers(&Threads)] {
            assert_eq!(planning.map(50, |at| at * at), Ok(squares.clone()));
            let (token, calls) = (CancellationToken::new(), AtomicUsize::new(0));
            let count = |at: usize| {
                calls.fetch_add(1, Ordering::Relaxed);
                if at == 3 {
                    token.clone().cancel();
                }
            };
            let planning = planning.until(&token);
            assert_eq!(planning.check(), Ok(()));
            assert_eq!(planning.map(50, count), Err(PlanError::Cancelled));
            let first = calls.load(Ordering::Relaxed);
            assert_eq!(planning.map(50, count), Err(PlanError::Cancelled));
            assert_eq!(calls.load(Ordering::Relaxed), first);
        }
    }
}

//! Events that nobody has, kept for reuse: the driver is asked for new ones only where these run out.

use std::collections::VecDeque;
use std::sync::{Mutex, PoisonError};

use cudarc::driver::sys::CUevent;

use crate::CudaError;
use crate::library::{Driver, call};

/// Events of one world that nobody has: masks come and go, and each needs some. They are made by quarters of what there are, and the driver
/// is asked for them again only when the world ends.
#[derive(Debug, Default)]
pub(crate) struct SpareEvents(Mutex<Shelf>);

#[derive(Debug, Default)]
struct Shelf {
    spare: VecDeque<usize>,
    /// Of these and those that somebody has.
    made: usize,
}

/// So many are left alone, that what one marked has mostly been reached before it is another's: who waits for it before it is recorded
/// anew waits for nothing then.
const RESTING: usize = 64;

impl SpareEvents {
    /// One that nobody has; `make` makes one more.
    pub(crate) fn take(&self, make: impl Fn() -> Result<CUevent, CudaError>) -> Result<CUevent, CudaError> {
        let mut shelf = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if shelf.spare.len() <= RESTING {
            // How many are needed at once grows by ever rarer coincidences of masks.
            for _ in 0..(shelf.made / 4).max(RESTING) {
                // In front of those that rest.
                shelf.spare.push_front(make()? as usize);
                shelf.made += 1;
            }
        }
        shelf.spare.pop_front().map_or_else(make, |event| Ok(event as CUevent))
    }

    /// Takes one back. Whoever waits for it may still do so.
    pub(crate) fn put(&self, event: CUevent) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).spare.push_back(event as usize);
    }

    /// Destroys all of them. Their context is current.
    pub(crate) fn free(&self, driver: &Driver) -> Result<(), CudaError> {
        let shelf = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        shelf.spare.into_iter().try_for_each(|event| {
            // SAFETY: made in make, and nobody has it.
            unsafe { call!(driver, cuEventDestroy_v2(event as CUevent)) }
        })
    }
}

#[cfg(test)]
mod tests {
    use std::cell::Cell;

    use super::*;

    #[test]
    fn a_spare_event_rests_before_it_is_another_s() {
        let spare = SpareEvents::default();
        let made = Cell::new(1000);
        let take = || {
            let make = || {
                made.set(made.get() + 1);
                Ok(made.get() as CUevent)
            };
            spare.take(make).map(|event| event as usize).unwrap()
        };
        // Many at once, so that a new most of a few makes none.
        assert_eq!((take(), made.get()), (1000 + RESTING, 1000 + RESTING));
        (1..=RESTING).for_each(|event| spare.put(event as CUevent));
        let more: Vec<usize> = (1..RESTING).map(|_| take()).collect();
        assert!(more.iter().all(|event| *event > 1000), "{more:?}");
        assert_eq!(made.get(), 1000 + RESTING);
        // Those that were given back rest until more come.
        spare.put(2000 as CUevent);
        spare.put(2001 as CUevent);
        assert_eq!([take(), take()], [1, 2]);
        assert_eq!(made.get(), 1000 + RESTING);
        assert_eq!((take(), made.get()), (1000 + 2 * RESTING, 1000 + 2 * RESTING));
    }
}

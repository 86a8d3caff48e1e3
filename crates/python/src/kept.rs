//! What was made ready on a group and may be called again: kept by what it is, latest first.

use std::sync::{Mutex, MutexGuard, PoisonError};

use counterpoint_exec::ExecError;

/// How many of a kind stay ready, unless it says otherwise.
const KEPT: usize = 32;

/// Layers that are ready, each with the key that all its Programs depend on.
pub(crate) struct Kept<K, L> {
    all: Mutex<Vec<One<K, L>>>,
    most: usize,
}

struct One<K, L> {
    key: K,
    layer: L,
    /// Whether a graph of the caller replays it.
    is_captured: bool,
}

impl<K, L> Default for Kept<K, L> {
    fn default() -> Self {
        Self::of(KEPT)
    }
}

impl<K, L> Kept<K, L> {
    /// At most so many that no graph replays.
    pub(crate) fn of(most: usize) -> Self {
        Self { all: Mutex::new(Vec::new()), most }
    }
}

impl<K: Clone + PartialEq, L> Kept<K, L> {
    /// Has `work` use the layer of a key, which `make` makes ready where it is not.
    pub(crate) fn with<T>(
        &self,
        key: &K,
        make: impl FnOnce() -> Result<L, ExecError>,
        work: impl FnOnce(&mut L) -> Result<T, ExecError>,
    ) -> Result<T, ExecError> {
        let mut all = self.lock();
        let latest = match all.iter().position(|known| known.key == *key) {
            Some(index) => all.remove(index),
            None => One { key: key.clone(), layer: make()?, is_captured: false },
        };
        all.insert(0, latest);
        let mut others = 0;
        all.retain(|kept| {
            others += usize::from(!kept.is_captured);
            kept.is_captured || others <= self.most
        });
        match all.first_mut() {
            Some(kept) => work(&mut kept.layer),
            None => Err(ExecError::tensor("layer", "is gone")),
        }
    }

    /// Has a layer stay, which a graph of the caller replays.
    pub(crate) fn keep(&self, key: &K) {
        self.lock().iter_mut().filter(|kept| kept.key == *key).for_each(|kept| kept.is_captured = true);
    }

    /// Lets go of layers that graphs replayed.
    pub(crate) fn let_go(&self) {
        self.lock().retain(|kept| !kept.is_captured);
    }

    fn lock(&self) -> MutexGuard<'_, Vec<One<K, L>>> {
        self.all.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

//! Values of Python's that compiled operators are given as numbers.

use std::collections::HashMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, LazyLock, Mutex, MutexGuard, PoisonError, Weak};

/// What values of a type are known by, each as long as it lives.
pub(crate) struct Numbers<T> {
    last: AtomicU64,
    known: LazyLock<Mutex<Known<T>>>,
}

struct Known<T> {
    values: HashMap<u64, Weak<T>>,
    /// How many of them there may be before those that are gone are looked for.
    most: usize,
}

impl<T> Numbers<T> {
    pub(crate) const fn new() -> Self {
        let known = || Mutex::new(Known { values: HashMap::new(), most: 64 });
        Self { last: AtomicU64::new(0), known: LazyLock::new(known) }
    }

    /// One that no other value of the type has had.
    pub(crate) fn next(&self) -> u64 {
        self.last.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// Has a value be found by its number.
    pub(crate) fn keep(&self, number: u64, value: &Arc<T>) {
        let mut known = self.lock();
        known.values.entry(number).or_insert_with(|| Arc::downgrade(value));
        if known.values.len() > known.most {
            known.values.retain(|_, value| value.strong_count() > 0);
            known.most = known.values.len().saturating_mul(2).max(64);
        }
    }

    /// The value, if it lives still.
    pub(crate) fn find(&self, number: u64) -> Option<Arc<T>> {
        self.lock().values.get(&number)?.upgrade()
    }

    fn lock(&self) -> MutexGuard<'_, Known<T>> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

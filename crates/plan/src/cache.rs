//! Least recently used plans, so that a mask that comes again is not planned again.

use std::num::NonZeroUsize;
use std::sync::Arc;

use lru::LruCache;

use crate::{Fingerprint, Plan};

/// The plans used last, found again by what they were made from: plans alone, or each with what was chosen for it.
#[derive(Debug)]
pub struct PlanCache<T = Plan> {
    plans: LruCache<Fingerprint, Arc<T>>,
    hits: u64,
    misses: u64,
}

impl<T> PlanCache<T> {
    /// Holds at most `capacity` plans and lets go of the one that was not asked for longest.
    pub fn new(capacity: NonZeroUsize) -> Self {
        Self { plans: LruCache::new(capacity), hits: 0, misses: 0 }
    }

    /// The plan of this fingerprint, where it is held. A miss is to be made and kept.
    pub fn find(&mut self, fingerprint: &Fingerprint) -> Option<Arc<T>> {
        let found = self.plans.get(fingerprint).cloned();
        match found {
            Some(_) => self.hits += 1,
            None => self.misses += 1,
        }
        found
    }

    /// Keeps a plan. Gives the one to use: that which is held already, where another thread was quicker.
    pub fn keep(&mut self, fingerprint: Fingerprint, plan: Arc<T>) -> Arc<T> {
        self.plans.get_or_insert(fingerprint, || plan).clone()
    }

    /// How often a plan was found.
    pub fn hits(&self) -> u64 {
        self.hits
    }

    /// How often one had to be made.
    pub fn misses(&self) -> u64 {
        self.misses
    }

    /// Plans held at most.
    pub fn capacity(&self) -> NonZeroUsize {
        self.plans.cap()
    }

    /// Number of plans held.
    pub fn len(&self) -> usize {
        self.plans.len()
    }

    /// Whether it holds no plan.
    pub fn is_empty(&self) -> bool {
        self.plans.is_empty()
    }
}

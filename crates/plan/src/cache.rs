//! Least recently used plans, so that a mask that comes again is not planned again.

use std::num::NonZeroUsize;
use std::sync::Arc;

use counterpoint_mask::Mask;
use lru::LruCache;

use crate::{AttentionSpec, Fingerprint, Plan, PlanConfig, PlanError};

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

impl PlanCache {
    /// The plan of [`Plan::new`], made only when the cache does not hold it.
    ///
    /// # Errors
    /// As [`Plan::new`]; nothing is kept then.
    pub fn plan(
        &mut self,
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Arc<Plan>, PlanError> {
        self.get(Fingerprint::of(mask, spec, config), || Plan::new(mask, spec, config))
    }

    /// The plan of [`Plan::cross_attention`], likewise.
    ///
    /// # Errors
    /// As [`Plan::cross_attention`]; nothing is kept then.
    pub fn cross_attention(
        &mut self,
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Arc<Plan>, PlanError> {
        let fingerprint = Fingerprint::of_cross_attention(mask, spec, config);
        self.get(fingerprint, || Plan::cross_attention(mask, spec, config))
    }

    /// The plan of [`Plan::for_mask_on`] on `base`, likewise. Plans with the same dispatch are the same base.
    ///
    /// # Errors
    /// As [`Plan::for_mask_on`]; nothing is kept then.
    pub fn for_mask_on(
        &mut self,
        base: &Plan,
        mask: &Mask,
        spec: &AttentionSpec,
        config: &PlanConfig,
    ) -> Result<Arc<Plan>, PlanError> {
        let fingerprint = Fingerprint::of_mask_on(base, mask, spec, config);
        self.get(fingerprint, || base.for_mask_on(mask, spec, config))
    }

    fn get(
        &mut self,
        fingerprint: Fingerprint,
        plan: impl FnOnce() -> Result<Plan, PlanError>,
    ) -> Result<Arc<Plan>, PlanError> {
        match self.find(&fingerprint) {
            Some(plan) => Ok(plan),
            None => Ok(self.keep(fingerprint, Arc::new(plan()?))),
        }
    }
}

//! Least recently used plans, so that a mask that comes again is not planned again.

use std::num::NonZeroUsize;
use std::sync::Arc;

use counterpoint_mask::Mask;
use lru::LruCache;

use crate::{AttentionSpec, Fingerprint, Plan, PlanConfig, PlanError};

/// The plans used last, found again by what they were made from.
#[derive(Debug)]
pub struct PlanCache {
    plans: LruCache<Fingerprint, Arc<Plan>>,
}

impl PlanCache {
    /// Holds at most `capacity` plans and lets go of the one that was not asked for longest.
    pub fn new(capacity: NonZeroUsize) -> Self {
        Self { plans: LruCache::new(capacity) }
    }

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
        Ok(self.plans.try_get_or_insert(fingerprint, || plan().map(Arc::new))?.clone())
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

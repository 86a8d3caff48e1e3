use std::fmt;
use std::num::NonZeroUsize;
use std::sync::Arc;

use counterpoint_mask::Mask;
use lru::LruCache;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{
    AttentionSpec, CostModel, DType, DispatchAlgorithm, Link, Plan, PlanConfig, PlanError, StageCount,
};

/// A hash of everything that a plan depends on. Equal inputs have equal fingerprints in every process and on every
/// machine, so ranks that plan apart can compare theirs and find out that they disagree before they wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of what [`Plan::new`] would plan: content, never object identity.
    pub fn of(mask: &Mask, spec: &AttentionSpec, config: &PlanConfig) -> Self {
        let mut words = Words::default();
        words.mask(mask);
        words.spec(spec);
        words.config(config);
        Self(words.0.finalize().into())
    }

    /// The 32 bytes of the hash.
    pub const fn bytes(&self) -> &[u8; 32] {
        &self.0
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.iter().try_for_each(|byte| write!(f, "{byte:02x}"))
    }
}

/// The hash is fed 64-bit little-endian words, every list after its length. Fields are taken apart by name, so that a new
/// one cannot be forgotten here.
#[derive(Default)]
struct Words(Sha256);

impl Words {
    fn word(&mut self, word: u64) {
        self.0.update(word.to_le_bytes());
    }

    fn size(&mut self, size: usize) {
        self.word(size as u64);
    }

    fn real(&mut self, real: f64) {
        self.word(real.to_bits());
    }

    fn mask(&mut self, mask: &Mask) {
        self.size(mask.seqlen_q());
        self.size(mask.seqlen_k());
        self.size(mask.slices().len());
        for slice in mask.slices() {
            for range in [slice.q_range, slice.k_range] {
                self.size(range.start);
                self.size(range.end);
            }
            self.word(slice.mask_type as u64);
        }
    }

    fn spec(&mut self, spec: &AttentionSpec) {
        let AttentionSpec { heads_q, heads_kv, head_dim, head_dim_v, dtype, scale, softcap, seqlen_sink } =
            *spec;
        for size in [heads_q, heads_kv, head_dim, head_dim_v, seqlen_sink] {
            self.size(size);
        }
        self.word(match dtype {
            DType::F64 => 0,
            DType::F32 => 1,
            DType::Bf16 => 2,
            DType::F16 => 3,
        });
        self.real(scale);
        self.real(softcap);
    }

    fn config(&mut self, config: &PlanConfig) {
        let PlanConfig { chunk_size, dispatch, stages, topology, cost } = *config;
        // 0 is not a chunk size and not a number of stages, so it can stand for "chosen automatically".
        self.size(chunk_size.unwrap_or(0));
        self.word(match dispatch {
            DispatchAlgorithm::Affinity => 0,
            DispatchAlgorithm::MinHeap => 1,
            DispatchAlgorithm::Sequential => 2,
            DispatchAlgorithm::Zigzag => 3,
        });
        self.size(match stages {
            StageCount::Auto => 0,
            StageCount::Fixed(stages) => stages,
        });
        self.size(topology.world_size);
        self.size(topology.ranks_per_node);
        let CostModel {
            forward_flops_per_second,
            backward_flops_per_second,
            memory_bytes_per_second,
            launch_seconds,
            link,
            network,
        } = cost;
        for real in
            [forward_flops_per_second, backward_flops_per_second, memory_bytes_per_second, launch_seconds]
        {
            self.real(real);
        }
        for Link { alpha_seconds, bytes_per_second } in [link, network] {
            self.real(alpha_seconds);
            self.real(bytes_per_second);
        }
    }
}

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
        let plan = self.plans.try_get_or_insert(Fingerprint::of(mask, spec, config), || {
            Plan::new(mask, spec, config).map(Arc::new)
        })?;
        Ok(plan.clone())
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

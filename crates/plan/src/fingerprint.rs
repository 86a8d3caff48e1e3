//! Hashes of what a plan depends on and of plans, taken over the serialised values, so that no field can be left out.

use std::fmt;

use counterpoint_mask::Mask;
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};
use sha2::{Digest, Sha256};

use crate::{AttentionSpec, Dispatch, Plan, Routing};

/// A SHA-256 of everything that a plan depends on, or of a plan itself ([`Plan::fingerprint`]): content, never object
/// identity. Equal content has equal fingerprints in every process and on every machine, so ranks that plan apart can
/// compare theirs and find out that they disagree before they wait for each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Fingerprint([u8; 32]);

impl Fingerprint {
    /// The fingerprint of what is planned for `mask` with `config`, all that a person chose (`plan_mask` and `PlanConfig` of crate `choose`).
    ///
    /// # Panics
    /// When `config` does not serialise.
    pub fn of(mask: &Mask, spec: &AttentionSpec, config: &impl Serialize) -> Self {
        if mask.seqlen_q() != mask.seqlen_k() {
            // One plan, so one fingerprint.
            return Self::of_cross_attention(mask, spec, config);
        }
        Self::hash::<_, ()>(&Hashed::SelfAttention(mask, spec, config))
    }

    /// The fingerprint of what is planned with queries and keys dispatched apart (`plan_cross_attention`).
    ///
    /// # Panics
    /// When `config` does not serialise.
    pub fn of_cross_attention(mask: &Mask, spec: &AttentionSpec, config: &impl Serialize) -> Self {
        Self::hash::<_, ()>(&Hashed::CrossAttention(mask, spec, config))
    }

    /// The fingerprint of what is planned for `mask` on the dispatch of `base` (`plan_mask_on`). Of that plan it sees the dispatch. `config`
    /// is without what is not looked at there (`PlanConfig::on_a_dispatch`).
    ///
    /// # Panics
    /// When `config` does not serialise.
    pub fn of_mask_on(base: &Plan, mask: &Mask, spec: &AttentionSpec, config: &impl Serialize) -> Self {
        Self::hash::<_, ()>(&Hashed::OnDispatch([&base.q_dispatch, &base.k_dispatch], mask, spec, config))
    }

    /// The fingerprint of this and of more that plans are distinguished by.
    ///
    /// # Panics
    /// When `more` does not serialise.
    pub fn and(&self, more: &impl Serialize) -> Self {
        Self::hash::<(), _>(&Hashed::And(self, more))
    }

    fn hash<C: Serialize, M: Serialize>(hashed: &Hashed<'_, C, M>) -> Self {
        // Lists follow their lengths, so different values are different bytes.
        postcard::serialize_with_flavor(hashed, Hasher(Sha256::new()))
            .expect("what is hashed serialises: its lists have known lengths, and hashing cannot fail")
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

impl Routing {
    /// The fingerprint of all ranks' tokens and their experts, by which ranks compare their routings.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::hash::<(), ()>(&Hashed::Routing(self))
    }
}

impl Plan {
    /// The fingerprint of the plan's content: all dispatches, parts, work and stages of all ranks. Ranks that each planned
    /// for themselves, or were shipped a plan, compare theirs before the first collective.
    pub fn fingerprint(&self) -> Fingerprint {
        Fingerprint::hash::<(), ()>(&Hashed::Plan(self))
    }
}

/// What has fingerprints. Each kind serialises with its own tag.
#[derive(Serialize)]
enum Hashed<'a, C, M> {
    SelfAttention(&'a Mask, &'a AttentionSpec, &'a C),
    CrossAttention(&'a Mask, &'a AttentionSpec, &'a C),
    OnDispatch([&'a Dispatch; 2], &'a Mask, &'a AttentionSpec, &'a C),
    Plan(&'a Plan),
    Routing(&'a Routing),
    And(&'a Fingerprint, &'a M),
}

/// Hashes what is serialised as it comes, without keeping it.
struct Hasher(Sha256);

impl Flavor for Hasher {
    type Output = Fingerprint;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.update(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Fingerprint> {
        Ok(Fingerprint(self.0.finalize().into()))
    }
}

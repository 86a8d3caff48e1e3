//! Hashes of what a plan depends on and of plans, taken over the serialised values, so that no field can be left out.

use std::fmt;

use counterpoint_mask::Mask;
use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize, Serializer};
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
        postcard::serialize_with_flavor(hashed, Hasher { hash: Sha256::new(), gathered: Vec::new() })
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
        Fingerprint(
            self.fingerprint_bytes(|| Fingerprint::hash::<(), ()>(&Hashed::Routing(PackedRouting(self))).0),
        )
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
    Routing(PackedRouting<'a>),
    And(&'a Fingerprint, &'a M),
}

/// A routing whose numbers are bytes: a million of them, one for each choice of each token, are hashed in every step.
struct PackedRouting<'a>(&'a Routing);

impl Serialize for PackedRouting<'_> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let (experts, ranks) = (self.0.experts(), self.0.ranks());
        // An expert's number, and of how many a token has: as many as there are at most.
        let width = [0xff, 0xffff].iter().take_while(|most| experts > **most).count();
        let of_rank = |rank| {
            let (starts, experts) = self.0.of_rank(rank);
            let counts = starts.windows(2).map(|pair| (pair[1] - pair[0]) as u32);
            [packed(width, counts), packed(width, experts.iter().copied())]
        };
        (experts, (0..ranks).map(of_rank).collect::<Vec<_>>()).serialize(serializer)
    }
}

/// Numbers of one byte, two or four.
fn packed(width: usize, numbers: impl ExactSizeIterator<Item = u32>) -> Bytes {
    let mut bytes = Vec::with_capacity(numbers.len() << width);
    match width {
        0 => bytes.extend(numbers.map(|number| number as u8)),
        1 => numbers.for_each(|number| bytes.extend_from_slice(&(number as u16).to_le_bytes())),
        _ => numbers.for_each(|number| bytes.extend_from_slice(&number.to_le_bytes())),
    }
    Bytes(bytes)
}

/// Serialised at once.
struct Bytes(Vec<u8>);

impl Serialize for Bytes {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_bytes(&self.0)
    }
}

/// Hashes what is serialised as it comes, some bytes at once: most numbers are one byte.
struct Hasher {
    hash: Sha256,
    gathered: Vec<u8>,
}

/// Bytes that are hashed at once, at least.
const AT_ONCE: usize = 4096;

impl Hasher {
    fn hash_gathered(&mut self) {
        self.hash.update(&self.gathered);
        self.gathered.clear();
    }
}

impl Flavor for Hasher {
    type Output = Fingerprint;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.gathered.push(byte);
        if self.gathered.len() >= AT_ONCE {
            self.hash_gathered();
        }
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.gathered.extend_from_slice(bytes);
        if self.gathered.len() >= AT_ONCE {
            self.hash_gathered();
        }
        Ok(())
    }

    fn finalize(mut self) -> postcard::Result<Fingerprint> {
        self.hash_gathered();
        Ok(Fingerprint(self.hash.finalize().into()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn routings_that_differ_have_other_fingerprints() {
        let none = Routing::NO_EXPERT;
        let of = |experts, ids: &[&[u32]]| {
            let ids: Vec<Vec<u32>> = ids.iter().map(|ids| ids.to_vec()).collect();
            Routing::top_k(experts, 2, &ids).unwrap().fingerprint()
        };
        let mut all = vec![
            of(4, &[&[0, 1, 2, none], &[3, none]]),
            of(4, &[&[0, none, 1, 2], &[3, none]]),
            of(4, &[&[0, 1, 2, 3], &[none, none]]),
            of(6, &[&[0, 1, 2, none], &[3, none]]),
            of(4, &[&[0, 1, 2, none, 3, none], &[]]),
            of(256, &[&[0, 1, 2, none], &[3, none]]),
            of(512, &[&[0, 1, 2, none], &[3, none]]),
            of(512, &[&[256, 1, 2, none], &[3, none]]),
            of(1 << 17, &[&[0, 1, 2, none], &[3, none]]),
            of(1 << 17, &[&[65536, 1, 2, none], &[3, none]]),
        ];
        assert_eq!(all[0], of(4, &[&[1, 0, none, 2], &[none, 3]]));
        all.sort_unstable();
        assert!(all.windows(2).all(|pair| pair[0] != pair[1]));
    }
}

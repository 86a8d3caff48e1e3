//! Which architecture a GPU's kernels are compiled for: `sm_90a` on Hopper, one `sm_80` for all 8.x, and portable ones elsewhere.

use std::fmt;

use serde::{Deserialize, Serialize};

/// A GPU's compute capability, such as 9.0.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Capability {
    /// The generation.
    pub major: u32,
    /// Within it.
    pub minor: u32,
}

impl fmt::Display for Capability {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{}.{}", self.major, self.minor)
    }
}

/// What a kernel is compiled for: an architecture's number, and whether the features that only this very architecture has
/// (`a`, such as wgmma on `sm_90a`) may be used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Arch {
    capability: Capability,
    specific: bool,
}

impl Arch {
    /// Hopper with wgmma, TMA and `setmaxnreg`.
    pub const SM_90A: Self = Self { capability: Capability { major: 9, minor: 0 }, specific: true };
    /// Hopper without them, for the portable kernels.
    pub const SM_90: Self = Self { capability: Capability { major: 9, minor: 0 }, specific: false };
    /// Ampere, and by binary compatibility every 8.x: mma.sync and cp.async.
    pub const SM_80: Self = Self { capability: Capability { major: 8, minor: 0 }, specific: false };

    /// What to compile for on a GPU: `sm_90a` on Hopper, `sm_80` on every 8.x (one binary serves them all), the exact
    /// capability elsewhere.
    pub fn of(capability: Capability) -> Self {
        match (capability.major, capability.minor) {
            (9, 0) => Self::SM_90A,
            _ => Self::portable(capability),
        }
    }

    /// What to compile the portable kernels for on a GPU: no feature that only one architecture has.
    pub fn portable(capability: Capability) -> Self {
        match capability.major {
            8 => Self::SM_80,
            _ => Self { capability, specific: false },
        }
    }

    /// Whether its machine code can be read here.
    pub fn has_known_encoding(self) -> bool {
        matches!(self.capability.major, 8 | 9)
    }

    /// Whether kernels made for Hopper run: the others are the portable ones.
    pub fn is_hopper(self) -> bool {
        self == Self::SM_90A
    }
}

impl fmt::Display for Arch {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let suffix = if self.specific { "a" } else { "" };
        write!(formatter, "sm_{}{}{suffix}", self.capability.major, self.capability.minor)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_for_every_capability() {
        let of = |major, minor| Arch::of(Capability { major, minor }).to_string();
        assert_eq!([of(8, 0), of(8, 6), of(8, 9)], ["sm_80"; 3]);
        assert_eq!([of(9, 0), of(10, 0), of(12, 1)], ["sm_90a", "sm_100", "sm_121"]);
        assert!(Arch::of(Capability { major: 9, minor: 0 }).is_hopper());
        assert!(!Arch::of(Capability { major: 10, minor: 0 }).is_hopper());
        let portable = Arch::portable(Capability { major: 9, minor: 0 });
        assert_eq!(portable.to_string(), "sm_90");
        assert!(!portable.is_hopper());
    }
}

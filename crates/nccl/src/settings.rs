//! How a transport sets NCCL up, as text behind its name.

use std::fmt;
use std::ops::RangeInclusive;

use counterpoint_driver::{NcclConfig, NcclCtaPolicy};
use thiserror::Error;

/// What a transport asks of NCCL; what it leaves open NCCL chooses, or its own variables say, which come before these settings.
///
/// Written behind a transport's name, such as `nccl+cluster-size=1+max-ctas=8`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct NcclSettings {
    /// Blocks of a cluster of its kernels, which start together (`NCCL_CGA_CLUSTER_SIZE`): none with 0.
    pub cluster_size: Option<u8>,
    /// Blocks of its kernels at least (`NCCL_MIN_CTAS`).
    pub min_ctas: Option<u8>,
    /// Blocks of its kernels at most (`NCCL_MAX_CTAS`): what a margin has to leave them.
    pub max_ctas: Option<u8>,
    /// What it saves (`NCCL_CTA_POLICY`).
    pub cta_policy: Option<NcclCtaPolicy>,
    /// Who forms sums.
    pub sums: NcclSums,
}

/// Who forms sums of a transport by NCCL.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub enum NcclSums {
    /// A pass of ours behind its sends and receives, in f32 and in the order of ranks: the same bits on any number of nodes.
    #[default]
    InRankOrder,
    /// NCCL itself, where its reduce-scatter is what a group-reduce asks for: by its algorithms, in switches where those can, in the type
    /// and in the order that it chooses.
    Library,
}

/// The largest cluster that every GPU with clusters has.
const MOST_BLOCKS_OF_CLUSTER: u8 = 8;
/// The most blocks that NCCL takes.
const MOST_CTAS: u8 = 64;

const POLICIES: [(&str, NcclCtaPolicy); 3] = [
    ("default", NcclCtaPolicy::Default),
    ("efficiency", NcclCtaPolicy::Efficiency),
    ("zero", NcclCtaPolicy::Zero),
];

/// Why words set nothing of NCCL's.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum NcclSettingFault {
    /// No setting.
    #[error("`{word}` is no setting of NCCL's: {}", NcclSettings::TEXT)]
    Unknown {
        /// What was written.
        word: String,
    },
    /// A setting without its number, or with one that NCCL does not take.
    #[error("`{word}` is no setting of NCCL's: give a number from {} to {}", numbers.start(), numbers.end())]
    Number {
        /// What was written.
        word: String,
        /// Those that it takes.
        numbers: RangeInclusive<u8>,
    },
    /// No policy.
    #[error("`{word}` is no setting of NCCL's: give default, efficiency or zero")]
    Policy {
        /// What was written.
        word: String,
    },
    /// The least is above the most.
    #[error("min-ctas={min} is more than max-ctas={max}; leave one of them out")]
    Ctas {
        /// Blocks at least.
        min: u8,
        /// Blocks at most.
        max: u8,
    },
}

impl NcclSettings {
    /// None.
    pub const PLAIN: Self = Self {
        cluster_size: None,
        min_ctas: None,
        max_ctas: None,
        cta_policy: None,
        sums: NcclSums::InRankOrder,
    };

    /// The text of all, for help.
    pub const TEXT: &'static str =
        "cluster-size=0..8, min-ctas=N, max-ctas=N, cta-policy=default|efficiency|zero, library-sums";

    /// The settings that these words name.
    ///
    /// # Errors
    /// A word that is no setting, and settings that contradict each other.
    pub fn parse<'a>(words: impl Iterator<Item = &'a str>) -> Result<Self, NcclSettingFault> {
        let mut settings = Self::default();
        for word in words {
            let (name, value) =
                word.split_once('=').map_or((word, None), |(name, value)| (name, Some(value)));
            let number = |numbers: RangeInclusive<u8>| {
                let found =
                    value.and_then(|value| value.parse().ok()).filter(|value| numbers.contains(value));
                found.ok_or_else(|| NcclSettingFault::Number { word: word.to_owned(), numbers })
            };
            match name {
                "cluster-size" => settings.cluster_size = Some(number(0..=MOST_BLOCKS_OF_CLUSTER)?),
                "min-ctas" => settings.min_ctas = Some(number(1..=MOST_CTAS)?),
                "max-ctas" => settings.max_ctas = Some(number(1..=MOST_CTAS)?),
                "cta-policy" => {
                    let named = POLICIES.into_iter().find(|(name, _)| value == Some(*name));
                    let unknown = || NcclSettingFault::Policy { word: word.to_owned() };
                    let (_, policy) = named.ok_or_else(unknown)?;
                    settings.cta_policy = Some(policy);
                }
                "library-sums" if value.is_none() => settings.sums = NcclSums::Library,
                _ => return Err(NcclSettingFault::Unknown { word: word.to_owned() }),
            }
        }
        match (settings.min_ctas, settings.max_ctas) {
            (Some(min), Some(max)) if min > max => Err(NcclSettingFault::Ctas { min, max }),
            _ => Ok(settings),
        }
    }

    /// What a communicator is made with.
    pub(crate) fn config(&self) -> NcclConfig {
        let Self { cluster_size, min_ctas, max_ctas, cta_policy, sums: _ } = *self;
        let config = NcclConfig::blocking()
            .with_ctas(cluster_size.map(u32::from), [min_ctas.map(u32::from), max_ctas.map(u32::from)]);
        match cta_policy {
            Some(policy) => config.with_cta_policy(policy),
            None => config,
        }
    }

    /// Multiprocessors that its kernels take at most, where that is known.
    pub fn workers(&self) -> Option<usize> {
        self.max_ctas.map(usize::from)
    }
}

impl fmt::Display for NcclSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let numbers =
            [("cluster-size", self.cluster_size), ("min-ctas", self.min_ctas), ("max-ctas", self.max_ctas)];
        for (name, number) in numbers {
            number.map_or(Ok(()), |number| write!(f, "+{name}={number}"))?;
        }
        let policy = POLICIES.into_iter().find(|(_, policy)| Some(*policy) == self.cta_policy);
        policy.map_or(Ok(()), |(name, _)| write!(f, "+cta-policy={name}"))?;
        match self.sums {
            NcclSums::InRankOrder => Ok(()),
            NcclSums::Library => f.write_str("+library-sums"),
        }
    }
}

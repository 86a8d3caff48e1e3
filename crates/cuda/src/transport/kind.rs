//! The transports between GPUs by name: NVLink kernels, copy engines, NCCL, or a hierarchy of them.

use std::fmt;
use std::str::FromStr;

use counterpoint_nccl::{NcclSettingFault, NcclSettings, NcclSums};
use counterpoint_schedule::{OverlapPolicy, PassOverlap, RankTransport};
use thiserror::Error;

/// How rows travel between GPUs.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// [`TransportKind::Nvlink`] where all GPUs reach each other's memory, else [`TransportKind::Nccl`]. Processes on several
    /// nodes: [`TransportKind::Hierarchical`].
    #[default]
    Auto,
    /// Kernels of a few multiprocessors read the other GPUs' memory. Where each rank has a GPU of its own, ranks pass barriers inside
    /// these kernels; where they share one, on the host.
    Nvlink,
    /// The copy engines write into the other GPUs' memory; no multiprocessor takes part in a group-cast, and in a group-reduce
    /// only for the sum.
    CopyEngine,
    /// NCCL's sends and receives, with a pass that gathers what is sent before and one that scatters or sums after.
    Nccl(NcclSettings),
    /// For ranks that are processes: NCCL between nodes, and inside each what [`TransportKind::Nvlink`] is.
    Hierarchical(NcclSettings),
}

impl TransportKind {
    /// By NCCL as it sets itself up, with sums in the order of ranks.
    pub const NCCL: Self = Self::Nccl(NcclSettings::PLAIN);

    /// Likewise between nodes.
    pub const HIERARCHICAL: Self = Self::Hierarchical(NcclSettings::PLAIN);

    /// All of them, by the names that users know.
    pub const NAMES: [(&'static str, Self); 5] = [
        ("auto", Self::Auto),
        ("nvlink", Self::Nvlink),
        ("copy-engine", Self::CopyEngine),
        ("nccl", Self::NCCL),
        ("hierarchical", Self::HIERARCHICAL),
    ];

    /// How NCCL is set up, where it moves rows.
    pub const fn nccl(self) -> Option<NcclSettings> {
        match self {
            Self::Nccl(settings) | Self::Hierarchical(settings) => Some(settings),
            Self::Auto | Self::Nvlink | Self::CopyEngine => None,
        }
    }

    /// Multiprocessors that its kernels take, of which those of ours take `own`.
    pub(crate) fn workers(self, own: u32) -> usize {
        self.nccl().and_then(|settings| settings.workers()).unwrap_or(own as usize)
    }

    /// Multiprocessors that a product must leave free where it waits for rows that others bring: its kernels, or the one thread that says that copy
    /// engines are through.
    pub(crate) fn waiting_margin(self, own: u32) -> usize {
        if self == Self::CopyEngine { 1 } else { self.workers(own) }
    }

    /// The ways in which passes of linear layers can be run; `has_barriers` where kernels of all ranks can wait for each other, and
    /// `workers` the multiprocessors of this transport's kernels.
    pub(crate) fn pass_overlaps(self, has_barriers: bool, workers: usize) -> Vec<PassOverlap> {
        let mut ways = self.transport().pass_overlaps(has_barriers, workers);
        if self.nccl().is_some_and(|settings| settings.sums == NcclSums::Library) {
            // Nothing says when a sum of NCCL's starts.
            ways.retain(|way| !is_bare_barrier(way.policy()));
        }
        ways
    }

    /// What it is in the table of what runs where, on one node where that is left open.
    pub const fn transport(self) -> RankTransport {
        match self {
            Self::Auto | Self::Nvlink => RankTransport::Nvlink,
            Self::CopyEngine => RankTransport::CopyEngine,
            Self::Nccl(_) => RankTransport::Nccl,
            Self::Hierarchical(_) => RankTransport::Hierarchical,
        }
    }

    /// Its name, without settings.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Auto => "auto",
            Self::Nvlink => "nvlink",
            Self::CopyEngine => "copy-engine",
            Self::Nccl(_) => "nccl",
            Self::Hierarchical(_) => "hierarchical",
        }
    }
}

impl fmt::Display for TransportKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(self.name())?;
        self.nccl().map_or(Ok(()), |settings| settings.fmt(formatter))
    }
}

/// Why a text names no transport.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TransportKindError {
    /// No transport has the name.
    #[error("`{name}` is no transport; give {}", TransportKind::NAMES.map(|(name, _)| name).join(", "))]
    Unknown {
        /// The name.
        name: String,
    },
    /// Settings that are none, or contradict each other.
    #[error(transparent)]
    Settings(#[from] NcclSettingFault),
    /// Settings of a transport that has none.
    #[error("`{text}`: {name} has no settings; they are of nccl and hierarchical")]
    NoSettings {
        /// The whole text.
        text: String,
        /// The transport.
        name: &'static str,
    },
    /// Sums of NCCL's, inside nodes.
    #[error("`{text}`: library-sums is for nccl, whose sums are of all ranks; kernels sum inside nodes here")]
    LibrarySums {
        /// The whole text.
        text: String,
    },
}

impl FromStr for TransportKind {
    type Err = TransportKindError;

    fn from_str(text: &str) -> Result<Self, TransportKindError> {
        let mut words = text.split('+');
        let name = words.next().unwrap_or_default();
        let named = Self::NAMES.into_iter().find(|(known, _)| *known == name);
        let settings = NcclSettings::parse(words)?;
        match named {
            Some((_, Self::Nccl(_))) => Ok(Self::Nccl(settings)),
            Some((_, Self::Hierarchical(_))) if settings.sums == NcclSums::Library => {
                Err(TransportKindError::LibrarySums { text: text.to_owned() })
            }
            Some((_, Self::Hierarchical(_))) => Ok(Self::Hierarchical(settings)),
            Some((_, kind)) if settings == NcclSettings::PLAIN => Ok(kind),
            Some((_, kind)) => {
                Err(TransportKindError::NoSettings { text: text.to_owned(), name: kind.name() })
            }
            None => Err(TransportKindError::Unknown { name: name.to_owned() }),
        }
    }
}

/// Whether only a kernel barrier sees to it that communication finds multiprocessors.
fn is_bare_barrier(policy: OverlapPolicy) -> bool {
    policy.has_barriers() && policy.sm_margin() == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        for text in [
            "auto",
            "nvlink",
            "copy-engine",
            "nccl",
            "hierarchical",
            "nccl+cluster-size=1+max-ctas=8",
            "hierarchical+min-ctas=2+max-ctas=4+cta-policy=efficiency",
            "nccl+cta-policy=zero+library-sums",
        ] {
            assert_eq!(text.parse::<TransportKind>().unwrap().to_string(), text);
        }
        for (text, word) in [
            ("", "is no transport"),
            ("ncll", "is no transport; give auto"),
            ("nvlink+max-ctas=4", "nvlink has no settings"),
            ("nccl+max-ctas=0", "a number from 1 to 64"),
            ("nccl+max-ctas", "a number from 1 to 64"),
            ("nccl+cluster-size=9", "a number from 0 to 8"),
            ("nccl+cta-policy=fast", "default, efficiency or zero"),
            ("nccl+min-ctas=8+max-ctas=4", "more than max-ctas=4"),
            ("nccl+library-sums=1", "no setting of NCCL's"),
            ("hierarchical+library-sums", "is for nccl"),
            ("nccl+", "no setting of NCCL's"),
        ] {
            let error = text.parse::<TransportKind>().unwrap_err().to_string();
            assert!(error.contains(word), "{text}: {error}");
        }
    }

    #[test]
    fn margins_follow_the_blocks_of_nccl() {
        let ways = |text: &str| {
            let kind: TransportKind = text.parse().unwrap();
            let ways = kind.pass_overlaps(false, kind.workers(16));
            ways.into_iter().map(|way| way.policy().to_string()).collect::<Vec<_>>()
        };
        let has = |text: &str, policy: &str| ways(text).iter().any(|way| way == policy);
        assert!(has("nccl", "kernel-barrier+sm-margin=16") && has("nccl", "kernel-barrier"));
        assert!(has("nccl+max-ctas=4", "kernel-barrier+sm-margin=4"));
        assert!(has("nccl+library-sums", "kernel-barrier+sm-margin=16"));
        assert!(!has("nccl+library-sums", "kernel-barrier"));
    }
}

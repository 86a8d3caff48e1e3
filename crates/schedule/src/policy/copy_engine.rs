//! `copy-engine`: copy engines move rows, which take no worker.

use super::rank_transport::RankTransport;
use super::rules::{
    EngineCollectives, LayerMargin, LayerRanks, LayerRules, MoverRules, PassTiming, PolicySupport,
    SUMMING_WORKERS,
};

pub(super) const RULES: MoverRules = MoverRules {
    word: Some("copy-engine"),
    engines: EngineCollectives::Everything,
    in_kernels: false,
    on: |transport| match transport {
        RankTransport::Nvlink | RankTransport::CopyEngine => PolicySupport::Runs,
        RankTransport::Cpu => PolicySupport::Refused("CPU ranks have no copy engines"),
        RankTransport::Nccl | RankTransport::Hierarchical => {
            PolicySupport::Refused("NCCL moves the rows of this transport; leave copy-engine out")
        }
    },
    refuses: |_| None,
    layers: &[LayerRules {
        ranks: LayerRanks::Gpus,
        preference: 2,
        // Engines leave sums to kernels.
        margin: LayerMargin::Workers(SUMMING_WORKERS),
        timing: PassTiming::UnderCopyEngines,
    }],
};

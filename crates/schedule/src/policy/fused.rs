//! `fused`: the kernels that make or take rows move them as they do so, where the transport has such kernels, and copy engines what other
//! group-casts send. A transport with such kernels has copy engines too, so nothing that runs with a kernel that waits for rows needs a
//! worker.

use super::rank_transport::{RankTransport, Workload};
use super::rules::{
    EngineCollectives, LayerMargin, LayerRanks, LayerRules, MoverRules, PassTiming, PolicySupport,
};

pub(super) const RULES: MoverRules = MoverRules {
    word: Some("fused"),
    engines: EngineCollectives::PlainCasts,
    in_kernels: true,
    on: |transport| match transport {
        RankTransport::Nvlink => PolicySupport::Runs,
        RankTransport::Cpu
        | RankTransport::CopyEngine
        | RankTransport::Nccl
        | RankTransport::Hierarchical => PolicySupport::WithoutEffect(
            "only kernels that write into other GPUs' memory send rows as they make them",
        ),
    },
    refuses: |workload| match workload {
        Workload::Linear => None,
        Workload::Attention => Some(
            "`fused` is for linear layers, whose products send rows as they make them; attention takes rows as they arrive \
             with one stage for all work (--stages 0)",
        ),
        Workload::Experts => {
            Some("`fused` is for linear layers; no kernel of experts sends rows as it makes them")
        }
    },
    layers: &[LayerRules {
        ranks: LayerRanks::Gpus,
        preference: 1,
        margin: LayerMargin::Nothing,
        timing: PassTiming::OneKernelWithCollective,
    }],
};

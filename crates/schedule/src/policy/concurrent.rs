//! `concurrent`: a stream for each, and events order only what depends on each other. The default.

use super::rules::{GroupTiming, LayerMargin, LayerRanks, LayerRules, OrderRules, PassTiming, ProductStart};

pub(super) const RULES: OrderRules = OrderRules {
    word: "concurrent",
    overlaps: true,
    starts: ProductStart::Free,
    for_attention: true,
    // Kernels of GPUs that fill the device let no collective start concurrently with them.
    layers: &[LayerRules {
        ranks: LayerRanks::Cpu,
        preference: 3,
        margin: LayerMargin::Nothing,
        timing: PassTiming::ByGroups(GroupTiming { starts: ProductStart::Free, yields_workers: false }),
    }],
};

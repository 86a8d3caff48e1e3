//! `kernel-barrier`: as `concurrent`, and a computation starts only once the communication that it should hide has started. Layers are tried
//! so without a margin, whose products lack workers only concurrently with a collective, and with one, under which communication also starts
//! under a product.

use super::rules::{GroupTiming, LayerMargin, LayerRanks, LayerRules, OrderRules, PassTiming, ProductStart};

const STARTS: ProductStart = ProductStart::AfterCommunication;

pub(super) const RULES: OrderRules = OrderRules {
    word: "kernel-barrier",
    overlaps: true,
    starts: STARTS,
    for_attention: true,
    layers: &[
        LayerRules {
            ranks: LayerRanks::Gpus,
            preference: 4,
            margin: LayerMargin::Nothing,
            timing: PassTiming::ByGroups(GroupTiming { starts: STARTS, yields_workers: true }),
        },
        LayerRules {
            ranks: LayerRanks::Gpus,
            preference: 5,
            margin: LayerMargin::Collectives,
            timing: PassTiming::ByGroups(GroupTiming { starts: STARTS, yields_workers: false }),
        },
    ],
};

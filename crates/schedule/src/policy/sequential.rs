//! `sequential`: one stream, so that nothing overlaps. The reference for correctness and for "never slower".

use super::rules::{LayerMargin, LayerRanks, LayerRules, OrderRules, PassTiming, ProductStart};

pub(super) const RULES: OrderRules = OrderRules {
    word: "sequential",
    overlaps: false,
    starts: ProductStart::Free,
    // Attention is compared with it whatever else is tried.
    for_attention: false,
    layers: &[LayerRules {
        ranks: LayerRanks::All,
        preference: 0,
        margin: LayerMargin::Nothing,
        timing: PassTiming::InSequence,
    }],
};

//! `signals`: as `concurrent`, and the products of a pass are one kernel, which goes on while what it has finished travels: a
//! communication starts once a signal says that its rows are there. Where rows are gathered, the kernel takes each group once a signal says
//! that it has arrived.

use super::rules::{GroupTiming, LayerMargin, LayerRanks, LayerRules, OrderRules, PassTiming, ProductStart};

pub(super) const RULES: OrderRules = OrderRules {
    word: "signals",
    overlaps: true,
    starts: ProductStart::OneKernel,
    // Attention has no products of groups.
    for_attention: false,
    layers: &[LayerRules {
        ranks: LayerRanks::All,
        preference: 6,
        margin: LayerMargin::Collectives,
        timing: PassTiming::ByGroups(GroupTiming { starts: ProductStart::OneKernel, yields_workers: false }),
    }],
};

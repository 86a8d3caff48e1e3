//! Comparisons whose runs take turns: a GPU at its power limit is a tenth slower at one time than at another, so what is compared runs
//! side by side, each now behind one and now behind another.

/// Of the time with nothing side by side: where less can be hidden, a share of it says nothing.
pub(crate) const LEAST_HIDEABLE: f64 = 0.01;

/// Which of `count` ways runs in each turn of a round.
pub(crate) fn turns(round: usize, count: usize) -> impl Iterator<Item = usize> {
    let forwards = round.is_multiple_of(2);
    (0..count).map(move |turn| (round + if forwards { turn } else { count - 1 - turn }) % count)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_round_has_all_and_every_order_comes() {
        let orders: BTreeSet<Vec<usize>> = (0..6).map(|round| turns(round, 3).collect()).collect();
        assert_eq!(orders.len(), 6);
        for mut order in orders {
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2]);
        }
        assert_eq!(turns(7, 1).collect::<Vec<_>>(), [0]);
        assert_eq!(turns(7, 0).count(), 0);
    }
}

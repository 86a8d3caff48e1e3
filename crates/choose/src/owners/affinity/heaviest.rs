//! The largest of what ranks have, also without two of them: found without branches, which would be predicted wrongly often.

/// The three heaviest of `loads`, the heaviest first; 0 where there are fewer.
pub(super) fn heaviest(loads: &[i64]) -> [i64; 3] {
    loads.iter().fold([0; 3], |[first, second, third], &load| {
        let (first, load) = (first.max(load), first.min(load));
        let (second, load) = (second.max(load), second.min(load));
        [first, second, third.max(load)]
    })
}

/// What the heaviest has of the ranks but two, which have this; 0 where there is none.
pub(super) fn most_of_others([first, second, third]: [i64; 3], [a, b]: [i64; 2]) -> i64 {
    // Equal loads are each other's place.
    match a.max(b) == first {
        true if a.min(b) == second => third,
        true => second,
        false => first,
    }
}

/// What the busiest rank's links carry in their busier direction, and those of all ranks.
pub(super) fn busier(sent: &[i64], received: &[i64]) -> (i64, i64) {
    let busier = sent.iter().zip(received).map(|(&sent, &received)| sent.max(received));
    busier.fold((0, 0), |(most, all), rows| (rows.max(most), all + rows))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few and many ranks, many of which have as much as others.
        #[test]
        fn the_most_of_others_is_that_of_all_but_two(
            loads in prop::collection::vec(-2..6_i64, 2..9), a: usize, b: usize,
        ) {
            let (a, b) = (a % loads.len(), b % (loads.len() - 1));
            let b = if b >= a { b + 1 } else { b };
            let others = (0..loads.len()).filter(|&rank| rank != a && rank != b).map(|rank| loads[rank]);
            let wanted = others.fold(0, i64::max);
            prop_assert_eq!(most_of_others(heaviest(&loads), [loads[a], loads[b]]), wanted);
        }
    }
}

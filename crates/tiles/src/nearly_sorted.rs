//! Sorting what mostly is in order: bands and columns from one tile to the next.

/// By how many places elements may be moved on average before all of them are sorted anew.
const MOVES: usize = 8;

/// Sorts `list` by `key`. What is a few places off its place is moved there, which takes a step for each of them.
pub(super) fn sort_nearly_sorted<T: Copy, K: Ord>(list: &mut [T], key: impl Fn(&T) -> K) {
    let mut left = MOVES * list.len();
    for index in 1..list.len() {
        let element = list[index];
        let of_element = key(&element);
        let mut at = index;
        while at > 0 && key(&list[at - 1]) > of_element {
            list[at] = list[at - 1];
            at -= 1;
        }
        list[at] = element;
        if index - at > left {
            list.sort_unstable_by_key(key);
            return;
        }
        left -= index - at;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Few and many, in order but for some, and in none.
        #[test]
        fn everything_is_sorted(
            length in 0..400_u32, swaps in prop::collection::vec((any::<usize>(), any::<usize>()), 0..200), reversed: bool,
        ) {
            let wanted: Vec<u32> = (0..length).map(|at| at / 2).collect();
            let mut list = wanted.clone();
            if reversed {
                list.reverse();
            }
            for (a, b) in swaps {
                if length > 0 {
                    list.swap(a % wanted.len(), b % wanted.len());
                }
            }
            sort_nearly_sorted(&mut list, |at| *at);
            prop_assert_eq!(list, wanted);
        }
    }
}

//! List scheduling in closed form: when workers that take items one after another have finished all of them.

use std::cmp::Reverse;
use std::collections::BinaryHeap;

/// With more items than this, orders of them are not tried out: one more or less at the end is then nothing, or else too much.
pub(super) const MOST_ITEMS: usize = 1 << 14;

/// Time until all of `workers` have finished when each takes the next item as soon as it is free. `items` are (time, how many of
/// them), in the order in which they are taken. Time: the logarithm of the workers for each item that not all of them take.
///
/// # Panics
/// When there is no worker.
pub(super) fn list_time(items: impl IntoIterator<Item = (u64, usize)>, workers: usize) -> u64 {
    assert!(workers > 0, "no worker never finishes");
    let mut free: BinaryHeap<Reverse<u64>> = (0..workers).map(|_| Reverse(0)).collect();
    // What has passed for everybody, and the end of the last item after that.
    let (mut passed, mut end) = (0, 0);
    let mut items = items.into_iter().peekable();
    while let Some((time, mut count)) = items.next() {
        while let Some((_, more)) = items.next_if(|&(next, _)| next == time) {
            count += more;
        }
        while count > 0 {
            let Some(mut first) = free.peek_mut() else { break };
            if count >= workers && end - first.0 <= time {
                // Nobody takes a second one before everybody has one.
                passed += time;
                count -= workers;
                continue;
            }
            first.0 += time;
            end = end.max(first.0);
            count -= 1;
        }
    }
    passed + end
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounds_of_all_workers_count_like_single_items() {
        let plain = |items: &[(u64, usize)], workers: usize| {
            let mut free = vec![0; workers];
            for &(time, count) in items {
                for _ in 0..count {
                    *free.iter_mut().min().unwrap() += time;
                }
            }
            free.into_iter().max().unwrap()
        };
        for items in [
            vec![(5, 1024), (3, 40), (1, 7)],
            vec![(1, 100), (40, 3), (40, 300), (7, 333), (9, 12)],
            vec![(0, 9), (2, 1)],
            vec![],
        ] {
            for workers in [1, 2, 7, 132] {
                assert_eq!(
                    list_time(items.iter().copied(), workers),
                    plain(&items, workers),
                    "{items:?}, {workers}"
                );
            }
        }
    }
}

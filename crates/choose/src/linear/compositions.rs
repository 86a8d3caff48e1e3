//! Every way in which the waves of a pass are groups.

/// Every sequence of sizes that add up to `waves`, in at most `most` groups: `2^(waves - 1)` where `most` allows.
pub fn compositions(waves: usize, most: usize) -> impl Iterator<Item = Vec<usize>> {
    let cuts = waves.saturating_sub(1).min(63);
    (0u64..1 << cuts).filter_map(move |mask| {
        if waves == 0 || mask.count_ones() as usize >= most {
            return None;
        }
        let mut sizes = vec![1];
        for cut in 0..cuts {
            match mask >> cut & 1 {
                1 => sizes.push(1),
                _ => *sizes.last_mut()? += 1,
            }
        }
        Some(sizes)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn compositions_are_all_there() {
        let all: Vec<_> = compositions(4, 9).collect();
        assert_eq!(all.len(), 8);
        assert!(all.contains(&vec![1, 2, 1]) && all.iter().all(|sizes| sizes.iter().sum::<usize>() == 4));
        assert_eq!(compositions(5, 1).collect::<Vec<_>>(), [vec![5]]);
        assert_eq!(compositions(4, 2).count(), 4);
        assert_eq!(compositions(0, 4).count(), 0);
    }
}

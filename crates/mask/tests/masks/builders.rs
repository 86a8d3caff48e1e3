//! Builders against the definition of each mask, pair by pair.

use counterpoint_mask::{Documents, MAX_SEQLEN, Mask, MaskError, Window};
use proptest::prelude::*;

use super::pairs::check;

/// The document of a token and its place in it.
fn place(lengths: &[usize], token: usize) -> (usize, usize) {
    let mut start = 0;
    for (document, &length) in lengths.iter().enumerate() {
        if token < start + length {
            return (document, token - start);
        }
        start += length;
    }
    panic!("token {token} is outside {lengths:?}");
}

/// At least one token in all; documents without tokens included.
fn lengths() -> impl Strategy<Value = Vec<usize>> {
    prop::collection::vec(prop_oneof![1 => Just(0_usize), 4 => 0_usize..14], 1..5)
        .prop_filter("a mask needs a token", |lengths| lengths.iter().sum::<usize>() > 0)
}

fn documents(lengths: &[usize]) -> Documents {
    Documents::from_lengths(lengths.iter().copied()).unwrap()
}

proptest! {
    #![proptest_config(crate::cases::cases(1500))]

    #[test]
    fn full_and_causal(lengths in lengths()) {
        let same = |row, col| place(&lengths, row).0 == place(&lengths, col).0;
        let full = Mask::full(documents(&lengths)).unwrap();
        check(&full, same)?;
        let causal = Mask::causal(documents(&lengths)).unwrap();
        check(&causal, |row, col| same(row, col) && col <= row)?;
        let documents = lengths.iter().filter(|&&length| length > 0).count();
        prop_assert_eq!((full.slices().len(), causal.slices().len()), (documents, documents));
    }

    #[test]
    fn cross_attention(pairs in prop::collection::vec((0_usize..12, 0_usize..12), 1..5)) {
        let (q, k): (Vec<usize>, Vec<usize>) = pairs.into_iter().unzip();
        prop_assume!(q.iter().sum::<usize>() > 0 && k.iter().sum::<usize>() > 0);
        let full = Mask::cross_full(documents(&q), documents(&k)).unwrap();
        check(&full, |row, col| place(&q, row).0 == place(&k, col).0)?;
        let causal = Mask::cross_causal(documents(&q), documents(&k)).unwrap();
        check(&causal, |row, col| {
            let ((document, i), (other, j)) = (place(&q, row), place(&k, col));
            // Counted from the ends: so many keys remain for at least as many queries.
            document == other && k[other] - j >= q[document] - i
        })?;
    }

    #[test]
    fn sliding_window(
        lengths in lengths(),
        left in prop::option::of(0_usize..16), right in prop::option::of(0_usize..16), global in 0_usize..6,
    ) {
        let mask = Mask::sliding_window(documents(&lengths), Window { left, right, global }).unwrap();
        check(&mask, |row, col| {
            let ((document, i), (other, j)) = (place(&lengths, row), place(&lengths, col));
            let not_too_late = right.is_none_or(|right| j <= i + right);
            let not_too_early = left.is_none_or(|left| j + left >= i);
            document == other && not_too_late && (not_too_early || j < global)
        })?;
        let most = match (right, global) {
            (Some(0), 0) => 2,
            (_, 0) | (Some(0), _) => 3,
            _ => 5,
        };
        prop_assert!(mask.slices().len() <= most * lengths.len(), "{:?}", mask);
    }

    #[test]
    fn block_causal(lengths in lengths(), block in 1_usize..6) {
        let mask = Mask::block_causal(documents(&lengths), block).unwrap();
        check(&mask, |row, col| {
            let ((document, i), (other, j)) = (place(&lengths, row), place(&lengths, col));
            document == other && j / block <= i / block
        })?;
    }

    #[test]
    fn last_global(lengths in lengths(), block in 1_usize..6, global in 0_usize..6) {
        let mask = Mask::last_global(documents(&lengths), block, global).unwrap();
        let start: usize = lengths.iter().sum();
        prop_assert_eq!(mask.seqlen_k(), start + global);
        check(&mask, |row, col| {
            row >= start || col < start && {
                let ((document, i), (other, j)) = (place(&lengths, row), place(&lengths, col));
                document == other && j / block <= i / block
            }
        })?;
    }

    #[test]
    fn prefix_lm(lengths in lengths(), prefix in 0_usize..16) {
        let mask = Mask::prefix_lm(documents(&lengths), prefix).unwrap();
        check(&mask, |row, col| {
            let ((document, i), (other, j)) = (place(&lengths, row), place(&lengths, col));
            document == other && (j < prefix || j <= i)
        })?;
        prop_assert!(mask.slices().len() <= 2 * lengths.len());
    }

    #[test]
    fn shared_question(question in 0_usize..12, answers in prop::collection::vec(0_usize..8, 1..5)) {
        prop_assume!(question + answers.iter().sum::<usize>() > 0);
        let mask = Mask::shared_question(question, documents(&answers)).unwrap();
        check(&mask, |row, col| {
            col <= row && (col < question || place(&answers, row - question).0 == place(&answers, col - question).0)
        })?;
    }

    #[test]
    fn block_sparse(
        seqlen in (1_usize..30, 1_usize..30), block in (1_usize..7, 1_usize..7), bits in any::<[u32; 30]>(),
        twice in any::<bool>(),
    ) {
        let (rows, cols) = (seqlen.0.div_ceil(block.0), seqlen.1.div_ceil(block.1));
        let on = |row: usize, col: usize| bits[row] >> col & 1 == 1;
        let mut blocks: Vec<(usize, usize)> =
            (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))).filter(|&(row, col)| on(row, col)).collect();
        if twice {
            blocks.extend(blocks.clone().iter().rev());
        }
        let mask = Mask::block_sparse(seqlen.0, seqlen.1, block.0, block.1, &blocks).unwrap();
        check(&mask, |row, col| on(row / block.0, col / block.1))?;
        // Runs along a row are one slice each.
        prop_assert!(mask.slices().len() <= rows * cols.div_ceil(2));
    }
}

#[test]
fn long_masks_have_few_slices() {
    let window = |left, right, global| Window { left: Some(left), right: Some(right), global };
    let count = |window| Mask::sliding_window(1 << 20, window).unwrap().slices().len();
    assert_eq!(count(window(1023, 0, 0)), 2);
    assert_eq!(count(window(1023, 0, 64)), 3);
    assert_eq!(count(window(512, 512, 0)), 3);
    assert_eq!(count(window(512, 512, 64)), 4);
    assert_eq!(Mask::causal(MAX_SEQLEN).unwrap().area(), {
        let n = MAX_SEQLEN as u128;
        (n * (n + 1) / 2) as u64
    });
    let grid: Vec<(usize, usize)> = (0..63).flat_map(|row| (0..63).map(move |col| (row, col))).collect();
    assert_eq!(Mask::block_sparse(1000, 1000, 16, 16, &grid).unwrap().slices().len(), 1);
}

#[test]
fn bad_arguments_are_refused() {
    assert_eq!(Documents::from_starts(vec![]), Err(MaskError::StartsNotAtZero { first: None }));
    assert_eq!(Documents::from_starts(vec![1, 5]), Err(MaskError::StartsNotAtZero { first: Some(1) }));
    assert_eq!(
        Documents::from_starts(vec![0, 5, 4]),
        Err(MaskError::StartsDecrease { index: 2, previous: 5, value: 4 })
    );
    for lengths in [[MAX_SEQLEN, 1], [1, usize::MAX]] {
        assert_eq!(
            Documents::from_lengths(lengths),
            Err(MaskError::LengthsTooLong { index: 1, limit: MAX_SEQLEN })
        );
    }
    assert_eq!(Mask::causal(0), Err(MaskError::EmptySequence { axis: "q" }));
    assert_eq!(
        Mask::full(usize::MAX),
        Err(MaskError::SequenceTooLong { axis: "q", seqlen: usize::MAX, limit: MAX_SEQLEN })
    );
    assert_eq!(Mask::block_causal(8, 0), Err(MaskError::EmptyBlock { field: "block" }));
    assert!(matches!(Mask::block_causal(MAX_SEQLEN, 2), Err(MaskError::TooManySlices { .. })));
    assert_eq!(
        Mask::cross_full(documents(&[1, 2]), 3),
        Err(MaskError::DocumentCount { queries: 2, keys: 1 })
    );
    assert_eq!(
        Mask::block_sparse(8, 8, 4, 4, &[(0, 0), (1, 2)]),
        Err(MaskError::BlockOutOfBounds { row: 1, col: 2, rows: 2, cols: 2 })
    );
    // Extreme options are clipped, not overflowed.
    let everything = Window { left: Some(usize::MAX), right: Some(usize::MAX), global: usize::MAX };
    assert_eq!(Mask::sliding_window(9, everything).unwrap().area(), 81);
    assert_eq!(Mask::prefix_lm(9, usize::MAX).unwrap().area(), 81);
    assert_eq!(Mask::block_causal(9, usize::MAX).unwrap().area(), 81);
    assert!(matches!(Mask::last_global(9, 1, usize::MAX), Err(MaskError::SequenceTooLong { .. })));
    assert!(matches!(Mask::shared_question(usize::MAX, 9), Err(MaskError::SequenceTooLong { .. })));
}

//! Masks from overlapping slices, dense arrays, trees and marks of tokens, against their definitions, pair by pair.

use counterpoint_mask::{AttnSlice, Documents, Mask, MaskError, MaskType, Range, Window};
use proptest::prelude::*;

use super::pairs::check;

const SIDE: usize = 14;

fn slices() -> impl Strategy<Value = Vec<AttnSlice>> {
    let range = || (0..SIDE, 1..=SIDE).prop_map(|(a, len)| Range::new(a, (a + len).min(SIDE)));
    let kinds = [MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];
    let slice = (range(), range(), prop::sample::select(kinds.to_vec()));
    prop::collection::vec(slice.prop_map(|(q, k, kind)| AttnSlice::new(q, k, kind)), 0..7)
}

proptest! {
    #![proptest_config(crate::cases::cases(1500))]

    #[test]
    fn a_union_counts_a_pair_once(slices in slices()) {
        let mask = Mask::union(SIDE, SIDE, &slices).unwrap();
        check(&mask, |row, col| slices.iter().any(|slice| slice.contains(row, col)))?;
    }

    #[test]
    fn what_is_left_of_a_band(slices in slices()) {
        prop_assume!(slices.len() > 1);
        let (band, other) = (slices[0].band(), slices[1].band());
        let pieces: Vec<_> = band.without(&other).collect();
        for row in 0..SIDE {
            for col in 0..SIDE {
                let held = pieces.iter().filter(|piece| piece.contains(row, col)).count();
                let wanted = band.contains(row, col) && !other.contains(row, col);
                prop_assert_eq!(held, usize::from(wanted), "row {}, column {}: {:?}", row, col, pieces);
            }
        }
    }

    #[test]
    fn rows_in_another_order(slices in slices(), starts in prop::collection::vec(0..SIDE, 8), seed in any::<u64>()) {
        let mask = Mask::union(SIDE, SIDE, &slices).unwrap();
        let order = |starts: &[usize], seed: u64| {
            let mut cuts: Vec<usize> = starts.iter().copied().chain([0, SIDE]).collect();
            cuts.sort_unstable();
            // Ranges of no rows among them.
            let mut order: Vec<Range> = cuts.windows(2).map(|pair| Range::new(pair[0], pair[1])).collect();
            let mut state = seed | 1;
            for last in (1..order.len()).rev() {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                order.swap(last, (state >> 33) as usize % (last + 1));
            }
            order
        };
        let (q_order, k_order) = (order(&starts[..4], seed), order(&starts[4..], !seed));
        let rows = |order: &[Range]| -> Vec<usize> { order.iter().flat_map(|range| range.start..range.end).collect() };
        let (queries, keys) = (rows(&q_order), rows(&k_order));
        let moved = mask.rearranged(&q_order, &k_order).unwrap();
        check(&moved, |row, col| mask.contains(queries[row], keys[col]))?;
    }

    #[test]
    fn dense_masks_come_back(bits in prop::collection::vec(any::<bool>(), SIDE * SIDE), slices in slices()) {
        let random = Mask::from_dense(SIDE, SIDE, |row, col| bits[row * SIDE + col]).unwrap();
        check(&random, |row, col| bits[row * SIDE + col])?;
        let sees = |row, col| slices.iter().any(|slice| slice.contains(row, col));
        check(&Mask::from_dense(SIDE, SIDE, sees).unwrap(), sees)?;
    }

    #[test]
    fn trees_see_their_ancestors(nodes in prop::collection::vec((any::<prop::sample::Index>(), 0..5_usize), 1..7)) {
        prop_assume!(nodes.iter().any(|(_, length)| *length > 0));
        let parents: Vec<Option<usize>> = nodes
            .iter()
            .enumerate()
            .map(|(node, (index, _))| index.index(node + 1).checked_sub(1))
            .collect();
        let lengths: Vec<usize> = nodes.iter().map(|(_, length)| *length).collect();
        let mask = Mask::prefix_tree(&parents, &Documents::from_lengths(lengths.clone()).unwrap()).unwrap();
        let piece: Vec<usize> =
            lengths.iter().enumerate().flat_map(|(piece, &length)| std::iter::repeat_n(piece, length)).collect();
        let descends = |from: usize, to: usize| {
            std::iter::successors(Some(from), |&at| parents[at]).any(|at| at == to)
        };
        check(&mask, |row, col| col <= row && descends(piece[row], piece[col]))?;
    }

    #[test]
    fn document_ids(ids in prop::collection::vec(-1..4_i64, 1..SIDE), causal in any::<bool>()) {
        let mask = Mask::from_document_ids(&ids, causal).unwrap();
        check(&mask, |row, col| ids[row] >= 0 && ids[row] == ids[col] && (!causal || col <= row))?;
    }

    #[test]
    fn windows_of_cross_attention(
        pairs in prop::collection::vec((0_usize..7, 0_usize..7), 1..4),
        left in prop::option::of(0_usize..6), right in prop::option::of(0_usize..6),
    ) {
        let (q, k): (Vec<usize>, Vec<usize>) = pairs.into_iter().unzip();
        prop_assume!(q.iter().sum::<usize>() > 0 && k.iter().sum::<usize>() > 0);
        let documents = |lengths: &[usize]| Documents::from_lengths(lengths.iter().copied()).unwrap();
        let window = Window { left, right, global: 0 };
        let mask = Mask::cross_sliding_window(documents(&q), documents(&k), window).unwrap();
        let place = |lengths: &[usize], token: usize| {
            documents(lengths).ranges().enumerate().find(|(_, range)| range.contains(token)).unwrap()
        };
        check(&mask, |row, col| {
            let ((a, rows), (b, cols)) = (place(&q, row), place(&k, col));
            // Distance to the end of each: the last query is aligned to the last key.
            let shift = (rows.end - row) as i64 - (cols.end - col) as i64;
            a == b && left.is_none_or(|left| shift >= -(left as i64)) && right.is_none_or(|right| shift <= right as i64)
        })?;
    }
}

#[test]
fn dense_shapes_are_found() {
    for expression in
        ["causal:64", "sliding-window:64,left=9,right=3", "varlen-causal:lengths=10,30,24", "full:64"]
    {
        let mask: Mask = expression.parse().unwrap();
        let found = Mask::from_dense(64, 64, |row, col| mask.contains(row, col)).unwrap();
        let (found, built) = (found.slices().len(), mask.slices().len());
        assert!(found <= built + 1, "{expression}: {found} slices for {built}");
    }
}

#[test]
fn bad_input_is_named() {
    let out = AttnSlice::new(Range::new(0, 4), Range::new(2, 9), MaskType::Full);
    let error = Mask::union(4, 8, &[out]).unwrap_err();
    assert!(matches!(error, MaskError::OutOfBounds { index: 0, axis: "k", end: 9, .. }), "{error}");
    let pieces = Documents::from_lengths([2, 2]).unwrap();
    let error = Mask::prefix_tree(&[None, Some(1)], &pieces).unwrap_err();
    assert_eq!(
        error.to_string(),
        "parents[1] is 1; a piece continues an earlier one, so its parent must be below 1"
    );
    let window = Window { left: Some(1), right: None, global: 2 };
    let error = Mask::cross_sliding_window(4, 6, window).unwrap_err();
    assert_eq!(error, MaskError::GlobalTokens { global: 2 });
}

#[test]
fn an_order_has_every_row_once() {
    let mask = Mask::causal(4).unwrap();
    let whole = [Range::new(0, 4)];
    for (order, row) in [
        (vec![Range::new(0, 3)], 3),
        (vec![Range::new(2, 4), Range::new(0, 1)], 1),
        (vec![Range::new(0, 3), Range::new(2, 4)], 2),
        (vec![Range::new(0, 5)], 4),
        (vec![], 0),
    ] {
        let expected = |axis| Err(MaskError::Order { axis, row, seqlen: 4 });
        assert_eq!(mask.rearranged(&order, &whole), expected("q"), "{order:?}");
        assert_eq!(mask.rearranged(&whole, &order), expected("k"), "{order:?}");
    }
    assert_eq!(mask.rearranged(&whole, &whole).unwrap(), mask);
}

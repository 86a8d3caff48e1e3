//! What `Mask::new` refuses, and how fast.

use std::time::Instant;

use counterpoint_mask::{AttnSlice, MAX_SEQLEN, Mask, MaskError, MaskType, Range};
use proptest::prelude::*;

const SIZE: usize = 12;

fn slice(q: (usize, usize), k: (usize, usize), mask_type: MaskType) -> AttnSlice {
    AttnSlice { q_range: Range { start: q.0, end: q.1 }, k_range: Range { start: k.0, end: k.1 }, mask_type }
}

fn any_slice(size: usize, longest: usize) -> impl Strategy<Value = AttnSlice> {
    let range = move || {
        (0..size, 1..=longest).prop_map(move |(start, len)| Range::new(start, (start + len).min(size)))
    };
    let types = vec![MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal];
    (range(), range(), prop::sample::select(types)).prop_map(|(q, k, t)| AttnSlice::new(q, k, t))
}

proptest! {
    #![proptest_config(crate::cases::cases(20000))]

    /// Against counting. Short slices on a large plane are often disjoint, long ones on a small one rarely.
    #[test]
    fn overlap_is_found_exactly_when_there_is_one(
        slices in prop_oneof![
            prop::collection::vec(any_slice(SIZE, SIZE), 0..5),
            prop::collection::vec(any_slice(40, 8), 0..14),
        ],
    ) {
        let shared = |a: &AttnSlice, b: &AttnSlice| {
            (0..40).any(|row| (0..40).any(|col| a.contains(row, col) && b.contains(row, col)))
        };
        let overlapping = slices.iter().enumerate().any(|(i, a)| slices[..i].iter().any(|b| shared(a, b)));
        match Mask::new(40, 40, slices.clone()) {
            Ok(mask) => {
                prop_assert!(!overlapping);
                prop_assert_eq!(mask.slices(), slices);
            }
            Err(MaskError::Overlap { first, second, row, col }) => {
                prop_assert!(first < second);
                prop_assert!(slices[first].contains(row, col) && slices[second].contains(row, col));
            }
            Err(error) => prop_assert!(false, "{}", error),
        }
    }

    /// Disjoint by construction: a partition of the plane into bands, given as slices in any order. One more pair
    /// anywhere is then an overlap.
    #[test]
    fn a_partition_is_accepted_and_one_more_pair_is_not(
        cuts in prop::collection::vec((any::<prop::sample::Index>(), 0_u8..3, 0_usize..64), 0..40),
        extra in (0_usize..64, 0_usize..64), turn in any::<prop::sample::Index>(),
        // At the front of a short sequence, or at the very end of the longest.
        (before, seqlen) in prop::sample::select(vec![(0, 64), (MAX_SEQLEN - 64, MAX_SEQLEN)]),
    ) {
        use counterpoint_mask::Band;
        let plane = Range::new(0, 64);
        let mut bands = vec![Band::full(plane, plane)];
        for (which, direction, at) in cuts {
            let band = bands.swap_remove(which.index(bands.len()));
            let diag = 2 * at as i64 - 64;
            bands.extend(match direction {
                0 => <[Band; 2]>::from(band.cut_rows(at)),
                1 => <[Band; 2]>::from(band.cut_cols(at)),
                _ => [
                    Band { diag_max: band.diag_max.min(diag), ..band },
                    Band { diag_min: band.diag_min.max(diag + 1), ..band },
                ],
            });
        }
        let there = |band: &Band| band.shift(before as i64, before as i64);
        let mut slices: Vec<AttnSlice> = bands.iter().flat_map(|band| there(band).to_slices()).collect();
        let turn = turn.index(slices.len());
        slices.rotate_left(turn);
        let mask = Mask::new(seqlen, seqlen, slices.clone());
        prop_assert_eq!(mask.map(|mask| mask.area()), Ok(64 * 64));
        let (row, col) = (before + extra.0, before + extra.1);
        slices.push(slice((row, row + 1), (col, col + 1), MaskType::Full));
        let second = slices.len() - 1;
        let first = slices.iter().position(|slice| slice.contains(row, col)).unwrap();
        prop_assert_eq!(Mask::new(seqlen, seqlen, slices), Err(MaskError::Overlap { first, second, row, col }));
    }
}

#[test]
fn ranges_are_checked() {
    let full = MaskType::Full;
    let refused = |slices| Mask::new(8, 6, slices).unwrap_err().to_string();
    let fine = slice((0, 1), (0, 1), full);
    assert_eq!(
        refused(vec![fine, slice((1, 9), (0, 6), full)]),
        "slices[1].q: the range [1, 9) is outside the sequence of 8 tokens; end it at 8 or before, or make seqlen_q larger"
    );
    assert_eq!(
        refused(vec![slice((1, 2), (0, 7), full)]),
        "slices[0].k: the range [0, 7) is outside the sequence of 6 tokens; end it at 6 or before, or make seqlen_k larger"
    );
    assert_eq!(
        refused(vec![fine, fine, slice((3, 3), (0, 6), full)]),
        "slices[2].q: the range [3, 3) is empty; leave the slice out"
    );
    assert_eq!(
        refused(vec![slice((3, 4), (5, 2), full)]),
        "slices[0].k: the range [5, 2) is reversed; write the smaller number first"
    );
    assert_eq!(
        refused(vec![slice((0, 8), (0, 6), full), fine]),
        "slices[0] and slices[1] overlap: both hold row 0, column 0; slices must be disjoint"
    );
    assert_eq!(Mask::new(0, 6, vec![]), Err(MaskError::EmptySequence { axis: "q" }));
    assert_eq!(
        Mask::new(6, MAX_SEQLEN + 1, vec![]),
        Err(MaskError::SequenceTooLong { axis: "k", seqlen: MAX_SEQLEN + 1, limit: MAX_SEQLEN })
    );
    // A slice whose rectangle is not empty may still hold no pair.
    assert_eq!(
        Mask::new(8, 6, vec![slice((0, 8), (0, 6), MaskType::BiCausal)]).map(|mask| mask.area()),
        Ok(0)
    );
    assert_eq!(Mask::new(MAX_SEQLEN, MAX_SEQLEN, vec![]).map(|mask| mask.area()), Ok(0));
}

/// 100,000 parallel diagonals, one pair wide, whose rectangles nearly all overlap each other. Nothing quadratic could
/// pass: there are five billion overlapping rectangles.
#[test]
fn a_hundred_thousand_nested_rectangles_take_less_than_a_second() {
    let n = 100_000;
    let size = 4 * n;
    let mut slices: Vec<AttnSlice> = (0..n)
        .map(|i| {
            // Columns `row + 2 i`, each with its own first and last row; any two share most of their rectangles.
            let (start, end) = (i % 1000, size / 2 - i % 777);
            slice((start, end), (start + 2 * i, end + 2 * i), MaskType::BiCausal)
        })
        .collect();
    let started = Instant::now();
    let mask = Mask::new(size, size, slices.clone()).unwrap();
    let seconds = started.elapsed().as_secs_f64();
    assert_eq!(mask.area(), mask.slices().iter().map(|slice| slice.q_range.len() as u64).sum::<u64>());
    println!("100,000 slices validated in {seconds:.3} s");
    // A sixth of a second when optimised and alone. The bound leaves room for a busy machine; a quadratic pass
    // takes minutes.
    assert!(seconds < 5.0, "{seconds} s");

    // The last pair of the last diagonal, held once more.
    let last = slices[n - 1];
    let (row, col) = (last.q_range.end - 1, last.k_range.end - 1);
    slices.push(slice((row, row + 1), (col, col + 1), MaskType::Full));
    assert_eq!(Mask::new(size, size, slices), Err(MaskError::Overlap { first: n - 1, second: n, row, col }));
}

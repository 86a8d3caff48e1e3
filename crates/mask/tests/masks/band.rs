//! Bands against their dense pictures.

use std::collections::BTreeSet;

use counterpoint_mask::{AttnSlice, Band, MAX_SEQLEN, MaskType, Range};
use proptest::prelude::*;

/// Every index used here is below this.
const SIZE: usize = 16;

type Pairs = BTreeSet<(usize, usize)>;

/// The definition, pair by pair.
fn pairs(band: &Band) -> Pairs {
    let mut pairs = Pairs::new();
    for row in band.q_range.start..band.q_range.end {
        for col in band.k_range.start..band.k_range.end {
            let diag = col as i64 - row as i64;
            if band.diag_min <= diag && diag <= band.diag_max {
                pairs.insert((row, col));
            }
        }
    }
    pairs
}

/// The definition of a slice's type, pair by pair.
fn slice_pairs(slice: &AttnSlice) -> Pairs {
    let (q, k) = (slice.q_range, slice.k_range);
    let mut pairs = Pairs::new();
    for i in 0..q.len() as i64 {
        for j in 0..k.len() as i64 {
            let causal = j - i <= k.len() as i64 - q.len() as i64;
            let inv_causal = j >= i;
            let unmasked = match slice.mask_type {
                MaskType::Full => true,
                MaskType::Causal => causal,
                MaskType::InvCausal => inv_causal,
                MaskType::BiCausal => causal && inv_causal,
            };
            if unmasked {
                pairs.insert((q.start + i as usize, k.start + j as usize));
            }
        }
    }
    pairs
}

fn range() -> impl Strategy<Value = Range> {
    (0..=SIZE, 0..=SIZE).prop_map(|(a, b)| Range::new(a.min(b), a.max(b)))
}

fn band() -> impl Strategy<Value = Band> {
    let diag = || prop_oneof![3 => -(SIZE as i64) - 2..=SIZE as i64 + 2, 1 => Just(i64::MIN)];
    (range(), range(), diag(), diag()).prop_map(|(q_range, k_range, min, max)| Band {
        q_range,
        k_range,
        diag_min: if min == i64::MIN { Band::NO_MIN } else { min },
        diag_max: if max == i64::MIN { Band::NO_MAX } else { max },
    })
}

fn slice() -> impl Strategy<Value = AttnSlice> {
    let mask_type =
        prop::sample::select(vec![MaskType::Full, MaskType::Causal, MaskType::InvCausal, MaskType::BiCausal]);
    (range(), range(), mask_type).prop_map(|(q, k, mask_type)| AttnSlice::new(q, k, mask_type))
}

fn union_of(slices: &[AttnSlice]) -> Pairs {
    slices.iter().flat_map(slice_pairs).collect()
}

proptest! {
    #![proptest_config(crate::cases::cases(10000))]

    #[test]
    fn a_band_is_its_definition(band in band()) {
        let pairs = pairs(&band);
        prop_assert_eq!(band.area(), pairs.len() as u64);
        prop_assert_eq!(band.is_empty(), pairs.is_empty());
        for row in 0..SIZE {
            for col in 0..SIZE {
                prop_assert_eq!(band.contains(row, col), pairs.contains(&(row, col)));
                if band.q_range.contains(row) {
                    prop_assert_eq!(band.columns(row).contains(col), pairs.contains(&(row, col)));
                }
            }
        }
        for token in 0..SIZE {
            prop_assert_eq!(band.rows().contains(token), pairs.iter().any(|&(row, _)| row == token));
            prop_assert_eq!(band.keys().contains(token), pairs.iter().any(|&(_, col)| col == token));
        }
    }

    #[test]
    fn a_slice_is_the_band_of_its_type(slice in slice()) {
        let expected = slice_pairs(&slice);
        prop_assert_eq!(pairs(&slice.band()), expected.clone());
        prop_assert_eq!(slice.area(), expected.len() as u64);
    }

    #[test]
    fn trimmed_bands_are_canonical(a in band(), b in band()) {
        let (trimmed_a, trimmed_b) = (a.trim(), b.trim());
        prop_assert_eq!(trimmed_a.map(|band| pairs(&band)).unwrap_or_default(), pairs(&a));
        prop_assert_eq!(trimmed_a == trimmed_b, pairs(&a) == pairs(&b));
        if let Some(trimmed) = trimmed_a {
            prop_assert_eq!(trimmed.trim(), Some(trimmed));
            prop_assert_eq!((trimmed.rows(), trimmed.keys()), (trimmed.q_range, trimmed.k_range));
        }
    }

    /// Two bands with a good chance to be equal sets written differently.
    #[test]
    fn trimming_forgets_how_a_band_was_written(band in band(), wider in 0_usize..4, further in 0_i64..4) {
        let trimmed = band.trim();
        if let Some(tight) = trimmed {
            let hidden = Band {
                diag_min: if tight.diag_min == Band::NO_MIN { -(2 * SIZE as i64) - further } else { tight.diag_min },
                k_range: match tight.diag_max {
                    // Rows end the columns by themselves, so the rectangle may reach further.
                    max if max != Band::NO_MAX && tight.q_range.end as i64 + max == tight.k_range.end as i64 => {
                        Range::new(tight.k_range.start, tight.k_range.end + wider)
                    }
                    _ => tight.k_range,
                },
                ..tight
            };
            prop_assert_eq!(pairs(&hidden), pairs(&band));
            prop_assert_eq!(hidden.trim(), trimmed);
        }
    }

    #[test]
    fn set_operations(a in band(), b in band(), q in range(), k in range(), at in 0..=SIZE) {
        let (in_a, in_b) = (pairs(&a), pairs(&b));
        prop_assert_eq!(pairs(&a.intersect(&b)), &in_a & &in_b);
        let inside: Pairs = in_a.iter().copied().filter(|&(row, col)| q.contains(row) && k.contains(col)).collect();
        prop_assert_eq!(pairs(&a.clip(&q, &k)), inside);
        let (above, below) = a.cut_rows(at);
        let expected: (Pairs, Pairs) = in_a.iter().partition(|&&(row, _)| row < at);
        prop_assert_eq!((pairs(&above), pairs(&below)), expected);
        let (left, right) = a.cut_cols(at);
        let expected: (Pairs, Pairs) = in_a.iter().partition(|&&(_, col)| col < at);
        prop_assert_eq!((pairs(&left), pairs(&right)), expected);
    }

    #[test]
    fn shifting_moves_every_pair(band in band(), dq in -20_i64..20, dk in -20_i64..20) {
        let far = band.shift(100, 200);
        let there = far.shift(dq, dk);
        let moved: Pairs = pairs(&band)
            .iter()
            .map(|&(row, col)| ((row as i64 + 100 + dq) as usize, (col as i64 + 200 + dk) as usize))
            .collect();
        prop_assert_eq!(pairs(&there), moved);
        prop_assert_eq!(there.shift(-100 - dq, -200 - dk), band);
    }

    #[test]
    fn any_band_is_at_most_three_slices(band in band()) {
        let slices: Vec<AttnSlice> = band.to_slices().collect();
        prop_assert!(slices.len() <= 3);
        prop_assert!(slices.iter().all(|slice| slice.area() > 0));
        prop_assert_eq!(slices.iter().map(AttnSlice::area).sum::<u64>(), band.area());
        prop_assert_eq!(union_of(&slices), pairs(&band));
    }

    #[test]
    fn cutting_a_slice_keeps_its_picture(slice in slice(), at in 0..=SIZE) {
        let dense = slice_pairs(&slice);
        for (first, second, along_rows) in [
            { let (a, b) = slice.cut_rows(at); (a, b, true) },
            { let (a, b) = slice.cut_cols(at); (a, b, false) },
        ] {
            prop_assert!(first.len() <= 3 && second.len() <= 3);
            let before = |&&(row, col): &&(usize, usize)| if along_rows { row < at } else { col < at };
            let expected: (Pairs, Pairs) = dense.iter().partition(before);
            prop_assert_eq!((union_of(&first), union_of(&second)), expected);
            let area: u64 = first.iter().chain(&second).map(AttnSlice::area).sum();
            prop_assert_eq!(area, slice.area());
        }
    }

    /// Two pieces of one band always fuse, whichever way it was cut.
    #[test]
    fn pieces_fuse_to_what_they_were_cut_from(band in band(), at in 0..=SIZE) {
        for (first, second) in [band.cut_rows(at), band.cut_cols(at)] {
            prop_assert_eq!(first.union(&second), band.trim());
        }
        if let Some(tight) = band.trim() {
            let along = |min: i64, max: i64| Band { diag_min: tight.diag_min.max(min), diag_max: tight.diag_max.min(max), ..tight };
            let diag = at as i64 - SIZE as i64 / 2;
            prop_assert_eq!(along(Band::NO_MIN, diag).union(&along(diag + 1, Band::NO_MAX)), Some(tight));
        }
    }

    #[test]
    fn merging_keeps_the_set(bands in prop::collection::vec(band(), 0..8)) {
        let before: Pairs = bands.iter().flat_map(pairs).collect();
        let merged = Band::merged(bands.clone());
        prop_assert_eq!(merged.iter().flat_map(pairs).collect::<Pairs>(), before);
        prop_assert!(merged.len() <= bands.len());
        prop_assert_eq!(&Band::merged(merged.clone()), &merged);
        prop_assert!(merged.iter().all(|band| band.trim() == Some(*band)));
    }

    /// Near the limits, and near those up to which 64 bits are enough, against 128-bit sums over a few rows of a huge band.
    #[test]
    fn area_is_exact_near_the_limits(
        q_start in 0..MAX_SEQLEN, k in (0..MAX_SEQLEN, 0..=MAX_SEQLEN), len in 1_usize..40,
        diags in (-(MAX_SEQLEN as i64)..MAX_SEQLEN as i64, 0..MAX_SEQLEN as i64), is_narrow: bool,
    ) {
        let most = if is_narrow { 1 << 30 } else { MAX_SEQLEN };
        let (q_start, k) = (q_start % most, (k.0 % most, k.1 % (most + 1)));
        let band = Band {
            q_range: Range::new(q_start, (q_start + len).min(most)),
            k_range: Range::new(k.0.min(k.1), k.0.max(k.1)),
            diag_min: diags.0,
            diag_max: diags.0.saturating_add(diags.1),
        };
        let mut count: i128 = 0;
        for row in band.q_range.start as i128..band.q_range.end as i128 {
            let lo = (row + i128::from(band.diag_min)).max(band.k_range.start as i128);
            let hi = (row + i128::from(band.diag_max) + 1).min(band.k_range.end as i128);
            count += (hi - lo).max(0);
        }
        prop_assert_eq!(i128::from(band.area()), count);
        // The same band standing on its other side: few columns, many rows.
        let mirrored = Band {
            q_range: band.k_range,
            k_range: band.q_range,
            diag_min: -band.diag_max,
            diag_max: -band.diag_min,
        };
        prop_assert_eq!(mirrored.area(), band.area());
    }
}

/// For many small bands, `union` answers exactly as an exhaustive search over all bands would.
#[test]
fn union_finds_every_band_that_is_a_union() {
    const SIZE: usize = 3;
    let ranges: Vec<Range> =
        (0..SIZE).flat_map(|start| (start + 1..=SIZE).map(move |end| Range::new(start, end))).collect();
    let diags = -(SIZE as i64 - 1)..=SIZE as i64 - 1;
    let mut all: Vec<Band> = Vec::new();
    for &q_range in &ranges {
        for &k_range in &ranges {
            for diag_min in diags.clone() {
                for diag_max in diag_min..=*diags.end() {
                    all.extend(Band { q_range, k_range, diag_min, diag_max }.trim());
                }
            }
        }
    }
    all.sort_unstable();
    all.dedup();
    let sets: Vec<Pairs> = all.iter().map(pairs).collect();
    let by_set: std::collections::BTreeMap<&Pairs, Band> = sets.iter().zip(all.iter().copied()).collect();
    let mut fused = 0;
    for (a, in_a) in all.iter().zip(&sets) {
        for (b, in_b) in all.iter().zip(&sets) {
            let expected = by_set.get(&(in_a | in_b)).copied();
            assert_eq!(a.union(b), expected, "{a:?} and {b:?}");
            fused += usize::from(expected.is_some());
        }
    }
    assert!(fused > all.len(), "some different bands must have fused, {fused} of {}", all.len());
}

/// Corners that kernels elsewhere got wrong: a pure diagonal, rectangles narrower than their diagonals, width 1.
#[test]
fn corner_cases() {
    let slice = |q: (usize, usize), k: (usize, usize), t| {
        AttnSlice::new(Range::new(q.0, q.1), Range::new(k.0, k.1), t)
    };
    let diagonal = slice((3, 7), (2, 6), MaskType::BiCausal);
    assert_eq!(diagonal.area(), 4);
    assert_eq!(diagonal.band().columns(5), Range::new(4, 5));
    assert_eq!(diagonal.band().to_slices().collect::<Vec<_>>(), [diagonal]);
    assert_eq!(slice((0, 5), (0, 4), MaskType::BiCausal).area(), 0);
    assert_eq!(slice((0, 5), (0, 4), MaskType::BiCausal).band().to_slices().count(), 0);
    let tall = slice((0, 10), (0, 3), MaskType::Causal);
    assert_eq!((tall.area(), tall.band().rows()), (6, Range::new(7, 10)));
    let inverse = slice((0, 10), (0, 3), MaskType::InvCausal);
    assert_eq!((inverse.area(), inverse.band().rows()), (6, Range::new(0, 3)));
    assert_eq!(
        slice((4, 5), (0, 9), MaskType::BiCausal).band().to_slices().next().unwrap().mask_type,
        MaskType::Full
    );
    assert_eq!(slice((0, 9), (4, 5), MaskType::Causal).area(), 1);
    assert_eq!(slice((0, 0), (4, 5), MaskType::Causal).area(), 0);
    let whole = Range::new(0, MAX_SEQLEN);
    let n = MAX_SEQLEN as u64;
    assert_eq!(AttnSlice::new(whole, whole, MaskType::Full).area(), n * n);
    assert_eq!(
        AttnSlice::new(whole, whole, MaskType::Causal).area(),
        (u128::from(n) * (u128::from(n) + 1) / 2) as u64
    );
    assert_eq!(AttnSlice::new(whole, whole, MaskType::BiCausal).area(), n);
}

/// A causal sequence cut into a grid of tiles is put together again.
#[test]
fn merging_undoes_a_grid() {
    let whole = AttnSlice::new(Range::new(0, 64), Range::new(0, 64), MaskType::Causal).band();
    let mut tiles = Vec::new();
    for row in (0..64).step_by(8) {
        for col in (0..64).step_by(16) {
            tiles.push(whole.clip(&Range::new(row, row + 8), &Range::new(col, col + 16)));
        }
    }
    assert_eq!(tiles.len(), 32);
    assert_eq!(Band::merged(tiles), [whole]);
    let window = Band { diag_min: -5, diag_max: 2, ..Band::full(Range::new(0, 64), Range::new(0, 64)) };
    let strips = (0..64).step_by(4).map(|row| window.clip(&Range::new(row, row + 4), &window.k_range));
    assert_eq!(Band::merged(strips.collect()), [window]);
}

/// A thousand packed documents, cut into 512-row chunks and shuffled, become one band a document again.
#[test]
fn merging_undoes_chunks_of_many_documents() {
    let mut documents = Vec::new();
    let mut start = 0;
    for index in 0..1000 {
        let end = start + 1 + (index * 7919) % 2097;
        documents.extend(
            AttnSlice::new(Range::new(start, end), Range::new(start, end), MaskType::Causal).band().trim(),
        );
        start = end;
    }
    let mut pieces = Vec::new();
    for document in &documents {
        for chunk in document.q_range.start / 512..=(document.q_range.end - 1) / 512 {
            pieces.push(document.clip(&Range::new(chunk * 512, (chunk + 1) * 512), &document.k_range));
        }
    }
    assert!(pieces.len() > 2500, "{}", pieces.len());
    pieces.sort_by_key(|band| band.q_range.start.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20);
    let count = pieces.len();
    let started = std::time::Instant::now();
    let mut merged = Band::merged(pieces);
    println!("{count} bands merged in {:.2} ms", started.elapsed().as_secs_f64() * 1e3);
    merged.sort_unstable_by_key(|band| band.q_range);
    assert_eq!(merged, documents);
}

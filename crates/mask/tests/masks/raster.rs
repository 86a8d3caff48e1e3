//! Pictures of masks against their pairs.

use std::time::Instant;

use counterpoint_mask::{Mask, PictureStyle, Window};
use proptest::prelude::*;

fn small_mask() -> impl Strategy<Value = Mask> {
    let window = |left, right, global| Window { left: Some(left), right: Some(right), global };
    prop_oneof![
        (1_usize..40, 1_usize..40).prop_map(|(q, k)| Mask::cross_causal(q, k).unwrap()),
        (1_usize..40, 0_usize..9, 0_usize..9, 0_usize..4).prop_map(move |(len, left, right, global)| {
            Mask::sliding_window(len, window(left, right, global)).unwrap()
        }),
        (1_usize..40, 1_usize..6).prop_map(|(len, block)| Mask::block_causal(len, block).unwrap()),
    ]
}

proptest! {
    #![proptest_config(crate::cases::cases(600))]

    #[test]
    fn a_raster_counts_every_pair_once(mask in small_mask(), width in 0_usize..50, height in 0_usize..50) {
        let raster = mask.raster(width, height);
        prop_assert_eq!(raster.width(), width.clamp(1, mask.seqlen_k()));
        prop_assert_eq!(raster.height(), height.clamp(1, mask.seqlen_q()));
        let picture = mask.rasterise();
        let (mut rows, mut cols) = (0, 0);
        for y in 0..raster.height() {
            prop_assert_eq!(raster.rows(y).start, rows);
            rows = raster.rows(y).end;
            cols = 0;
            for x in 0..raster.width() {
                prop_assert_eq!(raster.cols(x).start, cols);
                cols = raster.cols(x).end;
                let mut count = 0;
                for row in raster.rows(y).start..rows {
                    count += (raster.cols(x).start..cols).filter(|col| picture[row * mask.seqlen_k() + col]).count();
                }
                prop_assert_eq!(raster.area(x, y), count as u64);
                let pairs = raster.rows(y).len() * raster.cols(x).len();
                prop_assert_eq!(raster.density(x, y), count as f64 / pairs as f64);
            }
        }
        prop_assert_eq!((rows, cols), (mask.seqlen_q(), mask.seqlen_k()));
    }

    /// The dense picture against single questions.
    #[test]
    fn the_dense_picture_is_the_mask(mask in small_mask()) {
        for (index, sees) in mask.rasterise().into_iter().enumerate() {
            prop_assert_eq!(sees, mask.contains(index / mask.seqlen_k(), index % mask.seqlen_k()));
        }
    }
}

#[test]
fn pictures() {
    let mask = Mask::causal(64).unwrap();
    assert_eq!(mask.picture(4, 4, PictureStyle::Ascii), "+...\n#+..\n##+.\n###+\n");
    assert_eq!(mask.picture(4, 2, PictureStyle::Blocks), "▓░··\n██▓░\n");
    // Hardly anything is still drawn, and nearly everything is not drawn as full.
    let window = Window { left: Some(0), right: Some(0), global: 0 };
    assert_eq!(Mask::sliding_window(1 << 20, window).unwrap().picture(2, 2, PictureStyle::Ascii), "-.\n.-\n");
    assert_eq!(Mask::block_causal(1 << 10, (1 << 10) - 1).unwrap().picture(1, 1, PictureStyle::Ascii), "*\n");
}

#[test]
fn a_million_tokens_are_drawn_in_milliseconds() {
    let lengths: Vec<usize> = (0..1000).map(|i| 1 + (i * 7919) % 2097).collect();
    let documents = counterpoint_mask::Documents::from_lengths(lengths).unwrap();
    for mask in [Mask::causal(documents).unwrap(), Mask::causal(1 << 20).unwrap()] {
        let seconds = (0..5).map(|_| {
            let started = Instant::now();
            let raster = mask.raster(256, 256);
            let seconds = started.elapsed().as_secs_f64();
            let sum: u64 = (0..256).map(|y| (0..256).map(|x| raster.area(x, y)).sum::<u64>()).sum();
            assert_eq!(sum, mask.area());
            seconds
        });
        let best = seconds.fold(f64::INFINITY, f64::min);
        println!(
            "{} slices of {} tokens drawn in {:.2} ms",
            mask.slices().len(),
            mask.seqlen_q(),
            best * 1e3
        );
        assert!(best < 0.25, "{best} s");
    }
}

//! Lesson 1: a mask is a set of slices.
//!
//! Run it with `cargo run --example 01-mask`. Everything it says is asserted.

use counterpoint::mask::{
    AttnSlice, Band, Documents, Mask, MaskError, MaskType, PictureStyle, Range, Window,
};

fn main() -> Result<(), MaskError> {
    // A slice is a rectangle of queries and keys, and a shape inside it. This one is causal: query 3 sees keys 0..=3.
    let slice = AttnSlice::new(Range::new(0, 8), Range::new(0, 8), MaskType::Causal);
    assert!(slice.contains(3, 3) && !slice.contains(3, 4));
    // Its area, the number of pairs that attention computes, comes in closed form.
    assert_eq!(slice.area(), 8 * 9 / 2);

    // A mask is a list of slices that share no pair. Here: two documents packed into one sequence.
    let two = Mask::new(
        12,
        12,
        vec![slice, AttnSlice::new(Range::new(8, 12), Range::new(8, 12), MaskType::Causal)],
    )?;
    println!("two packed documents, {} pairs:\n{}", two.area(), two.picture(12, 12, PictureStyle::Blocks));
    // Builders make the usual ones; a document may even be empty.
    assert_eq!(Mask::causal(Documents::from_lengths([8, 0, 4])?)?.area(), two.area());

    // A pair that counted twice would be a wrong result, so it is an error that names the slices and the pair.
    let wrong =
        Mask::new(8, 8, vec![slice, AttnSlice::new(Range::new(6, 8), Range::new(0, 2), MaskType::Full)]);
    assert_eq!(wrong, Err(MaskError::Overlap { first: 0, second: 1, row: 6, col: 0 }));
    if let Err(error) = wrong {
        println!("refused: {error}\n");
    }

    // A window of four tokens over sixteen, with the first two always in sight. Long or short, it is three slices.
    let window = Window { left: Some(3), right: Some(0), global: 2 };
    let sliding = Mask::sliding_window(16, window)?;
    println!("sliding window with two global tokens:\n{}", sliding.picture(16, 16, PictureStyle::Blocks));
    println!("the same as JSON:\n{}", sliding.to_json());
    assert_eq!(sliding.slices().len(), 3);
    assert_eq!(Mask::sliding_window(1 << 20, window)?.slices().len(), 3);
    assert_eq!(Mask::from_json(&sliding.to_json())?, sliding);
    // On a command line it is one word.
    assert_eq!("sliding-window:16,left=3,right=0,global=2".parse::<Mask>()?, sliding);

    // To give work to ranks, masks are cut. A cut across a diagonal leaves other shapes, so the engine computes with
    // bands: rectangles with a lowest and a highest diagonal. A part of a band is one band again.
    let (above, below) = slice.band().cut_rows(5);
    let (left, right) = below.cut_cols(3);
    assert_eq!(above.area() + left.area() + right.area(), slice.area());
    // Rows 5..8 need all keys before 3, and of the others exactly 3..8.
    assert_eq!((left.keys(), right.keys()), (Range::new(0, 3), Range::new(3, 8)));
    // Any band is at most three slices, and neighbours fuse again.
    let pieces: Vec<AttnSlice> = right.to_slices().collect();
    println!("rows 5..8, keys 3..8 of the causal slice: {pieces:?}\n");
    assert_eq!(pieces, [AttnSlice::new(Range::new(5, 8), Range::new(3, 8), MaskType::Causal)]);
    assert_eq!(Band::merged(vec![right, above, left]), [slice.band()]);

    // Nothing here depends on the length: a million tokens in a small picture.
    let long = Mask::block_causal(Documents::from_starts(vec![0, 400_000, 700_000, 1 << 20])?, 50_000)?;
    println!("video, 1M tokens, {} pairs:\n{}", long.area(), long.picture(32, 16, PictureStyle::Blocks));
    let raster = long.raster(32, 16);
    let counted: u64 =
        (0..16).flat_map(|y| (0..32).map(move |x| (x, y))).map(|(x, y)| raster.area(x, y)).sum();
    assert_eq!(counted, long.area());
    Ok(())
}

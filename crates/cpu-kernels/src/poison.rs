//! What NaN and infinity in the inputs do: they make NaN of exactly the results that depend on them through an unmasked
//! pair. Padding that no pair touches may hold anything.
//!
//! Plain arithmetic gives neither half of that. A matrix product spreads a bad number of a masked column to all rows of
//! its tile (`0 * NaN`), and saturated scores and the vector exponential turn NaN into ordinary numbers. So the kernels
//! take rows with bad numbers out of what they gather, zeros in their place, and write NaN where the mask says so.

use counterpoint_plan::KEY_BLOCK;

use crate::real::Real;

/// Rows of gathered tensors that held a number that is not finite, by their place there. A row may be named twice.
#[derive(Default)]
pub(crate) struct PoisonedRows(Vec<usize>);

impl PoisonedRows {
    pub(crate) fn clear(&mut self) {
        self.0.clear();
    }

    pub(crate) fn insert(&mut self, row: usize) {
        self.0.push(row);
    }

    /// Names the rows of `width` elements in `gathered` that hold NaN or infinity, and makes them zeros.
    pub(crate) fn take_out_of<R: Real>(&mut self, gathered: &mut [R], width: usize) {
        // One pass over what has just been written is all that finite inputs pay.
        if all_finite(gathered) {
            return;
        }
        for (index, row) in gathered.chunks_exact_mut(width).enumerate() {
            if !all_finite(row) {
                row.fill(R::ZERO);
                self.insert(index);
            }
        }
    }

    /// Poisons the rows themselves: NaN for the sum of each that has seen anything, now or in a stage before.
    pub(crate) fn poison_sums<R: Real>(&self, row_max: &[R], row_sum: &mut [R]) {
        for &row in &self.0 {
            if row_max[row] != -R::INFINITY {
                row_sum[row] = R::NAN;
            }
        }
    }

    /// Taken as columns of the scores `s` (rows of [`KEY_BLOCK`], `-inf` where masked): poisons the sums of the rows
    /// that see one of them. The state of a forward carries NaN in `row_sum` to its end.
    pub(crate) fn poison_sums_of_viewers<R: Real>(&self, s: &[R], row_sum: &mut [R]) {
        for &col in &self.0 {
            for (scores, sum) in s.chunks_exact(KEY_BLOCK).zip(row_sum.iter_mut()) {
                if scores[col] != -R::INFINITY {
                    *sum = R::NAN;
                }
            }
        }
    }

    /// Makes the rows zeros in `matrix`, whose rows have [`KEY_BLOCK`] elements.
    pub(crate) fn silence<R: Real>(&self, matrix: &mut [R]) {
        for &row in &self.0 {
            matrix[row * KEY_BLOCK..(row + 1) * KEY_BLOCK].fill(R::ZERO);
        }
    }

    /// Makes the rows NaN in `matrix`, whose rows have `width` elements.
    pub(crate) fn fill_nan<R: Real>(&self, matrix: &mut [R], width: usize) {
        for &row in &self.0 {
            matrix[row * width..(row + 1) * width].fill(R::NAN);
        }
    }
}

/// What poison reaches in one visit of a backward and in its key block.
#[derive(Default)]
pub(crate) struct Reached {
    /// Rows of the visit whose `dq` it reaches.
    pub(crate) rows: PoisonedRows,
    /// Columns of the block whose `dk` and `dv` it reaches; kept from visit to visit.
    pub(crate) cols: PoisonedRows,
}

impl Reached {
    /// Spreads the poison of `rows` and `cols` through the pairs that the scores `s` (rows of [`KEY_BLOCK`]) show as
    /// unmasked. A row reaches its own `dq` and the gradients of all columns that it sees; a column reaches its own
    /// gradients and the `dq` of all rows that see it.
    pub(crate) fn spread<R: Real>(&mut self, rows: &PoisonedRows, cols: &PoisonedRows, s: &[R]) {
        self.rows.clear();
        for &row in &rows.0 {
            let scores = &s[row * KEY_BLOCK..(row + 1) * KEY_BLOCK];
            let before = self.cols.0.len();
            self.cols.0.extend((0..KEY_BLOCK).filter(|&col| scores[col] != -R::INFINITY));
            if self.cols.0.len() > before {
                self.rows.insert(row);
            }
        }
        for &col in &cols.0 {
            let viewers = s.chunks_exact(KEY_BLOCK).enumerate().filter(|(_, s)| s[col] != -R::INFINITY);
            let before = self.rows.0.len();
            self.rows.0.extend(viewers.map(|(row, _)| row));
            if self.rows.0.len() > before {
                self.cols.insert(col);
            }
        }
        // Many poisoned rows see the same columns, and the columns outlive the visit.
        self.cols.0.sort_unstable();
        self.cols.0.dedup();
    }
}

/// Lanes of independent sums: enough for the compiler to hide the latency of an addition of vectors.
const LANES: usize = 32;

/// Whether no element is NaN or infinite.
pub(crate) fn all_finite<R: Real>(elements: &[R]) -> bool {
    let chunks = elements.chunks_exact(LANES);
    let rest = chunks.remainder().iter().fold(R::ZERO, |sum, &x| sum + x);
    let mut lanes = [R::ZERO; LANES];
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    // A sum that has met NaN or infinity never becomes a number again. One that has not may still overflow.
    is_finite(lanes.into_iter().fold(rest, |sum, x| sum + x)) || elements.iter().all(|&x| is_finite(x))
}

/// Whether `x` is neither NaN nor infinite: times 0, only these are not 0.
pub(crate) fn is_finite<R: Real>(x: R) -> bool {
    x * R::ZERO == R::ZERO
}

/// Whether `x` can be the logarithm of a weight: finite, or `-inf`, that of 0.
pub(crate) fn is_log_weight<R: Real>(x: R) -> bool {
    x < R::INFINITY
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bad_number_anywhere_is_noticed() {
        // Sums of the largest numbers overflow to infinity and to NaN.
        for size in [1.0, f32::MAX] {
            for len in [0, 1, 31, 32, 33, 65, 96] {
                let mut elements: Vec<f32> =
                    (0..len).map(|at| if at % 3 == 0 { -size } else { size }).collect();
                assert!(all_finite(&elements), "{len} of {size:e}");
                for at in 0..len {
                    for bad in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
                        let finite = std::mem::replace(&mut elements[at], bad);
                        assert!(!all_finite(&elements), "{bad} at {at} of {len}");
                        elements[at] = finite;
                    }
                }
            }
        }
    }

    #[test]
    fn bad_rows_become_zeros_and_no_other() {
        let mut gathered = [1.0, 2.0, 3.0, f64::NAN, 5.0, 6.0, f64::INFINITY, f64::NEG_INFINITY];
        let mut rows = PoisonedRows::default();
        rows.take_out_of(&mut gathered, 2);
        assert_eq!(gathered, [1.0, 2.0, 0.0, 0.0, 5.0, 6.0, 0.0, 0.0]);
        assert_eq!(rows.0, [1, 3]);
    }

    #[test]
    fn poison_follows_unmasked_pairs() {
        let hidden = f32::NEG_INFINITY;
        // Rows 0 and 2 see columns 1 and 4; row 1 sees nothing; row 3 sees column 5.
        let mut s = vec![hidden; 4 * KEY_BLOCK];
        for (row, col) in [(0, 1), (0, 4), (2, 1), (2, 4), (3, 5)] {
            s[row * KEY_BLOCK + col] = -f32::MAX;
        }
        let mut reached = Reached::default();
        reached.spread(&PoisonedRows(vec![0, 1]), &PoisonedRows::default(), &s);
        assert_eq!((&reached.rows.0[..], &reached.cols.0[..]), (&[0][..], &[1, 4][..]));
        reached.spread(&PoisonedRows::default(), &PoisonedRows(vec![5, 7]), &s);
        assert_eq!((&reached.rows.0[..], &reached.cols.0[..]), (&[3][..], &[1, 4, 5][..]));

        let mut sums = [1.0; 4];
        PoisonedRows(vec![4, 6]).poison_sums_of_viewers(&s, &mut sums);
        assert_eq!(sums.map(f32::is_nan), [true, false, true, false]);
        let mut sums = [1.0; 4];
        PoisonedRows(vec![1, 3]).poison_sums(&[0.0, hidden, 0.0, 0.0], &mut sums);
        assert_eq!(sums.map(f32::is_nan), [false, false, false, true]);
    }
}

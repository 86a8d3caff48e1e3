//! Attention scores on the CPU: scale, softcap and mask, their gradient, and reductions whose order no vector width changes.

use counterpoint_plan::KEY_BLOCK;

use crate::matmul::{Mat, MatMut, matmul};
use crate::real::Real;
use crate::tile::Visit;

/// How scores come from dot products: `s = scale * q k^T`, under `softcap c > 0` then `c * tanh(s / c)`.
#[derive(Clone, Copy)]
pub(crate) struct Scoring<R> {
    scale: R,
    softcap: R,
}

impl<R: Real> Scoring<R> {
    pub(crate) fn new(scale: f64, softcap: f64) -> Self {
        Self { scale: R::from_f64(scale), softcap: R::from_f64(softcap) }
    }

    /// The factor on `q k^T`.
    pub(crate) fn scale(&self) -> R {
        self.scale
    }

    /// Scores of the stacked rows of a visit, `-inf` where masked, as [`products`](Self::products) lie.
    pub(crate) fn scores(&self, visit: &Visit, group: usize, head_dim: usize, q: &[R], k: &[R], s: &mut [R]) {
        self.products(visit, group, head_dim, q, k, s);
        if self.softcap > R::ZERO {
            let (rows, cols) = (visit.rows.len() * group, visit.cols.len());
            let inverse = R::ONE / self.softcap;
            for row in s[..rows * KEY_BLOCK].chunks_exact_mut(KEY_BLOCK) {
                row[..cols].iter_mut().for_each(|x| *x = self.capped(*x, inverse).0);
            }
        }
    }

    /// Scaled dot products of the stacked rows of a visit, `-inf` where masked: `group` rows a query row. `s` has rows of
    /// [`KEY_BLOCK`]; columns past a short block are masked too, so that every row is a whole number of vectors.
    pub(crate) fn products(
        &self,
        visit: &Visit,
        group: usize,
        head_dim: usize,
        q: &[R],
        k: &[R],
        s: &mut [R],
    ) {
        let (rows, cols) = (visit.rows.len() * group, visit.cols.len());
        let q = Mat::new(q, rows, head_dim, head_dim);
        let k = Mat::new(k, cols, head_dim, head_dim);
        matmul(self.scale, q, k.transposed(), R::ZERO, MatMut::new(s, rows, cols, KEY_BLOCK));
        let s = &mut s[..rows * KEY_BLOCK];
        for row in s.chunks_exact_mut(KEY_BLOCK) {
            for x in &mut row[..cols] {
                *x = x.saturate();
            }
        }
        mask(visit, group, s);
    }

    /// The score of a scaled dot product under softcap, which stays `-inf` where it is masked, and its slope.
    #[inline(always)]
    fn capped(&self, product: R, inverse: R) -> (R, R) {
        let (tanh, slope) = (product * inverse).fast_tanh_and_slope();
        (if product == -R::INFINITY { product } else { self.softcap * tanh }, slope)
    }

    /// Turns a row's [`products`](Self::products) `p` into probabilities `exp(s - lse)` and its `ds`, on entry `dout v^T`, into
    /// the gradient of the products: `p * (dout v^T - delta)`, under softcap times the score's slope.
    pub(crate) fn gradient(&self, lse: R, delta: R, p: &mut [R], ds: &mut [R]) {
        // A row that saw nothing has lse = -inf and only masked scores: p must be 0, and -inf - -inf is NaN.
        let lse = if lse == -R::INFINITY { R::INFINITY } else { lse };
        if self.softcap > R::ZERO {
            let inverse = R::ONE / self.softcap;
            for (p, ds) in p.iter_mut().zip(ds) {
                let (score, slope) = self.capped(*p, inverse);
                *p = (score - lse).fast_exp();
                *ds = *p * (ds.saturate() - delta).saturate() * slope;
            }
        } else {
            for (p, ds) in p.iter_mut().zip(ds) {
                *p = (*p - lse).fast_exp();
                *ds = *p * (ds.saturate() - delta).saturate();
            }
        }
    }
}

/// Sets what a visit's bands do not cover to `-inf`. A row may be covered by several bands (slices side by side): its
/// unmasked columns are the union of their intervals.
fn mask<R: Real>(visit: &Visit, group: usize, s: &mut [R]) {
    let cols = visit.cols.len();
    if cols < KEY_BLOCK {
        for row in s.chunks_exact_mut(KEY_BLOCK) {
            row[cols..].fill(-R::INFINITY);
        }
    }
    if visit.bands.is_empty() {
        return;
    }
    let first = visit.cols.start;
    for (stacked, row) in (visit.rows.start..visit.rows.end).zip(s.chunks_exact_mut(group * KEY_BLOCK)) {
        let mut intervals = visit
            .bands
            .iter()
            .filter(|band| band.q_range.contains(stacked))
            .map(|band| band.columns(stacked))
            .filter(|columns| !columns.is_empty())
            .map(|columns| (columns.start - first, columns.end - first));
        match (intervals.next(), intervals.next()) {
            (None, _) => row.fill(-R::INFINITY),
            (Some((start, end)), None) => {
                for head in row.chunks_exact_mut(KEY_BLOCK) {
                    head[..start].fill(-R::INFINITY);
                    head[end..].fill(-R::INFINITY);
                }
            }
            (Some(a), Some(b)) => {
                let mut seen = [false; KEY_BLOCK];
                for (start, end) in [a, b].into_iter().chain(intervals) {
                    seen[start..end].fill(true);
                }
                for head in row.chunks_exact_mut(KEY_BLOCK) {
                    for (x, seen) in head.iter_mut().zip(seen) {
                        *x = if seen { *x } else { -R::INFINITY };
                    }
                }
            }
        }
    }
}

/// Lanes of a fixed reduction tree: a row of [`KEY_BLOCK`] is folded lane by lane, the lanes in order. The compiler may
/// use vectors for it, and the result is one and the same on every machine.
const LANES: usize = 16;

/// The largest score of a row.
#[inline(always)]
pub(crate) fn row_max<R: Real>(row: &[R]) -> R {
    let mut lanes = [-R::INFINITY; LANES];
    for chunk in row.chunks_exact(LANES) {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane = x.larger(*lane);
        }
    }
    lanes.into_iter().fold(-R::INFINITY, |max, x| x.larger(max))
}

/// The sum of a row.
#[inline(always)]
pub(crate) fn row_sum<R: Real>(row: &[R]) -> R {
    let mut lanes = [R::ZERO; LANES];
    let chunks = row.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (lane, &x) in lanes.iter_mut().zip(chunk) {
            *lane += x;
        }
    }
    lanes.into_iter().chain(rest.iter().copied()).fold(R::ZERO, |sum, x| sum + x)
}

//! Samples of the results of fused and unfused products against f64, with the error that rounding allows.

use std::thread;

use counterpoint_cost::ProblemSize;
use counterpoint_exec::GemmCollectiveSpec;
use counterpoint_plan::GemmCollective;

use super::rank::RankTimes;
use super::{SEED, weight_seed};
use crate::gpu::gemm::{element_bound, sample};
use counterpoint_cuda::kernel::{ElementType, RandomFill, Scalar};

/// Columns of each row that are compared with f64.
const COLUMNS: usize = 16;

/// Compares every contender's sample with f64: the Programs', then the library's.
pub(super) fn judge(spec: &GemmCollectiveSpec, element: ElementType, results: &[RankTimes]) -> Vec<Judged> {
    let contenders = results.first().map_or(0, |times| times.rows.len());
    let (columns, scalar) = (sample(spec.size.n, COLUMNS), element.scalar());
    let parts: Vec<Vec<Sums>> = thread::scope(|scope| {
        let mut threads = Vec::new();
        for (rank, times) in results.iter().enumerate() {
            for (at, &row) in times.sampled.iter().enumerate() {
                let columns = &columns;
                threads.push(scope.spawn(move || {
                    let mut sums = vec![Sums::default(); contenders];
                    for &column in columns {
                        let expected = expected(spec, element, rank, row, column);
                        let bound = expected.bound(scalar, spec);
                        for (sums, rows) in sums.iter_mut().zip(&times.rows) {
                            sums.add(f64::from(rows[at][column]), expected.right, bound);
                        }
                    }
                    sums
                }));
            }
        }
        threads.into_iter().filter_map(|thread| thread.join().ok()).collect()
    });
    let total = |contender: usize| {
        let all = parts.iter().map(|sums| sums[contender]);
        let sums = all.fold(Sums::default(), |a, b| Sums {
            errors: a.errors + b.errors,
            squares: a.squares + b.squares,
            // Not `max`, which would overlook a NaN.
            of_bound: if b.of_bound <= a.of_bound { a.of_bound } else { b.of_bound },
        });
        Judged { relative: (sums.errors / sums.squares).sqrt(), of_bound: sums.of_bound }
    };
    (0..contenders).map(total).collect()
}

/// An element as f64 has it, and what it may err.
struct Expected {
    right: f64,
    /// Of every rank's partial sum: its magnitude and the squares of its summands.
    partials: Vec<(f64, f64)>,
}

impl Expected {
    /// Partial sums are rounded, then their sum is.
    fn bound(&self, scalar: Scalar, spec: &GemmCollectiveSpec) -> f64 {
        let partial =
            |&(magnitude, squares): &(f64, f64)| element_bound(scalar, magnitude, squares, spec.size.k);
        let partials: f64 = self.partials.iter().map(partial).sum();
        match spec.collective {
            GemmCollective::AllGather => partials,
            // What is rounded at the end has the errors of the partial sums in it.
            _ => partials + element_bound(scalar, self.right.abs() + partials, 0.0, spec.ranks),
        }
    }
}

/// The element of `row`, counted in the result of `rank`.
fn expected(
    spec: &GemmCollectiveSpec,
    element: ElementType,
    rank: usize,
    row: usize,
    column: usize,
) -> Expected {
    let GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, k, .. }, .. } = *spec;
    let value = |seed, row: usize, column: usize| {
        f64::from(RandomFill::value(element.scalar(), seed, (row * k + column) as u64))
    };
    let partial = |x_seed: u64, x_row: usize, weight: usize| {
        let (mut right, mut squares) = (0.0, 0.0);
        for term in 0..k {
            let product = value(x_seed, x_row, term) * value(weight_seed(weight), column, term);
            right += product;
            squares += product * product;
        }
        (right, squares)
    };
    let own = m / ranks;
    let partials: Vec<(f64, f64)> = match collective {
        GemmCollective::AllGather => vec![partial(SEED + (row / own) as u64, row % own, rank)],
        GemmCollective::ReduceScatter => {
            (0..ranks).map(|peer| partial(SEED + peer as u64, rank * own + row, peer)).collect()
        }
        GemmCollective::AllReduce => (0..ranks).map(|peer| partial(SEED + peer as u64, row, peer)).collect(),
    };
    Expected {
        right: partials.iter().map(|partial| partial.0).sum(),
        partials: partials.iter().map(|&(right, squares)| (right.abs(), squares)).collect(),
    }
}

#[derive(Clone, Copy, Default)]
struct Sums {
    errors: f64,
    squares: f64,
    of_bound: f64,
}

impl Sums {
    fn add(&mut self, found: f64, right: f64, bound: f64) {
        let error = (found - right).abs();
        self.errors += error * error;
        self.squares += right * right;
        let of_bound = error / bound;
        self.of_bound = if of_bound <= self.of_bound { self.of_bound } else { of_bound };
    }
}

/// The relative error of a sample, and the largest share of an element's bound.
pub(super) struct Judged {
    pub(super) relative: f64,
    pub(super) of_bound: f64,
}

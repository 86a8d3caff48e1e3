//! Inputs of what is timed, whose results are known without computing them.

use std::sync::OnceLock;

use counterpoint_exec::{HostElement, HostTensor, with_host_element};
use counterpoint_plan::DType;
use counterpoint_reference::Draw;

/// Elements after which contents repeat: eight times a prime, so that rows of usual lengths begin at ever other places of it.
const PERIOD: usize = 8 * 8191;

/// What an input of Programs that are timed holds: a few elements again and again, which cost next to nothing to make, and small whole
/// numbers, so that results are known without computing all of them. Every type holds sums of them over 128 ranks, and f32 those of the
/// longest products.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Contents {
    /// Where in the period its first element is.
    start: usize,
}

impl Contents {
    /// Of a rank's input by its place among the inputs.
    pub(crate) fn of(rank: usize, input: usize) -> Self {
        Self { start: (rank * 9973 + input * 31_337) % PERIOD }
    }

    /// Element `index` of the tensor, counted row after row.
    pub(crate) fn at(self, index: usize) -> f64 {
        period()[(self.start + index) % PERIOD].into()
    }

    /// The sum of the products of so many elements of this tensor and of another, from these ones on.
    pub(crate) fn dot(self, first: usize, other: Self, other_first: usize, terms: usize) -> f64 {
        let period = period();
        let (mut a, mut b) = ((self.start + first) % PERIOD, (other.start + other_first) % PERIOD);
        let (mut left, mut sum) = (terms, 0i64);
        while left > 0 {
            let together = left.min(PERIOD - a).min(PERIOD - b);
            let pairs = period[a..a + together].iter().zip(&period[b..b + together]);
            sum += i64::from(pairs.map(|(&x, &y)| i32::from(x) * i32::from(y)).sum::<i32>());
            (a, b) = ((a + together) % PERIOD, (b + together) % PERIOD);
            left -= together;
        }
        sum as f64
    }

    /// The elements that repeat, the tensor's first one first.
    pub(crate) fn elements(self, dtype: DType) -> HostTensor {
        let (after, before) = period().split_at(self.start);
        with_host_element!(dtype, T => {
            let elements = before.iter().chain(after).map(|&value| <T as HostElement>::from_f32(value.into()));
            HostTensor::from_vec(vec![PERIOD], elements.collect::<Vec<T>>())
        })
    }
}

fn period() -> &'static [i8] {
    static ELEMENTS: OnceLock<Vec<i8>> = OnceLock::new();
    ELEMENTS.get_or_init(|| {
        let mut draw = Draw::new(0);
        (0..PERIOD).map(|_| draw.below(5) as i8 - 2).collect()
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn elements_and_their_products_are_those_of_the_tensor() {
        let (a, b) = (Contents::of(3, 0), Contents::of(5, 1));
        let held = a.elements(DType::Bf16).to_f64();
        for index in [0, 1, PERIOD - 1, PERIOD, 3 * PERIOD + 17] {
            assert_eq!(held[index % PERIOD], a.at(index));
        }
        for (first, other, terms) in [(0, 0, 1), (7, 12, 1000), (60_000, 5, 40_000), (9, 9, 2 * PERIOD + 3)] {
            let wanted: f64 = (0..terms).map(|at| a.at(first + at) * b.at(other + at)).sum();
            assert_eq!(a.dot(first, b, other, terms), wanted);
        }
    }

    /// A row that is mistaken for another, or comes from another rank, shows.
    #[test]
    fn rows_and_ranks_differ() {
        for row in [4096, 7168, 8192, 14_336, 28_672] {
            let rows: Vec<f64> =
                (0..64).map(|i| Contents::of(0, 0).dot(i * row, Contents::of(0, 1), 0, row)).collect();
            let others: Vec<f64> =
                (0..64).map(|i| Contents::of(1, 0).dot(i * row, Contents::of(1, 1), 0, row)).collect();
            let same = |a: &[f64], b: &[f64]| a.iter().zip(b).filter(|(a, b)| a == b).count();
            assert!(same(&rows[1..], &rows) < 8 && same(&rows, &others) < 8);
        }
    }
}

//! A row of `bench gemm --experts`: products of experts, and how long one takes who computes them.

use counterpoint_cuda::kernel::GemmLayout;
use counterpoint_report::{Column, Statistics, median};
use serde::Serialize;

use crate::gpu::ExpertProducts;
use crate::rows::MeasuredRow;

/// Who computes products in this process.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum By {
    /// Our grouped GEMM.
    Grouped,
    /// A launch of ours for each expert.
    Each,
    /// cuBLASLt's for each expert.
    LibraryEach,
    /// cuBLASLt's product of as many rows with one weight.
    LibraryWhole,
}

impl By {
    pub(super) const fn name(self) -> &'static str {
        match self {
            Self::Grouped => "grouped",
            Self::Each => "each",
            Self::LibraryEach => "cublaslt-each",
            Self::LibraryWhole => "cublaslt-whole",
        }
    }
}

/// Products of experts, by one who computes them.
#[derive(Clone, Debug, Serialize)]
pub(super) struct GroupedRow {
    experts: usize,
    m: usize,
    n: usize,
    k: usize,
    layout: &'static str,
    dtype: &'static str,
    pub(super) by: String,
    /// The shape of tiles of ours, a peer's variant.
    variant: String,
    seconds: Statistics,
    tflops: f64,
    /// Its time over that of the grouped product in the shape that is chosen.
    pub(super) ratio: f64,
    of_bound: f64,
}

impl GroupedRow {
    pub(super) fn new(
        products: &ExpertProducts,
        by: &str,
        variant: String,
        seconds: &[f64],
        grouped: f64,
        of_bound: f64,
    ) -> Self {
        let size = products.size;
        let own = median(seconds);
        let nothing = Statistics { count: 0, median: own, min: own, max: own, mean: own };
        Self {
            experts: products.rows.len(),
            m: size.m,
            n: size.n,
            k: size.k,
            layout: products.layout.name(),
            dtype: products.element.name(),
            by: by.to_owned(),
            variant,
            seconds: Statistics::of(seconds).unwrap_or(nothing),
            tflops: size.flops() / own / 1e12,
            ratio: own / grouped,
            of_bound,
        }
    }

    fn case(&self) -> (usize, [usize; 3], &str) {
        (self.experts, [self.m, self.n, self.k], self.layout)
    }

    /// Rows of an expert on average.
    fn rows_of_expert(&self) -> usize {
        let total = if self.layout == GemmLayout::Tn.name() { self.k } else { self.m };
        total / self.experts
    }
}

/// Of each case the least ratio of one who computes it, in whichever variant.
pub(super) fn fastest(rows: &[GroupedRow], by: &str) -> Vec<f64> {
    let mut found: Vec<&GroupedRow> = Vec::new();
    for row in rows.iter().filter(|row| row.by == by) {
        match found.iter_mut().find(|other| other.case() == row.case()) {
            Some(other) if other.ratio <= row.ratio => {}
            Some(other) => *other = row,
            None => found.push(row),
        }
    }
    found.into_iter().map(|row| row.ratio).collect()
}

impl MeasuredRow<12> for GroupedRow {
    const TABLE: [Column; 12] = [
        Column::number_name("experts").wide(7),
        Column::number_name("rows").wide(6),
        Column::number_name("m").wide(6),
        Column::number_name("n").wide(6),
        Column::number_name("k").wide(6),
        Column::name("layout").wide(6),
        Column::name("by").wide(14),
        Column::text("variant", 3).wide(14),
        Column::number("us", 0).wide(8),
        Column::number("TFLOP/s", 1).wide(7),
        Column::number("ratio", 0).wide(5),
        Column::number("of bound", 4).wide(8),
    ];

    fn cells(&self) -> [String; 12] {
        [
            self.experts.to_string(),
            self.rows_of_expert().to_string(),
            self.m.to_string(),
            self.n.to_string(),
            self.k.to_string(),
            self.layout.to_owned(),
            self.by.clone(),
            self.variant.clone(),
            format!("{:.1}", 1e6 * self.seconds.median),
            format!("{:.1}", self.tflops),
            format!("{:.3}", self.ratio),
            format!("{:.2}", self.of_bound),
        ]
    }

    fn fault(&self) -> Option<String> {
        let Self { experts, m, n, k, layout, by, variant, of_bound, .. } = self;
        let is_right = *of_bound <= 1.0;
        (!is_right).then(|| {
            format!(
                "{m} x {n} x {k} {layout} of {experts} experts by {by} {variant} ({of_bound:.2} of the bound)"
            )
        })
    }
}

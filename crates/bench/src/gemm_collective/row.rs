//! Rows of `bench gemm-collective`: ours compared with cuBLASLt and NCCL one after the other, and what to read from them.

use crate::gpu::GemmCollectiveTimes;
use crate::rows::MeasuredRow;
use counterpoint_exec::GemmCollectiveSpec;
use counterpoint_report::{Column, geometric_mean, median};
use counterpoint_schedule::OverlapPolicy;
use serde::Serialize;

/// One product with its collective under one policy.
#[derive(Clone, Debug, Serialize)]
pub(super) struct GemmCollectiveRow {
    pub(super) collective: &'static str,
    pub(super) ranks: usize,
    pub(super) m: usize,
    pub(super) n: usize,
    pub(super) k: usize,
    /// What was asked for: a policy, or `auto`.
    pub(super) asked: String,
    /// What it ran under.
    pub(super) overlap: String,
    pub(super) seconds: f64,
    /// Of cuBLASLt and NCCL one after the other, and of each alone; none on the CPU.
    pub(super) library: Option<Library>,
    /// Relative error against f64, and the largest share of an element's bound.
    pub(super) error: f64,
    pub(super) of_bound: f64,
    /// Elements of the sample whose bits are not those under the first policy.
    pub(super) different: u64,
}

/// What a user would do without this program.
#[derive(Clone, Copy, Debug, Serialize)]
pub(super) struct Library {
    pub(super) seconds: f64,
    pub(super) product_seconds: f64,
    pub(super) collective_seconds: f64,
    pub(super) error: f64,
    /// Its time over ours.
    pub(super) ratio: f64,
    /// Our time over the longer of its two parts.
    pub(super) of_ideal: f64,
}

impl GemmCollectiveRow {
    /// A row for every policy.
    pub(super) fn of(
        spec: &GemmCollectiveSpec,
        policies: &[OverlapPolicy],
        times: &GemmCollectiveTimes,
    ) -> Vec<Self> {
        let [library, product, collective] =
            [&times.library, &times.product, &times.collective].map(|samples| median(samples));
        let row = |(index, policy): (usize, &OverlapPolicy)| {
            let seconds = median(&times.policies[index]);
            Self {
                collective: spec.collective.name(),
                ranks: spec.ranks,
                m: spec.size.m,
                n: spec.size.n,
                k: spec.size.k,
                asked: policy.to_string(),
                overlap: policy.to_string(),
                seconds,
                library: Some(Library {
                    seconds: library,
                    product_seconds: product,
                    collective_seconds: collective,
                    error: times.library_error,
                    ratio: library / seconds,
                    of_ideal: seconds / product.max(collective),
                }),
                error: times.errors[index],
                of_bound: times.of_bound[index],
                different: times.different[index],
            }
        };
        policies.iter().enumerate().map(row).collect()
    }
}

impl MeasuredRow<14> for GemmCollectiveRow {
    const TABLE: [Column; 14] = [
        Column::name("collective").wide(14),
        Column::number_name("m").wide(6),
        Column::number_name("n").wide(6),
        Column::number_name("k").wide(6),
        Column::name("overlap").wide(23),
        Column::number("ours us", 0).wide(9),
        Column::number("cuBLASLt+NCCL us", 2),
        Column::number("ratio", 1).wide(5),
        Column::number("product us", 4),
        Column::number("collective us", 4),
        Column::number("of ideal", 3),
        Column::number("error", 5).wide(7),
        Column::number("its error", 7),
        Column::number("differ", 6),
    ];

    fn cells(&self) -> [String; 14] {
        let Self { collective, m, n, k, asked, overlap, seconds, error, different, .. } = self;
        let chosen = if asked == overlap { overlap.clone() } else { format!("{asked}: {overlap}") };
        let of_library =
            |text: &dyn Fn(&Library) -> String| self.library.as_ref().map_or("–".to_owned(), text);
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        [
            (*collective).to_owned(),
            m.to_string(),
            n.to_string(),
            k.to_string(),
            chosen,
            us(*seconds),
            of_library(&|library| us(library.seconds)),
            of_library(&|library| format!("{:.3}", library.ratio)),
            of_library(&|library| us(library.product_seconds)),
            of_library(&|library| us(library.collective_seconds)),
            of_library(&|library| format!("{:.3}", library.of_ideal)),
            format!("{error:.1e}"),
            of_library(&|library| format!("{:.1e}", library.error)),
            different.to_string(),
        ]
    }

    fn fault(&self) -> Option<String> {
        let Self { collective, m, n, k, overlap, of_bound, different, .. } = self;
        let is_right = *of_bound <= 1.0 && *different == 0;
        (!is_right).then(|| {
            format!(
                "{collective} of {m} x {n} x {k} under {overlap} ({of_bound:.2} of the bound, {different} other bits)"
            )
        })
    }
}

/// What to read from the rows of the last policy of each case.
pub(super) fn finding(rows: &[GemmCollectiveRow]) -> String {
    let ratios: Vec<f64> = rows.iter().filter_map(|row| row.library.map(|library| library.ratio)).collect();
    let Some(mean) = geometric_mean(&ratios) else { return String::new() };
    let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    format!("{} products: geometric mean {mean:.3} of cuBLASLt then NCCL, worst {worst:.3}\n", ratios.len())
}

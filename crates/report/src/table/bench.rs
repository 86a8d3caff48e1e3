//! Measured cases, as tables and JSON have them.

use serde::Serialize;

use super::{Column, Grid, Style, Tone, plain};
use crate::{
    quantity::{format_flops, format_gbps, format_ratio, format_seconds},
    statistics::Statistics,
};

/// What a benchmark's seconds amount to.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Rate {
    /// Floating-point work.
    Compute {
        /// TFLOP/s (1e12) of one rank.
        tflops: f64,
    },
    /// Data moved, in GB/s (1e9), as nccl-tests defines the two.
    Transfer {
        /// Bytes of the operation over its time.
        algbw: f64,
        /// `algbw` scaled to what the links carry.
        busbw: f64,
    },
}

/// How far a result is from its reference. There is no row without it: what was not checked is not printed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Verified {
    /// The error that was measured.
    pub error: f64,
    /// The largest error allowed.
    pub bound: f64,
}

impl Verified {
    /// Whether the error is within its bound. An error that is not a number is not.
    pub fn passed(&self) -> bool {
        self.error <= self.bound
    }
}

/// One measured case. Serialises to the JSON object of a benchmark row.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct BenchRow {
    /// What was measured, such as `attention forward`.
    pub name: String,
    /// Its shape, such as `4096 x 8 x 128`.
    pub shape: String,
    /// Element type.
    pub dtype: String,
    /// The mask, as a builder expression or a file; `None` where there is none.
    pub mask: Option<String>,
    /// Name of the device.
    pub device: String,
    /// Number of ranks.
    pub ranks: usize,
    /// Iterations and their seconds.
    pub seconds: Statistics,
    /// What they amount to.
    pub rate: Option<Rate>,
    /// Speed over that of the baseline measured in the same run: above 1 is faster.
    pub ratio: Option<f64>,
    /// Error against the reference.
    pub verified: Verified,
}

/// Measured cases, one row each.
pub fn bench_table(rows: &[BenchRow], style: &Style) -> String {
    let mut grid = Grid::new(vec![
        Column::name("what"),
        Column::name("shape"),
        Column::name("dtype"),
        Column::name("mask"),
        Column::number_name("ranks"),
        Column::number("median", 0),
        Column::number("min", 4),
        Column::number("max", 5),
        Column::number("rate", 1),
        Column::number("vs baseline", 2),
        Column::number("error", 3),
    ]);
    for row in rows {
        let rate = match row.rate {
            None => "–".to_owned(),
            Some(Rate::Compute { tflops }) => format_flops(tflops * 1e12),
            Some(Rate::Transfer { busbw, .. }) => format!("{} bus", format_gbps(busbw * 1e9)),
        };
        let error = format!("{:.1e}", row.verified.error);
        grid.row(vec![
            plain(&*row.name),
            plain(&*row.shape),
            plain(&*row.dtype),
            plain(row.mask.as_deref().unwrap_or("–")),
            plain(row.ranks.to_string()),
            plain(format_seconds(row.seconds.median)),
            plain(format_seconds(row.seconds.min)),
            plain(format_seconds(row.seconds.max)),
            plain(rate),
            match row.ratio {
                Some(ratio) => (format_ratio(ratio), if ratio < 0.98 { Tone::Bad } else { Tone::Good }),
                None => plain("–"),
            },
            if row.verified.passed() { plain(error) } else { (format!("{error} FAILED"), Tone::Bad) },
        ]);
    }
    grid.render(style)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(error: f64) -> BenchRow {
        BenchRow {
            name: "attention forward".into(),
            shape: "4096 x 8 x 128".into(),
            dtype: "f32".into(),
            mask: Some("causal:4k".into()),
            device: "cpu".into(),
            ranks: 4,
            seconds: Statistics::of(&[0.011, 0.0105, 0.013]).unwrap(),
            rate: Some(Rate::Compute { tflops: 0.0312 }),
            ratio: Some(0.9),
            verified: Verified { error, bound: 1e-5 },
        }
    }

    #[test]
    fn rows_say_what_was_measured_and_how_right_it_was() {
        let text = bench_table(&[row(3.2e-7)], &Style::PLAIN);
        for part in
            ["attention forward", "4096 x 8 x 128", "f32", "causal:4k", "11.0 ms", "10.5 ms", "13.0 ms"]
        {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        for part in ["31.2 GFLOP/s", "0.900x", "3.2e-7"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(!text.contains("FAILED"));
        for wrong in [f64::NAN, 1e-4] {
            assert!(bench_table(&[row(wrong)], &Style::PLAIN).contains("FAILED"));
        }
    }

    #[test]
    fn eighty_columns_keep_the_figures_that_matter() {
        let text = bench_table(&[row(3.2e-7)], &Style { color: false, width: Some(80) });
        for part in ["attention forward", "4096 x 8 x 128", "11.0 ms", "GFLOP/s", "no room for"] {
            assert!(text.contains(part), "{part} in\n{text}");
        }
        assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    }

    #[test]
    fn json_has_the_fields_of_a_benchmark_row() {
        let json = serde_json::to_value(row(3.2e-7)).unwrap();
        assert_eq!(json["ranks"], 4);
        assert_eq!(json["seconds"]["median"], 0.011);
        assert_eq!(json["seconds"]["count"], 3);
        assert_eq!(json["rate"]["tflops"], 0.0312);
        assert_eq!(json["verified"]["error"], 3.2e-7);
    }
}

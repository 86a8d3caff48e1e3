//! `counterpoint bench gemm`.

mod grouped;
mod products;

use crate::gpu::{GemmBench, GemmError};
use counterpoint_console::{CliError, Schema, UsageFault, arguments::Device as Where};
use counterpoint_cuda::kernel::{
    ElementType, Gemm, GemmEpilogue, GemmLibrary, GemmRunner, GemmShape, GemmSpec, TilePair, Warpgroups,
};
use counterpoint_cuda::{CudaError, Device};
use counterpoint_report::{Column, geometric_mean, median};
use serde::Serialize;

use crate::arguments::{BenchDType, BenchGemmArguments, BenchKernels};
use crate::interleaved::run_order;
use crate::rows::{MeasuredRow, Rows};

/// How long the runs of one product should take together, of each who computes it: beyond it there are fewer.
const SECONDS: f64 = 0.12;
/// Rounds at least, as often forwards as backwards.
const LEAST_ROUNDS: usize = 4;

/// `counterpoint bench gemm`.
pub(crate) fn run(arguments: &BenchGemmArguments) -> Result<(), CliError> {
    if arguments.device == Where::Cpu {
        return Err(CliError::usage(UsageFault::KernelsOfGpus));
    }
    let element = match arguments.dtype.unwrap_or(BenchDType::Bf16) {
        BenchDType::Bf16 => ElementType::Bf16,
        BenchDType::F16 => ElementType::F16,
    };
    if arguments.experts.is_some() {
        return grouped::run(arguments, element);
    }
    let failed = |source: CudaError| CliError::Cuda { source };
    let device = Device::open(0).map_err(failed)?;
    let device = match arguments.kernels.unwrap_or(BenchKernels::Native) {
        BenchKernels::Native => device,
        BenchKernels::Portable => device.portable(),
    };
    let library = GemmLibrary::open(&device).map_err(failed)?;
    let title = format!(
        "matrix products of {} on {}, interleaved with cuBLASLt {}, by the device's clock",
        element.name(),
        device.properties().name,
        library.version().version,
    );
    let mut shown = Rows::begin(true, || Ok(title), Schema::BenchGemm, arguments.json)?;
    let mut best = Vec::new();
    for mut spec in products::chosen(arguments, element) {
        spec.sm_margin = arguments.sm_margin;
        let rows = measure(&device, &library, &spec, arguments).map_err(failed)?;
        rows.iter().try_for_each(|row| shown.add(row))?;
        best.extend(rows.first().map(|row| row.ratio));
    }
    shown.end(&finding(&best), "products out of bounds against f64")
}

/// A product, ours in one shape compared with the library's.
#[derive(Debug, Serialize)]
struct GemmRow {
    m: usize,
    n: usize,
    k: usize,
    layout: &'static str,
    epilogue: &'static str,
    tile: String,
    seconds: f64,
    tflops: f64,
    library_seconds: f64,
    library_tflops: f64,
    /// The library's time over ours.
    ratio: f64,
    /// Relative errors, and shares of bounds.
    error: f64,
    of_bound: f64,
    library_error: f64,
    library_of_bound: f64,
    iterations: usize,
}

/// Times and checks a product in the shapes asked for, the one that would be chosen first.
fn measure(
    device: &Device,
    library: &GemmLibrary,
    spec: &GemmSpec,
    arguments: &BenchGemmArguments,
) -> Result<Vec<GemmRow>, CudaError> {
    let bench = GemmBench::new(device, spec)?;
    let shapes: Vec<_> = Gemm::shapes(device, spec)?.into_iter().take(arguments.tiles as usize).collect();
    let mut runners = Vec::new();
    for &shape in &shapes {
        runners.push(GemmRunner::Ours(Gemm::with_shape(bench.stream(), spec, shape)?));
    }
    runners.push(GemmRunner::Library(library.gemm(spec)?));
    let errors = runners.iter().map(|runner| bench.error(runner)).collect::<Result<Vec<GemmError>, _>>()?;
    let once: Vec<usize> = run_order(0, runners.len()).collect();
    let longest = bench.seconds(&runners, &once)?.into_iter().flatten().fold(0.0, f64::max);
    let iterations = ((SECONDS / longest.max(1e-6)) as usize)
        .clamp(LEAST_ROUNDS, (arguments.iterations as usize).max(LEAST_ROUNDS));
    // The clock falls under load: who always ran first would run on a cooler GPU. The first round is for that alone.
    let rounds = (0..=iterations).flat_map(|round| run_order(round, runners.len()));
    let mut seconds = bench.seconds(&runners, &rounds.collect::<Vec<usize>>())?;
    for samples in &mut seconds {
        samples.remove(0);
    }
    let medians: Vec<f64> = seconds.iter().map(|samples| median(samples)).collect();
    let (library_seconds, library_error) = (medians[shapes.len()], errors[shapes.len()]);
    let row = |(index, shape): (usize, &GemmShape)| GemmRow {
        m: spec.size.m,
        n: spec.size.n,
        k: spec.size.k,
        layout: spec.layout.name(),
        epilogue: match spec.epilogue {
            GemmEpilogue::Store => "store",
            GemmEpilogue::StoreBias => "bias",
            GemmEpilogue::Accumulate => "add",
        },
        tile: label(shape),
        seconds: medians[index],
        tflops: spec.flops() / medians[index] / 1e12,
        library_seconds,
        library_tflops: spec.flops() / library_seconds / 1e12,
        ratio: library_seconds / medians[index],
        error: errors[index].relative,
        of_bound: errors[index].of_bound,
        library_error: library_error.relative,
        library_of_bound: library_error.of_bound,
        iterations,
    };
    Ok(shapes.iter().enumerate().map(row).collect())
}

/// A shape in a few letters.
fn label(shape: &GemmShape) -> String {
    let pair = if shape.pair == TilePair::Rows { "2x1" } else { "1x2" };
    // Parts at the same time, in turn, or handed over.
    let (sign, parts) = match (shape.serial_parts, shape.handed_parts) {
        (1, 1) => ('/', shape.splits),
        (_, 1) => ('+', shape.serial_parts),
        _ => ('>', shape.handed_parts),
    };
    let pingpong = match shape.warpgroups {
        Warpgroups::Cooperative => "",
        Warpgroups::Pingpong => "p",
        Warpgroups::Warps { block, stages } => return format!("128x{}x{block} {stages}", shape.columns),
    };
    format!("128x{}{pingpong} {pair} {sign}{parts}", shape.columns)
}

impl MeasuredRow<13> for GemmRow {
    const TABLE: [Column; 13] = [
        Column::number_name("m").wide(6),
        Column::number_name("n").wide(6),
        Column::number_name("k").wide(6),
        Column::name("layout").wide(6),
        Column::name("end").wide(5),
        Column::name("tile").wide(14),
        Column::number("ours us", 0).wide(8),
        Column::number("TFLOP/s", 2).wide(7),
        Column::number("cuBLASLt us", 3).wide(8),
        Column::number("its TFLOP/s", 4).wide(7),
        Column::number("ratio", 1).wide(5),
        Column::number("error", 5).wide(7),
        Column::number("its error", 6).wide(7),
    ];

    fn cells(&self) -> [String; 13] {
        let Self { m, n, k, layout, epilogue, tile, ratio, error, library_error, .. } = self;
        let tenths = |value: f64| format!("{value:.1}");
        [
            m.to_string(),
            n.to_string(),
            k.to_string(),
            (*layout).to_owned(),
            (*epilogue).to_owned(),
            tile.clone(),
            tenths(1e6 * self.seconds),
            tenths(self.tflops),
            tenths(1e6 * self.library_seconds),
            tenths(self.library_tflops),
            format!("{ratio:.3}"),
            format!("{error:.1e}"),
            format!("{library_error:.1e}"),
        ]
    }

    fn fault(&self) -> Option<String> {
        let Self { m, n, k, layout, tile, of_bound, library_of_bound, .. } = self;
        let is_right = *of_bound <= 1.0 && *library_of_bound <= 1.0;
        (!is_right).then(|| {
            format!(
                "{m} x {n} x {k} {layout} in tiles of {tile} ({of_bound:.2} and {library_of_bound:.2} of the bound)"
            )
        })
    }
}

/// What to read from the ratios.
fn finding(ratios: &[f64]) -> String {
    let Some(mean) = geometric_mean(ratios) else { return String::new() };
    let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let near = ratios.iter().filter(|ratio| **ratio >= 0.97).count();
    format!(
        "{} products: geometric mean {mean:.3} of cuBLASLt's speed, worst {worst:.3}, {near} within 3 %\n",
        ratios.len()
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_finding_counts_what_is_near() {
        let text = finding(&[1.0, 4.0, 0.5, 0.97]);
        assert_eq!(text, "4 products: geometric mean 1.180 of cuBLASLt's speed, worst 0.500, 3 within 3 %\n");
        assert_eq!(finding(&[]), "");
    }
}

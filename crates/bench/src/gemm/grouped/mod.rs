//! `counterpoint bench gemm --experts`: grouped products, and who else computes them.

mod peers;
mod row;
mod sizes;

use counterpoint_console::{CliError, Schema, UsageFault};
use counterpoint_cuda::kernel::{ElementType, Gemm, GemmLibrary, GemmRunner, GroupedGemm};
use counterpoint_cuda::{CudaError, Device};
use counterpoint_report::{geometric_mean, median};

use super::label;
use crate::arguments::{BenchGemmArguments, BenchKernels};
use crate::gpu::{ExpertProducts, GemmError, GroupedGemmBench, GroupedRunner};
use crate::interleaved::run_order;
use crate::pytorch::{Peers, TIMED, WARM_UP};
use crate::rows::Rows;
use peers::PeerResult;
use row::{By, GroupedRow};

/// How long the runs of one product should take together, of each who computes it: beyond it there are fewer.
const SECONDS: f64 = 0.12;
/// Rounds at least, as often forwards as backwards.
const LEAST_ROUNDS: usize = 2;

/// `counterpoint bench gemm --experts`.
pub(super) fn run(arguments: &BenchGemmArguments, element: ElementType) -> Result<(), CliError> {
    if arguments.kernels == Some(BenchKernels::Portable) {
        return Err(CliError::usage(UsageFault::NoPortableExperts));
    }
    let chosen = sizes::chosen(arguments, element)?;
    let failed = |source: CudaError| CliError::Cuda { source };
    let device = Device::open(0).map_err(failed)?;
    let library = GemmLibrary::open(&device).map_err(failed)?;
    let mut peers = peers::start(arguments, element)?;
    let title = format!(
        "grouped products of {} on {}, interleaved with cuBLASLt {}, by the device's clock; ratio: time over that of the first line",
        element.name(),
        device.properties().name,
        library.version().version,
    );
    let mut shown = Rows::begin(true, || Ok(title), Schema::BenchGroupedGemm, arguments.json)?;
    let mut all = Vec::new();
    for products in chosen {
        let bench = GroupedGemmBench::new(&device, products.clone()).map_err(failed)?;
        peers.prepare(&peers::case(&products));
        let rows = measure(&bench, &library, &products, arguments, &mut peers).map_err(failed)?;
        rows.iter().try_for_each(|row| shown.add(row))?;
        all.extend(rows);
    }
    shown.end(&findings(&all), "grouped products out of bounds")?;
    peers.end()
}

/// Who of ours and cuBLASLt's computes them, what each is called, and its tile.
struct Computing {
    by: By,
    tile: String,
    runner: GroupedRunner,
}

/// The grouped product in the shapes asked for, the one that would be chosen first; then the others.
fn computing(
    bench: &GroupedGemmBench,
    library: &GemmLibrary,
    products: &ExpertProducts,
    tiles: usize,
) -> Result<Vec<Computing>, CudaError> {
    let (stream, spec) = (bench.stream(), products.spec());
    let mut out = Vec::new();
    for shape in GroupedGemm::shapes(stream.device(), &spec)?.into_iter().take(tiles) {
        let runner = GroupedRunner::Grouped(Box::new(GroupedGemm::with_shape(stream, &spec, shape)?));
        out.push(Computing { by: By::Grouped, tile: label(&shape), runner });
    }
    let experts = 0..products.rows.len();
    let ours = |expert| {
        let spec = products.gemm(expert);
        let best = Gemm::shapes(stream.device(), &spec)?[0];
        Ok(GemmRunner::Ours(Gemm::with_shape(stream, &spec, best)?))
    };
    let theirs = |expert| Ok(GemmRunner::Library(library.gemm(&products.gemm(expert))?));
    let each = GroupedRunner::Each(experts.clone().map(ours).collect::<Result<_, CudaError>>()?);
    let library_each = GroupedRunner::Each(experts.map(theirs).collect::<Result<_, CudaError>>()?);
    let whole = GroupedRunner::Whole(Box::new(GemmRunner::Library(library.gemm(&products.whole_gemm())?)));
    for (by, runner) in [(By::Each, each), (By::LibraryEach, library_each), (By::LibraryWhole, whole)] {
        out.push(Computing { by, tile: String::new(), runner });
    }
    Ok(out)
}

/// Times and checks the products, interleaved with peers: rows, that of the grouped product first.
fn measure(
    bench: &GroupedGemmBench,
    library: &GemmLibrary,
    products: &ExpertProducts,
    arguments: &BenchGemmArguments,
    peers: &mut Peers<PeerResult>,
) -> Result<Vec<GroupedRow>, CudaError> {
    let all = computing(bench, library, products, arguments.tiles as usize)?;
    let (names, runners): (Vec<_>, Vec<_>) =
        all.into_iter().map(|Computing { by, tile, runner }| ((by, tile), runner)).unzip();
    let errors = runners.iter().map(|runner| bench.error(runner)).collect::<Result<Vec<GemmError>, _>>()?;
    let once: Vec<usize> = run_order(0, runners.len()).collect();
    let longest = bench.seconds(&runners, &once)?.into_iter().flatten().fold(0.0, f64::max);
    let rounds = ((SECONDS / longest.max(1e-6)) as usize)
        .min(arguments.iterations as usize)
        .div_ceil(TIMED)
        .max(LEAST_ROUNDS);
    let mut seconds = vec![Vec::new(); runners.len()];
    for round in 0..rounds {
        // The clock falls under load: who always ran first would run on a cooler GPU.
        for next in run_order(round, 1 + peers.variants().len()) {
            match next.checked_sub(1) {
                Some(peer) => peers.run_often(peer),
                None => {
                    let order = (0..WARM_UP + TIMED).flat_map(|run| run_order(round + run, runners.len()));
                    let runs = bench.seconds(&runners, &order.collect::<Vec<usize>>())?;
                    for (all, runs) in seconds.iter_mut().zip(runs) {
                        all.extend(&runs[WARM_UP..]);
                    }
                }
            }
        }
    }
    let grouped = median(&seconds[0]);
    let ours = names.into_iter().zip(&errors).zip(&seconds).map(|(((by, tile), error), seconds)| {
        GroupedRow::new(products, by.name(), tile, seconds, grouped, error.of_bound)
    });
    let mut rows: Vec<GroupedRow> = ours.collect();
    rows.extend(peers.variants().iter().filter(|variant| !variant.seconds.is_empty()).map(|variant| {
        let PeerResult { by, variant: name, error_over_bound } = &variant.known;
        GroupedRow::new(products, by, name.clone(), &variant.seconds, grouped, *error_over_bound)
    }));
    Ok(rows)
}

/// A line for each who computes them but ours: how fast the grouped product is, compared with theirs.
fn findings(rows: &[GroupedRow]) -> String {
    let mut names: Vec<&str> = Vec::new();
    for row in rows.iter().filter(|row| row.by != By::Grouped.name()) {
        if !names.contains(&row.by.as_str()) {
            names.push(&row.by);
        }
    }
    names.into_iter().filter_map(|by| finding(by, &row::fastest(rows, by))).collect()
}

fn finding(by: &str, ratios: &[f64]) -> Option<String> {
    let mean = geometric_mean(ratios)?;
    let worst = ratios.iter().copied().fold(f64::INFINITY, f64::min);
    let near = ratios.iter().filter(|ratio| **ratio >= 0.97).count();
    let count = ratios.len();
    Some(format!(
        "of {by}'s speed: geometric mean {mean:.3}, worst {worst:.3}; {near} of {count} at least 0.97\n"
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn findings_take_the_fastest_variant_of_each_case() {
        let products = |m: usize| ExpertProducts {
            layout: counterpoint_cuda::kernel::GemmLayout::Nt,
            element: ElementType::Bf16,
            size: [m, 64, 64].into(),
            rows: vec![m],
            sm_margin: 0,
        };
        let row = |m: usize, by: &str, variant: &str, seconds: f64| {
            GroupedRow::new(&products(m), by, variant.to_owned(), &[seconds], 1.0, 0.5)
        };
        let rows = [
            row(128, By::Grouped.name(), "128x256", 1.0),
            row(128, "deepgemm", "rows", 4.0),
            row(128, "deepgemm", "ends", 1.0),
            row(128, "torch", "", 2.0),
            row(256, By::Grouped.name(), "128x256", 1.0),
            row(256, "deepgemm", "rows", 0.25),
        ];
        assert_eq!(
            findings(&rows),
            "of deepgemm's speed: geometric mean 0.500, worst 0.250; 1 of 2 at least 0.97\n\
             of torch's speed: geometric mean 2.000, worst 2.000; 1 of 1 at least 0.97\n"
        );
        assert_eq!(findings(&rows[..1]), "");
    }
}

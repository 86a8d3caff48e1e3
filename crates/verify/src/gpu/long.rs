//! Checks of long sequences: of the longest that is promised, whose indices do not fit 32 bits; of one whose backward adds up dk and dv
//! of query heads in memory; and of those whose forwards read keys in clusters of CTAs.

use counterpoint_exec::{ExecError, Pass, random_inputs};
use counterpoint_mask::{Mask, MaskError, Window};
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::selftest::SelfCheck;
use counterpoint_reference::{Sample, check_sample};

use counterpoint_bench::gpu::{AttentionBench, BenchPass};
use counterpoint_cuda::CudaMachine;

/// A long sequence and its heads.
struct Long {
    name: String,
    mask: Result<Mask, MaskError>,
    heads: usize,
    /// Rows and keys that are looked at.
    sample: (usize, usize),
}

/// The longest sequence that is promised, and a little more so that no tile is whole. With these heads its tensors have more
/// elements than 32 bits with a sign can count.
const ROWS: usize = (4 << 20) + 77;
const HEAD_DIM: usize = 128;
/// Columns that a row sees.
const WINDOW: usize = 64;
const SEED: u64 = 77;

/// Rows of which tiles of keys see so many that each query head is an item of its own on Hopper.
const CAUSAL_ROWS: usize = 12_877;

/// Rows of so many keys that two CTAs of a cluster share a forward's tiles of 256 rows on Hopper. The last tile has 44 rows, of which the second
/// CTA has none; of the second, a full mask, tiles of the last round are split along the keys as well.
const CLUSTERED_ROWS: [usize; 2] = [25_900, 46_380];

/// Forward and backward of a sequence of 4M rows and of shorter ones with eight query heads of a key head, on samples of rows and keys, the
/// last ones among them. The first needs 40 GB of the host's memory and as much of the GPU's.
pub fn selftest_long(machine: &CudaMachine) -> Vec<SelfCheck> {
    let window = Window { left: Some(WINDOW - 1), right: Some(0), global: 0 };
    let longest = Long {
        name: format!("{ROWS} rows bf16 hd{HEAD_DIM} 4:1, window of {WINDOW}"),
        mask: Mask::sliding_window(ROWS, window),
        heads: 4,
        sample: (4000, 1000),
    };
    let grouped = |rows: usize, name: &str, mask: Result<Mask, MaskError>| Long {
        name: format!("{rows} rows bf16 hd{HEAD_DIM} 8:1, {name}"),
        mask,
        heads: 8,
        sample: (200, 200),
    };
    let [of_tiles, of_parts] = CLUSTERED_ROWS;
    let others = [
        grouped(CAUSAL_ROWS, "causal", Mask::causal(CAUSAL_ROWS)),
        grouped(of_tiles, "causal, in clusters", Mask::causal(of_tiles)),
        grouped(of_parts, "full, in clusters", Mask::full(of_parts)),
    ];
    let check = |long: Long| {
        let name = long.name.clone();
        run(machine, long).unwrap_or_else(|error| SelfCheck::failed(name, SEED, error.to_string()))
    };
    others.into_iter().chain([longest]).map(check).collect()
}

fn run(machine: &CudaMachine, long: Long) -> Result<SelfCheck, ExecError> {
    let Long { name, mask, heads, sample: (rows, keys) } = long;
    let spec = AttentionSpec::new(heads, 1, HEAD_DIM, DType::Bf16);
    let mask = match mask {
        Ok(mask) => mask,
        Err(error) => return Ok(SelfCheck::failed(name, SEED, error.to_string())),
    };
    let inputs = random_inputs(&mask, &spec, SEED, Pass::ForwardBackward);
    let bench = AttentionBench::new(machine, &spec, &inputs)?;
    let mut case = bench.case(&mask)?;
    case.prepare(BenchPass::Backward)?;
    // The second run begins with what the first has left in memory of the kernels'.
    case.outputs(BenchPass::Backward)?;
    let outputs = case.outputs(BenchPass::Backward)?;
    let sample = Sample::random(&mask, &spec, Pass::ForwardBackward, rows, keys, SEED);
    let report = check_sample(&mask, &spec, &inputs, &outputs, &sample);
    Ok(SelfCheck::of_report(name, SEED, &report))
}

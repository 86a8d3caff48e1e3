//! A check of the longest sequence that is promised, whose indices do not fit 32 bits.

use counterpoint_exec::{ExecError, Pass, random_inputs};
use counterpoint_mask::{Mask, Window};
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::selftest::SelfCheck;
use counterpoint_reference::{Sample, check_sample};

use counterpoint_bench::gpu::{AttentionBench, BenchPass};
use counterpoint_cuda::CudaMachine;

/// The longest sequence that is promised, and a little more so that no tile is whole. With these heads its tensors have more
/// elements than 32 bits with a sign can count.
const ROWS: usize = (4 << 20) + 77;
const HEADS: usize = 4;
const HEAD_DIM: usize = 128;
/// Columns that a row sees.
const WINDOW: usize = 64;
const SEED: u64 = 77;

/// Forward and backward of a sequence of 4M rows, on a sample of rows and keys, the last ones among them.
/// It needs 40 GB of the host's memory and as much of the GPU's.
pub fn selftest_long(machine: &CudaMachine) -> Vec<SelfCheck> {
    let name = format!("{ROWS} rows bf16 hd{HEAD_DIM} {HEADS}:1, window of {WINDOW}");
    vec![run(machine, &name).unwrap_or_else(|error| SelfCheck::failed(name, SEED, error.to_string()))]
}

fn run(machine: &CudaMachine, name: &str) -> Result<SelfCheck, ExecError> {
    let spec = AttentionSpec::new(HEADS, 1, HEAD_DIM, DType::Bf16);
    let window = Window { left: Some(WINDOW - 1), right: Some(0), global: 0 };
    let mask = match Mask::sliding_window(ROWS, window) {
        Ok(mask) => mask,
        Err(error) => return Ok(SelfCheck::failed(name.to_owned(), SEED, error.to_string())),
    };
    let inputs = random_inputs(&mask, &spec, SEED, true);
    let bench = AttentionBench::new(machine, &spec, &inputs)?;
    let mut case = bench.case(&mask)?;
    case.prepare(BenchPass::Backward)?;
    let outputs = case.outputs(BenchPass::Backward)?;
    let sample = Sample::random(&mask, &spec, Pass::ForwardBackward, 4000, 1000, SEED);
    let report = check_sample(&mask, &spec, &inputs, &outputs, &sample);
    Ok(SelfCheck::of_report(name.to_owned(), SEED, &report))
}

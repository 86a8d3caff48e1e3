//! The CPU's attention kernels on masks of every kind, compared with the rate of the matrix product that they are made of.

use counterpoint_console::{
    CliError, Progress, arguments::dtype_name, device, input::random_inputs, mask_argument,
};
use counterpoint_exec::Pass;
use counterpoint_measure::{AttentionBench, Rate as Measured, Seconds, bench_attention};
use counterpoint_plan::DType;
use counterpoint_report::{BenchRow, Rate, Statistics, format_flops};
use rayon::ThreadPoolBuilder;
use serde_json::json;

use super::{BACKWARD, FORWARD, Goals, Section, Sizes, shape_text, verified};

/// Share of the matrix product's rate to reach on the causal mask.
const OF_MATMUL: f64 = 0.4;

/// The kernels of one rank on all cores, per mask, against the matrix product of the library that they use.
pub(super) fn measure(sizes: &Sizes, progress: &Progress) -> Result<Section, CliError> {
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let pool = ThreadPoolBuilder::new()
        .num_threads(threads)
        .build()
        .map_err(|error| CliError::Threads { threads, reason: error.to_string() })?;
    let mut section = Section::new(format!(
        "attention kernels, one rank, {threads} threads; vs baseline: rate over that of a matrix product"
    ));
    let (goal_rows, rows, heads) = (sizes.goal_rows, sizes.rows, sizes.heads);
    let documents = [rows / 2, rows / 4, rows / 8, rows / 16, rows / 16].map(|n| n.to_string()).join(",");
    let cases = [
        (format!("causal:{goal_rows}"), heads, DType::F32),
        (format!("full:{rows}"), heads, DType::F32),
        (format!("varlen-causal:lengths={documents}"), heads, DType::F32),
        (format!("sliding-window:{rows},left={},right=0", rows / 8), heads, DType::F32),
        (format!("block-causal:{rows},block={}", rows / 8), heads, DType::F32),
        (format!("preset:block_causal_last_global,{rows}"), heads, DType::F32),
        (format!("preset:shared_question,{rows}"), heads, DType::F32),
        (format!("sliding-window:{rows},left={},right=0,global=64", rows / 8), heads, DType::F32),
        (format!("preset:block_sparse,{rows}"), heads, DType::F32),
        (format!("causal:{rows}"), heads / 2, DType::F32),
        (format!("causal:{rows}"), heads, DType::Bf16),
    ];
    let count = sizes.masks.min(cases.len());
    for (at, (name, heads_kv, dtype)) in cases.into_iter().take(count).enumerate() {
        progress.step(format!("{name}, {} of {count}", at + 1));
        let mask = mask_argument::load(&name)?;
        let spec = sizes.spec(heads, heads_kv, dtype);
        let inputs = random_inputs(&mask, &spec, at as u64, Pass::ForwardBackward);
        let bench = bench_attention(&mask, &spec, &inputs, sizes.iterations, &pool);
        let shape = shape_text(&inputs.q, &inputs.k);
        if at == 0 {
            section.findings = findings(&bench, &name, dtype, sizes.goals);
        }
        let baseline = json!({
            "name": format!("matmul {}^3 {}", bench.matmul_size, dtype_name(dtype.accumulator())),
            "seconds": bench.matmul.seconds,
            "tflops": bench.matmul.tflops,
        });
        for (what, measured, names) in [
            ("attention forward", Some(bench.forward), FORWARD),
            ("attention backward", bench.backward, BACKWARD),
        ] {
            let Some(measured) = measured else { continue };
            let row = BenchRow {
                name: what.to_owned(),
                shape: shape.clone(),
                dtype: dtype_name(dtype).to_owned(),
                mask: Some(name.clone()),
                device: device::cpu_name(),
                ranks: 1,
                seconds: statistics(&measured.seconds),
                rate: Some(Rate::Compute { tflops: measured.tflops }),
                ratio: Some(measured.of_matmul),
                verified: verified(&bench.check, names),
            };
            section.add(
                row,
                json!({"area": bench.area, "threads": bench.threads, "baseline": baseline}),
                &bench.check,
            );
        }
    }
    Ok(section)
}

fn statistics(seconds: &Seconds) -> Statistics {
    let Seconds { iterations, min, median, max, mean } = *seconds;
    Statistics { count: iterations, median, min, max, mean }
}

fn findings(bench: &AttentionBench, mask: &str, dtype: DType, goals: Goals) -> Vec<String> {
    let percent = |measured: &Measured| format!("{:.0} %", 100.0 * measured.of_matmul);
    let mut out = vec![format!(
        "{} matrix product {}^3 on {} threads: {}",
        dtype_name(dtype.accumulator()),
        bench.matmul_size,
        bench.threads,
        format_flops(bench.matmul.tflops * 1e12)
    )];
    let what = format!("{mask}: forward at {} of its rate", percent(&bench.forward));
    let reached = bench.forward.of_matmul >= OF_MATMUL;
    out.push(goals.judge(&what, &format!("{:.0} %", 100.0 * OF_MATMUL), reached));
    out.extend(
        bench
            .backward
            .as_ref()
            .map(|backward| format!("{mask}: backward at {} of its rate", percent(backward))),
    );
    out
}

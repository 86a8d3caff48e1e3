//! `counterpoint selftest --compile-only`.

use std::fmt::Write;
use std::time::Instant;

use counterpoint_cuda::kernel::specialisations;
use counterpoint_cuda::{CompileReport, CubinCache, examine};

use crate::arguments::SelftestArguments;
use crate::console;
use crate::error::CliError;
use crate::progress::Progress;
use crate::schema::Schema;

/// Compiles every kernel without a GPU and judges what came out.
pub(super) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    let began = Instant::now();
    let part = arguments.only.as_deref().unwrap_or_default();
    let kernels: Vec<_> =
        specialisations().into_iter().filter(|kernel| kernel.source.name().contains(part)).collect();
    if kernels.is_empty() {
        let reason =
            "is in the name of no kernel; `counterpoint selftest --compile-only` lists them".to_owned();
        return Err(CliError::Flag { flag: "--only", value: part.to_owned(), reason });
    }
    let progress = Progress::new();
    let mut heard = 0;
    let report = examine(&kernels, &CubinCache::from_environment(), |name| {
        heard += 1;
        progress.step(format!("{heard} of {} kernels; {name}", kernels.len()));
    });
    drop(progress);
    let report = report.map_err(|source| CliError::Cuda { source })?;
    if arguments.json {
        console::print_json(Schema::SelftestCompile, &report)?;
    } else {
        console::print(&table(&report, began.elapsed().as_secs_f64()))?;
    }
    verdict(&report)
}

/// A line a kernel, what is wrong, and a row of figures.
fn table(report: &CompileReport, seconds: f64) -> String {
    let mut text = String::new();
    let name_width = report.kernels.iter().map(|kernel| kernel.name.len()).max().unwrap_or(0).max(6);
    let mut line = |name: &str, arch: &str, figures: [&str; 4]| {
        let [registers, local, spilled, hgmma] = figures;
        let _ = writeln!(
            text,
            "{name:name_width$}  {arch:7}  {registers:>9}  {local:>6}  {spilled:>7}  {hgmma:>5}"
        );
    };
    line("kernel", "arch", ["registers", "local", "spilled", "HGMMA"]);
    for kernel in &report.kernels {
        let hgmma = kernel.hgmma.map_or("-".to_owned(), |count| count.to_string());
        let [registers, local, spilled] =
            [kernel.registers, kernel.local_bytes, kernel.spill_bytes].map(|figure| figure.to_string());
        line(&kernel.name, &kernel.arch, [&registers, &local, &spilled, &hgmma]);
    }
    for fault in &report.failed {
        let _ = writeln!(text, "FAILED  {}: {}", fault.name, fault.reason);
    }
    let kernels = console::count(report.kernels.len(), "kernel");
    let faults = console::count(report.failed.len(), "fault");
    let _ = writeln!(text, "NVRTC {}: {kernels} compiled, {faults}, {seconds:.1} s", report.nvrtc);
    text
}

/// An error when a kernel is not what it must be.
fn verdict(report: &CompileReport) -> Result<(), CliError> {
    let Some(first) = report.failed.first() else { return Ok(()) };
    let faults = console::count(report.failed.len(), "fault");
    let reason = first.reason.lines().next().unwrap_or_default();
    Err(CliError::CheckFailed {
        what: format!("{faults} in compiled kernels, the first: {}: {reason}", first.name),
    })
}

#[cfg(test)]
mod tests {
    use counterpoint_cuda::{KernelFault, KernelReport};

    use super::*;

    fn report(failed: Vec<KernelFault>) -> CompileReport {
        let kernel = |name: &str, hgmma| KernelReport {
            name: name.to_owned(),
            arch: "sm_90a".to_owned(),
            registers: 168,
            local_bytes: 0,
            spill_bytes: 0,
            hgmma,
        };
        let kernels = vec![kernel("attention", Some(64)), kernel("cast", None)];
        CompileReport { nvrtc: "13.0".to_owned(), kernels, failed }
    }

    #[test]
    fn figures_stand_under_their_names() {
        let fault = KernelFault { name: "cast".to_owned(), reason: "spills 8 bytes of registers".to_owned() };
        let expected = "\
kernel     arch     registers   local  spilled  HGMMA
attention  sm_90a         168       0        0     64
cast       sm_90a         168       0        0      -
FAILED  cast: spills 8 bytes of registers
NVRTC 13.0: 2 kernels compiled, 1 fault, 1.5 s
";
        assert_eq!(table(&report(vec![fault]), 1.5), expected);
    }

    #[test]
    fn faults_are_failures() {
        verdict(&report(Vec::new())).unwrap();
        let fault = KernelFault { name: "cast".to_owned(), reason: "does not compile:\nthe log".to_owned() };
        let error = verdict(&report(vec![fault])).unwrap_err();
        assert_eq!(error.to_string(), "1 fault in compiled kernels, the first: cast: does not compile:");
        assert_eq!(error.exit_status(), 1);
    }
}

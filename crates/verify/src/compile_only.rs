//! `counterpoint selftest --compile-only`.

use std::fmt::Write;
use std::time::Instant;

use counterpoint_console::{self as console, CheckFault, CliError, FlagFault, Schema, Ticker};
use counterpoint_cuda::kernel::specialisations;
use counterpoint_cuda::{CompileReport, CubinCache, KernelReport, examine};
use counterpoint_report::{Column, table};

use crate::arguments::SelftestArguments;

/// Compiles every kernel without a GPU and judges what came out.
pub(super) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    let began = Instant::now();
    let part = arguments.only.as_deref().unwrap_or_default();
    let kernels: Vec<_> =
        specialisations().into_iter().filter(|kernel| kernel.source.name().contains(part)).collect();
    if kernels.is_empty() {
        return Err(CliError::flag("--only", part, FlagFault::NoKernel));
    }
    let mut ticker = Ticker::new("selftest --compile-only");
    let mut heard = 0;
    let report = examine(&kernels, CubinCache::of_process(), |name| {
        heard += 1;
        ticker.report(|| format!("{heard} of {} kernels; {name}", kernels.len()));
    });
    drop(ticker);
    let report = report.map_err(|source| CliError::Cuda { source })?;
    if arguments.json {
        console::print_json(Schema::SelftestCompile, &report)?;
    } else {
        console::print(&text(&report, arguments.verbose, began.elapsed().as_secs_f64()))?;
    }
    verdict(&report)
}

/// What is wrong, and a row of figures; before it, where that was asked for, a line a kernel.
fn text(report: &CompileReport, verbose: bool, seconds: f64) -> String {
    let mut text = String::new();
    if verbose {
        text.push_str(&table(&COLUMNS, report.kernels.iter().map(cells), &console::style()));
    }
    for fault in &report.failed {
        let _ = writeln!(text, "FAILED  {}: {}", fault.name, fault.reason);
    }
    let kernels = console::count(report.kernels.len(), "kernel");
    let faults = console::count(report.failed.len(), "fault");
    let _ = writeln!(text, "NVRTC {}: {kernels} compiled, {faults}, {seconds:.1} s", report.nvrtc);
    text
}

const COLUMNS: [Column; 7] = [
    Column::name("kernel"),
    Column::name("arch"),
    Column::number("registers", 0),
    Column::number("local", 2),
    Column::number("spilled", 1),
    Column::number("HGMMA", 1),
    Column::number("HMMA", 1),
];

fn cells(kernel: &KernelReport) -> Vec<String> {
    let KernelReport { name, arch, registers, local_bytes, spill_bytes, hgmma, hmma } = kernel;
    let figures = [registers, local_bytes, spill_bytes].map(ToString::to_string);
    let matrix = [hgmma, hmma].map(|count| count.map_or("–".to_owned(), |count| count.to_string()));
    [name.clone(), arch.clone()].into_iter().chain(figures).chain(matrix).collect()
}

/// An error when a kernel is not what it must be.
fn verdict(report: &CompileReport) -> Result<(), CliError> {
    let Some(first) = report.failed.first() else { return Ok(()) };
    let line = first.reason.lines().next().unwrap_or_default().to_owned();
    let (faults, kernel) = (report.failed.len(), first.name.clone());
    Err(CliError::check(CheckFault::Kernels { faults, kernel, line }))
}

#[cfg(test)]
mod tests {
    use counterpoint_cuda::KernelFault;

    use super::*;

    fn report(failed: Vec<KernelFault>) -> CompileReport {
        let kernel = |name: &str, hgmma| KernelReport {
            name: name.to_owned(),
            arch: "sm_90a".to_owned(),
            registers: 168,
            local_bytes: 0,
            spill_bytes: 0,
            hgmma,
            hmma: hgmma.map(|_| 0),
        };
        let kernels = vec![kernel("attention", Some(64)), kernel("cast", None)];
        CompileReport { nvrtc: "13.0".to_owned(), kernels, failed }
    }

    #[test]
    fn faults_are_printed_and_kernels_when_asked() {
        let fault = KernelFault { name: "cast".to_owned(), reason: "spills 8 bytes of registers".to_owned() };
        let report = report(vec![fault]);
        let end =
            "FAILED  cast: spills 8 bytes of registers\nNVRTC 13.0: 2 kernels compiled, 1 fault, 1.5 s\n";
        assert_eq!(text(&report, false, 1.5), end);
        let all = text(&report, true, 1.5);
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let lines: Vec<String> = all.lines().map(words).collect();
        assert_eq!(lines[0], "kernel arch registers local spilled HGMMA HMMA");
        assert_eq!(lines[2..4], ["attention sm_90a 168 0 0 64 0", "cast sm_90a 168 0 0 – –"]);
        assert!(all.ends_with(end), "{all}");
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

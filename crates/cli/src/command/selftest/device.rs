//! `counterpoint selftest --device …`.

use std::time::Instant;

use counterpoint_cuda::selftest::{
    CudaSubject, selftest_cache, selftest_faults, selftest_fused, selftest_gemm, selftest_graphs,
    selftest_guard, selftest_isolation, selftest_links, selftest_long, selftest_normalised,
    selftest_signalled_products, selftest_signals, selftest_signals_in_graphs, selftest_step_graphs,
};
use counterpoint_cuda::{EngineUse, TransportKind};
use counterpoint_exec::TcpLoopback;
use counterpoint_exec::selftest::{
    CpuSubject, Extent, SelfCheck, Subject, selftest_attention, selftest_collectives, selftest_linear,
};

use super::ledger::Ledger;
use super::processes;
use crate::arguments::{Device, SelftestArguments};
use crate::error::CliError;
use crate::{console, device};

/// Runs the checks that the device has. The CPU is always examined, briefly where a GPU is what was asked for.
pub(super) fn run(arguments: &SelftestArguments) -> Result<(), CliError> {
    let extent = if arguments.quick { Extent::Quick } else { Extent::Full };
    let began = Instant::now();
    let mut ledger = Ledger::new(arguments.json, arguments.only.as_deref());
    let device = match arguments.device {
        Device::Cpu => {
            examine_cpu(extent, &mut ledger)?;
            device::cpu_name()
        }
        Device::Cuda => {
            // First, so that a machine without a GPU says so at once.
            let subject = CudaSubject::open().map_err(|source| CliError::Cuda { source })?;
            examine_cpu(Extent::Quick, &mut ledger)?;
            examine_gpu(&subject, extent, &mut ledger)?;
            subject.device()
        }
    };
    let document = ledger.finish(device, began.elapsed());
    if arguments.json {
        console::print_json(&document)?;
    } else {
        console::print(&document.last_line())?;
    }
    document.verdict()
}

fn examine_cpu(extent: Extent, ledger: &mut Ledger) -> Result<(), CliError> {
    if ledger.section("cpu") {
        let checks = selftest_attention(&CpuSubject, extent, |check, cases| ledger.hear(check, cases));
        ledger.add(checks)?;
    }
    if ledger.section("cpu linear layers") {
        let checks = selftest_linear(&CpuSubject, extent, 4, |check, cases| ledger.hear(check, cases));
        ledger.add(checks)?;
    }
    if ledger.section("collectives through tcp") {
        let heard = |check: &SelfCheck, cases: usize| ledger.hear(check, cases);
        let checks = selftest_collectives(&TcpLoopback::default(), extent, 8, heard);
        ledger.add(checks.map_err(|source| CliError::Run { source })?)?;
    }
    Ok(())
}

fn examine_gpu(subject: &CudaSubject, extent: Extent, ledger: &mut Ledger) -> Result<(), CliError> {
    let failed = |source| CliError::Cuda { source };
    // What the others rely on, first.
    if ledger.section("guard bytes") {
        ledger.add(selftest_guard(subject.gpu()).map_err(failed)?)?;
    }
    if extent == Extent::Full && ledger.section("all kernels") {
        ledger.add(subject.load_all())?;
    }
    if ledger.section("attention") {
        let checks = selftest_attention(subject, extent, |check, cases| ledger.hear(check, cases));
        ledger.add(checks)?;
    }
    if let Some(portable) = subject.portable().map_err(failed)? {
        if extent == Extent::Full && ledger.section("all portable kernels") {
            ledger.add(portable.load_all())?;
        }
        if ledger.section("portable attention") {
            let checks = selftest_attention(&portable, extent, |check, cases| ledger.hear(check, cases));
            ledger.add(checks)?;
        }
    }
    if extent == Extent::Full && ledger.section("long sequence") {
        ledger.add(selftest_long(subject.machine()))?;
    }
    if ledger.section("collectives") {
        examine_collectives(subject, 4, extent, ledger)?;
    }
    if subject.gpu().arch().is_hopper() && ledger.section("gemm") {
        let checks = selftest_gemm(subject.gpu(), extent, |check, cases| ledger.hear(check, cases));
        ledger.add(checks.map_err(failed)?)?;
    }
    if subject.gpu().arch().is_hopper() && ledger.section("linear layers") {
        examine_linear(subject, 4, extent, ledger)?;
    }
    if ledger.section("graphs") {
        let checks = selftest_graphs(subject.machine(), extent, |check, cases| ledger.hear(check, cases));
        ledger.add(checks)?;
    }
    if ledger.section("compiled kernels") {
        ledger.add(selftest_cache(subject.gpu()).map_err(failed)?)?;
    }
    examine_gpus(subject, extent, ledger)
}

/// What only several GPUs have: ranks on each, by every transport. On a single one kernels meet all the same.
fn examine_gpus(subject: &CudaSubject, extent: Extent, ledger: &mut Ledger) -> Result<(), CliError> {
    let failed = |source| CliError::Cuda { source };
    let over = |transport| CudaSubject::over_gpus(transport).map_err(failed);
    let nvlink = over(TransportKind::Auto)?;
    if ledger.section("meetings of kernels") {
        let devices = nvlink.as_ref().unwrap_or(subject).machine().devices();
        ledger.add(selftest_links(devices, extent).map_err(failed)?)?;
    }
    if ledger.section("signals of products") {
        let devices = nvlink.as_ref().unwrap_or(subject).machine().devices();
        ledger.add(selftest_signals(devices, extent).map_err(failed)?)?;
    }
    let gpus = nvlink.as_ref().map_or(1, |subject| subject.machine().devices().len());
    if ledger.section("processes") {
        let checks = processes::examine(gpus, extent);
        ledger.add(checks.map_err(failed)?)?;
    }
    for (section, transport) in [
        ("faults by nvlink", TransportKind::Nvlink),
        ("faults by copy-engine", TransportKind::CopyEngine),
        ("faults by nccl", TransportKind::Nccl),
    ] {
        // On a single GPU ranks share it, which NCCL does not do.
        let shared = || subject.over_this_gpu(transport).map_err(failed);
        let subject = match (over(transport)?, transport) {
            (None, TransportKind::Nccl) => continue,
            (None, _) => shared()?,
            (Some(subject), _) => subject,
        };
        if ledger.section(section) {
            let heard = |check: &SelfCheck, cases: usize| ledger.hear(check, cases);
            let checks = selftest_faults(subject.machine(), extent, heard);
            ledger.add(checks.map_err(|source| CliError::Run { source })?)?;
        }
    }
    let Some(nvlink) = nvlink else { return Ok(()) };
    if ledger.section("faults: isolated GPUs") {
        let checks = selftest_isolation(nvlink.machine());
        ledger.add(checks.map_err(|source| CliError::Run { source })?)?;
    }
    if ledger.section("attention on several GPUs") {
        let checks = selftest_attention(&nvlink, Extent::Quick, |check, cases| ledger.hear(check, cases));
        ledger.add(checks)?;
    }
    for (section, transport, most_ranks) in [
        ("collectives by nvlink, a GPU each", TransportKind::Nvlink, gpus),
        ("collectives by nvlink, GPUs shared", TransportKind::Nvlink, 2 * gpus),
        ("collectives by copy-engine", TransportKind::CopyEngine, 2 * gpus),
        ("collectives by nccl", TransportKind::Nccl, gpus),
    ] {
        let Some(subject) = over(transport)? else { continue };
        if ledger.section(section) {
            examine_collectives(&subject, most_ranks, extent, ledger)?;
        }
    }
    if ledger.section("collectives by kernels and copy engines") {
        let machine = nvlink.machine().clone().with_engines(EngineUse::ALWAYS);
        let heard = |check: &SelfCheck, cases: usize| ledger.hear(check, cases);
        let checks = selftest_collectives(&machine, extent, gpus, heard);
        ledger.add(checks.map_err(|source| CliError::Run { source })?)?;
    }
    for (section, transport) in [
        ("graphs of steps by nvlink", TransportKind::Nvlink),
        ("graphs of steps by copy-engine", TransportKind::CopyEngine),
        ("graphs of steps by nccl", TransportKind::Nccl),
    ] {
        let Some(subject) = over(transport)? else { continue };
        if ledger.section(section) {
            let checks = selftest_step_graphs(subject.machine(), extent);
            ledger.add(checks.map_err(|source| CliError::Run { source })?)?;
        }
    }
    if nvlink.gpu().arch().is_hopper() && ledger.section("products whose rows travel") {
        let checks = selftest_fused(nvlink.machine(), extent);
        ledger.add(checks.map_err(|source| CliError::Run { source })?)?;
    }
    for (section, transport) in [
        ("signalled products by nvlink", TransportKind::Nvlink),
        ("signalled products by copy-engine", TransportKind::CopyEngine),
        ("signalled products by nccl", TransportKind::Nccl),
    ] {
        let Some(subject) = over(transport)? else { continue };
        if subject.gpu().arch().is_hopper() && ledger.section(section) {
            let run = |source| CliError::Run { source };
            ledger.add(selftest_signalled_products(subject.machine(), extent).map_err(run)?)?;
            ledger.add(selftest_normalised(subject.machine()).map_err(run)?)?;
            if transport != TransportKind::CopyEngine {
                ledger.add(selftest_signals_in_graphs(subject.machine()).map_err(run)?)?;
            }
        }
    }
    for (section, transport, most_ranks) in [
        ("linear layers by nvlink, a GPU each", TransportKind::Nvlink, gpus),
        ("linear layers by copy-engine", TransportKind::CopyEngine, 2 * gpus),
    ] {
        let Some(subject) = over(transport)? else { continue };
        if subject.gpu().arch().is_hopper() && ledger.section(section) {
            examine_linear(&subject, most_ranks, extent, ledger)?;
        }
    }
    Ok(())
}

fn examine_linear(
    subject: &CudaSubject,
    most_ranks: usize,
    extent: Extent,
    ledger: &mut Ledger,
) -> Result<(), CliError> {
    let checks = selftest_linear(subject, extent, most_ranks, |check, cases| ledger.hear(check, cases));
    ledger.add(checks)
}

fn examine_collectives(
    subject: &CudaSubject,
    most_ranks: usize,
    extent: Extent,
    ledger: &mut Ledger,
) -> Result<(), CliError> {
    let heard = |check: &SelfCheck, cases: usize| ledger.hear(check, cases);
    let checks = selftest_collectives(subject.machine(), extent, most_ranks, heard);
    ledger.add(checks.map_err(|source| CliError::Run { source })?)
}

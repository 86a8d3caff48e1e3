//! Group-casts and group-reduces by transport and size for `doctor --calibrate`, the line of latency and bandwidth through them, and
//! what copy engines take.

use std::time::Duration;

use counterpoint_cost::{Link, LinkPoint, TransportMeasurement};
use counterpoint_exec::ExecError;
use counterpoint_plan::DType;
use counterpoint_report::median;

use super::CalibrationFault;
use crate::gpu::collective::{BenchCollective, CollectiveCase, bench_collective};
use counterpoint_cuda::exec_error;
use counterpoint_cuda::{CudaError, CudaMachine, TransportKind};

/// Bytes that a rank sends.
const SIZES: [u64; 4] = [64 << 10, 1 << 20, 16 << 20, 128 << 20];

/// Each transport that there is, at every size.
pub(super) fn transports(
    machine: &CudaMachine,
    report: &mut dyn FnMut(&str),
) -> Result<Vec<TransportMeasurement>, ExecError> {
    let mut measured = Vec::new();
    for kind in [TransportKind::Nvlink, TransportKind::CopyEngine, TransportKind::NCCL] {
        // One that there is not is no error: it is not measured.
        let Ok(machine) = machine.clone().with_transport(kind) else { continue };
        if kind == TransportKind::NCCL && counterpoint_cuda::nccl_version().is_err() {
            continue;
        }
        report(&format!("transport {kind}"));
        let points = |collective| {
            SIZES
                .iter()
                .map(|&bytes| point(&machine, collective, bytes, SPLIT))
                .collect::<Result<Vec<_>, _>>()
        };
        let (cast, reduce) = (points(BenchCollective::GroupCast)?, points(BenchCollective::GroupReduce)?);
        measured.push(TransportMeasurement { transport: kind.to_string(), cast, reduce });
    }
    Ok(measured)
}

/// Rows that lie together, of those that a rank sends to another.
const SPLIT: usize = 128;

/// What copy engines take: the link that they are where each rank gets its rows of a tensor by one copy, and seconds in which one begins
/// a copy, by what `measured` has of more copies. `None` where there are none between these GPUs.
pub(super) fn engines(
    machine: &CudaMachine,
    measured: &[TransportMeasurement],
    report: &mut dyn FnMut(&str),
) -> Result<Option<(Link, f64)>, ExecError> {
    let kind = TransportKind::CopyEngine;
    let Some(in_splits) = measured.iter().find(|one| one.transport == kind.to_string()) else {
        return Ok(None);
    };
    let Ok(machine) = machine.clone().with_transport(kind) else { return Ok(None) };
    report("copy engines, one copy for each rank");
    let cast = |&bytes: &u64| point(&machine, BenchCollective::GroupCast, bytes, usize::MAX);
    let whole = SIZES.iter().map(cast).collect::<Result<Vec<_>, _>>()?;
    let Some(link) = line(&whole) else { return Ok(None) };
    let (pieces, one) = (in_splits.cast[2], whole[2]);
    let more = pieces.bytes.div_ceil((SPLIT * ROW_BYTES) as u64) as usize;
    let fewer = BenchCollective::TENSORS * (machine.devices().len() - 1);
    Ok(Some((link, begin_seconds([one, pieces], more.saturating_sub(fewer)))))
}

/// What each copy takes to begin, of so many more of as many bytes.
fn begin_seconds([one, pieces]: [LinkPoint; 2], copies: usize) -> f64 {
    ((pieces.seconds - one.seconds) / copies.max(1) as f64).max(0.0)
}

/// Of a tensor that is cast, bf16.
const ROW_ELEMENTS: usize = 1024;
const ROW_BYTES: usize = 2 * ROW_ELEMENTS;

/// A collective of so many bytes a rank, in splits of at most so many rows and one at least for every other rank.
fn point(
    machine: &CudaMachine,
    collective: BenchCollective,
    bytes: u64,
    split_rows: usize,
) -> Result<LinkPoint, ExecError> {
    let dtype = match collective {
        BenchCollective::GroupCast => DType::Bf16,
        BenchCollective::GroupReduce => DType::F32,
    };
    let case = CollectiveCase {
        collective,
        ranks: machine.devices().len(),
        dtype,
        row_elements: ROW_ELEMENTS,
        rows: 1,
        split_rows,
        warmups: 3,
        iterations: 10,
        samples: 3,
        limit: Duration::from_secs(20),
    };
    let rows = (bytes / case.bytes()).max(1) as usize;
    let to_each = rows.div_ceil((case.ranks - 1).max(1));
    let case = CollectiveCase { rows, split_rows: split_rows.min(to_each), ..case };
    let times = bench_collective(machine, &case)?;
    if times.wrong > 0 {
        let (wrong, transport) = (times.wrong, machine.transport().to_string());
        let reason = CalibrationFault::Wrong { wrong, bytes, transport }.into();
        let kernel = "a group collective".to_owned();
        return Err(exec_error(0, "a calibration", CudaError::Launch { kernel, reason }));
    }
    Ok(LinkPoint { bytes: case.bytes(), seconds: median(&times.seconds) })
}

/// The line through the casts of a transport.
pub(super) fn link(measured: &TransportMeasurement) -> Option<Link> {
    line(&measured.cast)
}

/// The line through what was measured: its slope between the two largest, its begin at the second one.
fn line(casts: &[LinkPoint]) -> Option<Link> {
    let [.., large, largest] = casts else { return None };
    let small = casts.get(1)?;
    let bytes_per_second = (largest.bytes - large.bytes) as f64 / (largest.seconds - large.seconds);
    let alpha_seconds = small.seconds - small.bytes as f64 / bytes_per_second;
    (bytes_per_second.is_finite() && bytes_per_second > 0.0)
        .then_some(Link { alpha_seconds: alpha_seconds.max(0.0), bytes_per_second })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_gives_its_begin_and_slope() {
        let on_line = |bytes: u64| LinkPoint { bytes, seconds: 1e-5 + bytes as f64 / 3e11 };
        let cast: Vec<LinkPoint> = SIZES.into_iter().map(on_line).collect();
        let measured = TransportMeasurement { transport: "nvlink".to_owned(), cast, reduce: Vec::new() };
        let link = link(&measured).unwrap();
        assert!(
            (link.alpha_seconds / 1e-5 - 1.0).abs() < 1e-6
                && (link.bytes_per_second / 3e11 - 1.0).abs() < 1e-6
        );
        assert!(super::link(&TransportMeasurement { cast: Vec::new(), ..measured }).is_none());
        // 64 more copies that each take 2 us to begin.
        let one = on_line(16 << 20);
        let pieces = LinkPoint { seconds: one.seconds + 64.0 * 2e-6, ..one };
        assert!((begin_seconds([one, pieces], 64) / 2e-6 - 1.0).abs() < 1e-6);
        assert_eq!(begin_seconds([pieces, one], 64), 0.0);
    }
}

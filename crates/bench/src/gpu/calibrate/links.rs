//! Group-casts and group-reduces by transport and size for `doctor --calibrate`, and the line of latency and bandwidth through them.

use std::time::Duration;

use counterpoint_exec::ExecError;
use counterpoint_plan::{DType, Link, LinkPoint, TransportMeasurement};
use counterpoint_report::median;

use crate::gpu::collective::{BenchCollective, CollectiveCase, bench_collective};
use counterpoint_cuda::exec_error;
use counterpoint_cuda::{CudaMachine, TransportKind};

/// Bytes that a rank sends.
const SIZES: [u64; 4] = [64 << 10, 1 << 20, 16 << 20, 128 << 20];

/// Each transport that there is, at every size.
pub(super) fn transports(
    machine: &CudaMachine,
    told: &mut dyn FnMut(&str),
) -> Result<Vec<TransportMeasurement>, ExecError> {
    let mut measured = Vec::new();
    for kind in [TransportKind::Nvlink, TransportKind::CopyEngine, TransportKind::Nccl] {
        // One that there is not is no error: it is not measured.
        let Ok(machine) = machine.clone().with_transport(kind) else { continue };
        if kind == TransportKind::Nccl && counterpoint_cuda::nccl_version().is_err() {
            continue;
        }
        told(&format!("transport {kind}"));
        let points = |collective| {
            SIZES.iter().map(|&bytes| point(&machine, collective, bytes)).collect::<Result<Vec<_>, _>>()
        };
        let (cast, reduce) = (points(BenchCollective::GroupCast)?, points(BenchCollective::GroupReduce)?);
        measured.push(TransportMeasurement { transport: kind.to_string(), cast, reduce });
    }
    Ok(measured)
}

fn point(machine: &CudaMachine, collective: BenchCollective, bytes: u64) -> Result<LinkPoint, ExecError> {
    let dtype = match collective {
        BenchCollective::GroupCast => DType::Bf16,
        BenchCollective::GroupReduce => DType::F32,
    };
    let case = CollectiveCase {
        collective,
        ranks: machine.devices().len(),
        dtype,
        row_elements: 1024,
        rows: 1,
        split_rows: 128,
        warmups: 3,
        iterations: 10,
        samples: 3,
        limit: Duration::from_secs(20),
    };
    let case = CollectiveCase { rows: (bytes / case.bytes()).max(1) as usize, ..case };
    let times = bench_collective(machine, &case)?;
    if times.wrong > 0 {
        let reason =
            format!("{} elements of {} bytes by {} are wrong", times.wrong, bytes, machine.transport());
        return Err(exec_error(
            0,
            "a calibration",
            counterpoint_cuda::CudaError::Launch { kernel: "a group collective".to_owned(), reason },
        ));
    }
    Ok(LinkPoint { bytes: case.bytes(), seconds: median(&times.seconds) })
}

/// The line through what was measured: its slope between the two largest casts, its begin at the second one.
pub(super) fn link(measured: &TransportMeasurement) -> Option<Link> {
    let [.., large, largest] = &measured.cast[..] else { return None };
    let small = measured.cast.get(1)?;
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
    }
}

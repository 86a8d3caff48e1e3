//! Products and their collectives as functions: the definition, the same bits however they overlap, and errors with names.

use counterpoint_exec::{
    CpuMachine, ExecError, GemmOverlap, HostTensor, WorldConfig, all_gather_gemm, gemm_all_reduce,
    gemm_reduce_scatter,
};
use counterpoint_plan::GemmCollective;
use counterpoint_schedule::OverlapPolicy;

const N: usize = 10;
const K: usize = 6;

/// Small whole numbers, whose sums are exact.
fn whole(rows: usize, columns: usize, seed: usize) -> HostTensor {
    let values = (0..rows * columns).map(|i| (((i + seed) * 7919) % 13) as f32 - 6.0);
    HostTensor::from_vec(vec![rows, columns], values.collect())
}

fn values(tensor: &HostTensor) -> &[f32] {
    tensor.as_slice().unwrap()
}

/// `x W^T`.
fn product(x: &HostTensor, weight: &HostTensor) -> Vec<f32> {
    let rows = values(x).chunks_exact(K);
    let dot = |row: &[f32], column: &[f32]| row.iter().zip(column).map(|(a, b)| a * b).sum::<f32>();
    rows.flat_map(|row| values(weight).chunks_exact(K).map(move |column| dot(row, column))).collect()
}

fn run(
    collective: GemmCollective,
    x: &[HostTensor],
    weight: &[HostTensor],
    overlap: GemmOverlap<'_>,
) -> Result<Vec<HostTensor>, ExecError> {
    let machine = CpuMachine::new(0, None)?;
    let config = WorldConfig { poison: true, ..WorldConfig::default() };
    match collective {
        GemmCollective::ReduceScatter => gemm_reduce_scatter(&machine, x, weight, overlap, &config),
        GemmCollective::AllReduce => gemm_all_reduce(&machine, x, weight, overlap, &config),
        GemmCollective::AllGather => all_gather_gemm(&machine, x, weight, overlap, &config),
    }
}

fn overlaps() -> Vec<GemmOverlap<'static>> {
    let policies = ["sequential", "concurrent", "kernel-barrier", "fused"];
    let policy = |name: &str| GemmOverlap::Policy(name.parse::<OverlapPolicy>().unwrap());
    policies.into_iter().map(policy).chain([GemmOverlap::default()]).collect()
}

#[test]
fn results_are_the_definition_whatever_overlaps() {
    for (ranks, rows) in [(1, 7), (2, 8), (3, 21)] {
        let m = ranks * rows;
        let weights: Vec<_> = (0..ranks).map(|rank| whole(N, K, 100 + rank)).collect();
        let inputs: Vec<_> = (0..ranks).map(|rank| whole(m, K, rank)).collect();
        let mut sums = vec![0.0; m * N];
        for (x, weight) in inputs.iter().zip(&weights) {
            sums.iter_mut().zip(product(x, weight)).for_each(|(sum, partial)| *sum += partial);
        }
        let own: Vec<_> = (0..ranks).map(|rank| whole(rows, K, 50 + rank)).collect();
        let all = HostTensor::from_vec(vec![m, K], own.iter().flat_map(values).copied().collect());
        for overlap in overlaps() {
            let scattered = run(GemmCollective::ReduceScatter, &inputs, &weights, overlap).unwrap();
            let reduced = run(GemmCollective::AllReduce, &inputs, &weights, overlap).unwrap();
            let gathered = run(GemmCollective::AllGather, &own, &weights, overlap).unwrap();
            for rank in 0..ranks {
                let place = format!("rank {rank} of {ranks} under {overlap:?}");
                assert_eq!(values(&scattered[rank]), &sums[rank * rows * N..][..rows * N], "{place}");
                assert_eq!(values(&reduced[rank]), sums, "{place}");
                assert_eq!(values(&gathered[rank]), product(&all, &weights[rank]), "{place}");
            }
        }
    }
}

#[test]
fn what_does_not_fit_is_named() {
    let (x, weight) = (vec![whole(4, K, 1), whole(4, K, 2)], vec![whole(N, K, 3), whole(N, K, 4)]);
    let refused = |x: &[HostTensor], weight: &[HostTensor]| {
        run(GemmCollective::ReduceScatter, x, weight, GemmOverlap::default()).unwrap_err().to_string()
    };
    let missing = refused(&x, &weight[..1]);
    assert!(missing.contains("weight") && missing.contains("1 ranks"), "{missing}");
    let longer = refused(&[x[0].clone(), whole(5, K, 2)], &weight);
    assert!(longer.contains("tensor x"), "{longer}");
    let wider = refused(&x, &[weight[0].clone(), whole(N, K + 1, 4)]);
    assert!(wider.contains("tensor weight"), "{wider}");
    assert!(refused(&[], &[]).contains("no rank"));
}

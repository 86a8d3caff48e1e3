//! `bench gemm-collective` on CPU ranks: fused and unfused Programs, every element against f64.

use std::time::Instant;

use counterpoint_cost::ProblemSize;
use counterpoint_exec::{
    Backend, CpuBackend, CpuMachine, CpuTransport, ExecError, GemmCollectiveSpec, HostTensor, Prepared,
    TensorFault, WorldConfig, dispatch, random_tensor,
};
use counterpoint_mask::Range;
use counterpoint_plan::GemmCollective;
use counterpoint_report::median;
use counterpoint_schedule::OverlapPolicy;

use super::row::GemmCollectiveRow;
use crate::arguments::BenchGemmCollectiveArguments;

type Ranked = Prepared<CpuBackend, CpuTransport>;

/// Times and checks one case on ranks that are threads of this machine: every element of the result.
pub(super) fn measure(
    spec: &GemmCollectiveSpec,
    policies: &[OverlapPolicy],
    arguments: &BenchGemmCollectiveArguments,
) -> Result<Vec<GemmCollectiveRow>, ExecError> {
    let inputs = Inputs::new(spec)?;
    let expected = inputs.product(spec);
    let mut first: Option<Vec<HostTensor>> = None;
    let mut rows = Vec::new();
    for policy in policies {
        let mut ranks = inputs.prepare(spec, *policy, arguments)?;
        let mut seconds = Vec::new();
        for _ in 0..=arguments.cycles {
            let began = Instant::now();
            Prepared::run_ranks(&mut ranks)?;
            seconds.push(began.elapsed().as_secs_f64());
        }
        let results = ranks.iter().map(|rank| match rank.buffer("y") {
            Some(buffer) => rank.backend().download(buffer),
            None => Err(missing("y")),
        });
        let results = results.collect::<Result<Vec<HostTensor>, _>>()?;
        let (error, of_bound) = compare(spec, &expected, &results);
        let different = match &first {
            None => 0,
            Some(first) => first.iter().zip(&results).filter(|(a, b)| a != b).count() as u64,
        };
        first.get_or_insert(results);
        rows.push(GemmCollectiveRow {
            collective: spec.collective.name(),
            ranks: spec.ranks,
            m: spec.size.m,
            n: spec.size.n,
            k: spec.size.k,
            asked: policy.to_string(),
            overlap: policy.to_string(),
            // The first run's memory is new.
            seconds: median(&seconds[1..]),
            library: None,
            error,
            of_bound,
            different,
        });
    }
    Ok(rows)
}

/// Every rank's operands.
struct Inputs {
    x: Vec<HostTensor>,
    weight: Vec<HostTensor>,
}

impl Inputs {
    fn new(spec: &GemmCollectiveSpec) -> Result<Self, ExecError> {
        let GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n, k }, dtype } = *spec;
        let tensor = |shape: [usize; 2], seed: usize| random_tensor(shape.to_vec(), dtype, seed as u64);
        let x = match collective {
            GemmCollective::AllGather => {
                let all = tensor([m, k], 1);
                (0..ranks).map(|rank| dispatch(&all, &[even(m, ranks, rank)])).collect::<Result<_, _>>()?
            }
            _ => (0..ranks).map(|rank| tensor([m, k], 1 + rank)).collect(),
        };
        Ok(Self { x, weight: (0..ranks).map(|rank| tensor([n, k], 100 + rank)).collect() })
    }

    fn prepare(
        &self,
        spec: &GemmCollectiveSpec,
        policy: OverlapPolicy,
        arguments: &BenchGemmCollectiveArguments,
    ) -> Result<Vec<Ranked>, ExecError> {
        let config = WorldConfig { limit: arguments.limit, poison: true, ..WorldConfig::default() };
        let machine = CpuMachine::new(policy.sm_margin(), None)?;
        let mut ranks = spec.prepare_groups(&machine, super::groups(arguments), policy, config)?;
        for (rank, prepared) in ranks.iter_mut().enumerate() {
            for (name, tensor) in [("x", &self.x[rank]), ("weight", &self.weight[rank])] {
                let buffer = prepared.backend().upload(name, tensor.clone())?;
                prepared.bind(name, buffer)?;
            }
        }
        Ok(ranks)
    }

    /// Every rank's result in f64.
    fn product(&self, spec: &GemmCollectiveSpec) -> Vec<Vec<f64>> {
        let GemmCollectiveSpec { collective, ranks, size: ProblemSize { m, n, k }, .. } = *spec;
        let product = |x: &[f64], weight: &[f64]| -> Vec<f64> {
            let dot = |row: &[f64], column: &[f64]| row.iter().zip(column).map(|(a, b)| a * b).sum::<f64>();
            let rows = x.chunks_exact(k);
            rows.flat_map(|row| weight.chunks_exact(k).map(move |column| dot(row, column))).collect()
        };
        let x: Vec<Vec<f64>> = self.x.iter().map(HostTensor::to_f64).collect();
        let weights: Vec<Vec<f64>> = self.weight.iter().map(HostTensor::to_f64).collect();
        if collective == GemmCollective::AllGather {
            let all = x.concat();
            return weights.iter().map(|weight| product(&all, weight)).collect();
        }
        let mut sums = vec![0.0; m * n];
        for (x, weight) in x.iter().zip(&weights) {
            sums.iter_mut().zip(product(x, weight)).for_each(|(sum, partial)| *sum += partial);
        }
        let rows = |rank: usize| match collective {
            GemmCollective::ReduceScatter => even(m, ranks, rank),
            _ => Range::new(0, m),
        };
        (0..ranks).map(|rank| sums[rows(rank).start * n..rows(rank).end * n].to_vec()).collect()
    }
}

/// Rows of a rank, as plans give them: the first ranks have one more where they cannot be equal.
fn even(rows: usize, ranks: usize, rank: usize) -> Range {
    let (short, longer) = (rows / ranks, rows % ranks);
    let start = rank * short + rank.min(longer);
    Range::new(start, start + short + usize::from(rank < longer))
}

/// The relative error of all elements, and the share that it is of what the type allows.
fn compare(spec: &GemmCollectiveSpec, expected: &[Vec<f64>], results: &[HostTensor]) -> (f64, f64) {
    let (mut errors, mut squares) = (0.0, 0.0);
    for (right, found) in expected.iter().zip(results) {
        for (right, found) in right.iter().zip(found.to_f64()) {
            errors += (found - right) * (found - right);
            squares += right * right;
        }
    }
    let relative = f64::sqrt(errors / squares);
    // Partial sums are rounded before they are summed.
    let allowed = match spec.dtype {
        counterpoint_plan::DType::F64 => 1e-14,
        counterpoint_plan::DType::F32 => 1e-5,
        counterpoint_plan::DType::Bf16 => 1.5e-2,
        counterpoint_plan::DType::F16 => 2e-3,
    };
    (relative, relative / allowed)
}

fn missing(name: &str) -> ExecError {
    ExecError::tensor(name, TensorFault::NotAnOutput)
}

use std::time::Duration;

use counterpoint_plan::DType;
use counterpoint_schedule::{Accumulate, ReduceOp};

use super::examine::unlike_elements;
use super::pattern::Pattern;
use super::{Extent, SelfCheck};
use crate::draw::Draw;
use crate::random::normal;
use crate::{Backend, Communicator, CpuMachine, ExecError, HostTensor, Machine, Reduce, World, WorldConfig};

/// One group collective with its tensors, the same on every machine.
struct Exchange {
    what: What,
    pattern: Pattern,
    /// Per rank the tensors of the rows that it owns, then those of the rows that it holds of others.
    owned: Vec<Vec<HostTensor>>,
    remote: Vec<Vec<HostTensor>>,
}

#[derive(Clone, Copy)]
enum What {
    Cast { wire: DType },
    Reduce(Reduce),
}

const TYPES: [DType; 3] = [DType::F32, DType::Bf16, DType::F16];
/// How far a merge may be from the CPU's, in units of the last place of its result: the two have different exponentials.
const MERGE_UNITS: f64 = 8.0;

/// Group collectives of several ranks on a machine against those of the CPU, which its own tests hold against a model: rows
/// are moved, and operands summed in the same order, to the last bit. There are at most `most_ranks` ranks. `checked` hears of
/// every check, with how many there are.
///
/// # Errors
/// When the CPU's own ranks fail.
pub fn selftest_collectives<M: Machine>(
    machine: &M,
    extent: Extent,
    most_ranks: usize,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Result<Vec<SelfCheck>, ExecError> {
    let cpu = CpuMachine::new(0, None)?;
    let count = match extent {
        Extent::Full => 60,
        Extent::Quick => 8,
    };
    let mut checks = Vec::new();
    for seed in 0..count {
        let exchange = Exchange::random(seed, extent, most_ranks);
        let name = exchange.describe();
        let expected = exchange.run(&cpu)?;
        let check = match exchange.run(machine) {
            Ok(actual) => exchange.judge(name, seed, &actual, &expected),
            Err(error) => SelfCheck::failed(name, seed, error.to_string()),
        };
        checked(&check, count as usize);
        checks.push(check);
    }
    Ok(checks)
}

impl Exchange {
    fn random(seed: u64, extent: Extent, most_ranks: usize) -> Self {
        let mut draw = Draw::new(seed);
        let world_size = draw.within(1, 4).min(most_ranks);
        let most_rows = match extent {
            Extent::Full => draw.pick(&[40, 40, 700]),
            Extent::Quick => 40,
        };
        let pattern = Pattern::random(&mut draw, world_size, most_rows);
        let (first, wire) = (draw.pick(&TYPES), draw.pick(&TYPES));
        let what = match seed as usize % 5 {
            0 | 1 => What::Cast { wire },
            kind => What::Reduce(Reduce {
                op: [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Lse][kind - 2],
                accumulate: draw.pick(&[Accumulate::Start, Accumulate::Continue]),
                wire_dtype: wire,
                reduce_dtype: DType::F32,
            }),
        };
        let heads = draw.within(1, 4);
        // Rows of whole vectors, and rows that are not.
        let width = draw.pick(&[1, 3, 8, 64, 128, 130]);
        let tensors: Vec<(Vec<usize>, DType)> = match what {
            // Out and lse, which travel as a pair.
            What::Reduce(Reduce { op: ReduceOp::Lse, .. }) => {
                vec![(vec![heads, width], first), (vec![heads], DType::F32)]
            }
            _ => vec![(vec![heads, width], first), (vec![width], draw.pick(&TYPES))],
        };
        let mut stream = 0;
        let mut rank_tensors = |rows: usize| -> Vec<HostTensor> {
            let each = tensors.iter().map(|(tail, dtype)| {
                stream += 1;
                normal(seed, stream, [&[rows], &tail[..]].concat(), *dtype)
            });
            each.collect()
        };
        let owned = pattern.owned_rows.iter().map(|&rows| rank_tensors(rows)).collect();
        let remote = pattern.remote_rows.iter().map(|&rows| rank_tensors(rows)).collect();
        Self { what, pattern, owned, remote }
    }

    fn describe(&self) -> String {
        let ranks = self.pattern.parts.len();
        let tensor = &self.owned[0][0];
        let dtype = |dtype: DType| format!("{dtype:?}").to_lowercase();
        let (what, wire) = match self.what {
            What::Cast { wire } => ("group-cast".to_owned(), wire),
            What::Reduce(Reduce { op, accumulate, wire_dtype, .. }) => {
                let words = format!("group-reduce {op:?} {accumulate:?}").to_lowercase();
                (words, wire_dtype)
            }
        };
        format!(
            "{what} {} over {}, rows of {:?}, {ranks} ranks",
            dtype(tensor.dtype()),
            dtype(wire),
            &tensor.shape()[1..]
        )
    }

    /// Runs it, every rank from a thread of its own, and gives what was written.
    fn run<M: Machine>(&self, machine: &M) -> Result<Vec<Vec<HostTensor>>, ExecError> {
        let config = WorldConfig { limit: Duration::from_secs(30), ..WorldConfig::default() };
        let world = World::new(self.pattern.parts.len(), config);
        let ends = machine.connect(&world)?;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ends
                .into_iter()
                .enumerate()
                .map(|(rank, (backend, transport))| {
                    scope.spawn(move || self.run_rank(rank, Communicator::new(backend, transport)?))
                })
                .collect();
            ranks
                .into_iter()
                .enumerate()
                .map(|(rank, thread)| {
                    thread.join().unwrap_or_else(|_| {
                        let place = "a group collective".to_owned();
                        Err(ExecError::RankPanicked { rank, place, message: "see above".to_owned() })
                    })
                })
                .collect()
        })
    }

    fn run_rank<B: Backend, T: crate::Transport<B>>(
        &self,
        rank: usize,
        communicator: Communicator<B, T>,
    ) -> Result<Vec<HostTensor>, ExecError> {
        let backend = communicator.backend();
        let upload = |tensors: &[HostTensor]| -> Result<Vec<B::Buffer>, ExecError> {
            tensors.iter().map(|tensor| backend.upload("selftest", tensor.clone())).collect()
        };
        let (owned, remote) = (upload(&self.owned[rank])?, upload(&self.remote[rank])?);
        let part = &self.pattern.parts[rank];
        let written = match self.what {
            What::Cast { wire } => {
                let pairs: Vec<_> = owned.iter().zip(&remote).collect();
                communicator.group_cast("cast", part, &pairs, wire)?.synchronize()?;
                remote
            }
            What::Reduce(reduce) => {
                let pairs: Vec<_> = remote.iter().zip(&owned).collect();
                communicator.group_reduce("reduce", part, &pairs, reduce)?.synchronize()?;
                owned
            }
        };
        written.iter().map(|buffer| backend.download(buffer)).collect()
    }

    fn judge(
        &self,
        name: String,
        seed: u64,
        actual: &[Vec<HostTensor>],
        expected: &[Vec<HostTensor>],
    ) -> SelfCheck {
        let pairs = actual.iter().flatten().zip(expected.iter().flatten());
        match self.what {
            What::Reduce(Reduce { op: ReduceOp::Lse, .. }) => {
                let units = pairs.map(|(actual, expected)| units_apart(actual, expected)).fold(0.0, f64::max);
                SelfCheck::of(name, seed, units, MERGE_UNITS)
            }
            _ => {
                let unlike: usize = pairs.map(|(actual, expected)| unlike_elements(actual, expected)).sum();
                SelfCheck::of(name, seed, unlike as f64, 0.0)
            }
        }
    }
}

/// The largest difference of two elements in units of the last place of the larger of 1 and the element. Infinite where one
/// is not a number and the other is.
fn units_apart(actual: &HostTensor, expected: &HostTensor) -> f64 {
    let unit = match expected.dtype() {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::Bf16 => f64::from(half::bf16::EPSILON),
        DType::F16 => f64::from(half::f16::EPSILON),
    };
    let apart = |(actual, expected): (f64, f64)| {
        if actual == expected || (actual.is_nan() && expected.is_nan()) {
            return 0.0;
        }
        let units = (actual - expected).abs() / (unit * expected.abs().max(1.0));
        if units.is_nan() { f64::INFINITY } else { units }
    };
    actual.to_f64().into_iter().zip(expected.to_f64()).map(apart).fold(0.0, f64::max)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_cpu_agrees_with_itself_and_every_kind_is_drawn() {
        let cpu = CpuMachine::new(0, None).unwrap();
        let mut heard = 0;
        let checks = selftest_collectives(&cpu, Extent::Full, 4, |_, _| heard += 1).unwrap();
        assert_eq!(heard, checks.len());
        assert!(checks.iter().all(|check| check.passed && check.error == 0.0), "{checks:#?}");
        for kind in [
            "group-cast bf16",
            "group-cast f32",
            "reduce sum start",
            "avg",
            "lse continue",
            "[4, 130]",
            "4 ranks",
        ] {
            assert!(checks.iter().any(|check| check.name.contains(kind)), "{kind}");
        }
    }

    #[test]
    fn a_row_in_the_wrong_place_is_found() {
        let cpu = CpuMachine::new(0, None).unwrap();
        let mut moved = 0;
        for seed in 0..20 {
            let exchange = Exchange::random(seed, Extent::Quick, 4);
            let expected = exchange.run(&cpu).unwrap();
            let mut actual = expected.clone();
            // Not all zeros: rows that nobody sent.
            let rows_differ = |tensor: &&mut HostTensor| {
                let values = tensor.to_f64();
                values.chunks(tensor.row_elements()).any(|row| *row != values[..tensor.row_elements()])
            };
            let Some(tensor) = actual.iter_mut().flatten().find(rows_differ) else { continue };
            let mut values = tensor.to_f64();
            values.rotate_right(tensor.row_elements());
            let (shape, dtype) = (tensor.shape().to_vec(), tensor.dtype());
            *tensor = crate::host_element::with_host_element!(dtype, T => HostTensor::from_vec(
                shape, values.iter().map(|&x| <T as crate::HostElement>::from_f64(x)).collect()
            ));
            moved += 1;
            assert!(!exchange.judge(String::new(), seed, &actual, &expected).passed, "seed {seed}");
        }
        assert!(moved > 12, "{moved}");
    }
}

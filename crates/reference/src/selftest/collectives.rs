//! The selftest of group collectives: random patterns on a machine, bit for bit what the CPU writes.

use std::time::Duration;

use counterpoint_exec::{
    Backend, Communicator, CpuMachine, ElementTypes, ExecError, HostElement, HostTensor, Machine, Reduce,
    Transport, World, WorldConfig, random_stream, with_host_element,
};
use counterpoint_plan::DType;
use counterpoint_schedule::{Accumulate, ReduceOp};

use super::examine::unlike_elements;
use super::pattern::Pattern;
use super::{Extent, SelfCheck, Share};
use crate::draw::Draw;

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

/// What one rank has written.
type Written = (usize, Vec<HostTensor>);

/// How far a merge may be from the CPU's, in units of the last place of its result: the two have different exponentials.
const MERGE_UNITS: f64 = 8.0;
/// Every collective runs so often, and must write the same bits each time.
const REPEATS: usize = 2;

/// Group collectives of several ranks on a machine against those of the CPU, which its own tests hold against a model: rows
/// are moved, and operands summed in the same order, to the last bit. There are at most `most_ranks` ranks. `checked` hears of
/// every check, with how many there are.
///
/// Where the machine's ranks are processes, each of them calls it, and checks what its own rank has written.
///
/// # Errors
/// When the CPU's own ranks fail.
pub fn selftest_collectives<M: Machine>(
    machine: &M,
    extent: Extent,
    share: Share,
    most_ranks: usize,
    mut checked: impl FnMut(&SelfCheck, usize),
) -> Result<Vec<SelfCheck>, ExecError> {
    let cpu = CpuMachine::new(0, None)?;
    let count = match extent {
        Extent::Full => 90,
        Extent::Quick => 10,
    };
    let mut checks = Vec::new();
    for seed in (0..count).filter(|seed| share.takes(*seed as usize)) {
        let ranks = Ranks { fixed: machine.world_size(), most: most_ranks };
        let exchange = Exchange::random(seed, extent, ranks, machine.element_types());
        let name = exchange.describe();
        let expected = exchange.run(&cpu)?;
        let check = match exchange.run(machine) {
            Ok(actual) => exchange.judge(name, seed, &actual, &expected),
            Err(error) => SelfCheck::failed(name, seed, error.to_string()),
        };
        checked(&check, share.count(count as usize));
        checks.push(check);
    }
    Ok(checks)
}

/// How many ranks an exchange has.
#[derive(Clone, Copy)]
struct Ranks {
    fixed: Option<usize>,
    most: usize,
}

impl Exchange {
    fn random(seed: u64, extent: Extent, ranks: Ranks, types: ElementTypes) -> Self {
        let mut draw = Draw::new(seed);
        let world_size = draw.within(1, ranks.most);
        let world_size = ranks.fixed.unwrap_or(world_size);
        let most_rows = match extent {
            Extent::Full => draw.pick(&[40, 40, 700]),
            Extent::Quick => 40,
        };
        let pattern = Pattern::random(&mut draw, world_size, most_rows);
        let (first, wire) = (draw.pick(types.tensors), draw.pick(types.tensors));
        let what = match seed as usize % 5 {
            0 | 1 => What::Cast { wire },
            kind => What::Reduce(Reduce {
                op: [ReduceOp::Sum, ReduceOp::Avg, ReduceOp::Lse][kind - 2],
                accumulate: draw.pick(&[Accumulate::Start, Accumulate::Continue]),
                wire_dtype: wire,
                reduce_dtype: draw.pick(types.sums),
            }),
        };
        // Tensors, or pairs of them, that travel together.
        let packed = draw.within(1, 3);
        let mut tensors: Vec<(Vec<usize>, DType)> = Vec::new();
        for index in 0..packed {
            let heads = draw.within(1, 4);
            // Rows of whole vectors, and rows that are not.
            let width = draw.pick(&[1, 3, 8, 64, 128, 130]);
            let dtype = if index == 0 { first } else { draw.pick(types.tensors) };
            tensors.push((vec![heads, width], dtype));
            if matches!(what, What::Reduce(Reduce { op: ReduceOp::Lse, .. })) {
                tensors.push((vec![heads], dtype.accumulator()));
            }
        }
        let mut stream = 0;
        let mut rank_tensors = |rows: usize| -> Vec<HostTensor> {
            let each = tensors.iter().map(|(tail, dtype)| {
                stream += 1;
                random_stream([&[rows], &tail[..]].concat(), *dtype, seed, stream)
            });
            each.collect()
        };
        let mut owned: Vec<_> = pattern.owned_rows.iter().map(|&rows| rank_tensors(rows)).collect();
        let mut remote: Vec<_> = pattern.remote_rows.iter().map(|&rows| rank_tensors(rows)).collect();
        if let What::Reduce(Reduce { op: ReduceOp::Lse, .. }) = what {
            let sides = owned.iter_mut().chain(&mut remote);
            sides.flat_map(|tensors| tensors.chunks_exact_mut(2)).for_each(|pair| blind(&mut draw, pair));
        }
        Self { what, pattern, owned, remote }
    }

    fn describe(&self) -> String {
        let ranks = self.pattern.parts.len();
        let tensors = &self.owned[0];
        let dtype = |dtype: DType| dtype.to_string();
        let (what, wire) = match self.what {
            What::Cast { wire } => ("group-cast".to_owned(), wire),
            What::Reduce(Reduce { op, accumulate, wire_dtype, reduce_dtype }) => {
                let words = format!("group-reduce {op} {accumulate} in {reduce_dtype}");
                (words, wire_dtype)
            }
        };
        let rows: Vec<String> = tensors
            .iter()
            .map(|tensor| format!("{} {:?}", dtype(tensor.dtype()), &tensor.shape()[1..]))
            .collect();
        format!("{what} over {}, rows of {}, {ranks} ranks", dtype(wire), rows.join(" and "))
    }

    /// Runs it, every rank of this process from a thread of its own, and gives what was written.
    fn run<M: Machine>(&self, machine: &M) -> Result<Vec<Written>, ExecError> {
        let config = WorldConfig { limit: Duration::from_secs(30), ..WorldConfig::default() };
        let world = World::new(self.pattern.parts.len(), config);
        let ends = machine.connect(&world)?;
        std::thread::scope(|scope| {
            let ranks: Vec<_> = ends
                .into_iter()
                .map(|(backend, transport)| {
                    let rank = transport.rank();
                    let thread =
                        scope.spawn(move || self.run_rank(rank, Communicator::new(backend, transport)?));
                    (rank, thread)
                })
                .collect();
            ranks
                .into_iter()
                .map(|(rank, thread)| {
                    let written = thread.join().unwrap_or_else(|_| {
                        let place = "a group collective".to_owned();
                        Err(ExecError::RankPanicked { rank, place, message: "see above".to_owned() })
                    });
                    Ok((rank, written?))
                })
                .collect()
        })
    }

    /// Every repetition's outputs, one after the other.
    fn run_rank<B: Backend, T: Transport<B>>(
        &self,
        rank: usize,
        communicator: Communicator<B, T>,
    ) -> Result<Vec<HostTensor>, ExecError> {
        let backend = communicator.backend();
        let upload = |tensors: &[HostTensor]| -> Result<Vec<B::Buffer>, ExecError> {
            tensors.iter().map(|tensor| backend.upload("selftest", tensor.clone())).collect()
        };
        let part = &self.pattern.parts[rank];
        let mut all = Vec::new();
        for _ in 0..REPEATS {
            let (owned, remote) = (upload(&self.owned[rank])?, upload(&self.remote[rank])?);
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
            for buffer in &written {
                all.push(backend.download(buffer)?);
            }
        }
        Ok(all)
    }

    fn judge(&self, name: String, seed: u64, actual: &[Written], expected: &[Written]) -> SelfCheck {
        let (mut units, mut unlike, mut unrepeated) = (0f64, 0, 0);
        for (rank, tensors) in actual {
            let Some((_, expected)) = expected.iter().find(|(other, _)| other == rank) else { continue };
            let (first, again) = tensors.split_at(tensors.len() / REPEATS);
            unrepeated += first.iter().zip(again).map(|(a, b)| unlike_elements(a, b)).sum::<usize>();
            for (actual, expected) in tensors.iter().zip(expected) {
                unlike += unlike_elements(actual, expected);
                units = units.max(units_apart(actual, expected));
            }
        }
        if unrepeated > 0 {
            return SelfCheck::failed(
                name,
                seed,
                format!("{unrepeated} elements differ between two repetitions"),
            );
        }
        match self.what {
            What::Reduce(Reduce { op: ReduceOp::Lse, .. }) => SelfCheck::of(name, seed, units, MERGE_UNITS),
            _ => SelfCheck::of(name, seed, unlike as f64, 0.0),
        }
    }
}

/// Makes some heads of some rows see nothing: a logarithm of `-inf`, and NaN where the result would be.
fn blind(draw: &mut Draw, pair: &mut [HostTensor]) {
    let [out, lse] = pair else { return };
    for at in 0..lse.len() {
        if !draw.chance(20) {
            continue;
        }
        let dim = out.len() / lse.len();
        with_host_element!(lse.dtype(), T => {
            lse.as_mut_slice::<T>().unwrap_or(&mut [])[at] = <T as HostElement>::from_f32(f32::NEG_INFINITY);
        });
        with_host_element!(out.dtype(), T => {
            let out = out.as_mut_slice::<T>().unwrap_or(&mut []);
            out[at * dim..(at + 1) * dim].fill(<T as HostElement>::from_f32(f32::NAN));
        });
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
    use counterpoint_exec::TcpLoopback;

    const RANKS: Ranks = Ranks { fixed: None, most: 8 };

    fn passes_to_the_last_bit(checks: &[SelfCheck]) {
        assert!(checks.iter().all(|check| check.passed && check.error == 0.0), "{checks:#?}");
    }

    #[test]
    fn the_cpu_agrees_with_itself_and_every_kind_is_drawn() {
        let cpu = CpuMachine::new(0, None).unwrap();
        let mut heard = 0;
        let checks = selftest_collectives(&cpu, Extent::Full, Share::ALL, 8, |_, _| heard += 1).unwrap();
        assert_eq!(heard, checks.len());
        passes_to_the_last_bit(&checks);
        for kind in [
            "group-cast over bf16",
            "group-cast over f64",
            "sum start in f64",
            "sum continue in",
            "in bf16",
            "in f16",
            "avg",
            "lse continue",
            "[4, 130]",
            "f16 [",
            " 1 ranks",
            " 8 ranks",
        ] {
            assert!(checks.iter().any(|check| check.name.contains(kind)), "{kind}");
        }
        let packed = |check: &SelfCheck| check.name.matches(" and ").count() == 2;
        assert!(checks.iter().any(packed));
        let drawn = (0..90).map(|seed| Exchange::random(seed, Extent::Full, RANKS, cpu.element_types()));
        let drawn: Vec<Exchange> = drawn.collect();
        let some = |has: fn(&Exchange) -> bool| drawn.iter().filter(|exchange| has(exchange)).count() > 3;
        assert!(some(|exchange| exchange.pattern.owned_rows.contains(&0)), "a rank that owns nothing");
        assert!(some(|exchange| exchange.pattern.remote_rows.contains(&0)), "a rank that receives nothing");
        assert!(some(|exchange| {
            exchange.pattern.parts.iter().flat_map(|part| &part.owned).any(|split| split.rows.is_empty())
        }));
    }

    #[test]
    fn ranks_that_join_through_tcp_write_the_same_bits() {
        let checks =
            selftest_collectives(&TcpLoopback::default(), Extent::Full, Share::ALL, 8, |_, _| {}).unwrap();
        passes_to_the_last_bit(&checks);
    }

    #[test]
    fn a_row_in_the_wrong_place_is_found() {
        let cpu = CpuMachine::new(0, None).unwrap();
        let mut moved = 0;
        for seed in 0..20 {
            let exchange = Exchange::random(seed, Extent::Quick, RANKS, cpu.element_types());
            let expected = exchange.run(&cpu).unwrap();
            let mut actual = expected.clone();
            // Not all zeros: rows that nobody sent.
            let rows_differ = |tensor: &&mut HostTensor| {
                let values = tensor.to_f64();
                values.chunks(tensor.row_elements()).any(|row| *row != values[..tensor.row_elements()])
            };
            let mut tensors = actual.iter_mut().flat_map(|(_, tensors)| tensors);
            let Some(tensor) = tensors.find(rows_differ) else { continue };
            let mut values = tensor.to_f64();
            values.rotate_right(tensor.row_elements());
            let (shape, dtype) = (tensor.shape().to_vec(), tensor.dtype());
            *tensor = with_host_element!(dtype, T => HostTensor::from_vec(
                shape, values.iter().map(|&x| <T as HostElement>::from_f64(x)).collect()
            ));
            moved += 1;
            assert!(!exchange.judge(String::new(), seed, &actual, &expected).passed, "seed {seed}");
        }
        assert!(moved > 12, "{moved}");
    }
}

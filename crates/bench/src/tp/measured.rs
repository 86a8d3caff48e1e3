//! What the ranks of `bench tp` measured of a policy, joined over processes, with a digest of all results.

use counterpoint_console::{CliError, launched::gather};
use counterpoint_exec::{HostData, HostTensor, LinearOutputs, Rendezvous};
use counterpoint_reference::WrongResult;
use counterpoint_schedule::{OverlapPolicy, Timeline};
use serde::{Deserialize, Serialize};

use crate::arguments::BenchTpPass;

/// What is measured of one policy.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Measured {
    /// What was asked for: a policy, or `auto`.
    pub(super) overlap: String,
    /// Those that were asked for.
    pub(super) passes: Vec<MeasuredPass>,
    /// The largest share of an element's bound, or what is wrong.
    pub(super) checked: Result<f64, WrongResult>,
    /// What distinguishes the results of each rank from others.
    pub(super) bits: Vec<u64>,
}

/// All runs of a pass.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct MeasuredPass {
    pub(super) pass: BenchTpPass,
    pub(super) policy: OverlapPolicy,
    pub(super) groups: usize,
    /// Whether these are of columns.
    pub(super) in_columns: bool,
    /// With the times of all operations.
    pub(super) detailed: Vec<Timeline>,
    /// With that of the whole alone, which nothing holds up.
    pub(super) whole: Vec<Timeline>,
}

impl MeasuredPass {
    /// What the slowest rank took in each run.
    pub(super) fn seconds(&self) -> Vec<f64> {
        self.whole.iter().map(slowest).collect()
    }
}

/// What the slowest rank took in a run, from the start of its first operation to the end of its last.
pub(super) fn slowest(run: &Timeline) -> f64 {
    let of_rank = |rank: usize| {
        let spans = run.spans.iter().filter(|span| span.rank == rank);
        let (begin, end) = spans.fold((f64::INFINITY, f64::NEG_INFINITY), |(begin, end), span| {
            (span.start.min(begin), span.end.max(end))
        });
        end - begin
    };
    (0..run.world_size).map(of_rank).fold(0.0, f64::max)
}

impl Measured {
    /// What all processes measured, each of its ranks, on rank 0.
    pub(super) fn of_all(self, rendezvous: &Rendezvous) -> Result<Option<Self>, CliError> {
        let all = gather(rendezvous, "times", &self)?;
        let joined = all.into_iter().reduce(Self::join);
        Ok(joined.filter(|_| rendezvous.rank() == 0))
    }

    /// Of more ranks, which ran together.
    fn join(mut self, other: Self) -> Self {
        let extend = |ours: &mut Vec<Timeline>, theirs: Vec<Timeline>| {
            for (ours, theirs) in ours.iter_mut().zip(theirs) {
                ours.spans.extend(theirs.spans);
            }
        };
        for (ours, theirs) in self.passes.iter_mut().zip(other.passes) {
            extend(&mut ours.detailed, theirs.detailed);
            extend(&mut ours.whole, theirs.whole);
        }
        self.checked = match (self.checked, other.checked) {
            (Ok(a), Ok(b)) => Ok(f64::max(a, b)),
            (Err(reason), _) | (_, Err(reason)) => Err(reason),
        };
        self.bits.extend(other.bits);
        self
    }

    /// One word for the bits of all results.
    pub(super) fn bits_in_words(&self) -> String {
        format!("{:016x}", self.bits.iter().fold(0, |state, &word| mixed(state, word)))
    }
}

/// A step of a hash that changes with every bit of the word: both are bijections of it.
fn mixed(state: u64, word: u64) -> u64 {
    (state ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15).rotate_left(29)
}

/// A number that is another one for other bits, but for chance.
pub(super) fn digest(outputs: &LinearOutputs) -> u64 {
    let tensors = [Some(&outputs.y), outputs.dx.as_ref(), outputs.dweight.as_ref(), outputs.dbias.as_ref()];
    tensors.into_iter().flatten().fold(0, |state, tensor| mixed(state, digest_of(tensor)))
}

fn digest_of(tensor: &HostTensor) -> u64 {
    match tensor.data() {
        HostData::F64(values) => values.iter().fold(0, |state, value| mixed(state, value.to_bits())),
        HostData::F32(values) => {
            values.iter().fold(0, |state, value| mixed(state, u64::from(value.to_bits())))
        }
        HostData::Bf16(values) => {
            values.iter().fold(0, |state, value| mixed(state, u64::from(value.to_bits())))
        }
        HostData::F16(values) => {
            values.iter().fold(0, |state, value| mixed(state, u64::from(value.to_bits())))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_bit_of_any_tensor_is_another_number() {
        let tensor = |values: [f32; 3]| HostTensor::from_vec(vec![3], values.to_vec());
        let outputs =
            |y, dx| LinearOutputs { y: tensor(y), dx: Some(tensor(dx)), dweight: None, dbias: None };
        let one = outputs([1.0, 2.0, 3.0], [0.0, 0.0, 0.0]);
        assert_eq!(digest(&one), digest(&one.clone()));
        for other in [outputs([1.0, 2.0, 3.0], [0.0, -0.0, 0.0]), outputs([2.0, 1.0, 3.0], [0.0; 3])] {
            assert_ne!(digest(&one), digest(&other));
        }
    }
}

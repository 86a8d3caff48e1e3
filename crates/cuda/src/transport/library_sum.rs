//! Group-reduces that NCCL sums itself, where it was asked to: those that are its reduce-scatter on all ranks.

use counterpoint_exec::collective::{Collective, Pattern};
use counterpoint_exec::{ExecError, PolicyFault};
use counterpoint_plan::DType;
use counterpoint_schedule::{Accumulate, BufferSpec, ReduceOp};

use super::exchange::PeerRange;
use super::{Call, CallError, CudaTransport, addresses};
use crate::backend::CallMarks;
use counterpoint_nccl::{NcclRank, NcclSum, SumSize};

/// A reduce-scatter: the rows for all ranks lie one after the other, as many for each.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct LibrarySum {
    /// The first row of the inputs, and of the outputs.
    first: [usize; 2],
    /// Of one rank.
    rows: usize,
}

impl LibrarySum {
    /// What this rank's part and those of the others come to. Ranks decide alike: one whose part is a reduce-scatter has the parts of all.
    pub(super) fn of<'a>(
        collective: &Collective,
        outputs: &[BufferSpec],
        others: impl Iterator<Item = &'a Pattern>,
        ranks: usize,
    ) -> Option<Self> {
        let reduction = collective.reduction.as_ref()?;
        let is_plain = reduction.op == ReduceOp::Sum && reduction.accumulate == Accumulate::Start;
        let tensors = collective.contract.tensors.iter().zip(outputs);
        let mut kept = tensors.map(|(tensor, output)| {
            tensor.dtype == tensor.wire && tensor.dtype == output.dtype && tensor.dtype != DType::F64
        });
        if !(is_plain && kept.all(|kept| kept)) {
            return None;
        }
        let own = Self::of_pattern(&collective.pattern, ranks)?;
        let mut others = others.map(|pattern| Self::of_pattern(pattern, ranks));
        others.all(|other| other.is_some_and(|other| other.rows == own.rows)).then_some(own)
    }

    fn of_pattern(pattern: &Pattern, ranks: usize) -> Option<Self> {
        let sent: Option<Vec<PeerRange>> = pattern.outgoing.iter().map(PeerRange::of).collect();
        let summed: Option<Vec<PeerRange>> = pattern.incoming.iter().map(PeerRange::of).collect();
        let (sent, summed) = (sent?, summed?);
        let (from, to) = (sent.first()?, summed.first()?);
        let follows = |(rank, range): (usize, &PeerRange)| {
            range.rows == from.rows && range.first == from.first + rank * from.rows
        };
        let is_whole = [&sent, &summed].iter().all(|all| all.len() == ranks);
        let is_one = summed.iter().all(|range| (range.first, range.rows) == (to.first, from.rows));
        let scatters = is_whole && is_one && sent.iter().enumerate().all(follows);
        scatters.then_some(Self { first: [from.first, to.first], rows: from.rows })
    }
}

impl CudaTransport {
    /// Enqueues a group-reduce as NCCL's reduce-scatter.
    pub(super) fn library_sum(
        &self,
        call: &Call<'_>,
        nccl: &NcclRank,
        sum: LibrarySum,
        marks: Option<&CallMarks>,
    ) -> Result<(), CallError> {
        let Call { backend, stream, place, collective, barrier, .. } = call;
        let (inputs, outputs) = addresses(call);
        let tensors = collective.collective.contract.tensors.iter().zip(inputs.iter().zip(&outputs));
        let sums: Vec<NcclSum> = tensors
            .map(|(tensor, (input, output))| {
                let row = (tensor.row_elements * tensor.dtype.size()) as u64;
                NcclSum {
                    from: input + sum.first[0] as u64 * row,
                    to: output + sum.first[1] as u64 * row,
                    size: SumSize { elements: sum.rows * tensor.row_elements, dtype: tensor.dtype },
                }
            })
            .collect();
        let queue = stream.queue();
        if barrier.is_some() && backend.left_to_communication().is_none() {
            let reason = PolicyFault::NoStart { place: place.to_string() };
            return Err(
                ExecError::Policy { rank: self.rank, policy: "kernel-barrier".to_owned(), reason }.into()
            );
        }
        nccl.connect_sums(&sums)?;
        // The margin is the sum's.
        barrier.map_or(Ok(()), |barrier| barrier.arrive(queue))?;
        marks.map_or(Ok(()), |marks| marks.begun.record(queue))?;
        // SAFETY: the rows lie inside the tensors, which live as long as what is enqueued; the stream orders their uses. All ranks make the same
        // calls: each has found a reduce-scatter in the parts of all.
        unsafe { nccl.reduce_scatter(queue, &sums, marks.map(|marks| &marks.ended)) }?;
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_exec::collective::PeerRows;
    use counterpoint_mask::Range;

    use super::*;

    fn pattern(outgoing: &[(usize, usize)], incoming: &[(usize, usize)]) -> Pattern {
        let peers = |all: &[(usize, usize)]| -> Vec<PeerRows> {
            let rows = all.iter().map(|&(start, end)| vec![Range::new(start, end)]);
            rows.enumerate().map(|(rank, rows)| PeerRows { rank, rows }).collect()
        };
        Pattern { outgoing: peers(outgoing), incoming: peers(incoming) }
    }

    #[test]
    fn a_reduce_scatter_has_equal_parts_one_after_the_other() {
        let scatter = pattern(&[(4, 7), (7, 10), (10, 13)], &[(2, 5); 3]);
        assert_eq!(LibrarySum::of_pattern(&scatter, 3), Some(LibrarySum { first: [4, 2], rows: 3 }));
        for (other, what) in [
            (pattern(&[(4, 7), (7, 10), (10, 14)], &[(2, 5); 3]), "uneven"),
            (pattern(&[(4, 7), (8, 11), (11, 14)], &[(2, 5); 3]), "a gap"),
            (pattern(&[(7, 10), (4, 7), (10, 13)], &[(2, 5); 3]), "another order"),
            (pattern(&[(4, 7), (7, 10)], &[(2, 5); 2]), "a rank without rows"),
            (pattern(&[(4, 7), (7, 10), (10, 13)], &[(2, 5), (2, 5), (5, 8)]), "other rows of one"),
        ] {
            assert_eq!(LibrarySum::of_pattern(&other, 3), None, "{what}");
        }
    }
}

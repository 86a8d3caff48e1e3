//! A rank's part in a group collective, checked, and what all ranks must agree on.

use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{Accumulate, BufferId, BufferSpec, GroupCast, GroupReduce, ReduceOp};
use serde::{Deserialize, Serialize};

use super::pattern::Pattern;
use crate::{CollectiveContext, CollectiveFault, ExecError, OpPlace, PlanIdentity, WireTensor};

/// One rank's part in a group collective, checked.
#[derive(Clone, Debug)]
pub struct Collective {
    /// What all ranks must agree on.
    pub contract: Contract,
    /// Rows by peer.
    pub pattern: Pattern,
    /// (input, output) in the caller's table.
    pub tensors: Vec<(BufferId, BufferId)>,
    /// `None` for a group-cast.
    pub reduction: Option<Reduction>,
    /// Even parts of the outputs' rows that are signalled as they come.
    pub delivery_parts: Option<usize>,
}

/// What all ranks of one collective must agree on.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contract {
    /// `group_cast` or `group_reduce` with its operation.
    pub kind: String,
    /// Its tensors, in order.
    pub tensors: Vec<WireTensor>,
    /// The plan that it belongs to.
    pub plan: Option<PlanIdentity>,
}

impl Contract {
    /// Whether a rank that has it is about to leave.
    pub(super) fn ends_group(&self) -> bool {
        self.plan.as_ref().is_some_and(PlanIdentity::is_end_of_group)
    }
}

/// How a group-reduce combines what arrives.
#[derive(Clone, Debug)]
pub struct Reduction {
    /// The operation.
    pub op: ReduceOp,
    /// Whether the output's own contents are the first operand.
    pub accumulate: Accumulate,
    /// Type in which operands are combined.
    pub dtype: DType,
    /// Operands of each row of the output, the own one included.
    pub operands: Vec<u32>,
}

impl Collective {
    /// Rank `rank`'s part in a group-cast among `world_size` ranks.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the part does not fit the tensors.
    pub fn cast(
        rank: usize,
        world_size: usize,
        place: &OpPlace,
        op: &GroupCast,
        context: &CollectiveContext<'_>,
    ) -> Result<Self, ExecError> {
        let check = Check { rank, world_size, place };
        let tensors = check.tensors(&op.tensors, context.buffers)?;
        for (input, output) in &tensors {
            if input.dtype != output.dtype {
                return Err(check.error(CollectiveFault::CastDType {
                    input: input.name.clone(),
                    input_dtype: input.dtype,
                    output: output.name.clone(),
                    output_dtype: output.dtype,
                }));
            }
        }
        check.part(&op.part, rows(&tensors, |pair| pair.0), rows(&tensors, |pair| pair.1))?;
        let wire = |(input, _): &(&BufferSpec, &BufferSpec)| WireTensor {
            row_elements: input.row_elements(),
            dtype: input.dtype,
            wire: op.wire_dtype,
        };
        let delivery_parts = op.delivery.map(|delivery| delivery.parts);
        let kind = delivery_parts
            .map_or("group_cast".to_owned(), |parts| format!("group_cast signalled in {parts} parts"));
        Ok(Self {
            contract: Contract {
                kind,
                tensors: tensors.iter().map(wire).collect(),
                plan: context.plan.cloned(),
            },
            pattern: Pattern::of_cast(&op.part),
            tensors: op.tensors.clone(),
            reduction: None,
            delivery_parts,
        })
    }

    /// Likewise in a group-reduce.
    ///
    /// # Errors
    /// As [`Collective::cast`].
    pub fn reduce(
        rank: usize,
        world_size: usize,
        place: &OpPlace,
        op: &GroupReduce,
        context: &CollectiveContext<'_>,
    ) -> Result<Self, ExecError> {
        let check = Check { rank, world_size, place };
        let tensors = check.tensors(&op.tensors, context.buffers)?;
        if op.op == ReduceOp::Lse {
            check.lse_pairs(&tensors)?;
        }
        check.part(&op.part, rows(&tensors, |pair| pair.1), rows(&tensors, |pair| pair.0))?;
        let pattern = Pattern::of_reduce(&op.part);
        let result_rows = tensors.iter().map(|(_, output)| output.rows()).max().unwrap_or(0);
        let mut operands = vec![u32::from(op.accumulate == Accumulate::Continue); result_rows];
        for rows in pattern.incoming.iter().flat_map(|peer| &peer.rows) {
            operands[rows.start..rows.end].iter_mut().for_each(|count| *count += 1);
        }
        let wire = |(index, (input, _)): (usize, &(&BufferSpec, &BufferSpec))| WireTensor {
            row_elements: input.row_elements(),
            dtype: input.dtype,
            // An error of a logarithm is an error of a weight's exponent: statistics are never narrowed.
            wire: if op.op == ReduceOp::Lse && index % 2 == 1 { input.dtype } else { op.wire_dtype },
        };
        Ok(Self {
            contract: Contract {
                kind: format!("group_reduce {} in {}", op.op, op.reduce_dtype),
                tensors: tensors.iter().enumerate().map(wire).collect(),
                plan: context.plan.cloned(),
            },
            pattern,
            tensors: op.tensors.clone(),
            reduction: Some(Reduction {
                op: op.op,
                accumulate: op.accumulate,
                dtype: op.reduce_dtype,
                operands,
            }),
            delivery_parts: None,
        })
    }
}

/// Rows that every tensor of one side has.
fn rows<'a>(
    tensors: &[(&'a BufferSpec, &'a BufferSpec)],
    side: impl Fn(&(&'a BufferSpec, &'a BufferSpec)) -> &'a BufferSpec,
) -> usize {
    tensors.iter().map(|pair| side(pair).rows()).min().unwrap_or(usize::MAX)
}

/// Checks of one rank's part, before anything moves.
struct Check<'a> {
    rank: usize,
    world_size: usize,
    place: &'a OpPlace,
}

impl Check<'_> {
    fn error(&self, reason: impl Into<CollectiveFault>) -> ExecError {
        ExecError::BadCollective {
            rank: self.rank,
            collective: self.place.to_string(),
            reason: Box::new(reason.into()),
        }
    }

    fn tensors<'a>(
        &self,
        tensors: &[(BufferId, BufferId)],
        specs: &'a [BufferSpec],
    ) -> Result<Vec<(&'a BufferSpec, &'a BufferSpec)>, ExecError> {
        let mut outputs: Vec<BufferId> = tensors.iter().map(|pair| pair.1).collect();
        outputs.sort_unstable();
        if let Some(pair) = outputs.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(self.error(CollectiveFault::OutputTwice { name: specs[pair[0].0].name.clone() }));
        }
        let mut out = Vec::with_capacity(tensors.len());
        for &(input, output) in tensors {
            let (input_spec, output_spec) = (&specs[input.0], &specs[output.0]);
            if outputs.binary_search(&input).is_ok() {
                return Err(self.error(CollectiveFault::InputIsOutput { name: input_spec.name.clone() }));
            }
            if input_spec.shape.is_empty() || output_spec.shape.is_empty() {
                return Err(self.error(CollectiveFault::NoRowAxis));
            }
            if input_spec.shape[1..] != output_spec.shape[1..] {
                return Err(self.error(CollectiveFault::Rows {
                    input: input_spec.name.clone(),
                    input_row: input_spec.shape[1..].to_vec(),
                    output: output_spec.name.clone(),
                    output_row: output_spec.shape[1..].to_vec(),
                }));
            }
            out.push((input_spec, output_spec));
        }
        Ok(out)
    }

    fn lse_pairs(&self, tensors: &[(&BufferSpec, &BufferSpec)]) -> Result<(), ExecError> {
        if !tensors.len().is_multiple_of(2) {
            return Err(self.error(CollectiveFault::LseCount { tensors: tensors.len() }));
        }
        for pair in tensors.chunks_exact(2) {
            for (out, lse) in [(pair[0].0, pair[1].0), (pair[0].1, pair[1].1)] {
                if out.shape[..out.shape.len() - 1] != lse.shape {
                    return Err(self.error(CollectiveFault::LsePair {
                        out: out.name.clone(),
                        out_shape: out.shape.clone(),
                        lse: lse.name.clone(),
                        lse_shape: lse.shape.clone(),
                    }));
                }
            }
        }
        Ok(())
    }

    fn part(&self, part: &GroupPart, owned_rows: usize, remote_rows: usize) -> Result<(), ExecError> {
        part.check(self.rank, self.world_size, owned_rows, remote_rows).map_err(|fault| self.error(fault))
    }
}

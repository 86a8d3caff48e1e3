//! What an operation touches: buffers that it reads and writes, barriers that it arrives at.

use super::{
    Accumulate, ArrivingKeys, AttentionBackward, BarrierId, BufferId, ForwardBegin, ForwardEnd, Gemm,
    GroupReduce, MaxLogits, Op, RowBlock,
};

impl Op {
    /// What arrives while the operation runs.
    pub fn arriving(&self) -> Option<&ArrivingKeys> {
        match self {
            Op::AttentionForward(op) => op.arriving.as_ref(),
            _ => self.backward().and_then(|op| op.arriving.as_ref()),
        }
    }

    /// Buffers that the operation reads, those apart that it reads once their rows have been delivered
    /// ([`Op::arriving`]). One that it reads and writes is in both lists.
    pub fn reads(&self) -> Vec<BufferId> {
        match self {
            Op::AttentionForward(op) => {
                let mut out = vec![op.q, op.k, op.v];
                if let ForwardBegin::Continue(state) = op.begin {
                    out.extend(state.buffers());
                }
                if let ForwardEnd::Result { sink, .. } = op.end {
                    out.extend(sink);
                }
                let goes_on = |max: &MaxLogits| max.accumulate == Accumulate::Continue;
                out.extend(op.max_logits.filter(goes_on).map(|max| max.buffer));
                out
            }
            Op::AttentionFinish(op) => {
                // Rows that it does not name stay as they are, so what was there counts.
                let mut out = vec![op.merged_out, op.merged_lse, op.out, op.lse];
                out.extend(op.sink);
                out
            }
            Op::AttentionDelta(op) => {
                let mut out = vec![op.out, op.dout, op.lse];
                out.extend(op.dlse);
                if let Some((sink, _)) = op.sink {
                    out.push(sink);
                }
                out
            }
            Op::AttentionBackward(op) => op.reads(),
            Op::Fused(parts) => {
                // What one part writes for the next is not read from before.
                let (mut out, mut written) = (Vec::new(), Vec::new());
                for part in parts {
                    out.extend(part.reads().into_iter().filter(|id| !written.contains(id)));
                    written.extend(part.writes());
                }
                out
            }
            Op::Gemm(op) => op.reads(),
            Op::WaveGemm(op) => op.groups.iter().flat_map(Gemm::reads).collect(),
            Op::UserKernel(op) => op.parts.iter().flat_map(|part| part.reads.iter().copied()).collect(),
            Op::RmsNorm(op) => {
                let mut out = once_each(&op.src);
                out.extend(op.residual);
                out.extend(op.weight);
                out
            }
            Op::RmsNormBackward(op) => {
                let mut out = vec![op.dout, op.sum];
                out.extend(op.weight.map(|(weight, _)| weight));
                out.extend(op.dsum);
                out
            }
            Op::ColumnSum(op) => {
                let mut out = once_each(&op.src);
                if op.accumulate == Accumulate::Continue {
                    out.push(op.dst);
                }
                out
            }
            Op::ColumnMax(op) => vec![op.src],
            Op::GroupCast(op) => op.tensors.iter().map(|&(input, _)| input).collect(),
            Op::GroupReduce(op) => op.reads(),
            Op::Cast { src, .. } | Op::CopyRows { src, .. } => vec![*src],
            Op::Concat { srcs, .. } => srcs.clone(),
            // Rows or columns that it does not name stay as they are, so what was there counts.
            Op::ZeroRows { dst, .. } => vec![*dst],
            Op::PlaceRows { src, dst, .. } | Op::PlaceColumns { src, dst, .. } => vec![*src, *dst],
            Op::Record(_) | Op::Wait(_) | Op::Await { .. } | Op::Signal { .. } | Op::WaitSignal { .. } => {
                Vec::new()
            }
        }
    }

    /// Buffers that the operation writes.
    pub fn writes(&self) -> Vec<BufferId> {
        match self {
            Op::AttentionForward(op) => {
                let mut all = match op.end {
                    ForwardEnd::State(state) => state.buffers().to_vec(),
                    ForwardEnd::Result { out, lse, .. } => vec![out, lse],
                };
                all.extend(op.max_logits.map(|max| max.buffer));
                all
            }
            Op::AttentionFinish(op) => vec![op.out, op.lse],
            Op::AttentionDelta(op) => {
                let mut out = vec![op.delta];
                out.extend(op.sink.map(|(_, dsink)| dsink));
                out
            }
            Op::AttentionBackward(op) => op.writes(),
            Op::Fused(parts) => parts.iter().flat_map(Op::writes).collect(),
            Op::Gemm(op) => vec![op.out],
            Op::WaveGemm(op) => op.groups.iter().map(|group| group.out).collect(),
            Op::UserKernel(op) => op.parts.iter().flat_map(|part| part.writes.iter().copied()).collect(),
            Op::RmsNorm(op) => vec![op.out, op.sum],
            Op::RmsNormBackward(op) => {
                let mut out = vec![op.dh];
                out.extend(op.weight.map(|(_, dweight)| dweight));
                out
            }
            Op::ColumnSum(op) => vec![op.dst],
            Op::ColumnMax(op) => vec![op.dst],
            Op::GroupCast(op) => op.tensors.iter().map(|&(_, output)| output).collect(),
            Op::GroupReduce(op) => op.tensors.iter().map(|&(_, output)| output).collect(),
            Op::Cast { dst, .. }
            | Op::Concat { dst, .. }
            | Op::CopyRows { dst, .. }
            | Op::ZeroRows { dst, .. }
            | Op::PlaceRows { dst, .. }
            | Op::PlaceColumns { dst, .. } => vec![*dst],
            Op::Record(_) | Op::Wait(_) | Op::Await { .. } | Op::Signal { .. } | Op::WaitSignal { .. } => {
                Vec::new()
            }
        }
    }
}

impl Op {
    /// The barriers at which the operation arrives with its start.
    pub fn arrives(&self) -> impl Iterator<Item = BarrierId> {
        self.parts().iter().filter_map(|part| match part {
            Op::GroupCast(cast) => cast.arrive,
            Op::GroupReduce(reduce) => reduce.arrive,
            _ => None,
        })
    }

    /// What each part of the operation reads and then writes, parts in their order.
    pub(crate) fn uses(&self) -> Vec<(usize, Vec<BufferId>, bool)> {
        match self {
            Op::WaveGemm(waves) => {
                let groups = waves.groups.iter().enumerate();
                groups
                    .flat_map(|(part, group)| [(part, group.reads(), false), (part, vec![group.out], true)])
                    .collect()
            }
            Op::UserKernel(user) => {
                let parts = user.parts.iter().enumerate();
                parts
                    .flat_map(|(at, part)| [(at, part.reads.clone(), false), (at, part.writes.clone(), true)])
                    .collect()
            }
            _ => vec![(usize::MAX, self.reads(), false), (usize::MAX, self.writes(), true)],
        }
    }
}

impl AttentionBackward {
    fn reads(&self) -> Vec<BufferId> {
        let mut out = vec![self.q, self.k, self.v, self.dout, self.lse, self.delta];
        if self.accumulate_dq == Accumulate::Continue {
            out.push(self.dq);
        }
        out
    }

    fn writes(&self) -> Vec<BufferId> {
        let mut out = vec![self.dq, self.dk, self.dv];
        out.extend(self.rounded_dq);
        out
    }
}

impl Gemm {
    fn reads(&self) -> Vec<BufferId> {
        let mut out = Vec::new();
        [&self.a, &self.b].into_iter().for_each(|rows| rows.add_buffers(&mut out));
        out.extend(self.bias);
        // Rows that it does not name stay as they are, so what was there counts in any case.
        out.push(self.out);
        out
    }
}

/// Each buffer of some blocks where it first comes.
fn once_each(blocks: &[RowBlock]) -> Vec<BufferId> {
    let mut out = Vec::new();
    for RowBlock { buffer, .. } in blocks {
        if !out.contains(buffer) {
            out.push(*buffer);
        }
    }
    out
}

impl GroupReduce {
    fn reads(&self) -> Vec<BufferId> {
        let mut out: Vec<_> = self.tensors.iter().map(|&(input, _)| input).collect();
        if self.accumulate == Accumulate::Continue {
            out.extend(self.tensors.iter().map(|&(_, output)| output));
        }
        out
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Range;

    use super::*;
    use crate::{GemmLayout, RowBlock, RowBlocks};

    #[test]
    fn a_product_reads_a_buffer_once_in_however_many_blocks() {
        let blocks = |of: &[usize]| -> RowBlocks {
            of.iter()
                .enumerate()
                .map(|(at, &id)| RowBlock { buffer: BufferId(id), rows: Range::new(at, at + 1) })
                .collect()
        };
        let gemm = Gemm {
            layout: GemmLayout::Nt,
            a: blocks(&[0, 3, 0, 3, 0]),
            b: blocks(&[1]),
            out: BufferId(2),
            out_rows: vec![Range::new(0, 5)].into(),
            pass_rows: 5,
            columns: None,
            bias: None,
            accumulate: Accumulate::Start,
        };
        assert_eq!(gemm.reads(), [0, 3, 1, 2].map(BufferId));
    }
}

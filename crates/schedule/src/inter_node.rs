//! How many bytes a Program sends between nodes, for comparison with what transports count.

use counterpoint_plan::{GroupPart, Topology};

use crate::{BufferId, GroupCast, GroupReduce, Op, Program};

impl Program {
    /// Bytes that this rank sends to ranks of other nodes in one run.
    pub fn inter_node_bytes(&self, topology: &Topology) -> u64 {
        let node = topology.node(self.rank);
        let far = |rank: &u32| topology.node(*rank as usize) != node;
        let owned = |part: &GroupPart| -> usize {
            part.owned
                .iter()
                .map(|split| split.rows.len() * split.ranks.iter().filter(|rank| far(rank)).count())
                .sum()
        };
        let remote = |part: &GroupPart| -> usize {
            part.remote.iter().filter(|split| far(&split.rank)).map(|split| split.rows.len()).sum()
        };
        let row = |tensors: &[(BufferId, BufferId)]| -> usize {
            tensors.iter().map(|(input, _)| self.buffers[input.0].row_elements()).sum()
        };
        let cast = |op: &GroupCast| owned(&op.part) * row(&op.tensors) * op.wire_dtype.size();
        let reduce = |op: &GroupReduce| remote(&op.part) * row(&op.tensors) * op.wire_dtype.size();
        let bytes = self.ops.iter().flat_map(|op| op.op.parts()).map(|op| match op {
            Op::GroupCast(op) => cast(op),
            Op::GroupReduce(op) => reduce(op),
            _ => 0,
        });
        bytes.map(|bytes| bytes as u64).sum()
    }
}

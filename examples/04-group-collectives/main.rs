//! Lesson 4: group collectives by themselves: rows to sets of ranks, and back with a reduction.
//!
//! Run it with `cargo run --example 04-group-collectives`. Three ranks, threads of this process, each with four rows. A
//! group-cast sends each row to the ranks that need it and to no other; a group-reduce over the same pattern brings
//! partial results back to the rows' owners.

use std::error::Error;

use counterpoint::exec::{Communicator, CpuBuffer, Group, HostTensor, Reduce, WorldConfig};
use counterpoint::plan::{DType, GroupPart};
use counterpoint::schedule::{Accumulate, ReduceOp};

const RANKS: usize = 3;

fn main() -> Result<(), Box<dyn Error>> {
    // Joined once; attention and layers of the same ranks run on it too.
    let group = Group::local(RANKS, WorldConfig::default())?;
    let ranks: Vec<_> = group.ranks().iter().map(Communicator::on).collect::<Result<_, _>>()?;

    // Every rank says what it sends, as (rows, destinations), and what it expects, as (rows, source): sizes are known on
    // both sides, so nothing is asked before data moves. Rank 0's first two rows go to both others, its third to rank 2,
    // its fourth to nobody; rank 2 wants rank 1's rows before those of rank 0.
    let parts = [
        GroupPart::from_splits([(2, &[1, 2][..]), (1, &[2]), (1, &[])], []),
        GroupPart::from_splits([(1, &[2][..]), (3, &[])], [(2, 0)]),
        GroupPart::from_splits([], [(1, 1), (2, 0), (1, 0)]),
    ];
    let received_rows = [0, 2, 4];

    let own: Vec<CpuBuffer> = (0..RANKS).map(|rank| rows(rank, 4, |row| (10 * rank + row) as f32)).collect();
    let received: Vec<CpuBuffer> = (0..RANKS).map(|rank| rows(rank, received_rows[rank], |_| 0.0)).collect();

    // Calls return at once with a handle: `wait` orders another stream behind it, `synchronize` waits here.
    let mut handles = Vec::new();
    for (rank, communicator) in ranks.iter().enumerate() {
        let tensors = [(&own[rank], &received[rank])];
        handles.push(communicator.group_cast("cast rows", &parts[rank], &tensors, DType::F32)?);
    }
    for handle in handles {
        handle.synchronize()?;
    }
    for (rank, buffer) in received.iter().enumerate() {
        println!("rank {rank} received {:?}", buffer.tensor()?.to_f64());
    }
    assert_eq!(received[1].tensor()?.to_f64(), [0.0, 1.0]);
    assert_eq!(received[2].tensor()?.to_f64(), [10.0, 0.0, 1.0, 2.0]);

    // The mirror: what each rank holds of others' rows goes to its owner and is added to what is there, in the order of ranks, so
    // that the result has the same bits every time. On the wire bf16, the sum in f32.
    let how = Reduce {
        op: ReduceOp::Sum,
        accumulate: Accumulate::Continue,
        wire_dtype: DType::Bf16,
        reduce_dtype: DType::F32,
    };
    let mut handles = Vec::new();
    for (rank, communicator) in ranks.iter().enumerate() {
        let tensors = [(&received[rank], &own[rank])];
        handles.push(communicator.group_reduce("reduce rows", &parts[rank], &tensors, how)?);
    }
    for handle in handles {
        handle.synchronize()?;
    }
    println!("rank 0 then owns {:?}", own[0].tensor()?.to_f64());
    // Row 1 of rank 0: its own 1, and one copy from each of the two ranks that received it.
    assert_eq!(own[0].tensor()?.to_f64(), [0.0, 3.0, 4.0, 3.0]);

    // A part that makes no sense is an error on the rank that made it, before anything is sent; all others get the same.
    let bad = GroupPart::from_splits([(5, &[1][..])], []);
    match ranks[0].group_cast("cast too much", &bad, &[(&own[0], &received[0])], DType::F32) {
        Err(error) => println!("refused: {error}"),
        Ok(_) => return Err("a split past the tensor was taken".into()),
    }
    Ok(())
}

/// A buffer of `count` rows of one f32 each.
fn rows(rank: usize, count: usize, value: impl Fn(usize) -> f32) -> CpuBuffer {
    let values: Vec<f32> = (0..count).map(value).collect();
    CpuBuffer::new(rank, "rows", HostTensor::from_vec(vec![count, 1], values))
}

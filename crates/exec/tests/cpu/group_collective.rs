//! Collectives of a group, made ready once.

use std::sync::Arc;

use counterpoint_exec::{
    CollectiveSpec, CpuBuffer, ExecError, Group, GroupCollective, HostTensor, Reduce, TensorPair, WorldConfig,
};
use counterpoint_plan::{DType, GroupPart};
use counterpoint_schedule::{Accumulate, ReduceOp, StreamKind};

/// A collective that is made ready once is called again and again, on the caller's streams and tensors, some of them strided, behind and
/// in front of other calls; rows that nobody sends stay as they are.
#[test]
fn a_collective_is_made_ready_once_and_called_on_tensors_of_the_caller() {
    const ROWS: [usize; 3] = [2, 3, 1];
    let group = Group::local(3, WorldConfig::default()).unwrap().overlap_calls();
    let shape = |rows| (vec![rows, 2], DType::F32);
    // One row more than comes.
    let pair = |rank: usize| TensorPair { input: shape(ROWS[rank]), output: shape(7) };
    let cast = |rank| CollectiveSpec {
        label: "gather".to_owned(),
        part: GroupPart::all_gather_v(rank, &ROWS),
        what: GroupCollective::Cast(DType::F32),
        tensors: vec![pair(rank), pair(rank)],
    };
    let calls = group.collective(cast).unwrap();
    let streams: Vec<_> = group
        .ranks()
        .iter()
        .map(|rank| Arc::new(rank.create_stream("caller", StreamKind::Compute).unwrap()))
        .collect();
    let streams: Vec<_> = streams.iter().collect();
    for round in 0..4 {
        let value = |rank: usize, tensor: usize| (100 * round + 10 * rank + tensor) as f32;
        let input = |rank: usize, tensor: usize| {
            let elements = vec![value(rank, tensor); 2 * ROWS[rank]];
            CpuBuffer::new(rank, "own", HostTensor::from_vec(vec![ROWS[rank], 2], elements))
        };
        let output = |rank| CpuBuffer::new(rank, "all", HostTensor::from_vec(vec![7, 2], vec![-1f32; 14]));
        let tensors: Vec<_> =
            (0..3).map(|rank| [0, 1].map(|tensor| (input(rank, tensor), output(rank)))).collect();
        let pairs: Vec<_> =
            tensors.iter().map(|pairs| pairs.each_ref().map(|(input, output)| (input, output))).collect();
        let pairs: Vec<_> = pairs.iter().map(|pairs| &pairs[..]).collect();
        let streams = (round % 2 == 0).then_some(&streams[..]);
        let tickets = calls.call(&pairs, streams).unwrap();
        tickets.iter().for_each(|ticket| ticket.wait().unwrap());
        for pairs in &tensors {
            for (tensor, (_, all)) in pairs.iter().enumerate() {
                let rows = (0..3).flat_map(|rank| vec![value(rank, tensor); 2 * ROWS[rank]]);
                let right: Vec<f32> = rows.chain([-1.0; 2]).collect();
                assert_eq!(all.tensor().unwrap().as_slice::<f32>().unwrap(), right, "round {round}");
            }
        }
    }
    // A part that does not fit its tensors is refused, and nothing has happened.
    let short =
        |rank| CollectiveSpec { tensors: vec![TensorPair { output: shape(5), ..pair(rank) }], ..cast(rank) };
    let error = group.collective(short).err().unwrap();
    assert!(matches!(error, ExecError::BadCollective { .. } | ExecError::Program { .. }), "{error}");
    let sum = |rank| {
        let (op, accumulate) = (ReduceOp::Sum, Accumulate::Continue);
        let reduce = Reduce { op, accumulate, wire_dtype: DType::F32, reduce_dtype: DType::F32 };
        let pair = TensorPair { input: shape(6), output: shape(ROWS[rank]) };
        CollectiveSpec {
            what: GroupCollective::Reduce(reduce),
            tensors: vec![pair],
            label: "sum".to_owned(),
            ..cast(rank)
        }
    };
    let sums = group.collective(sum).unwrap();
    let tensors: Vec<_> = (0..3)
        .map(|rank| {
            let of = |rows: usize, value: f32| {
                CpuBuffer::new(rank, "rows", HostTensor::from_vec(vec![rows, 2], vec![value; 2 * rows]))
            };
            (of(6, 1.0 + rank as f32), of(ROWS[rank], 0.5))
        })
        .collect();
    let pairs: Vec<_> = tensors.iter().map(|(input, output)| [(input, output)]).collect();
    let pairs: Vec<_> = pairs.iter().map(|pair| &pair[..]).collect();
    let tickets = sums.call(&pairs, None).unwrap();
    tickets.iter().for_each(|ticket| ticket.wait().unwrap());
    for (rank, (_, output)) in tensors.iter().enumerate() {
        assert_eq!(output.tensor().unwrap().to_f64(), vec![6.5; 2 * ROWS[rank]]);
    }
    group.close().unwrap();
}

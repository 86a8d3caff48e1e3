//! Parts that make no sense, and parts that do not fit each other.

use std::time::{Duration, Instant};

use counterpoint_exec::{CpuBuffer, ExecError, Reduce};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint_schedule::{Accumulate, ReduceOp};

use crate::collectives::{buffer, connect};

const SUM: Reduce = Reduce {
    op: ReduceOp::Sum,
    accumulate: Accumulate::Start,
    wire_dtype: DType::F32,
    reduce_dtype: DType::F32,
};

fn rows(rows: usize) -> CpuBuffer {
    buffer(&[rows, 2], DType::F32, &vec![0.0; 2 * rows])
}

/// Rank 0 of 2 makes a bad call: it gets the error at once, and rank 1, which is in the collective already, gets the same.
fn refused(part: &GroupPart, from: &CpuBuffer, to: &CpuBuffer) -> String {
    let ranks = connect(2);
    let (own, received) = (rows(4), rows(4));
    let waiting = GroupPart::from_splits([], [(4, 0)]);
    let handle = ranks[1].group_cast("cast", &waiting, &[(&own, &received)], DType::F32).unwrap();
    let began = Instant::now();
    let error = ranks[0].group_cast("cast", part, &[(from, to)], DType::F32).map(drop).unwrap_err();
    assert!(matches!(error, ExecError::BadCollective { rank: 0, .. }), "{error}");
    assert_eq!(handle.synchronize().unwrap_err(), error);
    assert!(began.elapsed() < Duration::from_secs(10), "the other rank waited for the limit");
    error.to_string()
}

#[test]
fn bad_parts_are_refused_before_anything_moves() {
    let owned = |start, end, ranks: &[u32]| GroupPart {
        owned: vec![OwnedSplit { rows: Range { start, end }, ranks: ranks.to_vec() }],
        remote: Vec::new(),
    };
    let remote = |splits: &[(usize, usize, u32)]| GroupPart {
        owned: Vec::new(),
        remote: splits
            .iter()
            .map(|&(start, end, rank)| RemoteSplit { rows: Range { start, end }, rank })
            .collect(),
    };
    for (part, reason) in [
        (owned(0, 5, &[1]), "rows 0..5 of a tensor of 4 rows"),
        (owned(0, 4, &[2]), "names rank 2; there are ranks 0 to 1"),
        (owned(0, 4, &[1, 0]), "rank 0 after rank 1"),
        (owned(3, 2, &[1]), "ends before it begins"),
        (remote(&[(0, 9, 1)]), "rows 0..9 of a tensor of 4 rows"),
        (remote(&[(0, 2, 1), (1, 3, 1)]), "share row 1"),
        (remote(&[(0, 2, 0)]), "expects [2] of itself"),
    ] {
        let text = refused(&part, &rows(4), &rows(4));
        assert!(text.contains(reason), "{text}");
        assert!(text.starts_with("rank 0 cannot take part in `cast`"), "{text}");
    }
    let part = owned(0, 4, &[1]);
    let other_dtype = buffer(&[4, 2], DType::F64, &[0.0; 8]);
    assert!(refused(&part, &rows(4), &other_dtype).contains("keeps the element type"));
    let other_shape = buffer(&[4, 3], DType::F32, &[0.0; 12]);
    assert!(refused(&part, &rows(4), &other_shape).contains("[2]"));
}

#[test]
fn pairs_of_a_merge_are_checked() {
    let ranks = connect(1);
    let part = GroupPart::default();
    let lse = Reduce { op: ReduceOp::Lse, ..SUM };
    let (a, b) = (rows(4), rows(4));
    let error = ranks[0].group_reduce("merge", &part, &[(&a, &b)], lse).map(drop).unwrap_err();
    assert!(error.to_string().contains("1 tensors do not form (out, lse) pairs"), "{error}");
    let ranks = connect(1);
    let (c, d) = (rows(4), rows(4));
    let error = ranks[0].group_reduce("merge", &part, &[(&a, &b), (&c, &d)], lse).map(drop).unwrap_err();
    assert!(error.to_string().contains("are not an (out, lse) pair"), "{error}");
}

/// Issues one collective on each of two ranks; gives the error, the same on every rank that gets one. The buffers serve once: when the error
/// comes, a rank's thread may not have let go of them yet.
fn disagreement(calls: [(&str, &GroupPart, [&CpuBuffer; 2], Option<Reduce>); 2]) -> ExecError {
    let ranks = connect(2);
    let issued: Vec<_> = ranks
        .iter()
        .zip(calls)
        .map(|(rank, (label, part, [from, to], reduce))| match reduce {
            None => rank.group_cast(label, part, &[(from, to)], DType::F32),
            Some(reduce) => rank.group_reduce(label, part, &[(from, to)], reduce),
        })
        .collect();
    // The first rank may find out before the second calls, which is then refused at once. A rank whose own part is empty has nobody
    // to wait for and may be through before the other finds out.
    let errors: Vec<_> = issued
        .into_iter()
        .filter_map(|handle| handle.and_then(|handle| handle.synchronize()).err())
        .collect();
    assert!(errors.iter().all(|error| *error == errors[0]));
    errors[0].clone()
}

#[test]
fn sizes_that_do_not_match_name_both_ranks() {
    let send = GroupPart::from_splits([(3, &[1u32][..])], []);
    for expected in [vec![(2, 0)], vec![(2, 0), (1, 0)], vec![]] {
        let (a, b, c, d) = (rows(4), rows(4), rows(4), rows(4));
        let receive = GroupPart::from_splits([], expected);
        let error = disagreement([("cast", &send, [&a, &b], None), ("cast", &receive, [&c, &d], None)]);
        assert!(matches!(error, ExecError::CollectiveMismatch { sequence: 0, .. }), "{error}");
        let text = error.to_string();
        assert!(text.contains("rank 0 sends splits of [3] rows and rank 1 expects"), "{text}");
    }
    // Expected by one side only.
    let (a, b, c, d) = (rows(4), rows(4), rows(4), rows(4));
    let receive = GroupPart::from_splits([], [(3, 0)]);
    let nothing = GroupPart::default();
    let error = disagreement([("cast", &nothing, [&a, &b], None), ("cast", &receive, [&c, &d], None)]);
    assert!(error.to_string().contains("rank 0 sends splits of [] rows and rank 1 expects [3]"), "{error}");
}

#[test]
fn tensors_that_do_not_match_name_both_ranks() {
    let send = GroupPart::from_splits([(3, &[1u32][..])], []);
    let receive = GroupPart::from_splits([], [(3, 0)]);
    let (a, b) = (rows(4), rows(4));
    let (c, d) = (buffer(&[4, 3], DType::F32, &[0.0; 12]), buffer(&[4, 3], DType::F32, &[0.0; 12]));
    let error = disagreement([("cast", &send, [&a, &b], None), ("cast", &receive, [&c, &d], None)]);
    assert!(matches!(error, ExecError::CollectiveMismatch { .. }), "{error}");
    assert!(error.to_string().contains("3 x f32 on rank 1"), "{error}");
}

#[test]
fn another_collective_at_the_same_place_names_both() {
    let send = GroupPart::from_splits([(3, &[1u32][..])], []);
    let receive = GroupPart::from_splits([], [(3, 0)]);
    let (a, b, c, d) = (rows(4), rows(4), rows(4), rows(4));
    let error = disagreement([("cast k", &send, [&a, &b], None), ("cast v", &receive, [&c, &d], None)]);
    assert!(matches!(error, ExecError::CollectiveOrder { .. }), "{error}");
    assert!(error.to_string().contains("`cast k`") && error.to_string().contains("`cast v`"), "{error}");
    // A cast of one meets a reduce of the other, and sums are matched with averages.
    let (a, b, c, d) = (rows(4), rows(4), rows(4), rows(4));
    let error = disagreement([("x", &send, [&a, &b], None), ("x", &receive, [&c, &d], Some(SUM))]);
    assert!(
        error.to_string().contains("group_cast") && error.to_string().contains("group_reduce"),
        "{error}"
    );
    let (a, b, c, d) = (rows(4), rows(4), rows(4), rows(4));
    let average = Reduce { op: ReduceOp::Avg, ..SUM };
    let (owner, holder) = (receive, send);
    let error = disagreement([("x", &holder, [&a, &b], Some(SUM)), ("x", &owner, [&c, &d], Some(average))]);
    assert!(
        matches!(error, ExecError::CollectiveMismatch { .. } | ExecError::CollectiveOrder { .. }),
        "{error}"
    );
}

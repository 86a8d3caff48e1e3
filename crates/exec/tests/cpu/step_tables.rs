//! Step tables that were made ahead: what they give, as bytes too, and what is refused.

use counterpoint_exec::{
    AttentionCalls, AttentionTask, CpuMachine, DescribedCpu, ExecError, Group, Pass, StepTables, TablesFault,
    Ticket, WorldConfig,
};
use counterpoint_mask::Mask;
use counterpoint_plan::AttentionSpec;
use counterpoint_schedule::{OverlapPolicy, StartOrder};

use crate::group::{Case, spec};

const POLICY: OverlapPolicy = OverlapPolicy::new(StartOrder::Concurrent);

type Tables = StepTables<DescribedCpu>;

fn task(case: &Case) -> AttentionTask<'_> {
    AttentionTask::new(&case.plan, &case.spec, Pass::ForwardBackward, POLICY, true)
}

fn tables(task: &AttentionTask<'_>, ranks: usize) -> Vec<Tables> {
    (0..ranks).map(|rank| task.tables(&DescribedCpu, rank).unwrap()).collect()
}

fn group(ranks: usize) -> Group<CpuMachine> {
    Group::local(ranks, WorldConfig::default()).unwrap()
}

/// Why the tables are refused, of which rank.
fn refused(
    group: &Group<CpuMachine>,
    task: &AttentionTask<'_>,
    tables: &[Tables],
) -> (usize, TablesFault, String) {
    let error = group.attention_with(task, tables).map(drop).unwrap_err();
    let sentence = error.to_string();
    match error {
        ExecError::Tables { rank, reason } => (rank, reason, sentence),
        other => panic!("{other}"),
    }
}

fn run(calls: &AttentionCalls<CpuMachine>, case: &Case) {
    let tensors = case.tensors();
    let forwards: Vec<_> = tensors.iter().map(|tensors| tensors.forward()).collect();
    calls.forward(&forwards, None).unwrap().iter().try_for_each(Ticket::wait).unwrap();
    let backwards: Vec<_> = tensors.iter().map(|tensors| tensors.backward()).collect();
    calls.backward(&backwards, None).unwrap().iter().try_for_each(Ticket::wait).unwrap();
    case.check(&tensors);
}

/// To the last bit, over as many ranks, as bytes of another process are.
#[test]
fn attention_by_tables_made_ahead_gives_the_same_bits() {
    for ranks in [1, 3] {
        let (group, case) = (group(ranks), Case::new(&Mask::causal(50).unwrap(), ranks, spec(), 7));
        let made = tables(&task(&case), ranks);
        let read: Vec<Tables> =
            made.iter().map(|tables| Tables::from_bytes(&tables.to_bytes()).unwrap()).collect();
        assert_eq!(read, made);
        run(&group.attention_with(&task(&case), &read).unwrap(), &case);
        run(&case.prepare(&group), &case);
    }
}

/// Nothing was made ready then, and the group goes on.
#[test]
fn tables_of_something_else_are_refused() {
    let (ranks, group) = (2, group(2));
    let case = Case::new(&Mask::causal(50).unwrap(), ranks, spec(), 1);
    let own = tables(&task(&case), ranks);

    let (rank, reason, sentence) = refused(&group, &task(&case), &[own[1].clone(), own[0].clone()]);
    assert_eq!((rank, reason), (0, TablesFault::Rank { theirs: 1 }));
    assert_eq!(
        sentence,
        "rank 0 does not take these step tables: they are of rank 1; give each rank its own"
    );

    let (_, reason, sentence) = refused(&group, &task(&case), &own[..1]);
    assert_eq!(reason, TablesFault::Ranks { given: 1, here: 2 });
    assert!(
        sentence.ends_with("they are of 1 rank, and 2 are in this process; give each of these its own"),
        "{sentence}"
    );

    let other = Case::new(&Mask::full(50).unwrap(), ranks, spec(), 1);
    let (_, reason, sentence) = refused(&group, &task(&case), &tables(&task(&other), ranks));
    let of_plan = |reason: &TablesFault| match reason {
        TablesFault::Plan { what, theirs, own } => (what.clone(), theirs.clone(), own.clone()),
        other => panic!("{other}"),
    };
    assert!(of_plan(&reason).0.contains("fingerprint"), "{reason}");
    assert!(sentence.contains("they are of another plan: "), "{sentence}");

    let spec = AttentionSpec { scale: 0.5, ..spec() };
    let other = Case::new(&Mask::causal(50).unwrap(), ranks, spec, 1);
    let (_, reason, _) = refused(&group, &task(&case), &tables(&task(&other), ranks));
    let own_scale = case.spec.scale.to_string();
    assert_eq!(of_plan(&reason), ("scale".to_owned(), "0.5".to_owned(), own_scale));

    let sequential = OverlapPolicy::new(StartOrder::Sequential);
    let other = AttentionTask::new(&case.plan, &case.spec, Pass::ForwardBackward, sequential, true);
    let (_, reason, _) = refused(&group, &task(&case), &tables(&other, ranks));
    assert_eq!(of_plan(&reason).0, "policy");

    let forward = AttentionTask::new(&case.plan, &case.spec, Pass::Forward, POLICY, true);
    let (_, reason, sentence) = refused(&group, &task(&case), &tables(&forward, ranks));
    assert_eq!(reason, TablesFault::Pass { theirs: 1, own: 2 });
    assert!(
        sentence.ends_with("they are of the forward alone, and its backward is wanted too"),
        "{sentence}"
    );
    let (_, reason, sentence) = refused(&group, &forward, &own);
    assert_eq!(reason, TablesFault::Pass { theirs: 2, own: 1 });
    assert!(
        sentence.ends_with("they are of a forward and its backward, and the forward alone is wanted"),
        "{sentence}"
    );

    let error = task(&case).tables(&DescribedCpu, 2).unwrap_err().to_string();
    assert!(error.contains("rank 2") && error.contains("the plan has 2 ranks"), "{error}");
    run(&group.attention_with(&task(&case), &own).unwrap(), &case);
}

/// As every [`ByteFormat`](counterpoint_plan::ByteFormat) has it.
#[test]
fn bytes_that_were_not_made_so_are_refused() {
    let case = Case::new(&Mask::causal(50).unwrap(), 1, spec(), 1);
    let bytes = tables(&task(&case), 1)[0].to_bytes();
    let sentence = |bytes: &[u8]| Tables::from_bytes(bytes).unwrap_err().to_string();
    assert_eq!(sentence(b"PK"), "these 2 bytes are no step tables");
    let other = [&bytes[..5], b"9", &bytes[6..]].concat();
    assert!(sentence(&other).starts_with("they were made by counterpoint 9"), "{}", sentence(&other));
    let cut = &bytes[..bytes.len() - 1];
    assert!(sentence(cut).contains("are not those that were made"), "{}", sentence(cut));
}

//! Plans and Programs as text that names no type and no field of the code, so that renames and moves leave it as it is.

use std::fmt::Write;

use counterpoint::mask::{Band, Range};
use counterpoint::plan::{Dispatch, GroupPart, LinearPlan, Plan, StagePlan, TwoLevelPart};
use counterpoint::schedule::Program;

/// Everything that a plan says, one line a fact.
pub(crate) fn plan(plan: &Plan) -> String {
    let mut out = String::new();
    dispatch("queries", &plan.q_dispatch, &mut out);
    dispatch("keys", &plan.k_dispatch, &mut out);
    for rank in &plan.ranks {
        let index = rank.rank;
        let _ = writeln!(
            out,
            "rank {index}: q {} k {} rows {} {} area {}",
            ranges(&rank.q_ranges),
            ranges(&rank.k_ranges),
            rank.q_rows,
            rank.k_rows,
            rank.area
        );
        for (direction, stages) in [("forward", &rank.forward), ("backward", &rank.backward)] {
            for (at, one) in stages.iter().enumerate() {
                stage(&format!("rank {index} {direction} stage {at}"), one, &mut out);
            }
        }
        if let Some(hosted) = &rank.hosted {
            let (q, rows, area) = (ranges(&hosted.q_ranges), hosted.q_rows, hosted.area);
            let _ = writeln!(out, "rank {index} hosted: q {q} rows {rows} area {area}");
            let _ = writeln!(out, "rank {index} hosted bands: {}", bands(&hosted.bands));
            let _ = writeln!(out, "rank {index} hosted exchange: {}", part(&hosted.part));
        }
    }
    if let Some(levels) = &plan.two_level {
        for (direction, ranks) in [("forward", &levels.forward), ("backward", &levels.backward)] {
            for (rank, stages) in ranks.iter().enumerate() {
                for (at, one) in stages.iter().enumerate() {
                    two_level(&format!("rank {rank} {direction} stage {at}"), one, &mut out);
                }
            }
        }
        for (rank, one) in levels.whole.iter().enumerate() {
            two_level(&format!("rank {rank} whole"), one, &mut out);
        }
        for (rank, one) in levels.hosted.iter().enumerate() {
            two_level(&format!("rank {rank} queries"), one, &mut out);
        }
    }
    out
}

/// Everything that a linear layer's plan says.
pub(crate) fn linear_plan(plan: &LinearPlan) -> String {
    let mut out = format!("groups {:?}\n", plan.group_sizes());
    for rank in 0..plan.tp_size {
        let _ = writeln!(
            out,
            "rank {rank}: tokens {} features {} {}",
            range(&plan.tokens_of(rank)),
            plan.local_in_features(),
            plan.local_out_features()
        );
        for group in 0..plan.groups() {
            let _ = writeln!(out, "rank {rank} group {group}: {}", part(&plan.group_part(rank, group)));
            let packed = part(&plan.packed_group_part(rank, group));
            let _ = writeln!(out, "rank {rank} group {group} packed: {packed}");
        }
        let _ = writeln!(out, "rank {rank} all tokens: {}", part(&plan.all_tokens_part(rank)));
    }
    out
}

/// The long listing of a Program without the names of buffers, streams and operations, which change nothing.
pub(crate) fn program(program: &Program) -> String {
    let mut program = program.clone();
    program.name = "program".to_owned();
    for (index, stream) in program.streams.iter_mut().enumerate() {
        stream.name = format!("s{index}");
    }
    for (index, buffer) in program.buffers.iter_mut().enumerate() {
        buffer.name = format!("b{index}");
    }
    program.ops.iter_mut().for_each(|op| op.label.clear());
    format!("{program:#}")
}

fn dispatch(name: &str, dispatch: &Dispatch, out: &mut String) {
    let _ = writeln!(out, "{name}: {} rows in chunks of {}", dispatch.seqlen(), dispatch.chunk_size());
    for rank in 0..dispatch.cp_size() {
        let _ = writeln!(out, "{name} of rank {rank}: chunks {:?}", dispatch.chunks(rank));
    }
}

fn stage(name: &str, stage: &StagePlan, out: &mut String) {
    let _ = writeln!(
        out,
        "{name}: receives {} own rows {} key rows {} area {}",
        ranges(&stage.recv_ranges),
        stage.own_rows,
        stage.key_rows,
        stage.area
    );
    let _ = writeln!(out, "{name} bands: {}", bands(&stage.bands));
    let _ = writeln!(out, "{name} exchange: {}", part(&stage.part));
}

fn two_level(name: &str, level: &TwoLevelPart, out: &mut String) {
    let _ = writeln!(out, "{name} between nodes: {} rows, {}", level.inter_rows, part(&level.inter));
    let _ = writeln!(out, "{name} inside nodes, own: {}", part(&level.near));
    let _ = writeln!(out, "{name} inside nodes, of others: {}", part(&level.forward));
}

fn range(range: &Range) -> String {
    format!("{}..{}", range.start, range.end)
}

fn ranges(all: &[Range]) -> String {
    all.iter().map(range).collect::<Vec<_>>().join(",")
}

fn bands(all: &[Band]) -> String {
    let bands = all.iter().map(|band| {
        let (q, k) = (range(&band.q_range), range(&band.k_range));
        let min = if band.diag_min == Band::NO_MIN { "none".to_owned() } else { band.diag_min.to_string() };
        let max = if band.diag_max == Band::NO_MAX { "none".to_owned() } else { band.diag_max.to_string() };
        format!("{q}x{k}:{min}:{max}")
    });
    bands.collect::<Vec<_>>().join(" ")
}

/// A rank's part in a group collective.
pub(crate) fn part(part: &GroupPart) -> String {
    let owned: Vec<String> =
        part.owned.iter().map(|split| format!("{}:{:?}", range(&split.rows), split.ranks)).collect();
    let remote: Vec<String> =
        part.remote.iter().map(|split| format!("{}:{}", range(&split.rows), split.rank)).collect();
    format!("owned {} remote {}", owned.join(" "), remote.join(" "))
}

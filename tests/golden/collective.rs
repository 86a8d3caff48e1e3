//! Group collectives by themselves: the patterns of the usual ones, random patterns, and what they bring.

use counterpoint::exec::{Communicator, CpuBuffer, Reduce, World, WorldConfig};
use counterpoint::mask::Range;
use counterpoint::plan::{DType, GemmCollective, GroupPart, OwnedSplit, RemoteSplit};
use counterpoint::schedule::{
    Accumulate, MatrixShape, RankOf, ReduceOp, lower_collective, lower_join, lower_product,
};

use crate::case::{Case, DTYPES, POLICIES, dtype_name};
use crate::draw::Draw;
use crate::plan_text;
use crate::tensor::{Elements, bits, tensor};

/// Cases of collectives.
pub(crate) const COUNT: usize = 30;

/// Every rank's part, with the rows of its two tensors.
struct Pattern {
    parts: Vec<GroupPart>,
    owned_rows: Vec<usize>,
    remote_rows: Vec<usize>,
}

pub(crate) fn case(index: usize) -> Case {
    let mut draw = Draw::new(0xc011_0000 + index as u64);
    let ranks = draw.within(1, 6);
    let dtypes = [0, 1, 2].map(|_| draw.pick(&DTYPES));
    let how = draw.pick(&[ReduceOp::Sum, ReduceOp::Avg]);
    let accumulate = draw.pick(&[Accumulate::Start, Accumulate::Continue]);
    let (kind, pattern) = pattern(ranks, &mut draw);
    let text = format!(
        "{kind} of {ranks} ranks, {} on the wire as {}, {} in {}{}",
        dtype_name(dtypes[0]),
        dtype_name(dtypes[1]),
        if how == ReduceOp::Sum { "summed" } else { "averaged" },
        dtype_name(dtypes[2]),
        if accumulate == Accumulate::Continue { ", added to what is there" } else { "" },
    );
    let mut case = Case::new(format!("collective {index:03}"), text);
    let parts: Vec<String> = pattern.parts.iter().map(plan_text::part).collect();
    case.part("plan", parts.join("\n"));
    let [rows, columns] = [draw.within(1, 40), draw.within(1, 20)];
    let policy = draw.pick(&POLICIES).parse().unwrap();
    for rank in 0..ranks {
        for (name, collective) in [
            ("all-gather", GemmCollective::AllGather),
            ("reduce-scatter", GemmCollective::ReduceScatter),
            ("all-reduce", GemmCollective::AllReduce),
        ] {
            let program = lower_collective(
                collective,
                RankOf { rank, ranks },
                MatrixShape { rows, columns },
                dtypes[0],
            );
            case.part(&format!("{name} {rank}"), plan_text::program(&program));
        }
    }
    let product =
        lower_product(RankOf { rank: 0, ranks }, [rows, columns, 7].into(), 2 * rows, dtypes[0], policy);
    case.part("product", plan_text::program(&product));
    case.part(
        "join",
        plan_text::program(&lower_join(RankOf { rank: 0, ranks }, MatrixShape { rows, columns }, dtypes[0])),
    );
    let reduce = Reduce { op: how, accumulate, wire_dtype: dtypes[1], reduce_dtype: dtypes[2] };
    case.outputs_of_any_machine(|_| run(&pattern, dtypes[0], reduce, index as u64));
    case
}

fn pattern(ranks: usize, draw: &mut Draw) -> (&'static str, Pattern) {
    let lengths: Vec<usize> = (0..ranks).map(|_| draw.within(0, 20)).collect();
    let total = lengths.iter().sum();
    match draw.within(0, 3) {
        0 => {
            let parts = (0..ranks).map(|rank| GroupPart::all_gather_v(rank, &lengths)).collect();
            ("all-gather", Pattern { parts, remote_rows: vec![total; ranks], owned_rows: lengths })
        }
        1 => {
            let table: Vec<Vec<usize>> =
                (0..ranks).map(|_| (0..ranks).map(|_| draw.within(0, 9)).collect()).collect();
            let parts = (0..ranks).map(|rank| GroupPart::all_to_all_v(rank, &table)).collect();
            let owned_rows = table.iter().map(|row| row.iter().sum()).collect();
            let remote_rows = (0..ranks).map(|rank| table.iter().map(|row| row[rank]).sum()).collect();
            ("all-to-all", Pattern { parts, owned_rows, remote_rows })
        }
        _ => ("random pattern", random(ranks, draw)),
    }
}

/// Splits in random places with random destinations, the rank itself among them.
fn random(ranks: usize, draw: &mut Draw) -> Pattern {
    let mut parts = vec![GroupPart::default(); ranks];
    let owned_rows: Vec<usize> = (0..ranks).map(|_| draw.within(0, 24)).collect();
    let mut remote_rows = vec![0; ranks];
    for rank in 0..ranks {
        for cut in draw.cuts(owned_rows[rank], 5).windows(2) {
            let to: Vec<u32> = (0..ranks as u32).filter(|_| draw.percent(50)).collect();
            for &other in &to {
                let start = remote_rows[other as usize] + draw.within(0, 2);
                let rows = Range::new(start, start + cut[1] - cut[0]);
                remote_rows[other as usize] = rows.end;
                parts[other as usize].remote.push(RemoteSplit { rows, rank: rank as u32 });
            }
            parts[rank].owned.push(OwnedSplit { rows: Range::new(cut[0], cut[1]), ranks: to });
        }
    }
    Pattern { parts, owned_rows, remote_rows }
}

/// Bits of what a group-cast and then a group-reduce of the same pattern leave on every rank.
fn run(pattern: &Pattern, dtype: DType, how: Reduce, seed: u64) -> String {
    const COLUMNS: usize = 3;
    let ranks = pattern.parts.len();
    let buffers = |name: &str, rows: &[usize], stream: u64| -> Vec<CpuBuffer> {
        let make = |(rank, rows): (usize, &usize)| {
            let seed = (seed * 16 + stream) * 64 + rank as u64;
            CpuBuffer::new(rank, name, tensor(&[*rows, COLUMNS], dtype, Elements::Real, seed))
        };
        rows.iter().enumerate().map(make).collect()
    };
    let local = Communicator::local(&World::new(ranks, WorldConfig::default()), None).unwrap();
    let own = buffers("own", &pattern.owned_rows, 0);
    let others = buffers("others", &pattern.remote_rows, 1);
    let casts = local.iter().enumerate().map(|(rank, local)| {
        local.group_cast("cast", &pattern.parts[rank], &[(&own[rank], &others[rank])], how.wire_dtype)
    });
    casts.collect::<Vec<_>>().into_iter().for_each(|handle| handle.unwrap().synchronize().unwrap());
    let cast: String = others.iter().map(|buffer| bits("cast", &buffer.tensor().unwrap())).collect();
    let sums = buffers("sums", &pattern.owned_rows, 2);
    let reduces = local.iter().enumerate().map(|(rank, local)| {
        local.group_reduce("reduce", &pattern.parts[rank], &[(&others[rank], &sums[rank])], how)
    });
    reduces.collect::<Vec<_>>().into_iter().for_each(|handle| handle.unwrap().synchronize().unwrap());
    cast + &sums.iter().map(|buffer| bits("reduced", &buffer.tensor().unwrap())).collect::<String>()
}

//! The mechanism alone: whatever owners, hosts, layers and cuts are given, what is written out is a plan of the mask.

mod checks;
#[path = "../../mask/tests/random/mod.rs"]
mod random;

use checks::{check_dispatch, check_exchange, check_hosting, check_pairs, directions};
use counterpoint_mask::Range;
use counterpoint_plan::{
    Dispatch, Division, HostedRows, KEY_BLOCK, Outline, Owners, Planning, RankOutline, RowHosts, StageCuts,
    Topology,
};
use proptest::prelude::*;

/// Chunks dealt as `drawn` says; some ranks may own nothing.
fn dealt(seqlen: usize, chunk_size: usize, ranks: usize, drawn: &[usize]) -> Dispatch {
    let mut rank_chunks = vec![Vec::new(); ranks];
    for chunk in 0..seqlen.div_ceil(chunk_size) {
        rank_chunks[drawn[chunk % drawn.len()] % ranks].push(chunk as u32);
    }
    Dispatch::new(seqlen, chunk_size, rank_chunks)
}

/// Ends of `stages` remote stages, at key blocks that are drawn, stage 0 included.
fn cut(ranks: &[RankOutline], stages: usize, drawn: &[usize]) -> StageCuts {
    let places = ranks.iter().enumerate().map(|(rank, outline)| {
        let rows = outline.remote.len();
        let inner =
            (1..stages).map(|stage| drawn[(rank * stages + stage) % drawn.len()] * KEY_BLOCK % (rows + 1));
        let inner = inner.map(|place| place / KEY_BLOCK * KEY_BLOCK);
        let mut places: Vec<usize> = std::iter::once(0).chain(inner).chain([rows]).collect();
        places.sort_unstable();
        places
    });
    StageCuts::new(ranks, &places.collect::<Vec<_>>(), stages + 1)
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(256))]

    #[test]
    fn any_owners_hosts_and_cuts_make_a_plan(
        mask in random::masks(500),
        ranks in 1..7_usize,
        chunk_sizes in proptest::array::uniform2(1..90_usize),
        owners in proptest::collection::vec(0..7_usize, 1..40),
        offloaded in proptest::collection::vec((0..7_usize, 0..150_usize, 1..60_usize, 0..128_u32), 0..6),
        stages in proptest::array::uniform2(1..5_usize),
        places in proptest::collection::vec(0..9_usize, 1..30),
        layers in 1..9_usize,
        gathers: bool,
    ) {
        let [q_dispatch, k_dispatch] = [(mask.seqlen_q(), chunk_sizes[0]), (mask.seqlen_k(), chunk_sizes[1])]
            .map(|(seqlen, chunk_size)| dealt(seqlen, chunk_size, ranks, &owners));
        let local_rows: Vec<usize> = (0..ranks).map(|rank| q_dispatch.tokens(rank)).collect();
        let division = Division::new(&mask, Owners::new(q_dispatch, k_dispatch));
        let of_rank = |rank: usize| -> Vec<HostedRows> {
            let mut end = 0;
            let own = offloaded.iter().filter(|(other, ..)| other % ranks == rank);
            let some = own.map(|&(_, gap, length, hosts)| {
                let start = (end + gap).min(local_rows[rank]);
                end = (start + length).min(local_rows[rank]);
                let these = (0..ranks as u32).filter(|host| hosts >> host & 1 == 1).collect();
                let hosts = if hosts == 0 { RowHosts::All } else { RowHosts::These(these) };
                HostedRows { rows: Range::new(start, end), hosts }
            });
            some.filter(|offloaded| !offloaded.rows.is_empty()).collect()
        };
        let offloaded: Vec<Vec<HostedRows>> = (0..ranks).map(of_rank).collect();
        let division = division.with_hosts(&offloaded);
        let topology = Topology::flat(ranks);
        let (owners, outlines) = RankOutline::of(division, &topology, |_, _| layers, &Planning::ALONE).unwrap();
        let gathers = gathers && outlines.iter().all(|rank| rank.own_rows().is_multiple_of(KEY_BLOCK));
        let forward = match gathers {
            true => StageCuts::gathered(&outlines),
            false => cut(&outlines, stages[0], &places),
        };
        let backward = cut(&outlines, stages[1], &places);
        let outline = Outline { owners, ranks: outlines, forward, backward };
        let plan = outline.clone().into_plan(&Planning::ALONE).unwrap();
        check_dispatch(&plan);
        check_pairs(&mask, &plan);
        check_exchange(&mask, &plan);
        let sees_keys = plan.ranks.iter().any(|rank| rank.hosted.as_ref().is_some_and(|work| work.area > 0));
        if sees_keys {
            check_hosting(&mask, &plan);
        }
        for rank in 0..ranks {
            prop_assert_eq!(&outline.clone().into_rank(rank), plan.rank(rank));
            prop_assert_eq!(directions(plan.rank(rank)).map(<[_]>::len), [if gathers { 2 } else { stages[0] + 1 }, stages[1] + 1]);
        }
    }
}

//! What every plan must hold, whoever chose it: all pairs once, exactly the needed rows, matching splits. Tests of crate `choose` hold its
//! plans to the same.

use std::collections::{BTreeSet, VecDeque};

use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{GroupPart, HostedRows, KEY_BLOCK, Plan, RankPlan, RowHosts, StagePlan};

/// Every row of `ranges`, in order.
pub(crate) fn rows(ranges: &[Range]) -> Vec<usize> {
    ranges.iter().flat_map(|range| range.start..range.end).collect()
}

/// Global key rows of a stage's key buffer, in order.
pub(crate) fn key_buffer(stage: &StagePlan, index: usize, own: &[Range]) -> Vec<usize> {
    match (index, stage.own_rows) {
        (0, _) => rows(own),
        (_, 0) => rows(&stage.recv_ranges),
        _ => [rows(own), rows(&stage.recv_ranges)].concat(),
    }
}

/// The stages of the forward and of the backward.
pub(crate) fn directions(rank: &RankPlan) -> [&[StagePlan]; 2] {
    [&rank.forward, &rank.backward]
}

/// How often each (row, column) is unmasked in the mask and computed by the plan.
pub(crate) fn check_pairs(mask: &Mask, plan: &Plan) {
    let (seqlen_q, seqlen_k) = (mask.seqlen_q(), mask.seqlen_k());
    let mut wanted = vec![0_u8; seqlen_q * seqlen_k];
    for slice in mask.slices() {
        for row in rows(&[slice.q_range]) {
            for col in rows(&[slice.k_range]) {
                wanted[row * seqlen_k + col] += u8::from(slice.contains(row, col));
            }
        }
    }
    for direction in 0..2 {
        let mut painted = vec![0_u8; seqlen_q * seqlen_k];
        for rank in &plan.ranks {
            let q_rows = rows(&rank.q_ranges);
            assert_eq!(q_rows.len(), rank.q_rows);
            for (index, stage) in directions(rank)[direction].iter().enumerate() {
                let buffer = key_buffer(stage, index, &rank.k_ranges);
                assert_eq!(buffer.len(), stage.key_rows);
                let mut area = 0;
                for band in stage.bands.iter() {
                    for row in rows(&[band.q_range]) {
                        for col in rows(&[band.columns(row)]) {
                            painted[q_rows[row] * seqlen_k + buffer[col]] += 1;
                            area += 1;
                        }
                    }
                }
                assert_eq!(area, stage.area);
            }
            let mut area = directions(rank)[direction].iter().map(|stage| stage.area).sum::<u64>();
            if let Some(hosted) = &rank.hosted {
                let (q_rows, k_rows) = (rows(&hosted.q_ranges), rows(&rank.k_ranges));
                assert_eq!(q_rows.len(), hosted.q_rows);
                let mut hosted_area = 0;
                for band in hosted.bands.iter() {
                    for row in rows(&[band.q_range]) {
                        for col in rows(&[band.columns(row)]) {
                            painted[q_rows[row] * seqlen_k + k_rows[col]] += 1;
                            hosted_area += 1;
                        }
                    }
                }
                assert_eq!(hosted_area, hosted.area);
                area += hosted_area;
            }
            assert_eq!(rank.area, area);
        }
        assert_eq!(painted, wanted, "direction {direction}");
    }
    assert_eq!(plan.ranks.iter().map(|rank| rank.area).sum::<u64>(), mask.area());
}

/// Moves row numbers as a group-cast would and returns what every rank's buffer then holds.
fn group_cast(parts: &[&GroupPart], own_rows: &[usize], inputs: &[Vec<usize>]) -> Vec<Vec<usize>> {
    let mut wires = vec![VecDeque::new(); parts.len() * parts.len()];
    for (source, part) in parts.iter().enumerate() {
        for split in &part.owned {
            assert!(!split.rows.is_empty() && !split.ranks.is_empty());
            assert!(split.ranks.windows(2).all(|pair| pair[0] < pair[1]));
            for &rank in &split.ranks {
                let message = inputs[source][split.rows.start..split.rows.end].to_vec();
                wires[source * parts.len() + rank as usize].push_back(message);
            }
        }
    }
    let mut outputs = Vec::new();
    for (rank, part) in parts.iter().enumerate() {
        let mut buffer = vec![None; own_rows[rank] + part.recv_rows() as usize];
        for split in &part.remote {
            let message: Vec<usize> = wires[split.rank as usize * parts.len() + rank]
                .pop_front()
                .expect("a split without a sender");
            assert_eq!(message.len(), split.rows.len());
            for (place, row) in (split.rows.start..split.rows.end).zip(message) {
                assert_eq!(buffer[place].replace(row), None, "two splits fill row {place}");
            }
        }
        let filled: Option<Vec<usize>> = buffer.into_iter().skip(own_rows[rank]).collect();
        outputs.push(filled.expect("the buffer is packed"));
    }
    assert!(wires.iter().all(VecDeque::is_empty), "something was sent that nobody takes");
    outputs
}

/// Exactly the needed rows arrive, each once over all stages, from cuts at multiples of a key block of one list.
pub(crate) fn check_exchange(mask: &Mask, plan: &Plan) {
    let list = |rank: &RankPlan| rank.forward.iter().flat_map(|stage| rows(&stage.recv_ranges)).collect();
    let lists: Vec<Vec<usize>> = plan.ranks.iter().map(list).collect();
    for direction in 0..2 {
        let inputs: Vec<Vec<usize>> = plan.ranks.iter().map(|rank| rows(&rank.k_ranges)).collect();
        let stages = directions(&plan.ranks[0])[direction].len();
        let mut received = vec![Vec::new(); plan.ranks.len()];
        for stage in 0..stages {
            let parts: Vec<&GroupPart> =
                plan.ranks.iter().map(|rank| &directions(rank)[direction][stage].part).collect();
            let own_rows: Vec<usize> =
                plan.ranks.iter().map(|rank| directions(rank)[direction][stage].own_rows).collect();
            for (rank, buffer) in group_cast(&parts, &own_rows, &inputs).into_iter().enumerate() {
                let stage_plan = &directions(&plan.ranks[rank])[direction][stage];
                assert_eq!(buffer, rows(&stage_plan.recv_ranges));
                if stage == 0 {
                    assert!(stage_plan.part.is_empty());
                }
                assert!(stage_plan.part.owned.iter().all(|split| !split.ranks.contains(&(rank as u32))));
                for pair in stage_plan.part.owned.windows(2) {
                    assert!(pair[0].rows.end <= pair[1].rows.start);
                }
                received[rank].extend(buffer);
            }
            for rank in 0..plan.ranks.len() {
                let later: usize = directions(&plan.ranks[rank])[direction][stage + 1..]
                    .iter()
                    .map(|stage| stage.key_rows)
                    .sum();
                assert!(received[rank].len() % KEY_BLOCK == 0 || later == 0, "a cut inside a key block");
            }
        }
        for (rank, received) in plan.ranks.iter().zip(&received) {
            assert_eq!(directions(rank)[direction].len(), stages, "every rank has the same number of stages");
            let own: BTreeSet<usize> = rows(&rank.k_ranges).into_iter().collect();
            let mut needed = BTreeSet::new();
            let hosts = hosts_of_rows(rank);
            let hosted_by = |other: &RankPlan, hosts: &[u32]| hosts.contains(&(other.rank as u32));
            for (row, hosts) in rows(&rank.q_ranges).into_iter().zip(hosts) {
                let mut columns = BTreeSet::new();
                for slice in mask.slices().iter().filter(|slice| slice.q_range.contains(row)) {
                    columns.extend(rows(&[slice.band().columns(row)]));
                }
                for host in plan.ranks.iter().filter(|other| hosted_by(other, &hosts)) {
                    rows(&host.k_ranges).iter().for_each(|column| _ = columns.remove(column));
                }
                needed.extend(columns);
            }
            assert_eq!(*received, lists[rank.rank], "the order does not depend on the stages");
            let mut received = received.clone();
            received.sort_unstable();
            assert_eq!(received, needed.difference(&own).copied().collect::<Vec<_>>());
            assert_eq!(rank.recv_rows(), received.len() as u64);
            assert_eq!(rows(&rank.recv_ranges()), received);
        }
    }
}

/// The ranks that host each local query row.
fn hosts_of_rows(rank: &RankPlan) -> Vec<Vec<u32>> {
    let mut hosts = vec![Vec::new(); rank.q_rows];
    for HostedRows { rows, hosts: by } in rank.hosted.iter().flat_map(|hosted| hosted.hosted_rows()) {
        let RowHosts::These(by) = by else { unreachable!("hosts by number") };
        hosts[rows.start..rows.end].iter_mut().for_each(|hosts| hosts.clone_from(&by));
    }
    hosts
}

/// Hosts receive the rows that they host and see some of their keys, and no others; what they send back meets its rows.
pub(crate) fn check_hosting(mask: &Mask, plan: &Plan) {
    let hosting = plan.ranks.iter().filter(|rank| rank.hosted.is_some()).count();
    assert!(hosting == 0 || hosting == plan.cp_size());
    let Some(works) = plan.ranks.iter().map(|rank| rank.hosted.as_ref()).collect::<Option<Vec<_>>>() else {
        return;
    };
    let inputs: Vec<Vec<usize>> = plan.ranks.iter().map(|rank| rows(&rank.q_ranges)).collect();
    let parts: Vec<&GroupPart> = works.iter().map(|work| &work.part).collect();
    let none = vec![0; plan.cp_size()];
    let buffers = group_cast(&parts, &none, &inputs);
    let hosts: Vec<(usize, Vec<u32>)> = plan
        .ranks
        .iter()
        .flat_map(|rank| rows(&rank.q_ranges).into_iter().zip(hosts_of_rows(rank)))
        .collect();
    let offloaded =
        |rank: usize| rows(&works[rank].offloaded()).into_iter().map(|local| inputs[rank][local]).collect();
    let offloaded: Vec<Vec<usize>> = (0..plan.cp_size()).map(offloaded).collect();
    assert!(offloaded.iter().any(|rows| !rows.is_empty()), "hosting of nothing");
    let reduced: Vec<GroupPart> = works.iter().map(|work| work.owner_part()).collect();
    assert_eq!(group_cast(&reduced.iter().collect::<Vec<_>>(), &none, &offloaded), buffers);
    for ((rank, work), buffer) in plan.ranks.iter().zip(&works).zip(&buffers) {
        assert_eq!(*buffer, rows(&work.q_ranges));
        assert_eq!(work.offloaded_rows(), offloaded[rank.rank].len());
        let wanted: Vec<usize> = hosts
            .iter()
            .filter(|(_, hosts)| hosts.contains(&(rank.rank as u32)))
            .map(|(row, _)| *row)
            .filter(|&row| {
                rank.k_ranges.iter().any(|keys| {
                    mask.slices().iter().filter(|slice| slice.q_range.contains(row)).any(|slice| {
                        let columns = slice.band().columns(row);
                        !columns.is_empty() && columns.overlaps(keys)
                    })
                })
            })
            .collect::<BTreeSet<usize>>()
            .into_iter()
            .collect();
        assert_eq!(*buffer, wanted);
        let own = buffer.iter().filter(|row| inputs[rank.rank].contains(row)).count() as u64;
        assert_eq!(rank.query_recv_rows(), buffer.len() as u64 - own);
        work.part.check(rank.rank, plan.cp_size(), rank.q_rows, work.q_rows).unwrap();
    }
    let sent = plan.ranks.iter().map(RankPlan::query_send_rows).sum::<u64>();
    assert_eq!(sent, plan.ranks.iter().map(RankPlan::query_recv_rows).sum::<u64>());
}

/// Every row has one owner.
pub(crate) fn check_dispatch(plan: &Plan) {
    for (dispatch, of) in [(&plan.q_dispatch, 0), (&plan.k_dispatch, 1)] {
        let mut seen = vec![0; dispatch.seqlen()];
        for rank in &plan.ranks {
            let ranges = if of == 0 { &rank.q_ranges } else { &rank.k_ranges };
            rows(ranges).into_iter().for_each(|row| seen[row] += 1);
        }
        assert!(seen.iter().all(|&count| count == 1));
    }
}

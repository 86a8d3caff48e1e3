//! Query offload: hands the work of offloaded rows to the ranks that own the keys.

use counterpoint_mask::{Band, Range};

use super::{HostedRows, HostedWork, RowHosts};
use crate::Dispatch;
use crate::exchange::{PlacedRows, exchange};
use crate::row_list::RowList;
use crate::runs::Runs;
use crate::work::push_fused;

/// Takes the work of offloaded rows out of `work` (local rows, global columns), and gives it to the owners of its keys that host them:
/// what remains, and every rank's part of the rest. `offloaded` are ascending and disjoint rows of each rank.
pub(crate) fn assign(
    work: &[Vec<Band>],
    offloaded: &[Vec<HostedRows>],
    q_dispatch: &Dispatch,
    q_runs: &Runs,
    k_runs: &Runs,
) -> (Vec<Vec<Band>>, Vec<HostedWork>) {
    let mut stays: Vec<Vec<Band>> = vec![Vec::new(); work.len()];
    // Rows are still global, columns are the host's local key rows.
    let mut hosted: Vec<Vec<Band>> = vec![Vec::new(); work.len()];
    for (rank, (bands, offloaded)) in work.iter().zip(offloaded).enumerate() {
        if offloaded.is_empty() {
            stays[rank].clone_from(bands);
            continue;
        }
        let own = RowList::new(q_dispatch.ranges(rank));
        for band in bands {
            let mut start = band.q_range.start;
            let first = offloaded.partition_point(|offloaded| offloaded.rows.end <= start);
            for HostedRows { rows, hosts } in
                offloaded[first..].iter().take_while(|offloaded| offloaded.rows.start < band.q_range.end)
            {
                let gone = rows.intersect(&band.q_range);
                stays[rank].extend(clip_rows(band, Range::new(start, gone.start)));
                start = gone.end;
                if *hosts != RowHosts::All {
                    keep(band, gone, k_runs, hosts, &mut stays[rank]);
                }
                let mut local = gone.start;
                for global in own.rows(gone.start, gone.end) {
                    let to_global = global.start as i64 - local as i64;
                    let here = Range::new(local, local + global.len());
                    local = here.end;
                    if let Some(piece) = clip_rows(band, here) {
                        give(&piece.shift(to_global, 0), k_runs, hosts, &mut hosted);
                    }
                }
            }
            stays[rank].extend(clip_rows(band, Range::new(start, band.q_range.end)));
        }
    }
    let rows = |bands: &Vec<Band>| Range::merged(bands.iter().map(|band| band.q_range).collect());
    let q_ranges: Vec<Vec<Range>> = hosted.iter().map(rows).collect();
    let placed: Vec<Vec<PlacedRows>> = q_ranges.iter().map(|ranges| PlacedRows::of(ranges, 0)).collect();
    let parts = exchange(q_runs, &placed).into_iter().zip(q_ranges);
    let hosts = hosted.into_iter().zip(&placed).zip(parts).map(|((bands, placed), (part, q_ranges))| {
        let to_buffer = |band: Band| {
            // Rows of a band follow each other, so they are in one range.
            let at = placed.partition_point(|rows| rows.range.end <= band.q_range.start);
            band.shift(placed[at].start as i64 - placed[at].range.start as i64, 0)
        };
        let mut bands: Vec<Band> = bands.into_iter().map(to_buffer).collect();
        bands.sort_unstable();
        let (q_rows, area) = (q_ranges.iter().map(Range::len).sum(), bands.iter().map(Band::area).sum());
        HostedWork { part, q_ranges, q_rows, bands: bands.into(), area }
    });
    (stays, hosts.collect())
}

/// The part of a trimmed band in `rows`, trimmed.
fn clip_rows(band: &Band, rows: Range) -> Option<Band> {
    (!rows.is_empty()).then(|| band.clip(&rows, &band.k_range).trim()).flatten()
}

/// Cuts a band of global rows and columns where the columns' owner changes, and gives each host its own.
fn give(band: &Band, k_runs: &Runs, hosts: &RowHosts, hosted: &mut [Vec<Band>]) {
    for run in k_runs.overlapping(&band.k_range).iter().filter(|run| hosts.has(run.rank)) {
        if let Some(piece) = band.clip(&band.q_range, &run.range).trim() {
            let to_local = run.local_start as i64 - run.range.start as i64;
            push_fused(&mut hosted[run.rank as usize], piece.shift(0, to_local));
        }
    }
}

/// Leaves the part of a band of local `rows` whose keys belong to none of the hosts.
fn keep(band: &Band, rows: Range, k_runs: &Runs, hosts: &RowHosts, stays: &mut Vec<Band>) {
    let mut kept = Range::new(band.k_range.start, band.k_range.start);
    let mut leave = |keys: Range| stays.extend(band.clip(&rows, &keys).trim());
    for run in k_runs.overlapping(&band.k_range) {
        match hosts.has(run.rank) {
            false => kept.end = run.range.end,
            true => {
                leave(kept);
                kept = Range::new(run.range.end, run.range.end);
            }
        }
    }
    leave(kept);
}

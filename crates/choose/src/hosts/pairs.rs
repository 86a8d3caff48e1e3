//! Query offload of some keys of a row: what each pair of a rank and an owner of keys gains by itself.
//!
//! A key row has to be fetched unless the owner hosts all rows of a rank that see it, so a rank's pieces are looked at widest first, by the keys
//! of that owner that they see.

use counterpoint_mask::{Band, Range};
use counterpoint_plan::{AttentionSpec, Division, HostedRows, RowHosts};

use super::proposals::{Cuts, Prices};
use crate::config::{PlanConfig, QueryExchange};

/// More pieces of a rank's rows, each for an owner of keys that it sees, are not looked at: a fraction of a second on one core.
const MOST_PARTS: usize = 1 << 18;

/// Above the mean by so much a host computes at most, where load counts.
const MOST_LOAD: f64 = 1.05;

/// Ways to have some owners of keys compute for rows that are worth a look: what moves the fewest bytes, and what does so while no rank computes
/// much more than the mean. `division` has no offloaded row.
pub(super) fn proposals(
    division: &Division,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> Vec<Vec<Vec<HostedRows>>> {
    let most_loads: &[f64] = match config.query_exchange {
        QueryExchange::Never => return Vec::new(),
        QueryExchange::FewestBytes => &[f64::INFINITY],
        QueryExchange::Auto => &[f64::INFINITY, MOST_LOAD],
    };
    let prices = Prices::new(spec, &config.cost);
    let Some(ranks) = of_ranks(division, &prices) else { return Vec::new() };
    let mut found: Vec<Vec<Vec<HostedRows>>> = Vec::new();
    for &most_load in most_loads {
        let hosted = choose(&ranks, most_load);
        if hosted.iter().any(|rows| !rows.is_empty()) && !found.contains(&hosted) {
            found.push(hosted);
        }
    }
    found
}

/// A rank's rows, and what owners of their keys could compute.
struct RankPairs {
    /// Rows of pieces.
    rows: Vec<Range>,
    /// Pairs that it computes.
    area: f64,
    /// With owners that are worth a look.
    pairs: Vec<Pair>,
}

/// What an owner of keys could compute for a rank.
struct Pair {
    owner: usize,
    /// Pieces that are wide enough, widest first.
    candidates: Vec<usize>,
    /// With `0 ..` of these hosted.
    prefixes: Vec<Prefix>,
}

#[derive(Clone, Copy)]
struct Prefix {
    /// Bytes between the two.
    bytes: f64,
    /// Pairs that the owner computes.
    area: f64,
}

/// What a piece sees of an owner's keys.
#[derive(Clone)]
struct Part {
    piece: usize,
    /// Global key rows.
    keys: Vec<Range>,
    width: usize,
    area: u64,
}

/// `None` where there is nothing to gain, or too much to look at.
fn of_ranks(division: &Division, prices: &Prices) -> Option<Vec<RankPairs>> {
    let (work, owners) = (division.work(), division.owners());
    let mut parts_left = MOST_PARTS;
    let mut ranks = Vec::with_capacity(work.len());
    for (rank, bands) in work.iter().enumerate() {
        let area = bands.iter().map(Band::area).sum::<u64>() as f64;
        let Some(cuts) = Cuts::of(bands, owners.q_dispatch(), rank, prices) else {
            ranks.push(RankPairs { rows: Vec::new(), area, pairs: Vec::new() });
            continue;
        };
        let by_owner = parts(division, rank, &cuts, &mut parts_left)?;
        let rows: Vec<Range> = (0..cuts.len()).map(|piece| cuts.rows(piece)).collect();
        let pair = |(owner, parts): (usize, Vec<Part>)| pair(owner, parts, &rows, prices);
        let pairs = by_owner.into_iter().enumerate().filter_map(pair).collect();
        ranks.push(RankPairs { rows, area, pairs });
    }
    ranks.iter().any(|rank| !rank.pairs.is_empty()).then_some(ranks)
}

/// By owner, what the pieces of a rank see of its keys, by piece. `None` where there is more than may be looked at.
fn parts(division: &Division, rank: usize, cuts: &Cuts, parts_left: &mut usize) -> Option<Vec<Vec<Part>>> {
    let mut by_owner: Vec<Vec<Part>> = vec![Vec::new(); division.work().len()];
    let mut of_piece: Vec<Vec<(usize, Range, u64)>> = vec![Vec::new(); cuts.len()];
    for band in &division.work()[rank] {
        for piece in cuts.crossed(band) {
            let Some(here) = band.clip(&cuts.rows(piece), &band.k_range).trim() else { continue };
            for run in division.owners().k_runs().overlapping(&here.k_range) {
                if run.rank as usize == rank {
                    continue;
                }
                if let Some(part) = here.clip(&here.q_range, &run.range).trim() {
                    *parts_left = parts_left.checked_sub(1)?;
                    of_piece[piece].push((run.rank as usize, part.k_range, part.area()));
                }
            }
        }
    }
    for (piece, mut seen) in of_piece.into_iter().enumerate() {
        seen.sort_unstable_by_key(|(owner, keys, _)| (*owner, keys.start));
        for same in seen.chunk_by(|a, b| a.0 == b.0) {
            let keys = Range::merged(same.iter().map(|(_, keys, _)| *keys).collect());
            let (width, area) = (keys.iter().map(Range::len).sum(), same.iter().map(|(.., area)| area).sum());
            by_owner[same[0].0].push(Part { piece, keys, width, area });
        }
    }
    Some(by_owner)
}

/// What hosting gains, where it may.
fn pair(owner: usize, parts: Vec<Part>, rows: &[Range], prices: &Prices) -> Option<Pair> {
    let is_wide = |part: &Part| prices.is_wide(rows[part.piece].len(), part.width);
    let (mut candidates, others): (Vec<Part>, Vec<Part>) = parts.into_iter().partition(is_wide);
    if candidates.is_empty() {
        return None;
    }
    candidates.sort_by_key(|part| (std::cmp::Reverse(part.width), part.piece));
    let count = |ranges: &[Range]| ranges.iter().map(Range::len).sum::<usize>();
    // Keys that a candidate sees and no later one does, nor a piece that is none.
    let mut seen = Range::merged(others.into_iter().flat_map(|part| part.keys).collect());
    let mut fetched = count(&seen);
    let mut only: Vec<usize> = Vec::with_capacity(candidates.len());
    for part in candidates.iter().rev() {
        let new = count(&Range::without(&part.keys, &seen));
        only.push(new);
        fetched += new;
        seen = Range::merged(seen.into_iter().chain(part.keys.iter().copied()).collect());
    }
    let (mut hosted_rows, mut area) = (0, 0);
    let mut prefixes = vec![Prefix { bytes: fetched as f64 * prices.key_bytes, area: 0.0 }];
    for (part, only) in candidates.iter().zip(only.into_iter().rev()) {
        fetched -= only;
        hosted_rows += rows[part.piece].len();
        area += part.area;
        let bytes = fetched as f64 * prices.key_bytes + hosted_rows as f64 * prices.query_bytes;
        prefixes.push(Prefix { bytes, area: area as f64 });
    }
    let gains = prefixes.iter().any(|prefix| prefix.bytes < prefixes[0].bytes);
    let candidates = candidates.into_iter().map(|part| part.piece).collect();
    gains.then_some(Pair { owner, candidates, prefixes })
}

/// Takes pairs, those that save the most bytes for what they move first, as far as no host computes more than `most_load` of the mean.
fn choose(ranks: &[RankPairs], most_load: f64) -> Vec<Vec<HostedRows>> {
    let mean = ranks.iter().map(|rank| rank.area).sum::<f64>() / ranks.len() as f64;
    let mut loads: Vec<f64> = ranks.iter().map(|rank| rank.area).collect();
    let best = |pair: &Pair, room: f64| -> usize {
        let fits = pair.prefixes.iter().enumerate().filter(|(_, prefix)| prefix.area <= room);
        fits.min_by(|a, b| a.1.bytes.total_cmp(&b.1.bytes)).map_or(0, |(count, _)| count)
    };
    let saved_per_area = |pair: &Pair| {
        let prefix = pair.prefixes[best(pair, f64::INFINITY)];
        (pair.prefixes[0].bytes - prefix.bytes) / prefix.area.max(1.0)
    };
    let mut order: Vec<(f64, usize, usize)> = Vec::new();
    for (rank, of_rank) in ranks.iter().enumerate() {
        order.extend(of_rank.pairs.iter().enumerate().map(|(at, pair)| (saved_per_area(pair), rank, at)));
    }
    order.sort_by(|a, b| b.0.total_cmp(&a.0).then((a.1, a.2).cmp(&(b.1, b.2))));
    let mut hosts: Vec<Vec<Vec<u32>>> = ranks.iter().map(|rank| vec![Vec::new(); rank.rows.len()]).collect();
    for (_, rank, at) in order {
        let pair = &ranks[rank].pairs[at];
        let count = best(pair, most_load * mean - loads[pair.owner]);
        loads[pair.owner] += pair.prefixes[count].area;
        loads[rank] -= pair.prefixes[count].area;
        pair.candidates[..count].iter().for_each(|&piece| hosts[rank][piece].push(pair.owner as u32));
    }
    let of_rank = |(rank, hosts): (&RankPairs, Vec<Vec<u32>>)| {
        let mut hosted: Vec<HostedRows> = Vec::new();
        for (&rows, mut by) in rank.rows.iter().zip(hosts) {
            if by.is_empty() {
                continue;
            }
            by.sort_unstable();
            let by = RowHosts::These(by);
            match hosted.last_mut() {
                Some(last) if last.rows.end == rows.start && last.hosts == by => last.rows.end = rows.end,
                _ => hosted.push(HostedRows { rows, hosts: by }),
            }
        }
        hosted
    };
    ranks.iter().zip(hosts).map(of_rank).collect()
}

//! Query offload: which query rows are worth sending to the keys that they see.

use counterpoint_cost::CostModel;
use counterpoint_mask::{Band, Range};
use counterpoint_plan::{AttentionSpec, Dispatch, Division, OffloadedRows, Runs};

use crate::config::{PlanConfig, QueryExchange};

/// Pieces of a rank's rows that may be offloaded, widest first. Those that are not as wide gain less, and each is a step.
const MOST_PIECES: usize = 64;

/// Choices of rows to offload that are worth a look; none where nothing is to be gained. The first one moves the
/// fewest bytes, or there is one only. `division` has no offloaded row.
///
/// A rank's rows are looked at in pieces, from those that see the most keys on: a key row has to be fetched unless all pieces
/// that see it are offloaded, so pieces that see less do not pay unless those that see more are offloaded as well.
pub(super) fn proposals(
    division: &Division,
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> Vec<OffloadedRows> {
    let (work, owners) = (division.work(), division.owners());
    let (q_dispatch, k_dispatch, k_runs) = (owners.q_dispatch(), owners.k_dispatch(), owners.k_runs());
    if config.query_exchange == QueryExchange::Never || work.len() == 1 {
        return Vec::new();
    }
    let prices = Prices::new(spec, &config.cost);
    let areas: Vec<u64> = work.iter().map(|bands| bands.iter().map(Band::area).sum()).collect();
    let mean_area = areas.iter().sum::<u64>() as f64 / areas.len() as f64;
    let measures: &[Measure] = match config.query_exchange {
        QueryExchange::FewestBytes => &[Measure::Bytes],
        _ => &Measure::ALL,
    };
    let mut found = vec![vec![Vec::new(); work.len()]; measures.len()];
    let mut owners = Owners::new(k_runs, work.len());
    for (rank, bands) in work.iter().enumerate() {
        let pieces = wide_pieces(bands, q_dispatch, rank, &prices);
        if pieces.candidates.is_empty() {
            continue;
        }
        let own = k_dispatch.ranges(rank);
        let prefixes = prefixes(&pieces, &own, rank, &mut owners, &prices, areas[rank] as f64);
        for (measure, offloaded) in measures.iter().zip(&mut found) {
            let cost = |prefix: &Prefix| measure.cost(prefix, &prices, mean_area);
            let best = (1..prefixes.len()).fold(0, |best, index| {
                if cost(&prefixes[index]) < cost(&prefixes[best]) { index } else { best }
            });
            let rows = pieces.candidates[..best].iter().map(|piece| piece.rows).collect();
            offloaded[rank] = Range::merged(rows);
        }
    }
    let mut distinct: Vec<OffloadedRows> = Vec::new();
    for offloaded in found {
        if offloaded.iter().any(|rows| !rows.is_empty()) && !distinct.contains(&offloaded) {
            distinct.push(offloaded);
        }
    }
    distinct
}

/// What moving and computing costs in a forward and a backward together.
pub(super) struct Prices {
    /// Bytes that a key row fetched makes travel.
    pub(super) key_bytes: f64,
    /// Bytes that a query row makes travel for every host.
    pub(super) query_bytes: f64,
    seconds_per_byte: f64,
    seconds_per_pair: f64,
}

impl Prices {
    pub(super) fn new(spec: &AttentionSpec, cost: &CostModel) -> Self {
        let forward = spec.flops_forward(1) / cost.forward_flops_per_second;
        let backward = spec.flops_backward(1) / cost.backward_flops_per_second;
        Self {
            key_bytes: spec.exchanged_key_bytes() as f64,
            query_bytes: spec.exchanged_query_bytes() as f64,
            seconds_per_byte: 1.0 / cost.link.bytes_per_second,
            seconds_per_pair: forward + backward,
        }
    }

    /// Whether so many key rows are more bytes than so many query rows that go to one host.
    pub(super) fn is_wide(&self, rows: usize, keys: usize) -> bool {
        keys as f64 * self.key_bytes > rows as f64 * self.query_bytes
    }
}

/// What a rank's choice is measured by.
#[derive(Clone, Copy)]
enum Measure {
    /// Bytes alone.
    Bytes,
    /// Time on the link, and that of computing more than the mean.
    Sum,
    /// Time on the link or of computing, whichever is longer.
    Longer,
}

impl Measure {
    const ALL: [Self; 3] = [Self::Bytes, Self::Sum, Self::Longer];

    fn cost(self, prefix: &Prefix, prices: &Prices, mean_area: f64) -> f64 {
        let link = prefix.bytes * prices.seconds_per_byte;
        match self {
            Self::Bytes => prefix.bytes,
            Self::Sum => link + (prefix.area - mean_area).max(0.0) * prices.seconds_per_pair,
            Self::Longer => link.max(prefix.area * prices.seconds_per_pair),
        }
    }
}

/// Neighbouring rows of one rank.
struct Piece {
    /// Local rows.
    rows: Range,
    /// Global key rows that they see, merged and ascending.
    keys: Vec<Range>,
    area: u64,
}

impl Piece {
    fn width(&self) -> usize {
        self.keys.iter().map(Range::len).sum()
    }
}

/// A rank's rows.
struct Pieces {
    /// Those that may be offloaded, widest first.
    candidates: Vec<Piece>,
    /// Key rows that the others see, merged and ascending.
    others: Vec<Range>,
}

/// A rank's rows in chunks, cut also where the work of wide bands begins and ends.
pub(super) struct Cuts {
    ends: Vec<usize>,
}

impl Cuts {
    /// Where some piece sees enough keys to be worth moving to at least one host; most masks have none, which is soon seen.
    pub(super) fn of(bands: &[Band], q_dispatch: &Dispatch, rank: usize, prices: &Prices) -> Option<Self> {
        let mut local = 0;
        let chunks = q_dispatch.chunks(rank).iter().map(|&chunk| {
            local += q_dispatch.chunk_range(chunk as usize).len();
            local
        });
        let mut ends: Vec<usize> = std::iter::once(0).chain(chunks).collect();
        let chunk_ends = ends.len();
        for band in bands {
            if prices.is_wide(band.q_range.len().min(q_dispatch.chunk_size()), band.k_range.len()) {
                ends.extend([band.q_range.start, band.q_range.end]);
            }
        }
        if ends.len() > 8 * chunk_ends + MOST_PIECES {
            ends.truncate(chunk_ends);
        }
        ends.sort_unstable();
        ends.dedup();
        let cuts = Self { ends };
        let mut widths = vec![0; cuts.len()];
        bands
            .iter()
            .for_each(|band| cuts.crossed(band).for_each(|piece| widths[piece] += band.k_range.len()));
        let is_wide = |(piece, &keys): (usize, &usize)| prices.is_wide(cuts.rows(piece).len(), keys);
        widths.iter().enumerate().any(is_wide).then_some(cuts)
    }

    /// Number of pieces.
    pub(super) fn len(&self) -> usize {
        self.ends.len() - 1
    }

    /// Local rows of a piece.
    pub(super) fn rows(&self, piece: usize) -> Range {
        Range::new(self.ends[piece], self.ends[piece + 1])
    }

    /// The pieces that hold rows of a band.
    pub(super) fn crossed(&self, band: &Band) -> std::ops::Range<usize> {
        let first = self.ends.partition_point(|&end| end <= band.q_range.start) - 1;
        first..self.ends.partition_point(|&end| end < band.q_range.end)
    }
}

/// A rank's pieces. Candidates see enough keys to be worth moving to at least one host.
fn wide_pieces(bands: &[Band], q_dispatch: &Dispatch, rank: usize, prices: &Prices) -> Pieces {
    let Some(cuts) = Cuts::of(bands, q_dispatch, rank, prices) else {
        return Pieces { candidates: Vec::new(), others: Vec::new() };
    };
    let mut pieces: Vec<Piece> =
        (0..cuts.len()).map(|piece| Piece { rows: cuts.rows(piece), keys: Vec::new(), area: 0 }).collect();
    for band in bands {
        for piece in &mut pieces[cuts.crossed(band)] {
            if let Some(part) = band.clip(&piece.rows, &band.k_range).trim() {
                piece.keys.push(part.k_range);
                piece.area += part.area();
            }
        }
    }
    pieces.iter_mut().for_each(|piece| piece.keys = Range::merged(std::mem::take(&mut piece.keys)));
    let (mut candidates, mut others): (Vec<Piece>, Vec<Piece>) =
        pieces.into_iter().partition(|piece| prices.is_wide(piece.rows.len(), piece.width()));
    candidates.sort_by_key(|piece| (std::cmp::Reverse(piece.width()), piece.rows.start));
    others.extend(candidates.drain(MOST_PIECES.min(candidates.len())..));
    let others = others.into_iter().flat_map(|piece| piece.keys).collect();
    Pieces { candidates, others: Range::merged(others) }
}

/// What is left of a rank's traffic and work when its first few candidates are offloaded.
struct Prefix {
    /// That it receives and sends for its own rows.
    bytes: f64,
    /// Unmasked pairs that it computes of its own rows.
    area: f64,
}

/// For `0 ..` candidates offloaded; as far as it can pay.
fn prefixes(
    pieces: &Pieces,
    own: &[Range],
    rank: usize,
    owners: &mut Owners<'_>,
    prices: &Prices,
    area: f64,
) -> Vec<Prefix> {
    let count = |ranges: &[Range]| ranges.iter().map(Range::len).sum::<usize>();
    // Key rows of others that a candidate sees and no later one does, nor a row that is no candidate.
    let mut seen = pieces.others.clone();
    let mut fetched = count(&Range::without(&seen, own));
    let mut only: Vec<usize> = Vec::with_capacity(pieces.candidates.len());
    for piece in pieces.candidates.iter().rev() {
        let new = Range::without(&Range::without(&piece.keys, &seen), own);
        only.push(count(&new));
        fetched += count(&new);
        seen = Range::merged(seen.into_iter().chain(piece.keys.iter().copied()).collect());
    }
    only.reverse();
    let mut prefixes = vec![Prefix { bytes: fetched as f64 * prices.key_bytes, area }];
    let most_bytes = prefixes[0].bytes + area * prices.seconds_per_pair / prices.seconds_per_byte;
    let (mut query_bytes, mut left) = (0.0, area);
    for (piece, only) in pieces.candidates.iter().zip(only) {
        query_bytes += (piece.rows.len() * owners.others_of(&piece.keys, rank)) as f64 * prices.query_bytes;
        if query_bytes >= most_bytes {
            break;
        }
        fetched -= only;
        let remote = count(&Range::without(&piece.keys, own)) as f64 / piece.width().max(1) as f64;
        left -= piece.area as f64 * remote;
        prefixes.push(Prefix { bytes: fetched as f64 * prices.key_bytes + query_bytes, area: left });
    }
    prefixes
}

/// Counts the owners of key rows.
struct Owners<'a> {
    k_runs: &'a Runs,
    /// The last count that met each rank.
    met: Vec<u32>,
    counts: u32,
}

impl<'a> Owners<'a> {
    fn new(k_runs: &'a Runs, ranks: usize) -> Self {
        Self { k_runs, met: vec![0; ranks], counts: 0 }
    }

    /// The number of ranks other than `rank` that own some of `keys`.
    fn others_of(&mut self, keys: &[Range], rank: usize) -> usize {
        self.counts += 1;
        self.met[rank] = self.counts;
        let mut others = 0;
        for run in keys.iter().flat_map(|keys| self.k_runs.overlapping(keys)) {
            let met = &mut self.met[run.rank as usize];
            if *met != self.counts {
                *met = self.counts;
                others += 1;
                if others + 1 == self.met.len() {
                    break;
                }
            }
        }
        others
    }
}

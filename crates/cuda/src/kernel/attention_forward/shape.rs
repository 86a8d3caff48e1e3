//! Tiles of the Hopper attention forward: block sizes, packed query heads and split tiles, chosen by an estimate of the time.

use serde::{Deserialize, Serialize};

use counterpoint_tiles::{
    HeadGroups, Tile, TileDirection, TileOrder, TilePartials, TilePlacement, TileSchedule,
    TileScheduleConfig, TileScheduleError, TileSplit,
};

use crate::kernel::AttentionProblem;

/// Padded head dimensions (of q and k, of v) that there are shapes for.
pub(super) const HEAD_DIMS: [(u32, u32); 6] =
    [(64, 64), (96, 96), (128, 128), (192, 128), (192, 192), (256, 256)];

/// How many query heads of one key head may share a tile. Only divisors of the heads per key head come into question.
pub(super) const PACKS: [u32; 2] = [1, 8];

/// `Loop` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) enum Loop {
    Uniform,
    Interior,
}

/// The work of a CTA: `rows` rows of `pack` heads, against blocks of `block` keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub(super) struct ForwardShape {
    pub head_dim: u32,
    pub head_dim_v: u32,
    pub rows: u32,
    pub block: u32,
    pub pack: u32,
    /// Tiles whose query rows are in shared memory at once.
    pub query_slots: u32,
    /// How consumers go through the steps, one for each block.
    pub steps: Loop,
    /// CTAs of a cluster, which share a tile, `rows` rows each, and read its blocks of keys and values once for all of them.
    pub ctas: u32,
}

impl ForwardShape {
    /// The shapes with the largest tiles and blocks that registers and shared memory hold: the fewest instructions for a key. At head 64
    /// three warpgroups overlap better than two, and two with longer blocks are for those whose tiles would be too few.
    pub(super) fn large((head_dim, head_dim_v): (u32, u32), pack: u32) -> impl Iterator<Item = Self> {
        let shapes: &[(u32, u32, u32, Loop)] = match head_dim {
            64 if pack == 1 => &[(192, 128, 2, Loop::Interior), (128, 208, 2, Loop::Interior)],
            64 => &[(192, 128, 2, Loop::Interior)],
            96 | 128 => &[(128, 176, 1, Loop::Uniform)],
            192 if head_dim_v == 128 => &[(128, 128, 1, Loop::Uniform)],
            192 => &[(128, 112, 1, Loop::Uniform)],
            _ => &[(128, 80, 1, Loop::Uniform)],
        };
        shapes.iter().map(move |&(rows, block, query_slots, steps)| Self {
            head_dim,
            head_dim_v,
            rows,
            block,
            pack,
            query_slots,
            steps,
            ctas: 1,
        })
    }

    /// The shape with each loop that its consumers may have. Where there are two, tiles and blocks are the same for both.
    pub(super) fn loops(self) -> impl Iterator<Item = Self> {
        let both = (self.head_dim, self.head_dim_v, self.block) == (128, 128, 176);
        [self].into_iter().chain(both.then_some(Self { steps: Loop::Interior, ..self }))
    }

    /// That of two CTAs, for rows of very many keys.
    pub(super) fn clusters(dims: (u32, u32)) -> impl Iterator<Item = Self> {
        let interior =
            Self::large(dims, 1).flat_map(Self::loops).filter(|shape| shape.steps == Loop::Interior);
        interior.filter(|shape| shape.head_dim == 128).map(|shape| Self { ctas: 2, ..shape })
    }

    /// The shape whose blocks divide 128 keys, the unit in which stages are cut: a row's blocks are then the same for any
    /// number of stages. They also waste less at the edges of a mask, and the next tile's queries arrive early.
    pub(super) fn small((head_dim, head_dim_v): (u32, u32), pack: u32) -> Self {
        let (rows, block, query_slots) = match head_dim {
            64 | 96 | 128 => (128, 128, 2),
            192 => (128, 64, 2),
            _ => (128, 64, 1),
        };
        Self { head_dim, head_dim_v, rows, block, pack, query_slots, steps: Loop::Uniform, ctas: 1 }
    }

    /// Whether a stage may have it.
    pub(super) fn divides_stages(self) -> bool {
        self == Self::small((self.head_dim, self.head_dim_v), self.pack)
    }

    /// Warpgroups that compute; one more loads.
    const fn consumers(self) -> u32 {
        self.rows / 64
    }

    pub(super) const fn threads(self) -> u32 {
        128 * (self.consumers() + 1)
    }

    /// Tokens that a tile owns at most.
    pub(super) const fn tokens(self) -> u32 {
        self.rows / self.pack * self.ctas
    }

    /// Dynamic shared memory of a CTA: `AttentionForwardShared`, and what aligning it to 1024 bytes may take.
    pub(super) const fn shared_bytes(self) -> u32 {
        let key_row = 128 * self.head_dim.div_ceil(64);
        let value_row = 128 * self.head_dim_v.div_ceil(64);
        let tensors = self.query_slots * self.rows * key_row + 2 * self.block * (key_row + value_row);
        // Steps, items and barriers are far smaller than the rounding up of the whole.
        tensors + 1024 + 1024
    }

    /// Bytes of a partial result: a tile's rows and their lse, of all heads.
    fn partial_bytes(self, problem: &AttentionProblem) -> usize {
        self.tokens() as usize * problem.heads_q * (problem.head_dim_v + 1) * size_of::<f32>()
    }

    /// What a tile schedule for it is made with.
    fn config(self, problem: &AttentionProblem) -> TileScheduleConfig {
        let blocks = if problem.deterministic { TilePlacement::Aligned } else { TilePlacement::Tight };
        TileScheduleConfig {
            direction: TileDirection::Forward,
            tile_rows: self.tokens() as usize,
            block: self.block as usize,
            tiles: TilePlacement::Tight,
            blocks,
            order: TileOrder::Work,
            split: None,
            partials: TilePartials::OfSplit,
            arrival: (problem.rows_arriving > 0).then(|| problem.rows_k - problem.rows_arriving),
        }
    }

    /// An estimate of the time that a schedule takes on `workers` CTAs, in keys that one CTA computes with 128 rows. The constants
    /// are fitted to an H200's times for the masks of the benchmark.
    fn cost(self, schedule: &TileSchedule, heads: usize, workers: u32, may_split: bool) -> f64 {
        // What a block costs besides its keys, a bounded block on top of that, and a tile. Interior blocks cost 2 % less where they have
        // a loop body of their own, the others 5 % more. At head 64 a third warpgroup fills the gaps that two leave: its blocks cost no
        // more than their keys. With one head a tile that is faster on documents and 1 % slower on long windows, with eight on both.
        let (per_block, bounded, tile) = match self.steps {
            Loop::Uniform => (24.0, 12.0, 60.0),
            Loop::Interior if self.head_dim == 64 && self.rows == 192 => (0.0, 24.0, 120.0),
            Loop::Interior if self.head_dim == 64 => (16.0, 60.0, 220.0),
            Loop::Interior => (20.0, 26.0, 80.0),
        };
        let statistics = schedule.statistics();
        let rows = f64::from(self.rows) / 128.0;
        let block = rows * (f64::from(self.block) + per_block);
        let all = statistics.blocks as f64 * block
            + statistics.bounded_blocks as f64 * rows * bounded
            + statistics.tiles as f64 * tile;
        let heads = heads as f64 / f64::from(self.pack);
        let longest = statistics.longest_tile as f64 * block + tile;
        // Whoever finishes last is half an average tile behind.
        let behind = all / statistics.tiles.max(1) as f64 / 2.0;
        let workers = f64::from(workers.max(1));
        let share = all * heads / workers;
        // Tiles that are too few for all are split.
        if may_split && longest > 2.0 * share && statistics.longest_tile >= 16 {
            return share;
        }
        // Somebody has as many tiles as there are rounds, be they the shortest: 192 rows make fewer and longer ones than 128.
        let rounds = (statistics.tiles as f64 * heads / workers).ceil();
        let shortest = schedule.tiles().iter().map(|tile| tile.blocks).min().unwrap_or(0);
        let whole_rounds = rounds * (f64::from(shortest) * block + tile);
        (share + behind).max(longest).max(whole_rounds)
    }
}

/// Which shapes a launch may choose from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Freedom {
    /// All.
    Any,
    /// Small blocks: a stage.
    Small,
    /// Small blocks and one head a tile.
    SmallUnpacked,
}

/// What becomes of the tiles of a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum TileEnds {
    /// States, of whole tiles.
    States,
    /// Results; those of split tiles are merged.
    Results,
    /// All are merged.
    Partials,
}

/// The shape for a problem, and the schedule to follow: of all shapes in question the one whose estimate is least. Tiles are split
/// along the keys where there are too few of them to keep `workers` busy and `ends` allows it.
pub(super) fn choose(
    problem: &AttentionProblem,
    dims: (u32, u32),
    freedom: Freedom,
    workers: u32,
    ends: TileEnds,
) -> Result<(ForwardShape, TileSchedule), TileScheduleError> {
    let heads_per_key = (problem.heads_q / problem.heads_kv) as u32;
    // Packing more heads wastes less at the edges of a mask, so the largest pack stands for all.
    let largest = PACKS.into_iter().rev().find(|&pack| heads_per_key.is_multiple_of(pack)).unwrap_or(1);
    let packs = match freedom {
        Freedom::SmallUnpacked => vec![1],
        _ if largest == 1 => vec![1],
        _ => vec![1, largest],
    };
    let mut shapes = Vec::new();
    for pack in packs {
        if freedom == Freedom::Any && !problem.deterministic {
            shapes.extend(ForwardShape::large(dims, pack));
        }
        shapes.push(ForwardShape::small(dims, pack));
    }
    shapes.dedup();
    // No ranks with GPUs of their own have run clusters yet, so where rows arrive there are none.
    if freedom == Freedom::Any && !problem.deterministic && problem.rows_arriving == 0 && workers > 1 {
        let all = problem.rows_k;
        shapes.extend(ForwardShape::clusters(dims).filter(|_| key_bytes(problem, all) >= READ_AGAIN));
    }
    let mut best: Option<(f64, ForwardShape, TileSchedule)> = None;
    for shape in shapes {
        let schedule =
            TileSchedule::new(&problem.bands, problem.rows_q, problem.rows_k, &shape.config(problem))?;
        let may_split = ends != TileEnds::States && !problem.deterministic;
        let cost = |shape: &ForwardShape| shape.cost(&schedule, problem.heads_q, workers, may_split);
        if shape.ctas > 1 {
            // Nothing that a cost in keys knows of: what is saved is the cache's work, and with it power. Not where the end of a launch counts.
            const ROUNDS: usize = 8;
            let statistics = schedule.statistics();
            let has_rounds = statistics.tiles * problem.heads_q >= ROUNDS * (workers / shape.ctas) as usize;
            if has_rounds && key_bytes(problem, statistics.longest_tile * shape.block as usize) >= READ_AGAIN
            {
                best = Some((0.0, shape, schedule));
            }
            continue;
        }
        let shape = shape.loops().min_by(|a, b| cost(a).total_cmp(&cost(b))).unwrap_or(shape);
        let cost = cost(&shape);
        if best.as_ref().is_none_or(|(least, ..)| cost < *least) {
            best = Some((cost, shape, schedule));
        }
    }
    let Some((_, shape, schedule)) = best else { unreachable!("there is always a small shape") };
    let partials = match ends {
        TileEnds::States => return Ok((shape, schedule)),
        TileEnds::Results if problem.deterministic => return Ok((shape, schedule)),
        TileEnds::Results => TilePartials::OfSplit,
        TileEnds::Partials => TilePartials::OfAll,
    };
    let heads = problem.heads_q / shape.pack as usize;
    // All partial results are there anyway.
    let last_round_partials = match ends {
        TileEnds::Partials => usize::MAX,
        _ => problem_bytes(problem) / 100 / shape.partial_bytes(problem),
    };
    let workers = (workers / shape.ctas).max(1) as usize;
    let split = TileSplit { workers, heads, last_round_partials };
    let split = (!problem.deterministic).then_some(split);
    let config = TileScheduleConfig { split, partials, ..shape.config(problem) };
    Ok((shape, TileSchedule::new(&problem.bands, problem.rows_q, problem.rows_k, &config)?))
}

/// From how many bytes of keys and values on the tiles of a head read them from memory again, which CTAs of a cluster do once. One H200,
/// 64:8 and 16:16 heads: at 16.8 MB clusters are 1.01 to 1.03 of the speed of single CTAs, at 8.4 MB 0.99 to 1.00, at 4.2 MB 0.98 to 0.99.
const READ_AGAIN: usize = 12 << 20;

/// Bytes of so many keys and values of a head.
fn key_bytes(problem: &AttentionProblem, keys: usize) -> usize {
    keys * (problem.head_dim + problem.head_dim_v) * problem.element.bytes()
}

/// Bytes of q, k, v and out.
fn problem_bytes(problem: &AttentionProblem) -> usize {
    let AttentionProblem { rows_q, rows_k, heads_q, heads_kv, head_dim, head_dim_v, element, .. } = *problem;
    (rows_q * heads_q + rows_k * heads_kv) * (head_dim + head_dim_v) * element.bytes()
}

/// Which heads some tiles are worked on together for, so that their keys and values stay in the second level cache.
pub(super) fn head_groups(
    problem: &AttentionProblem,
    shape: ForwardShape,
    schedule: &TileSchedule,
    tiles: &[Tile],
    workers: u32,
) -> HeadGroups {
    /// An eighth of an H200's cache. 12 MB are the same on dense masks and 1 to 3 % slower on documents, 24 MB 1 % slower on
    /// dense masks, 40 MB 2 %.
    const CACHED_BYTES: usize = 6 << 20;
    let AttentionProblem { heads_q, heads_kv, head_dim, head_dim_v, element, .. } = *problem;
    let row_bytes = (head_dim + head_dim_v) * element.bytes();
    let heads_per_key = heads_q / shape.pack as usize / heads_kv;
    let workers = (workers / shape.ctas).max(1) as usize;
    schedule.head_groups(tiles, heads_kv, heads_per_key, CACHED_BYTES / row_bytes, workers)
}

#[cfg(test)]
mod tests;

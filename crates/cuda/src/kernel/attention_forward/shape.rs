//! Tiles of the Hopper attention forward: block sizes, packed query heads and split tiles, chosen by an estimate of the time.

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
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Loop {
    Uniform,
    Interior,
}

/// The work of a CTA: `rows` rows of `pack` heads, against blocks of `block` keys.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
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
        })
    }

    /// The shape with each loop that its consumers may have. Where there are two, tiles and blocks are the same for both.
    pub(super) fn loops(self) -> impl Iterator<Item = Self> {
        let both = (self.head_dim, self.head_dim_v, self.block) == (128, 128, 176);
        [self].into_iter().chain(both.then_some(Self { steps: Loop::Interior, ..self }))
    }

    /// The shape whose blocks divide 128 keys, the unit in which stages are cut: a row's blocks are then the same for any
    /// number of stages. They also waste less at the edges of a mask, and the next tile's queries arrive early.
    pub(super) fn small((head_dim, head_dim_v): (u32, u32), pack: u32) -> Self {
        let (rows, block, query_slots) = match head_dim {
            64 | 96 | 128 => (128, 128, 2),
            192 => (128, 64, 2),
            _ => (128, 64, 1),
        };
        Self { head_dim, head_dim_v, rows, block, pack, query_slots, steps: Loop::Uniform }
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
        self.rows / self.pack
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
    let mut best: Option<(f64, ForwardShape, TileSchedule)> = None;
    for shape in shapes {
        let schedule =
            TileSchedule::new(&problem.bands, problem.rows_q, problem.rows_k, &shape.config(problem))?;
        let may_split = ends != TileEnds::States && !problem.deterministic;
        let cost = |shape: &ForwardShape| shape.cost(&schedule, problem.heads_q, workers, may_split);
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
    let split = TileSplit { workers: workers.max(1) as usize, heads, last_round_partials };
    let split = (!problem.deterministic).then_some(split);
    let config = TileScheduleConfig { split, partials, ..shape.config(problem) };
    Ok((shape, TileSchedule::new(&problem.bands, problem.rows_q, problem.rows_k, &config)?))
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
    schedule.head_groups(tiles, heads_kv, heads_per_key, CACHED_BYTES / row_bytes, workers as usize)
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Mask, Window};

    use super::*;
    use crate::kernel::ElementType;

    fn problem(mask: &str, heads_q: usize, heads_kv: usize) -> AttentionProblem {
        problem_of(mask.parse().unwrap(), heads_q, heads_kv)
    }

    fn problem_of(mask: Mask, heads_q: usize, heads_kv: usize) -> AttentionProblem {
        AttentionProblem {
            bands: mask.bands().collect::<Vec<_>>().into(),
            rows_q: mask.seqlen_q(),
            rows_k: mask.seqlen_k(),
            rows_arriving: 0,
            heads_q,
            heads_kv,
            head_dim: 128,
            head_dim_v: 128,
            element: ElementType::Bf16,
            scale: 0.088,
            softcap: None,
            sm_margin: 0,
            deterministic: false,
        }
    }

    #[test]
    fn shapes_fit_a_multiprocessor() {
        for dims in HEAD_DIMS {
            for shape in PACKS
                .into_iter()
                .flat_map(|pack| ForwardShape::large(dims, pack))
                .chain([ForwardShape::small(dims, 1)])
            {
                assert!(shape.shared_bytes() <= 232_448, "{shape:?}");
                // Blocks of whole instructions, tiles of whole warpgroups.
                assert!(shape.block % 16 == 0 && shape.rows % 64 == 0);
            }
            assert_eq!(128 % ForwardShape::small(dims, 1).block, 0);
        }
    }

    #[test]
    fn long_rows_take_large_blocks_and_short_documents_packed_heads() {
        let shape = |mask, heads_q, heads_kv| {
            let problem = problem(mask, heads_q, heads_kv);
            choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap().0
        };
        assert_eq!(shape("full:8k", 16, 16).block, 176);
        assert_eq!(shape("sliding-window:8k,left=1023,right=0", 16, 16).block, 128);
        let packed = shape("sliding-window:8k,left=1023,right=0", 64, 8);
        assert_eq!((packed.block, packed.pack), (176, 8));
        let documents = shape("varlen-full:lengths=100,60,30,200,10,300,70,50,20,120", 64, 8);
        assert_eq!(documents.pack, 8);
    }

    #[test]
    fn interior_steps_have_a_loop_where_rows_are_long() {
        let chosen = |seqlen: usize, mask: &str, heads: (usize, usize), dim: u32| {
            let documents = || {
                let lengths = DOCUMENTS.iter().find(|lengths| lengths.iter().sum::<usize>() == seqlen);
                Documents::from_lengths(lengths.unwrap().iter().copied()).unwrap()
            };
            let mask = match mask {
                "full" => Mask::full(seqlen),
                "causal" => Mask::causal(seqlen),
                "sw_causal" => {
                    Mask::sliding_window(seqlen, Window { left: Some(1023), right: Some(0), global: 0 })
                }
                "varlen_full" => Mask::full(documents()),
                _ => Mask::causal(documents()),
            };
            let mut problem = problem_of(mask.unwrap(), heads.0, heads.1);
            (problem.head_dim, problem.head_dim_v) = (dim as usize, dim as usize);
            let shape = choose(&problem, (dim, dim), Freedom::Any, 132, TileEnds::Results).unwrap().0;
            (shape.rows, shape.block, shape.pack, shape.steps)
        };
        let (uniform, interior) = (Loop::Uniform, Loop::Interior);
        for mask in ["full", "causal", "sw_causal"] {
            assert_eq!(chosen(2048, mask, (16, 16), 64), (128, 128, 1, uniform), "{mask}");
        }
        for seqlen in [8192, 16384, 32768] {
            for mask in ["full", "causal", "varlen_full", "varlen_causal"] {
                assert_eq!(chosen(seqlen, mask, (16, 16), 64), (192, 128, 1, interior), "{seqlen} {mask}");
            }
            assert_eq!(chosen(seqlen, "sw_causal", (16, 16), 64), (128, 128, 1, uniform), "{seqlen}");
            for mask in ["full", "causal", "sw_causal", "varlen_full", "varlen_causal"] {
                assert_eq!(chosen(seqlen, mask, (64, 8), 64), (192, 128, 8, interior), "{seqlen} {mask}");
            }
        }
        assert_eq!(chosen(16384, "full", (1, 1), 64), (128, 208, 1, interior), "one round of either");
        for seqlen in [8192, 16384] {
            for mask in ["full", "causal"] {
                assert_eq!(chosen(seqlen, mask, (16, 16), 128), (128, 176, 1, interior), "{seqlen} {mask}");
            }
            for (mask, pack, steps) in [
                ("full", 1, interior),
                ("causal", 8, interior),
                ("sw_causal", 8, uniform),
                ("varlen_causal", 8, uniform),
            ] {
                assert_eq!(chosen(seqlen, mask, (64, 8), 128), (128, 176, pack, steps), "{seqlen} {mask}");
            }
        }
    }

    #[test]
    fn long_rows_in_many_rounds_have_three_warpgroups_at_head_64() {
        let mut problem = problem("causal:10000", 3, 1);
        let q_range = counterpoint_mask::Range::new(0, 384);
        problem.bands = vec![counterpoint_mask::Band { q_range, diag_max: 9600, ..problem.bands[0] }].into();
        (problem.rows_q, problem.head_dim, problem.head_dim_v) = (384, 64, 64);
        let rows =
            |workers| choose(&problem, (64, 64), Freedom::Any, workers, TileEnds::Results).unwrap().0.rows;
        // Six tiles of 192 rows or nine of 128, on as many multiprocessors.
        assert_eq!((rows(1), rows(9)), (192, 128));
        problem.deterministic = true;
        assert_eq!(choose(&problem, (64, 64), Freedom::Any, 1, TileEnds::Results).unwrap().0.rows, 128);
        (problem.heads_q, problem.deterministic) = (8, false);
        let packed = choose(&problem, (64, 64), Freedom::Any, 1, TileEnds::Results).unwrap().0;
        assert_eq!((packed.rows, packed.pack), (192, 8));
    }

    #[test]
    fn a_loop_of_interior_steps_pays_from_some_blocks_on() {
        for (dim, seqlens) in [(64, [2048, 4096]), (128, [1024, 2048])] {
            let chosen = seqlens.map(|seqlen| {
                let mut problem = problem(&format!("full:{seqlen}"), 16, 16);
                (problem.head_dim, problem.head_dim_v) = (dim as usize, dim as usize);
                choose(&problem, (dim, dim), Freedom::Any, 132, TileEnds::Results).unwrap().0.steps
            });
            assert_eq!(chosen, [Loop::Uniform, Loop::Interior], "{dim}");
        }
    }

    #[test]
    fn few_tiles_are_split_unless_bits_must_not_change() {
        let mut problem = problem("full:16k", 1, 1);
        problem.bands = vec![counterpoint_mask::Band {
            q_range: counterpoint_mask::Range::new(0, 128),
            ..problem.bands[0]
        }]
        .into();
        problem.rows_q = 128;
        assert!(choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap().1.partials() > 1);
        assert_eq!(
            choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::States).unwrap().1.partials(),
            0
        );
        problem.deterministic = true;
        let (shape, schedule) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
        assert_eq!((schedule.partials(), shape.block), (0, 128));
    }

    #[test]
    fn an_incomplete_last_round_is_cut() {
        let gain = |mask: &str, heads_q: usize, heads_kv: usize| {
            let problem = problem(mask, heads_q, heads_kv);
            let (shape, cut) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
            let (_, whole) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::States).unwrap();
            let heads = heads_q / shape.pack as usize;
            let gain = whole.makespan(132, heads) as f64 / cut.makespan(132, heads) as f64 - 1.0;
            (cut.merges().len(), cut.partials(), (1000.0 * gain).round())
        };
        assert_eq!(gain("full:32k", 16, 16), (1, 3, 25.0));
        // Here the lightest tiles fill the last round, or the gain is not worth the memory: at 16k it is 2.4 % for 15 partial results,
        // 6 % of q, k, v and out.
        assert_eq!(gain("full:8k", 64, 8), (0, 0, 0.0));
        for mask in ["full:8k", "full:16k", "causal:8k", "sliding-window:8k,left=1023,right=0", "causal:32k"]
        {
            assert_eq!(gain(mask, 16, 16), (0, 0, 0.0), "{mask}");
        }
    }

    /// The documents of the benchmark, 8k, 16k and 32k tokens.
    const DOCUMENTS: [&[usize]; 3] = [
        &[102, 1003, 419, 356, 130, 895, 108, 1718, 1139, 2048, 81, 87, 27, 43, 24, 5, 1, 3, 2, 1],
        &[
            102, 3051, 419, 2404, 130, 895, 108, 1718, 1139, 2074, 2701, 696, 220, 344, 194, 88, 5, 68, 12,
            9, 5, 2,
        ],
        &[
            2150, 6102, 419, 2404, 2178, 895, 108, 3766, 1139, 8192, 2701, 1393, 440, 344, 389, 88, 51, 7, 1,
            1,
        ],
    ];

    #[test]
    fn partial_results_take_less_than_a_hundredth_of_the_tensors() {
        for lengths in DOCUMENTS {
            let documents = || Documents::from_lengths(lengths.iter().copied()).unwrap();
            let seqlen: usize = lengths.iter().sum();
            let window = Window { left: Some(1023), right: Some(0), global: 0 };
            let masks = [
                Mask::full(seqlen),
                Mask::causal(seqlen),
                Mask::block_causal(seqlen, 2048),
                Mask::sliding_window(seqlen, window),
                Mask::full(documents()),
                Mask::causal(documents()),
                Mask::block_causal(documents(), 2048),
            ];
            for (mask, heads) in
                masks.into_iter().flat_map(|mask| [(mask.clone(), (16, 16)), (mask, (64, 8))])
            {
                let problem = problem_of(mask.unwrap(), heads.0, heads.1);
                let (shape, schedule) =
                    choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
                let workspace = schedule.partials() * shape.partial_bytes(&problem);
                assert!(
                    100 * workspace < problem_bytes(&problem),
                    "{:?} {heads:?}: {workspace}",
                    problem.bands
                );
            }
        }
    }

    #[test]
    fn heads_whose_keys_fit_the_cache_go_together() {
        let groups = |mask: &str, heads_q: usize, heads_kv: usize| {
            let problem = problem(mask, heads_q, heads_kv);
            let (shape, schedule) =
                choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
            let HeadGroups { tiles, heads } = head_groups(&problem, shape, &schedule, schedule.tiles(), 132);
            (tiles, schedule.tiles().len(), heads)
        };
        // All of them, or one or two whose keys alone fill the cache; light tiles come last for all.
        assert_eq!(groups("full:512", 16, 16), (0, 4, 16));
        assert_eq!(groups("full:8k", 16, 16), (64, 64, 1));
        assert_eq!(groups("causal:32k", 16, 16), (251, 256, 1));
        assert_eq!(groups("full:32k", 64, 8), (256, 256, 8));
    }
}

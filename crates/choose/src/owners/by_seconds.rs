//! Dispatches by what kernels that compute tiles take, in figures of one GPU and not of the machine's profile: who computes what decides
//! about bits, which must not follow what was measured.

use std::cmp::Reverse;
use std::ops::ControlFlow;

use counterpoint_mask::{Band, Mask, Range};

use counterpoint_cost::{CostModel, ReadyWork, TileCost, TileCosts, TileShape, WorkerSharing};
use counterpoint_plan::{
    AttentionSpec, ChunkWork, Dispatch, Division, Owners, PlanError, Planning, RankOutline, StageCuts,
};

use super::affinity::{Effort, Prices, Reach, Search, is_searched, local_search};
use crate::closed_form::{Direction, StagePrediction, busier_rows_of_all, makespan};
use crate::config::{DispatchAlgorithm, PlanConfig};
use crate::receive_layers::most_layers;
use crate::whole_work::whole_work;

/// Parts that times are counted in: picoseconds, and longer ones where all work takes longer than five hours, so that no sum of them is
/// more than can be counted.
const PICOSECONDS: f64 = 1e12;
const MOST_PARTS: f64 = 2e16;
/// Keys of a rank are there or arrive, and lie in pieces: its backward can gather fewer of a document's tiles than that of a whole mask.
const STAGGERED_COLUMNS: f64 = 12.0;
const COST: CostModel = CostModel {
    sharing: Some(WorkerSharing::H200),
    tiles: Some(TileCosts {
        backward: TileCost { staggered_columns: STAGGERED_COLUMNS, ..TileCosts::H200.backward },
        ..TileCosts::H200
    }),
    ..CostModel::H200
};
/// How often the schedules of all ranks are built to see what they take beyond their chunks.
const ROUNDS: usize = 4;
/// A dispatch gives way to one that is predicted to take less by this part.
const LEAST_GAIN: i64 = 300;

/// `dispatch`, or one whose slowest rank is predicted to end sooner: found by swaps whose chunks have prices of their own, and then
/// made level by the schedules of whole ranks, which share tiles among chunks and keys.
pub(crate) fn by_seconds(
    mask: &Mask,
    work: &ChunkWork,
    dispatch: Dispatch,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<Dispatch, PlanError> {
    by_seconds_with(Effort::DEFAULT, &Problem { mask, spec, config, planning }, work, dispatch)
}

/// What is planned, and how.
#[derive(Clone, Copy)]
struct Problem<'a> {
    mask: &'a Mask,
    spec: &'a AttentionSpec,
    config: &'a PlanConfig,
    planning: &'a Planning<'a>,
}

fn by_seconds_with(
    effort: Effort,
    problem: &Problem<'_>,
    work: &ChunkWork,
    dispatch: Dispatch,
) -> Result<Dispatch, PlanError> {
    let &Problem { mask, spec, config, planning } = problem;
    if config.dispatch != DispatchAlgorithm::Affinity
        || config.cost.tiles.is_none()
        || !is_searched(work, &dispatch)
    {
        return Ok(dispatch);
    }
    // What suits the whole mask hardly ever is another shape than what suits a rank's part of it.
    let bands: Vec<Band> = mask.bands().collect();
    let whole = whole_work(spec, &bands, [mask.seqlen_q(), mask.seqlen_k()], planning);
    let Some(shapes) = COST.tile_shapes(&whole) else { return Ok(dispatch) };
    let Some((mut prices, parts)) = prices(problem, work, dispatch.cp_size(), shapes)? else {
        return Ok(dispatch);
    };
    let reach = Reach::new(work);
    let mut dispatch = by_chunks(effort, work, &reach, &prices, dispatch, planning);
    // A direction counts by the part that its slowest rank is behind: a forward is a third as long as a backward.
    let weight = Weight::of(&prices);
    prices.chunks.iter_mut().for_each(|price| *price = weight.weigh(*price));
    let mut known = KnownTimes::new(shapes);
    // Of all ranks in this order; or of as many as take `until`.
    let mut weighed =
        |dispatch: &Dispatch, order: &[usize], until: i64| -> Result<Vec<[i64; 2]>, PlanError> {
            let mut seconds = vec![[0; 2]; dispatch.cp_size()];
            rank_seconds(problem, dispatch, order, &mut known, parts, |rank, of_rank| {
                seconds[rank] = weight.weigh(of_rank);
                match slowest(&seconds) < until {
                    true => ControlFlow::Continue(()),
                    false => ControlFlow::Break(()),
                }
            })?;
            Ok(seconds)
        };
    let mut order: Vec<usize> = (0..dispatch.cp_size()).collect();
    let mut seconds = weighed(&dispatch, &order, i64::MAX)?;
    let (mut best, mut least) = (dispatch.clone(), slowest(&seconds));
    for round in 1..=ROUNDS {
        prices.beyond = (0..dispatch.cp_size())
            .map(|rank| {
                let chunks = dispatch.chunks(rank).iter().map(|&chunk| prices.chunks[chunk as usize]);
                chunks.fold(seconds[rank], |rest, chunk| [0, 1].map(|at| rest[at] - chunk[at]))
            })
            .collect();
        let next =
            local_search(work, &reach, &prices, (Search::Downhill, effort), dispatch.clone(), planning);
        if next == dispatch {
            break;
        }
        dispatch = next;
        let limit = least - least / LEAST_GAIN;
        let mut until = i64::MAX;
        if round == ROUNDS {
            // No swaps follow, so that only what gains is looked at to its end: first the ranks that likely are the slowest.
            until = limit;
            order.sort_by_key(|&rank| {
                let chunks = dispatch.chunks(rank).iter().map(|&chunk| prices.chunks[chunk as usize]);
                let seconds = chunks.chain([prices.beyond[rank]]).flatten().sum::<i64>();
                (Reverse(seconds), rank)
            });
        }
        seconds = weighed(&dispatch, &order, until)?;
        if slowest(&seconds) < limit {
            (best, least) = (dispatch.clone(), slowest(&seconds));
        }
    }
    Ok(best)
}

/// The first search. Chunks that are dear in one direction mostly are in the other: what distinguishes them is left to schedules.
fn by_chunks(
    effort: Effort,
    work: &ChunkWork,
    reach: &Reach,
    prices: &Prices,
    dispatch: Dispatch,
    planning: &Planning<'_>,
) -> Dispatch {
    let both = prices.chunks.iter().map(|price| [0, price[0] + price[1]]).collect();
    let prices = Prices { chunks: both, ..prices.clone() };
    local_search(work, reach, &prices, (Search::Wide, effort), dispatch, planning)
}

/// What makes a forward of all chunks as long as their backward.
#[derive(Clone, Copy)]
struct Weight(f64);

impl Weight {
    fn of(prices: &Prices) -> Self {
        let all = |at: usize| prices.chunks.iter().map(|price| price[at]).sum::<i64>().max(1) as f64;
        Self(all(1) / all(0))
    }

    fn weigh(self, [forward, backward]: [i64; 2]) -> [i64; 2] {
        [(forward as f64 * self.0) as i64, backward]
    }
}

/// A forward and a backward, each until its slowest rank has ended.
fn slowest(seconds: &[[i64; 2]]) -> i64 {
    [0, 1].map(|at| seconds.iter().map(|rank| rank[at]).max().unwrap_or(0)).iter().sum()
}

/// What each chunk costs, and each row that travels, in so many parts of a second.
fn prices(
    problem: &Problem<'_>,
    work: &ChunkWork,
    ranks: usize,
    shapes: [TileShape; 2],
) -> Result<Option<(Prices, f64)>, PlanError> {
    let &Problem { mask, spec, planning, .. } = problem;
    let chunks = work.num_chunks();
    let alone = (0..chunks as u32).map(|chunk| vec![chunk]).collect();
    let alone = Dispatch::new(work.seqlen_q(), work.chunk_size(), alone);
    let bands = Owners::new(alone.clone(), alone).work(mask);
    // Chunks of one document that see all of it are the same work: the first of each, and for every chunk which of them.
    let (mut firsts, mut like) = (Vec::new(), Vec::with_capacity(chunks));
    for chunk in 0..chunks {
        let is_same =
            |last: usize| bands[last] == bands[chunk] && work.rows(last).len() == work.rows(chunk).len();
        if !chunk.checked_sub(1).is_some_and(is_same) {
            firsts.push(chunk);
        }
        like.push(firsts.len() - 1);
    }
    let price = |first: usize| {
        let chunk = firsts[first];
        let work = whole_work(spec, &bands[chunk], [work.rows(chunk).len(), work.seqlen_k()], planning);
        COST.share_seconds(&work, shapes)
    };
    let each: Option<Vec<[f64; 2]>> = planning.map(firsts.len(), price)?.into_iter().collect();
    let Some(each) = each else { return Ok(None) };
    let row_bytes = 2 * spec.kv_row_bytes() + spec.kv_gradient_row_bytes();
    let row = row_bytes as f64 / COST.link.bytes_per_second;
    let computing: f64 = like.iter().flat_map(|&first| each[first]).sum();
    let longest = computing + row * work.seqlen_k() as f64 * ranks as f64;
    let parts = PICOSECONDS.min(MOST_PARTS / longest);
    let count = |seconds: f64| (seconds * parts) as i64;
    let chunks = like.into_iter().map(|first| each[first].map(count)).collect();
    Ok(Some((Prices { chunks, beyond: vec![[0; 2]; ranks], row: count(row) }, parts)))
}

/// What kernels take for work that was met before: swaps leave many ranks as they are.
struct KnownTimes {
    shapes: [TileShape; 2],
    known: Vec<(Vec<Band>, [usize; 2], [f64; 2])>,
}

impl KnownTimes {
    fn new(shapes: [TileShape; 2]) -> Self {
        Self { shapes, known: Vec::new() }
    }

    /// Seconds of a forward and a backward of `bands` over so many query and key rows.
    fn seconds(
        &mut self,
        bands: &[Band],
        rows: [usize; 2],
        spec: &AttentionSpec,
        planning: &Planning<'_>,
    ) -> [f64; 2] {
        if let Some(seconds) = self.find(bands, rows) {
            return seconds;
        }
        let seconds = self.work_out(bands, rows, spec, planning);
        self.known.push((bands.to_vec(), rows, seconds));
        seconds
    }

    /// Works out what of these is not known, side by side.
    fn learn(
        &mut self,
        works: &[(Vec<Band>, [usize; 2])],
        spec: &AttentionSpec,
        planning: &Planning<'_>,
    ) -> Result<(), PlanError> {
        let mut new: Vec<&(Vec<Band>, [usize; 2])> = Vec::new();
        for work in works {
            if self.find(&work.0, work.1).is_none() && !new.contains(&work) {
                new.push(work);
            }
        }
        let seconds = planning.map(new.len(), |at| self.work_out(&new[at].0, new[at].1, spec, planning))?;
        let learnt = new.into_iter().zip(seconds);
        self.known.extend(learnt.map(|((bands, rows), seconds)| (bands.clone(), *rows, seconds)));
        Ok(())
    }

    fn find(&self, bands: &[Band], rows: [usize; 2]) -> Option<[f64; 2]> {
        let known = self.known.iter().find(|known| known.1 == rows && known.0 == bands);
        known.map(|(.., seconds)| *seconds)
    }

    fn work_out(
        &self,
        bands: &[Band],
        rows: [usize; 2],
        spec: &AttentionSpec,
        planning: &Planning<'_>,
    ) -> [f64; 2] {
        let work = whole_work(spec, bands, rows, planning);
        let seconds = COST.seconds_in(&work, self.shapes);
        seconds.unwrap_or_else(|| [COST.forward_seconds(&work), COST.backward_seconds(&work)])
    }
}

/// Hands `visit` what a forward and a backward that do all work at once take rank after rank in this `order`, in so many `parts` of a second,
/// until it breaks off. `known` are times for the same `spec`.
fn rank_seconds(
    problem: &Problem<'_>,
    dispatch: &Dispatch,
    order: &[usize],
    known: &mut KnownTimes,
    parts: f64,
    mut visit: impl FnMut(usize, [i64; 2]) -> ControlFlow<()>,
) -> Result<(), PlanError> {
    let &Problem { mask, spec, config, planning } = problem;
    let division = Division::new(mask, Owners::new(dispatch.clone(), dispatch.clone()));
    let layers = |work: &[Vec<Band>], received: &[usize]| most_layers(work, received, spec, config);
    let (owners, ranks) = RankOutline::of(division, &config.topology, layers, planning)?;
    let cuts = StageCuts::gathered(&ranks);
    let links = busier_rows_of_all(&cuts, 1, owners.k_runs(), ranks.len(), &config.topology);
    let received = |rank: usize| cuts.rows(rank, 1).iter().map(Range::len).sum::<usize>();
    let work = |rank: usize| {
        let outline = &ranks[rank];
        let rows = [outline.q_rows, outline.own_rows() + received(rank)];
        (cuts.bands(rank, outline).swap_remove(1), rows)
    };
    let mut ahead = Vec::new();
    if planning.has_helpers() {
        // Alone, ranks after one that decides are not looked at.
        ahead = planning.map(ranks.len(), work)?;
        known.learn(&ahead, spec, planning)?;
    }
    for &rank in order {
        planning.check()?;
        let outline = &ranks[rank];
        let (bands, rows) = match ahead.get_mut(rank) {
            Some(ahead) => std::mem::take(ahead),
            None => work(rank),
        };
        let (own_rows, received) = (outline.own_rows(), received(rank));
        let [forward, backward] = known.seconds(&bands, rows, spec, planning);
        let (links, ready) = (links[rank], ReadyWork::of(&bands, own_rows));
        let takes = |direction: Direction, computing: f64| {
            let compute_seconds = computing + direction.own_seconds(own_rows, spec, &COST);
            let stage = StagePrediction { compute_seconds, ..direction.transfers(links, spec, &COST) };
            (makespan([stage.as_rows_arrive(&ready, received, spec, &COST)]) * parts) as i64
        };
        let seconds = [takes(Direction::Forward, forward), takes(Direction::Backward, backward)];
        if visit(rank, seconds).is_break() {
            break;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::{Documents, Window};
    use rand::{RngExt, SeedableRng};
    use rand_chacha::ChaCha8Rng;

    use super::*;
    use crate::owners::dispatch;
    use counterpoint_plan::{DType, GradientShares, chunk_work};

    const SPEC: AttentionSpec = AttentionSpec {
        heads_q: 64,
        heads_kv: 8,
        head_dim: 128,
        head_dim_v: 128,
        dtype: DType::Bf16,
        scale: 0.1,
        softcap: 0.0,
        seqlen_sink: 0,
        gradient_shares: GradientShares::Accumulators,
        max_logits: false,
        dlse: false,
    };

    fn problem<'a>(mask: &'a Mask, config: &'a PlanConfig) -> Problem<'a> {
        Problem { mask, spec: &SPEC, config, planning: &Planning::ALONE }
    }

    fn all_ranks(problem: &Problem<'_>, dispatch: &Dispatch, known: &mut KnownTimes) -> Vec<[i64; 2]> {
        let mut seconds = Vec::new();
        let order: Vec<usize> = (0..dispatch.cp_size()).collect();
        let all = rank_seconds(problem, dispatch, &order, known, PICOSECONDS, |_, of_rank| {
            seconds.push(of_rank);
            ControlFlow::Continue(())
        });
        all.unwrap();
        seconds
    }

    fn shapes(mask: &Mask) -> [TileShape; 2] {
        let bands: Vec<Band> = mask.bands().collect();
        let rows = [mask.seqlen_q(), mask.seqlen_k()];
        COST.tile_shapes(&whole_work(&SPEC, &bands, rows, &Planning::ALONE)).unwrap()
    }

    /// Packs of documents whose lengths are as unlike as those of texts.
    fn packed(rows: usize, kind: usize, seed: u64) -> Mask {
        let mut rng = ChaCha8Rng::seed_from_u64(seed);
        let (mut left, mut lengths) = (rows, Vec::new());
        while left > 0 {
            let length = (1 << rng.random_range(3..13)) + rng.random_range(0..800);
            lengths.push(left.min(length));
            left -= left.min(length);
        }
        let documents = Documents::from_lengths(lengths).unwrap();
        let window = Window { left: Some(1023), right: Some(0), global: 0 };
        match kind % 4 {
            0 => Mask::full(documents),
            1 => Mask::sliding_window(documents, window),
            2 => Mask::block_causal(documents, 2048),
            _ => Mask::causal(documents),
        }
        .unwrap()
    }

    /// The search that plans are made with finds what one that takes two and a half times as long does, which looks for shapes of tiles
    /// rank by rank.
    #[test]
    fn the_short_search_is_as_good_as_the_long_one() {
        let (mut logarithms, mut worst): (f64, f64) = (0.0, 0.0);
        const MASKS: usize = 36;
        for number in 0..MASKS {
            let ranks = [2, 4, 8][number % 3];
            let mask = packed(ranks * 8192, number / 3, number as u64);
            let work = chunk_work(&mask, 512);
            let config = PlanConfig { cost: CostModel::H200, ..PlanConfig::new(ranks) };
            let first = dispatch(&work, ranks, DispatchAlgorithm::Affinity);
            let kernels = |effort: Effort| {
                let found = by_seconds_with(effort, &problem(&mask, &config), &work, first.clone()).unwrap();
                let division = Division::new(&mask, Owners::new(found.clone(), found));
                let layers =
                    |work: &[Vec<Band>], received: &[usize]| most_layers(work, received, &SPEC, &config);
                let (_, outlines) =
                    RankOutline::of(division, &config.topology, layers, &Planning::ALONE).unwrap();
                let cuts = StageCuts::gathered(&outlines);
                let seconds = outlines.iter().enumerate().map(|(rank, outline)| {
                    let bands = &cuts.bands(rank, outline)[1];
                    let received: usize = cuts.rows(rank, 1).iter().map(Range::len).sum();
                    let rows = [outline.q_rows, outline.own_rows() + received];
                    let work = whole_work(&SPEC, bands, rows, &Planning::ALONE);
                    [COST.forward_seconds(&work), COST.backward_seconds(&work)]
                });
                let slowest =
                    seconds.fold([0.0, 0.0], |most: [f64; 2], rank| [0, 1].map(|at| most[at].max(rank[at])));
                slowest[0] + slowest[1]
            };
            let ratio = kernels(Effort::DEFAULT) / kernels(Effort::LONG);
            logarithms += ratio.ln();
            worst = worst.max(ratio);
        }
        let mean = (logarithms / MASKS as f64).exp();
        println!("{mean:.4} of the long search's kernel seconds, at worst {worst:.4}");
        assert!(mean < 1.01 && worst < 1.06, "{mean} {worst}");
    }

    /// Prices of chunks leave the slowest of these ranks several hundredths behind the others.
    #[test]
    fn schedules_of_whole_ranks_make_them_level() {
        let lengths = [
            2150, 6102, 419, 2404, 2178, 895, 108, 3766, 1139, 8192, 2701, 1393, 440, 344, 389, 88, 51, 7, 1,
            1,
        ];
        let documents = Documents::from_lengths(lengths).unwrap();
        let rows = lengths.iter().sum::<usize>();
        let config = PlanConfig { cost: CostModel::H200, ..PlanConfig::new(4) };
        let mut most: f64 = 0.0;
        let masks = [
            Mask::full(documents.clone()),
            Mask::causal(documents.clone()),
            Mask::block_causal(documents, 2048),
        ];
        for mask in masks.map(Result::unwrap) {
            assert_eq!(rows, 32768);
            let work = chunk_work(&mask, 512);
            let first = dispatch(&work, 4, DispatchAlgorithm::Affinity);
            let shapes = shapes(&mask);
            let problem = problem(&mask, &config);
            let (prices, _) = prices(&problem, &work, 4, shapes).unwrap().unwrap();
            let level_by = |config: &PlanConfig| {
                by_seconds(&mask, &work, first.clone(), &SPEC, config, &Planning::ALONE).unwrap()
            };
            let level = level_by(&config);
            let seconds = |dispatch: &Dispatch| {
                let ranks = all_ranks(&problem, dispatch, &mut KnownTimes::new(shapes)).into_iter();
                slowest(&ranks.map(|rank| Weight::of(&prices).weigh(rank)).collect::<Vec<_>>())
            };
            let (reach, alone) = (Reach::new(&work), &Planning::ALONE);
            let by_chunks = by_chunks(Effort::DEFAULT, &work, &reach, &prices, first.clone(), alone);
            let (before, after) = (seconds(&by_chunks), seconds(&level));
            assert!(after <= before, "{before} {after}");
            most = most.max((before - after) as f64 / before as f64);
            assert_eq!(level_by(&config), level);
            let other = PlanConfig { dispatch: DispatchAlgorithm::Zigzag, ..config };
            assert_eq!(level_by(&other), first);
        }
        assert!(most > 0.01, "{most}");
    }
}

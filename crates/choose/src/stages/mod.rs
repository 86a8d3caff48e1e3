//! Cutting each rank's remote work into stages whose communication hides under the computation of earlier ones.

mod columns;
mod profile;
mod solver;
mod tiles;
mod traffic;

use counterpoint_mask::Band;
use counterpoint_plan::{
    AttentionSpec, Division, KEY_BLOCK, Outline, PlanError, Planning, RankOutline, Runs, StageCuts,
};

use crate::closed_form::{Direction, LinkRows, StagePrediction, StageWork, busier_rows, makespan};
use crate::config::PlanConfig;
use crate::pass_stages::StageCount;
use crate::receive_layers::most_layers;

use profile::Profile;
use solver::{Cuts, Rates};
use tiles::Candidate;
use traffic::Traffic;

/// Pieces of a list of remote rows between places where it may be cut. Solving takes time in the square of it, and more of
/// them gain next to nothing: a stage's end is then known to a sixteenth of the list. More stages than
/// these, asked for, are cut evenly.
const CELLS: usize = 16;

/// Remote stages that [`StageCount::Auto`] tries. Each one costs a launch and a collective on every rank.
const MOST_AUTO_STAGES: usize = 8;

/// The outline of a division of the work, cut into the stages that `config` asks for.
pub(crate) fn outline(
    division: Division,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<Outline, PlanError> {
    let layers = |work: &[Vec<Band>], received: &[usize]| most_layers(work, received, spec, config);
    let (owners, ranks) = RankOutline::of(division, &config.topology, layers, planning)?;
    let [forward, backward] = cut(&ranks, owners.k_runs(), spec, config, planning)?;
    Ok(Outline { owners, ranks, forward, backward })
}

/// Cuts for the forward and for the backward.
// Long: one comparison of every number of stages, whose bookkeeping all of its parts share.
fn cut(
    ranks: &[RankOutline],
    runs: &Runs,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<[StageCuts; 2], PlanError> {
    let can_gather =
        config.topology.nodes() == 1 && ranks.iter().all(|rank| rank.own_rows().is_multiple_of(KEY_BLOCK));
    let gathers = |count: StageCount| can_gather && count == StageCount::Fixed(0);
    let asked = config.stages.each();
    if ranks.iter().all(|rank| rank.remote.is_empty()) {
        return Ok(asked.map(|_| StageCuts::local(ranks.len())));
    }
    if asked.into_iter().all(gathers) {
        return Ok(asked.map(|_| StageCuts::gathered(ranks)));
    }
    let cells = asked.map(|count| match count {
        StageCount::Auto => CELLS,
        StageCount::Fixed(stages) => CELLS.max(stages),
    });
    let cells = cells[0].max(cells[1]);
    let profiles = planning.map(ranks.len(), |rank| Profile::new(&ranks[rank], runs, cells))?;
    let traffic = Traffic::new(ranks, &profiles, runs, &config.topology);
    let one_stage: Vec<Vec<u8>> = profiles.iter().map(|profile| vec![0; profile.places.len() - 1]).collect();
    let sent = traffic.sent(&one_stage, 1);
    let passes = [(Direction::Forward, asked[0]), (Direction::Backward, asked[1])];
    let cut = planning.map(passes.len(), |pass| {
        let (direction, asked) = passes[pass];
        if gathers(asked) {
            return Ok(StageCuts::gathered(ranks));
        }
        let most = match asked {
            StageCount::Auto => MOST_AUTO_STAGES,
            StageCount::Fixed(stages) => stages.max(1),
        };
        let solved = planning.map(ranks.len(), |rank| {
            let received = ranks[rank].remote.len() as u64;
            let links = [received, sent[rank].near + sent[rank].far, traffic.inter_node(rank)];
            let rates = direction.rates(spec, config, ranks[rank].q_rows, links);
            Cuts::solve(&profiles[rank], &rates, most)
        })?;
        let predict_hosted = |(rank, outline): (usize, &RankOutline)| {
            let hosted = outline.hosted.as_ref()?;
            let rows = busier_rows(&hosted.part, rank, &config.topology);
            Some(direction.predict_hosted(hosted, rows, outline.merged_rows(), spec, &config.cost))
        };
        let hosted: Vec<Option<StagePrediction>> = ranks.iter().enumerate().map(predict_hosted).collect();
        let cuts = |choice: &Choice| {
            let places = profiles
                .iter()
                .zip(&choice.cuts)
                .map(|(profile, cut)| cut.iter().map(|&index| profile.places[usize::from(index)]).collect());
            StageCuts::new(ranks, &places.collect::<Vec<Vec<usize>>>(), choice.stages + 1)
        };
        if let StageCount::Fixed(stages) = asked {
            return Ok(cuts(&Choice::new(&solved, stages.max(1), Cuts::most_up_to)));
        }
        let by_pairs = |rank: usize, area, remote, rows| {
            let work = StageWork { area, q_rows: ranks[rank].q_rows, own_rows: 0, remote };
            direction.predict(work, rows, spec, &config.cost)
        };
        let quickest = Choice::quickest(&solved, most, |choice, limit| {
            let links = choice.links(&profiles, &traffic);
            slowest_below(limit, choice.seconds(&links, &profiles, &hosted, &by_pairs))
        });
        if config.cost.tiles.is_none() {
            // What the CPU's rates say of one launch more or less is too coarse to give up overlap for.
            return Ok(cuts(&quickest));
        }
        let single = Choice::new(&solved, 1, Cuts::best_up_to);
        let links = single.links(&profiles, &traffic);
        let by_rank: Vec<f64> = single.seconds(&links, &profiles, &hosted, &by_pairs).collect();
        let probed = tiles::slowest(&by_rank);
        let mut candidates = vec![Candidate { cuts: cuts(&single), links: links.clone() }];
        if quickest.stages > 1 {
            let links = quickest.links(&profiles, &traffic);
            candidates.push(Candidate { cuts: cuts(&quickest), links });
        }
        if can_gather {
            candidates.push(Candidate { cuts: StageCuts::gathered(ranks), links });
        }
        tiles::quickest(candidates, planning, |candidate, limit| {
            candidate.seconds(direction, ranks, &hosted, (&probed, limit), (spec, &config.cost), planning)
        })
    })?;
    let [forward, backward] = <[_; 2]>::try_from(cut).unwrap_or_else(|_| unreachable!("two passes were cut"));
    Ok([forward?, backward?])
}

/// One way for all ranks to cut their lists into the same number of remote stages.
struct Choice {
    stages: usize,
    /// By rank: where the first stage starts, then where each ends, as indices into the profile's places. The last
    /// stages of a rank may be idle; it takes part in their collectives all the same.
    cuts: Vec<Vec<u16>>,
}

impl Choice {
    /// Every rank takes its best cuts into as many stages with rows as `own_stages` says, of `stages`.
    fn new(solved: &[Cuts], stages: usize, own_stages: impl Fn(&Cuts, usize) -> usize) -> Self {
        let padded = |cuts: &Cuts| {
            let mut cut = cuts.cut(own_stages(cuts, stages)).to_vec();
            cut.resize(stages + 1, cut[cut.len() - 1]);
            cut
        };
        Self { stages, cuts: solved.iter().map(padded).collect() }
    }

    /// The choice whose slowest rank ends first, of one for each number of stages up to `most`; the fewest stages where
    /// several agree. `seconds(choice, limit)` is what a choice takes, or anything from `limit` on when it takes no less.
    ///
    /// Each rank cuts for itself, as if its sending were spread over its stages. Who sends what when follows only from all
    /// cuts together, and can undo what stages gain: then every rank waits for one owner at a time. So the number of stages
    /// is chosen by what they really send, and is never worse than a single stage.
    fn quickest(solved: &[Cuts], most: usize, seconds: impl Fn(&Choice, f64) -> f64) -> Self {
        let mut best = Choice::new(solved, 1, Cuts::best_up_to);
        let mut least = seconds(&best, f64::INFINITY);
        for stages in 2..=most {
            if solved.iter().all(|cuts| cuts.best_up_to(stages) < stages) {
                // The same cuts as with one stage less.
                continue;
            }
            let choice = Choice::new(solved, stages, Cuts::best_up_to);
            let seconds = seconds(&choice, least);
            if seconds < least {
                (best, least) = (choice, seconds);
            }
        }
        best
    }

    /// Rows in the busier direction of the links of every rank, by remote stage.
    fn links(&self, profiles: &[Profile], traffic: &Traffic) -> Vec<Vec<LinkRows>> {
        let stage_of: Vec<Vec<u8>> = self
            .cuts
            .iter()
            .map(|cut| {
                let cells = cut.windows(2).enumerate();
                cells.flat_map(|(stage, ends)| (ends[0]..ends[1]).map(move |_| stage as u8)).collect()
            })
            .collect();
        let sent = traffic.sent(&stage_of, self.stages);
        let of_rank = |(rank, (cut, profile)): (usize, (&Vec<u16>, &Profile))| {
            let stages = cut.windows(2).zip(&sent[rank * self.stages..]);
            let busier = |(ends, &sent): (&[u16], &LinkRows)| {
                let received = traffic.received(rank, profile, usize::from(ends[0]), usize::from(ends[1]));
                LinkRows::busier(sent, received)
            };
            stages.map(busier).collect()
        };
        self.cuts.iter().zip(profiles).enumerate().map(of_rank).collect()
    }

    /// Predicted makespan of rank after rank, every stage charged what it really sends and receives.
    fn seconds<'a>(
        &'a self,
        links: &'a [Vec<LinkRows>],
        profiles: &'a [Profile],
        hosted: &'a [Option<StagePrediction>],
        predict: &'a impl Fn(usize, u64, bool, LinkRows) -> StagePrediction,
    ) -> impl Iterator<Item = f64> + 'a {
        self.cuts.iter().zip(profiles).enumerate().map(move |(rank, (cut, profile))| {
            let local = predict(rank, profile.local_area, false, LinkRows::default());
            let remote = cut.windows(2).zip(&links[rank]).map(|(ends, &rows)| {
                let (from, to) = (usize::from(ends[0]), usize::from(ends[1]));
                predict(rank, profile.area_before[to] - profile.area_before[from], true, rows)
            });
            makespan(std::iter::once(local).chain(hosted[rank]).chain(remote))
        })
    }
}

/// The largest of `seconds`; or the first that reaches `limit`.
fn slowest_below(limit: f64, seconds: impl Iterator<Item = f64>) -> f64 {
    let mut slowest = 0.0;
    for seconds in seconds {
        slowest = f64::max(slowest, seconds);
        if slowest >= limit {
            break;
        }
    }
    slowest
}

impl Direction {
    /// What the stages cost of a rank with `q_rows` query rows that receives, sends and takes from other nodes so many rows in
    /// all. A stage's transfer takes as long as the busier side of it; which rows others fetch when is not known while
    /// everybody's cuts are still open, so a rank's sending is spread over its stages as its receiving is.
    fn rates(
        self,
        spec: &AttentionSpec,
        config: &PlanConfig,
        q_rows: usize,
        [received, sent, inter_node]: [u64; 3],
    ) -> Rates {
        let cost = &config.cost;
        let busier = received.max(sent) as f64 / received.max(1) as f64;
        let inter_node_share = inter_node as f64 / received.max(1) as f64;
        let near = busier / cost.link.bytes_per_second;
        let far = busier * inter_node_share / cost.network.bytes_per_second;
        let byte = near.max(far);
        let alpha = match inter_node {
            0 => cost.link.alpha_seconds,
            _ => cost.link.alpha_seconds.max(cost.network.alpha_seconds),
        };
        let launch = self.launch_seconds(q_rows, spec, cost);
        let (reduce_alpha, reduce_row) = match self {
            Direction::Forward => (0.0, 0.0),
            Direction::Backward => (alpha, spec.kv_gradient_row_bytes() as f64 * byte),
        };
        Rates {
            launch,
            remote_launch: launch + self.remote_seconds(q_rows, spec, cost),
            pair: self.pair_seconds(spec, cost),
            cast_alpha: alpha,
            cast_row: spec.kv_row_bytes() as f64 * byte,
            reduce_alpha,
            reduce_row,
        }
    }
}

//! Searches for the fastest groups of a layer's forward, whatever it is that says how long things take.

use std::ops::ControlFlow;

use counterpoint_plan::{
    GemmCollective, LinearDirection, LinearPlan, LinearSpec, PlanError, Topology, WaveGroups,
};

use super::compositions::compositions;
use super::fastest::COLUMN_GROUPS;
use super::pass::LinearPass;
use super::wave_costs::{LinkUse, PassCosts, PassCurves};
use counterpoint_schedule::ProductStart;

/// Says how long a pass of a layer and its parts take: a machine that runs them, or a simulator.
pub trait PassClock {
    /// Why a time cannot be had.
    type Error: From<PlanError>;

    /// Seconds of a rank's product of so many rows, all ranks at once.
    fn product(&mut self, rows: usize) -> Result<f64, Self::Error>;

    /// Seconds of the collective of so many rows of each rank: of the gather or the reduction, and of the way back where sums
    /// travel back.
    fn travel(&mut self, rows: usize) -> Result<[f64; 2], Self::Error>;

    /// Seconds in which a rank puts the sums of several groups together, where they are apart.
    fn join(&mut self) -> Result<f64, Self::Error>;

    /// Seconds of what a rank computes behind the products that communicate: the gradient of the weight, or nothing.
    fn after(&mut self) -> Result<f64, Self::Error>;

    /// Seconds of the pass with the groups of a plan.
    fn pass(&mut self, plan: &LinearPlan) -> Result<f64, Self::Error>;
}

/// How far a search has got.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SearchStep {
    /// What is timed next.
    pub what: String,
    /// Times taken.
    pub done: usize,
    /// Times to take.
    pub all: usize,
}

/// A search for the groups of one layer on one machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct GroupSearcher {
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks that share it.
    pub tp_size: usize,
    /// The pass whose groups are searched.
    pub direction: LinearDirection,
    /// Rows of a wave in each rank's tokens.
    pub wave: usize,
    /// The most groups that are looked at.
    pub most_groups: usize,
    /// The most sequences that a predictive search tries besides one group.
    pub trials: usize,
    /// See [`PassCosts::starts`].
    pub starts: ProductStart,
    /// See [`PassCosts::link`].
    pub link: LinkUse,
    /// See [`PassCosts::overlapped_speed`].
    pub overlapped_speed: f64,
}

impl GroupSearcher {
    /// Waves of the pass.
    ///
    /// # Errors
    /// A layer that cannot be split.
    pub fn waves(&self) -> Result<usize, PlanError> {
        Ok(self.plan(WaveGroups::Fixed(1))?.tokens_of(0).len().div_ceil(self.wave.max(1)))
    }

    /// The layer with groups.
    ///
    /// # Errors
    /// A layer that cannot be split, groups that do not add up.
    pub fn plan(&self, groups: WaveGroups) -> Result<LinearPlan, PlanError> {
        LinearPlan::new(self.spec, self.tp_size, groups)
    }

    /// The layer with groups of so many waves.
    fn of_waves(&self, groups: &[usize]) -> Result<LinearPlan, PlanError> {
        let whole = self.plan(WaveGroups::Fixed(1))?;
        self.plan(WaveGroups::Sizes(whole.rows_of_waves(self.wave, groups)))
    }

    /// Times every sequence of groups, and returns the fastest with its seconds.
    ///
    /// # Errors
    /// When the clock fails.
    pub fn exhaustive<C: PassClock>(
        &self,
        clock: &mut C,
        mut report: impl FnMut(SearchStep),
    ) -> Result<(LinearPlan, f64), C::Error> {
        let waves = self.waves()?;
        let all = compositions(waves, self.most_groups).count();
        let mut best: Option<(LinearPlan, f64)> = None;
        for (done, groups) in compositions(waves, self.most_groups).enumerate() {
            let plan = self.of_waves(&groups)?;
            report(SearchStep { what: format!("groups of {:?} waves", groups), done, all });
            let seconds = clock.pass(&plan)?;
            if best.as_ref().is_none_or(|(_, least)| seconds < *least) {
                best = Some((plan, seconds));
            }
        }
        // A forward has at least one wave, so there is at least one sequence.
        let whole = self.plan(WaveGroups::Fixed(1))?;
        Ok(best.unwrap_or((whole, f64::INFINITY)))
    }

    /// Times products and collectives of some sizes by themselves, has the fastest groups follow from these times, and tries
    /// them: one group and [`trials`](Self::trials) more sequences at most. What the parts take from each other shows in a trial only,
    /// so each one corrects what is expected of the sequences left; and of what no time of a part shows, neighbours of the fastest so
    /// far know most, so every second trial is the best of these. Returns the fastest that was tried, with its seconds. Who is given (`report`) a
    /// trial may break the search off before it; of other steps what he answers does not count.
    ///
    /// # Errors
    /// When the clock fails.
    pub fn predictive<C: PassClock>(
        &self,
        clock: &mut C,
        mut report: impl FnMut(SearchStep) -> ControlFlow<()>,
    ) -> Result<(LinearPlan, f64), C::Error> {
        let costs = self.costs(clock, &mut |step| {
            let _ = report(step);
        })?;
        let whole = self.plan(WaveGroups::Fixed(1))?;
        let mut step = |what, done| report(SearchStep { what, done, all: self.trials + 1 });
        let _ = step("one group".to_owned(), 0);
        let mut best = (whole.clone(), clock.pass(&whole)?);
        let Some(mut costs) = costs else { return Ok(best) };
        let mut fastest = vec![costs.waves()];
        let mut tried = vec![fastest.clone()];
        for trial in 1..=self.trials {
            let expected = || untried(&costs, self.expected(&costs), &tried, best.1);
            let near = || untried(&costs, self.neighbours(&fastest), &tried, best.1);
            let next = if trial % 2 == 1 { expected().or_else(near) } else { near().or_else(expected) };
            let Some(groups) = next else { break };
            if step(format!("groups of {groups:?} waves"), trial).is_break() {
                break;
            }
            let plan = self.of_waves(&groups)?;
            let seconds = clock.pass(&plan)?;
            costs.correct(&groups, seconds);
            if seconds < best.1 {
                (best, fastest) = ((plan, seconds), groups.clone());
            }
            tried.push(groups);
        }
        Ok(best)
    }

    /// Times the pass in groups of columns too, where sums of few rows travel under the kernel that computes all of them. Returns the faster of
    /// these and of what was found before, with its seconds.
    ///
    /// # Errors
    /// When the clock fails.
    pub fn columns<C: PassClock>(
        &self,
        clock: &mut C,
        found: (LinearPlan, f64),
        mut report: impl FnMut(SearchStep),
    ) -> Result<(LinearPlan, f64), C::Error> {
        let Self { spec, tp_size, direction, .. } = *self;
        let pass = LinearPass { spec, topology: Topology::flat(tp_size), direction };
        if self.starts != ProductStart::OneKernel || !pass.has_few_rows() {
            return Ok(found);
        }
        let mut best = found;
        let mut tried = Vec::new();
        for (done, groups) in COLUMN_GROUPS.into_iter().enumerate() {
            let plan = self.plan(WaveGroups::Columns(groups))?;
            if plan.column_sizes().is_empty() || tried.contains(&plan) {
                continue;
            }
            report(SearchStep {
                what: format!("{groups} groups of columns"),
                done,
                all: COLUMN_GROUPS.len(),
            });
            let seconds = clock.pass(&plan)?;
            if seconds < best.1 {
                best = (plan.clone(), seconds);
            }
            tried.push(plan);
        }
        Ok(best)
    }

    /// The speed of products under collectives with which a forward in two groups takes what the clock says: by the times of its
    /// parts, and of the whole. `None` where nothing overlaps.
    ///
    /// # Errors
    /// When the clock fails.
    pub fn overlapped_speed<C: PassClock>(&self, clock: &mut C) -> Result<Option<f64>, C::Error> {
        let Some(mut costs) = self.costs(clock, &mut |_| {})? else { return Ok(None) };
        let waves = costs.waves();
        let groups = [waves.div_ceil(2), waves / 2];
        if groups.contains(&0) {
            return Ok(None);
        }
        costs.correct(&groups, clock.pass(&self.of_waves(&groups)?)?);
        Ok(Some(costs.overlapped_speed))
    }

    /// What the parts take, each by itself; `None` where there is one only. Of sizes those are timed that are doubled, of products also
    /// those in between where times do not lie on a line, as where the last round of a GPU's tiles is not full.
    fn costs<C: PassClock>(
        &self,
        clock: &mut C,
        report: &mut impl FnMut(SearchStep),
    ) -> Result<Option<PassCosts>, C::Error> {
        let whole = self.plan(WaveGroups::Fixed(1))?;
        let rows = whole.tokens_of(0).len();
        let mut sizes: Vec<usize> =
            doubled(self.waves()?).map(|waves| (waves * self.wave).min(rows)).collect();
        sizes.dedup();
        let Some(collective) = GemmCollective::of_pass(&self.spec, self.direction) else { return Ok(None) };
        let owners = match collective {
            GemmCollective::AllGather => (self.tp_size - 1).max(1),
            GemmCollective::ReduceScatter | GemmCollective::AllReduce => self.tp_size,
        };
        let has_after = self.direction == (LinearDirection::Backward { weight_gradient: true });
        let others = usize::from(collective != GemmCollective::AllReduce) + usize::from(has_after);
        let mut of_products: Vec<usize> = sizes.iter().map(|size| size * owners).collect();
        if collective == GemmCollective::AllGather && self.starts == ProductStart::OneKernel {
            // One kernel has the rank's own rows too.
            let with_own: Vec<usize> = of_products.iter().map(|size| rows + size).collect();
            of_products.truncate(1);
            of_products.extend(with_own);
        }
        let (mut done, mut all) = (0, of_products.len() + sizes.len() + others);
        let mut step = |what: String, more: usize| {
            all += more;
            report(SearchStep { what, done, all });
            done += 1;
        };
        let (mut product, mut travel, mut back) = (Curve::default(), Curve::default(), Curve::default());
        for size in of_products {
            step(format!("a product of {size} rows"), 0);
            product.add(size, clock.product(size)?);
        }
        let between = product.unknown(self.wave.max(1) * owners);
        for (index, &size) in between.iter().enumerate() {
            step(format!("a product of {size} rows"), if index == 0 { between.len() } else { 0 });
            product.add(size, clock.product(size)?);
        }
        for &size in &sizes {
            step(format!("a collective of {size} rows"), 0);
            let [there, way_back] = clock.travel(size)?;
            travel.add(size, there);
            back.add(size, way_back);
        }
        let mut join = 0.0;
        match collective {
            GemmCollective::AllGather => {
                step("a product of a rank's own rows".to_owned(), 0);
                product.add(rows, clock.product(rows)?);
            }
            GemmCollective::ReduceScatter => {
                step("putting groups together".to_owned(), 0);
                join = clock.join()?;
            }
            GemmCollective::AllReduce => {}
        }
        let mut after = 0.0;
        if has_after {
            step("the gradient of the weight".to_owned(), 0);
            after = clock.after()?;
        }
        let curves = PassCurves {
            after,
            join,
            starts: self.starts,
            link: self.link,
            product: &|rows| product.at(rows),
            travel: &|rows| travel.at(rows),
            back: &|rows| back.at(rows),
            overlapped_speed: self.overlapped_speed,
        };
        Ok(curves.costs(&whole, self.direction, self.wave))
    }

    /// The sequences that are expected to be fastest with up to 2, 4, 8 groups and so on.
    fn expected(&self, costs: &PassCosts) -> Vec<Vec<usize>> {
        let all = self.most_groups.min(costs.waves());
        let doubled = std::iter::successors(Some(2), |most| Some(2 * most)).take_while(|&most| most < all);
        doubled.chain([all]).map(|most| costs.fastest(most)).collect()
    }

    /// Sequences that differ from this one by a group that is cut in two, two that are one, or a wave that is in the next group.
    fn neighbours(&self, groups: &[usize]) -> Vec<Vec<usize>> {
        let replaced =
            |at: usize, old: usize, new: &[usize]| [&groups[..at], new, &groups[at + old..]].concat();
        let cut = groups
            .iter()
            .enumerate()
            .flat_map(|(at, &waves)| (1..waves).map(move |first| replaced(at, 1, &[first, waves - first])));
        let joined = groups.windows(2).enumerate().flat_map(|(at, pair)| {
            let [first, second] = [pair[0], pair[1]];
            let moved = [[first + 1, second - 1], [first - 1, second + 1]];
            let moved =
                moved.into_iter().filter(|pair| !pair.contains(&0)).map(move |pair| replaced(at, 2, &pair));
            moved.chain([replaced(at, 2, &[first + second])])
        });
        cut.chain(joined).filter(|groups| groups.len() <= self.most_groups).collect()
    }
}

/// The sequence that is expected to be fastest, of those that were not tried; `None` where none can be expected to beat `least`
/// seconds.
fn untried(
    costs: &PassCosts,
    sequences: Vec<Vec<usize>>,
    tried: &[Vec<usize>],
    least: f64,
) -> Option<Vec<usize>> {
    let fresh = sequences.into_iter().filter(|groups| !tried.contains(groups));
    let timed = fresh.map(|groups| (costs.seconds(&groups), groups));
    let (seconds, groups) = timed.min_by(|a, b| a.0.total_cmp(&b.0))?;
    (seconds < least * WORTH_A_TRIAL).then_some(groups)
}

/// A sequence that is expected to take this much longer than the fastest that was tried is left out.
const WORTH_A_TRIAL: f64 = 1.1;

/// Numbers of waves that are timed: each twice the one before, and all.
fn doubled(waves: usize) -> impl Iterator<Item = usize> {
    std::iter::successors(Some(1), move |&size: &usize| (size < waves).then_some((2 * size).min(waves)))
}

/// Of a time: what is farther from a line than noise, which is a hundredth or so, takes it.
const OFF_THE_LINE: f64 = 0.02;

/// Seconds by size, along the lines between what was measured.
#[derive(Clone, Debug, Default)]
struct Curve(Vec<(usize, f64)>);

impl Curve {
    fn add(&mut self, size: usize, seconds: f64) {
        match self.0.binary_search_by_key(&size, |(known, _)| *known) {
            Ok(known) => self.0[known].1 = self.0[known].1.min(seconds),
            Err(place) => self.0.insert(place, (size, seconds)),
        }
    }

    /// Sizes in the middle of what was measured, multiples of `step`, on both sides of each time that is not on the line between those
    /// next to it.
    fn unknown(&self, step: usize) -> Vec<usize> {
        let mut sizes = Vec::new();
        for points in self.0.windows(3) {
            let &[(a, x), (b, y), (c, z)] = points else { continue };
            let line = x + (z - x) * (b - a) as f64 / (c - a) as f64;
            if (y - line).abs() > OFF_THE_LINE * y {
                let between = [(a, b), (b, c)].map(|(low, high)| (low, (low + high) / 2 / step * step));
                sizes.extend(
                    between.into_iter().filter(|(low, middle)| middle > low).map(|(_, middle)| middle),
                );
            }
        }
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }

    fn at(&self, size: usize) -> f64 {
        let after = self.0.partition_point(|(known, _)| *known < size);
        match (after.checked_sub(1).and_then(|before| self.0.get(before)), self.0.get(after)) {
            (Some(&(a, x)), Some(&(b, y))) => x + (y - x) * (size - a) as f64 / (b - a) as f64,
            (None, Some(&(_, seconds))) => seconds,
            // Past the last one at its rate.
            (Some(&(last, seconds)), None) => seconds * size as f64 / last as f64,
            (None, None) => 0.0,
        }
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_plan::{DType, GemmCollective};

    use super::*;

    #[test]
    fn neighbours_differ_by_one_step() {
        let searcher = GroupSearcher {
            spec: GemmCollective::ReduceScatter.layer([64, 8, 8].into(), DType::Bf16),
            tp_size: 2,
            direction: LinearDirection::Forward,
            wave: 8,
            most_groups: 3,
            trials: 0,
            starts: ProductStart::Free,
            link: LinkUse::Apart,
            overlapped_speed: 1.0,
        };
        let found = searcher.neighbours(&[3, 1]);
        assert_eq!(found, [vec![1, 2, 1], vec![2, 1, 1], vec![2, 2], vec![4]]);
        assert!(searcher.neighbours(&[1, 1, 2]).iter().all(|groups| groups.len() <= 3));
        assert_eq!(searcher.neighbours(&[1]), Vec::<Vec<usize>>::new());
    }

    #[test]
    fn curves_and_their_points() {
        assert_eq!(doubled(1).collect::<Vec<_>>(), [1]);
        assert_eq!(doubled(10).collect::<Vec<_>>(), [1, 2, 4, 8, 10]);
        assert_eq!(doubled(32).last(), Some(32));
        let mut curve = Curve::default();
        curve.add(4, 3.0);
        curve.add(2, 1.0);
        assert_eq!([1, 2, 3, 4, 8].map(|size| curve.at(size)), [1.0, 1.0, 2.0, 3.0, 6.0]);
    }
}

//! In which groups the rows of a pass travel: the seconds of any sequence of sizes, and the fastest one.
//!
//! A pass is some waves of equal work; a group is some of them in a row. Its product and its collective take what they take
//! for that many waves, so both may be curves of any form (a start, then a rate that grows with the size). Small first groups
//! let the communication begin early, small last ones leave little of it behind (FlashOverlap, arXiv 2504.19519, section 4.1).

use counterpoint_plan::{GemmCollective, LinearDirection, LinearPlan};
use counterpoint_schedule::ProductStart;

/// What reductions and their ways back travel on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinkUse {
    /// One link, one after the other.
    Shared,
    /// Links of their own, or one that is never full.
    Apart,
}

/// What a pass of some waves costs. Each table has a value for every number of waves, 0 first: the seconds of a product or
/// collective of so many waves at once.
#[derive(Clone, Debug, PartialEq)]
pub struct PassCosts {
    /// What follows what.
    pub collective: GemmCollective,
    /// The product of a group.
    pub product: Vec<f64>,
    /// Where one kernel takes rows as they arrive, that of the rank's own rows and so many waves; else not looked at.
    pub together: Vec<f64>,
    /// The collective of a group: reduction, or under [`GemmCollective::AllGather`] the gather.
    pub travel: Vec<f64>,
    /// The way back under [`GemmCollective::AllReduce`]; else not looked at.
    pub back: Vec<f64>,
    /// Computation before the first group's product that needs no communication: the product of the rank's own rows.
    pub before: f64,
    /// Computation after the last product that needs no communication: the gradient of the weight.
    pub after: f64,
    /// Putting together the sums of several groups, at the end; one group needs it not.
    pub join: f64,
    /// What products wait for.
    pub starts: ProductStart,
    /// What collectives travel on.
    pub link: LinkUse,
    /// Speed of computation while communication is under way, of its usual one: above 0, at most 1. What collectives that
    /// run on a GPU's multiprocessors leave of them.
    pub overlapped_speed: f64,
}

/// What the parts of a pass take by themselves, by their size.
#[derive(Clone, Copy)]
pub struct PassCurves<'a> {
    /// Seconds of a rank's product of so many rows.
    pub product: &'a dyn Fn(usize) -> f64,
    /// Seconds in which so many rows of each rank are gathered, or reduced.
    pub travel: &'a dyn Fn(usize) -> f64,
    /// Seconds in which so many reduced rows of each rank travel back to all.
    pub back: &'a dyn Fn(usize) -> f64,
    /// See [`PassCosts::after`].
    pub after: f64,
    /// See [`PassCosts::join`].
    pub join: f64,
    /// See [`PassCosts::starts`].
    pub starts: ProductStart,
    /// See [`PassCosts::link`].
    pub link: LinkUse,
    /// See [`PassCosts::overlapped_speed`].
    pub overlapped_speed: f64,
}

impl PassCurves<'_> {
    /// What a pass of a layer costs in waves of `wave` rows of each rank's tokens; `None` where it does not communicate.
    pub fn costs(&self, plan: &LinearPlan, direction: LinearDirection, wave: usize) -> Option<PassCosts> {
        if plan.tp_size == 1 {
            return None;
        }
        let collective = GemmCollective::of_pass(&plan.spec, direction)?;
        let rows = plan.tokens_of(0).len();
        let waves = rows.div_ceil(wave.max(1));
        let table = |seconds: &dyn Fn(usize) -> f64| {
            (0..=waves).map(|n| if n == 0 { 0.0 } else { seconds((n * wave).min(rows)) }).collect()
        };
        let before = if collective == GemmCollective::AllGather { (self.product)(rows) } else { 0.0 };
        // Of a gather the own rows are multiplied before.
        let owners = if collective == GemmCollective::AllGather { plan.tp_size - 1 } else { plan.tp_size };
        let mut together = Vec::new();
        if collective == GemmCollective::AllGather && self.starts == ProductStart::OneKernel {
            together = table(&|others| (self.product)(rows + others * owners));
            together[0] = before;
        }
        Some(PassCosts {
            collective,
            product: table(&|rows| (self.product)(rows * owners)),
            together,
            travel: table(self.travel),
            back: table(self.back),
            before,
            after: self.after,
            join: if collective == GemmCollective::ReduceScatter { self.join } else { 0.0 },
            starts: self.starts,
            link: self.link,
            overlapped_speed: self.overlapped_speed,
        })
    }
}

/// How far a pass has got after some groups: when each kind of work ends, in seconds.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
struct Ends {
    compute: f64,
    travel: f64,
    back: f64,
    /// When the link has moved what it was given: reductions and their ways back share it.
    link: f64,
    /// When the last collective of sums started.
    started: f64,
    /// Waves whose sums are reduced and have not been sent back.
    pending: usize,
    /// Of these, those that were reduced under the last product, where they wait for its end.
    reduced: usize,
    /// Waves that had been computed when the one kernel last waited for rows, if it has.
    waited: Option<usize>,
}

/// Of computation under communication: below it, what was seen has another reason.
const LEAST_SPEED: f64 = 0.25;

/// Sequences that are kept for each number of waves done.
const FRONT: usize = 64;

impl PassCosts {
    /// Waves of the pass.
    pub fn waves(&self) -> usize {
        self.product.len().min(self.travel.len()).saturating_sub(1)
    }

    /// Seconds of the pass with groups of so many waves.
    ///
    /// # Panics
    /// When there are more waves than the tables have.
    pub fn seconds(&self, groups: &[usize]) -> f64 {
        let mut left = groups.iter().sum();
        let mut ends = self.start(left);
        for &waves in groups {
            left -= waves;
            ends = self.step(ends, waves, left);
        }
        self.end(ends, groups.len())
    }

    /// Sets the speed of computation under communication such that `groups` take the `seconds` that they were seen to take, as
    /// far as it can account for them.
    pub(crate) fn correct(&mut self, groups: &[usize], seconds: f64) {
        // The seconds fall with the speed.
        let (mut slow, mut fast) = (LEAST_SPEED, 1.0);
        for _ in 0..30 {
            self.overlapped_speed = 0.5 * (slow + fast);
            if self.seconds(groups) > seconds {
                slow = self.overlapped_speed
            } else {
                fast = self.overlapped_speed
            }
        }
    }

    /// The fastest sequence of at most `most` groups, in waves. Exact up to sequences whose ends differ by less than a
    /// ten-thousandth of the pass; of equally fast ones the one with the fewest groups. Some per cent may be missed where a sequence that
    /// is ahead may end later than one that was behind: a way back of sums may go first and hold it up, one kernel may wait later for rows.
    pub fn fastest(&self, most: usize) -> Vec<usize> {
        let all = self.waves();
        if all <= 1 || most <= 1 {
            return vec![all.max(1)];
        }
        let slack = 1e-4 * self.seconds(&[all]);
        let mut fronts: Vec<Vec<Reached>> = vec![Vec::new(); all + 1];
        fronts[0].push(Reached { ends: self.start(all), groups: 0, from: (0, 0) });
        for done in 0..all {
            thin(&mut fronts[done], slack);
            for index in 0..fronts[done].len() {
                let reached = fronts[done][index];
                for waves in 1..=all - done {
                    // The last group that is allowed takes what is left.
                    if reached.groups + 1 == most && done + waves < all {
                        continue;
                    }
                    let ends = self.step(reached.ends, waves, all - done - waves);
                    let next = Reached { ends, groups: reached.groups + 1, from: (done, index) };
                    fronts[done + waves].push(next);
                }
            }
        }
        let seconds = |reached: &Reached| {
            self.end(reached.ends, reached.groups) + slack * reached.groups as f64 / most as f64
        };
        let Some(best) = fronts[all].iter().min_by(|a, b| seconds(a).total_cmp(&seconds(b))) else {
            return vec![all];
        };
        let (mut sizes, mut at) = (Vec::new(), (all, *best));
        while at.0 > 0 {
            let (before, index) = at.1.from;
            sizes.push(at.0 - before);
            at = (before, fronts[before][index]);
        }
        sizes.reverse();
        sizes
    }

    fn start(&self, waves: usize) -> Ends {
        let busy_until = if self.collective == GemmCollective::AllGather { self.travel[waves] } else { 0.0 };
        Ends { compute: self.compute_until(0.0, self.before, busy_until), ..Ends::default() }
    }

    /// After one more group of `waves`, with `left` still to come.
    fn step(&self, mut ends: Ends, waves: usize, left: usize) -> Ends {
        if self.collective == GemmCollective::AllGather {
            // It starts with the product that hides it.
            let begin = if self.takes_workers() { ends.travel.max(ends.started) } else { ends.travel };
            ends.travel = begin + self.travel[waves];
            let busy_until = ends.travel + self.travel[left];
            ends.started = ends.compute.max(ends.travel);
            let seconds = match self.starts {
                ProductStart::OneKernel => {
                    let done = self.waves() - left;
                    if ends.compute < ends.travel {
                        ends.waited = Some(done - waves);
                    }
                    // It goes on with what is there: the waves of tiles of groups that follow each other are full.
                    let until = |done: usize| match ends.waited {
                        None => self.together[done],
                        Some(before) => self.product[done - before],
                    };
                    (until(done) - until(done - waves)).max(0.0)
                }
                ProductStart::Free | ProductStart::AfterCommunication => self.product[waves],
            };
            ends.compute = self.compute_until(ends.started, seconds, busy_until);
            return ends;
        }
        let begin = match self.starts {
            ProductStart::Free | ProductStart::OneKernel => ends.compute,
            ProductStart::AfterCommunication => ends.compute.max(ends.started),
        };
        if self.takes_workers() {
            ends = self.send_back_at_end(ends, begin);
        }
        let busy_until = ends.travel.max(ends.back);
        let seconds = match self.starts {
            ProductStart::OneKernel => {
                let done = self.waves() - left;
                (self.product[done] - self.product[done - waves]).max(0.0)
            }
            ProductStart::Free | ProductStart::AfterCommunication => self.product[waves],
        };
        ends.compute = self.compute_until(begin, seconds, busy_until);
        if self.takes_workers() {
            ends.started = ends.travel.max(ends.compute);
            ends.travel = self.moved_by(&mut ends.link, ends.started, &self.travel, waves);
            if self.collective == GemmCollective::AllReduce {
                ends.pending = waves;
            }
            return ends;
        }
        // The next reduction comes before the way back of the last one where its product is done by then.
        let reduced = ends.travel;
        if ends.compute > reduced {
            ends = self.send_back(ends, reduced);
        }
        ends.started = ends.travel.max(ends.compute);
        ends.travel = self.moved_by(&mut ends.link, ends.started, &self.travel, waves);
        ends = self.send_back(ends, reduced);
        if self.collective == GemmCollective::AllReduce {
            ends.pending = waves;
        }
        ends
    }

    /// Whether collectives take workers from products and find them only where one ends.
    fn takes_workers(&self) -> bool {
        self.starts == ProductStart::AfterCommunication && self.overlapped_speed < 1.0
    }

    /// Where a product ends at `at`, sums travel back that have been reduced under it; those whose reduction starts there are next.
    fn send_back_at_end(&self, mut ends: Ends, at: f64) -> Ends {
        if ends.reduced > 0 {
            ends.back = self.moved_by(&mut ends.link, ends.back.max(at), &self.back, ends.reduced);
        }
        (ends.reduced, ends.pending) = (ends.pending, 0);
        ends
    }

    /// Sums reduced at `reduced` travel back to all.
    fn send_back(&self, mut ends: Ends, reduced: f64) -> Ends {
        if ends.pending > 0 {
            let begin = ends.back.max(reduced);
            ends.back = self.moved_by(&mut ends.link, begin, &self.back, ends.pending);
            ends.pending = 0;
        }
        ends
    }

    /// When the link has moved so many waves of a collective that starts at `begin`: what comes before a byte moves may run
    /// while others use the link.
    fn moved_by(&self, link: &mut f64, begin: f64, table: &[f64], waves: usize) -> f64 {
        if self.link == LinkUse::Apart {
            return begin + table[waves];
        }
        let first = match table {
            [_, one, two, ..] => (2.0 * one - two).clamp(0.0, *one),
            _ => 0.0,
        };
        let first = first.min(table[waves]);
        *link = link.max(begin + first) + table[waves] - first;
        *link
    }

    fn end(&self, ends: Ends, groups: usize) -> f64 {
        if self.takes_workers() && self.collective == GemmCollective::AllReduce {
            return self.end_of_workers(ends);
        }
        let reduced = ends.travel;
        let ends = self.send_back(ends, reduced);
        let communicated = ends.travel.max(ends.back);
        let computed = self.compute_until(ends.compute, self.after, communicated);
        computed.max(communicated) + if groups > 1 { self.join } else { 0.0 }
    }

    /// The end where sums travel back on workers that they find where products end.
    fn end_of_workers(&self, mut ends: Ends) -> f64 {
        let begin = ends.compute.max(ends.started);
        ends = self.send_back_at_end(ends, begin);
        let computed = self.compute_until(begin, self.after, ends.travel.max(ends.back));
        let last = ends.travel.max(computed);
        self.send_back_at_end(ends, last).back.max(computed)
    }

    /// When computation of `seconds` ends that starts at `start`, while communication is under way until `busy_until`.
    fn compute_until(&self, start: f64, seconds: f64, busy_until: f64) -> f64 {
        let overlapped = (busy_until - start).max(0.0) * self.overlapped_speed;
        if overlapped >= seconds {
            start + seconds / self.overlapped_speed
        } else {
            start.max(busy_until) + (seconds - overlapped)
        }
    }
}

/// A sequence of groups, by what it leads to.
#[derive(Clone, Copy, Debug)]
struct Reached {
    ends: Ends,
    groups: usize,
    /// Waves done before its last group, and the index of what was reached there.
    from: (usize, usize),
}

impl Reached {
    /// Whether nothing that follows `other` can end sooner by more than `slack` than the same after `self`.
    fn covers(&self, other: &Self, slack: f64) -> bool {
        self.ends.compute <= other.ends.compute + slack
            && self.ends.travel <= other.ends.travel + slack
            && self.ends.back <= other.ends.back + slack
            && self.ends.link <= other.ends.link + slack
            && self.ends.started <= other.ends.started + slack
            && self.ends.pending <= other.ends.pending
            && self.ends.reduced <= other.ends.reduced
            && self.ends.waited == other.ends.waited
            && self.groups <= other.groups
    }
}

/// Keeps what nothing else covers, those that end earliest first.
fn thin(front: &mut Vec<Reached>, slack: f64) {
    let latest = |reached: &Reached| reached.ends.compute.max(reached.ends.travel).max(reached.ends.back);
    front.sort_by(|a, b| latest(a).total_cmp(&latest(b)).then(a.groups.cmp(&b.groups)));
    let mut kept: Vec<Reached> = Vec::new();
    // The slack of a pass is shared by its steps.
    let slack = slack / FRONT as f64;
    for reached in front.drain(..) {
        if kept.len() < FRONT && !kept.iter().any(|better| better.covers(&reached, slack)) {
            kept.push(reached);
        }
    }
    *front = kept;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::linear::compositions::compositions;

    fn costs() -> impl Strategy<Value = PassCosts> {
        let collective = prop_oneof![
            Just(GemmCollective::ReduceScatter),
            Just(GemmCollective::AllReduce),
            Just(GemmCollective::AllGather)
        ];
        let curve = (0.0..5.0f64, 0.2..3.0f64);
        (
            collective,
            1usize..10,
            [curve.clone(), curve.clone(), curve],
            (0.0..8.0f64, 0.0..20.0f64),
            0.5..=1.0f64,
        )
            .prop_map(|(collective, waves, curves, (before, after), overlapped_speed)| {
                let each = curves[0].1;
                let [product, travel, back] = curves.map(|(start, each)| {
                    (0..=waves).map(|n| if n == 0 { 0.0 } else { start + each * n as f64 }).collect()
                });
                use ProductStart::{AfterCommunication, Free, OneKernel};
                let starts = [Free, AfterCommunication, OneKernel][waves % 3];
                // As one after the other, but for what a kernel needs to begin.
                let together = (0..=waves).map(|n| before + each * n as f64).collect();
                PassCosts {
                    collective,
                    product,
                    together,
                    travel,
                    back,
                    before,
                    after,
                    join: after / 8.0,
                    starts,
                    link: LinkUse::Shared,
                    overlapped_speed,
                }
            })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(300))]

        /// What is called fastest is as fast as the fastest of all sequences, or nearly so where one that is ahead may end later.
        #[test]
        fn the_fastest_is_that_of_an_exhaustive_search(costs in costs(), most in 1usize..10) {
            let waves = costs.waves();
            let found = costs.fastest(most);
            prop_assert!(found.len() <= most && found.iter().all(|&size| size > 0) && found.iter().sum::<usize>() == waves);
            let best = compositions(waves, most).map(|sizes| costs.seconds(&sizes)).fold(f64::INFINITY, f64::min);
            let seconds = costs.seconds(&found);
            // Of 670,000 such cases 366 missed more than 0.001, 0.047 at most.
            let is_one_gather = (costs.collective, costs.starts) == (GemmCollective::AllGather, ProductStart::OneKernel);
            let missed = if is_one_gather || costs.collective == GemmCollective::AllReduce { 0.1 } else { 0.001 };
            prop_assert!(seconds <= best * (1.0 + missed), "{:?} takes {} and the best {}", found, seconds, best);
        }
    }

    /// By hand: products of 2 a wave and sums of 1 or 3, each collective with a start of 0.5.
    #[test]
    fn a_pass_takes_what_its_parts_take() {
        let table = |start: f64, each: f64| {
            (0..=4).map(|n| if n == 0 { 0.0 } else { start + each * n as f64 }).collect()
        };
        let costs = |travel: f64| PassCosts {
            collective: GemmCollective::ReduceScatter,
            product: table(0.0, 2.0),
            together: Vec::new(),
            travel: table(0.5, travel),
            back: Vec::new(),
            before: 0.0,
            after: 0.0,
            join: 0.0,
            starts: ProductStart::Free,
            link: LinkUse::Shared,
            overlapped_speed: 1.0,
        };
        assert_eq!(costs(1.0).seconds(&[4]), 12.5);
        assert_eq!(costs(1.0).seconds(&[3, 1]), 6.0 + 3.5 + 1.5);
        assert_eq!(costs(1.0).seconds(&[2, 1, 1]), 8.0 + 1.5);
        assert_eq!(costs(3.0).seconds(&[1, 3]), 8.0 + 9.5);
        assert_eq!(costs(1.0).fastest(4).last(), Some(&1));
        assert_eq!(costs(3.0).fastest(4).first(), Some(&1));
        // At half the speed under the first sums, until 5.5, the next product has done 1.75 of its 6.
        let slowed = PassCosts { overlapped_speed: 0.5, ..costs(3.0) };
        assert_eq!(slowed.seconds(&[1, 3]), 5.5 + 4.25 + 9.5);
    }

    /// By hand: own rows take 2, groups 2 a wave behind each other in one kernel, 3 where it has waited, and travel takes 1 or 4.
    #[test]
    fn one_kernel_goes_on_with_what_has_come() {
        let costs = |travel: f64| PassCosts {
            collective: GemmCollective::AllGather,
            product: vec![0.0, 3.0, 5.0, 7.0],
            together: vec![2.0, 4.0, 6.0, 8.0],
            travel: (0..=3).map(|n| travel * n as f64).collect(),
            back: Vec::new(),
            before: 2.0,
            after: 0.0,
            join: 0.0,
            starts: ProductStart::OneKernel,
            link: LinkUse::Shared,
            overlapped_speed: 1.0,
        };
        assert_eq!(costs(1.0).seconds(&[1, 1, 1]), 8.0);
        // All come at 3; one each 4, of which none is left when the next comes; the first at 4 and the others at 12.
        assert_eq!(costs(1.0).seconds(&[3]), 3.0 + 7.0);
        assert_eq!(costs(4.0).seconds(&[1, 1, 1]), 12.0 + 3.0);
        assert_eq!(costs(4.0).seconds(&[1, 2]), 12.0 + 5.0);
    }
}

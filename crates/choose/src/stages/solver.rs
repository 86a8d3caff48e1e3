//! The best cuts of one rank's remote work into stages, by dynamic programming over the predicted makespan.

use super::profile::Profile;

/// Predicted costs of one rank in one direction, linear in rows and pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// Seconds to launch the local stage's computation.
    pub(crate) launch: f64,
    /// Seconds to launch another one's, and for what passes between them.
    pub(crate) remote_launch: f64,
    /// Seconds a pair.
    pub(crate) pair: f64,
    /// Seconds to start one stage's group-cast.
    pub(crate) cast_alpha: f64,
    /// Seconds a row of a group-cast.
    pub(crate) cast_row: f64,
    /// Seconds to start one stage's group-reduce; 0 in a forward.
    pub(crate) reduce_alpha: f64,
    /// Seconds a row of a group-reduce; 0 in a forward.
    pub(crate) reduce_row: f64,
}

impl Rates {
    /// Seconds of computing `area` pairs of the rank's own columns.
    pub(crate) fn local(&self, area: u64) -> f64 {
        if area == 0 { 0.0 } else { self.launch + area as f64 * self.pair }
    }

    /// Seconds of computing `area` pairs of columns received.
    pub(crate) fn remote(&self, area: u64) -> f64 {
        if area == 0 { 0.0 } else { self.remote_launch + area as f64 * self.pair }
    }

    /// Seconds of `stages` group-casts of `rows` rows in all.
    fn cast(&self, stages: usize, rows: usize) -> f64 {
        stages as f64 * self.cast_alpha + rows as f64 * self.cast_row
    }

    /// Seconds of `stages` group-reduces of `rows` rows in all.
    fn reduced(&self, stages: usize, rows: usize) -> f64 {
        stages as f64 * self.reduce_alpha + rows as f64 * self.reduce_row
    }
}

/// The best cuts of one rank for every number of remote stages that all have rows.
pub(crate) struct Cuts {
    /// `seconds[m]`: predicted makespan with `m` stages; infinite where there are fewer places than that.
    seconds: Vec<f64>,
    /// The best cuts into `m` stages, one after the other by `m`: `m + 1` indices into the profile's places.
    cuts: Vec<u16>,
    places: usize,
}

/// One path to cut up to a place.
#[derive(Clone, Copy, Debug)]
struct Path {
    /// When the last stage's computation ends.
    compute_end: f64,
    /// The latest `compute_end(s) - (s - 1) reduce_alpha - start(s) reduce_row` of the stages so far. Group-reduces run one
    /// after the other, each after its stage's computation, so that with `m` stages over `L` rows the last one ends at
    /// `m reduce_alpha + L reduce_row` after it: this is all that later stages need to know of earlier ones.
    reduce_lag: f64,
    /// The place where the last stage ends.
    place: u16,
    /// The path up to where the last stage starts.
    from: u32,
}

/// Paths to cut up to all places into ever more stages. Those of one state, a number of stages and a place where the last
/// one ends, lie together; none of them is better than another both in its end and in its lag. All of these are kept, so
/// the cuts found are the best; there are few (at most 13 in 30,000 random problems of 16 cells and 8 stages, at most 48
/// with 64 of each).
struct Paths {
    paths: Vec<Path>,
    /// Where the paths of each state start, and the end.
    starts: Vec<usize>,
}

impl Paths {
    /// The paths of the state that is being filled.
    fn add(&mut self, path: Path) {
        let start = self.starts[self.starts.len() - 1];
        let better = |a: &Path, b: &Path| a.compute_end <= b.compute_end && a.reduce_lag <= b.reduce_lag;
        if self.paths[start..].iter().any(|other| better(other, &path)) {
            return;
        }
        let mut index = start;
        while index < self.paths.len() {
            if better(&path, &self.paths[index]) {
                self.paths.swap_remove(index);
            } else {
                index += 1;
            }
        }
        self.paths.push(path);
    }

    fn close_state(&mut self) {
        self.starts.push(self.paths.len());
    }

    /// Indices of the paths of a closed state.
    fn of(&self, state: usize) -> std::ops::Range<usize> {
        self.starts[state]..self.starts[state + 1]
    }

    /// The path of a closed state at the end of the list that ends first. In a forward the lag is the end of the last
    /// computation.
    fn first(&self, state: usize) -> Option<usize> {
        self.of(state).reduce(|first, index| {
            if self.paths[index].reduce_lag < self.paths[first].reduce_lag { index } else { first }
        })
    }
}

/// What all paths share whose `m`th stage ends at a place, and what whoever goes on from there cannot avoid: the next
/// stage has at least the next cell, and so at least some lag. To count that lag now makes most paths equal that differ in
/// a smaller one.
struct Step {
    cast_end: f64,
    next_cast_end: f64,
    next_compute: f64,
    reduced: f64,
}

impl Step {
    fn new(profile: &Profile, rates: &Rates, m: usize, place: usize) -> Self {
        let (cast_end, reduced) =
            (rates.cast(m, profile.places[place]), rates.reduced(m, profile.places[place]));
        match profile.places.get(place + 1) {
            Some(&next) => Self {
                cast_end,
                next_cast_end: rates.cast(m + 1, next),
                next_compute: rates.remote(profile.area_before[place + 1] - profile.area_before[place]),
                reduced,
            },
            // Nothing comes after the end of the list.
            None => Self { cast_end, next_cast_end: 0.0, next_compute: 0.0, reduced: f64::INFINITY },
        }
    }

    fn least_next_lag(&self, compute_end: f64) -> f64 {
        compute_end.max(self.next_cast_end) + self.next_compute - self.reduced
    }
}

impl Cuts {
    /// Solves for `1 ..= stages` remote stages by dynamic programming over the profile's places. With
    /// `cast_end(s) = cast_end(s-1) + cast(s)` and `compute_end(s) = max(compute_end(s-1), cast_end(s)) + compute(s)`,
    /// the end of all casts up to place `j` depends on `s` and `j` alone, so a state is a place and a number of stages.
    pub(crate) fn solve(profile: &Profile, rates: &Rates, stages: usize) -> Self {
        let places = profile.places.len();
        let local = rates.local(profile.local_area) + rates.local(profile.hosted_area);
        let mut solved = Self { seconds: Vec::with_capacity(stages + 1), cuts: vec![0], places };
        solved.seconds.push(if places == 1 { local } else { f64::INFINITY });
        // State m * places + j: the first m stages end at place j. Without a stage only place 0 can be reached.
        let mut paths = Paths {
            paths: Vec::with_capacity(2 * (stages + 1) * places),
            starts: Vec::with_capacity((stages + 1) * places + 1),
        };
        paths.starts.push(0);
        paths.add(Path { compute_end: local, reduce_lag: f64::NEG_INFINITY, place: 0, from: 0 });
        (0..places).for_each(|_| paths.close_state());
        // Of a stage from place `i` to place `j`, however many are before it: `computes[j * places + i]`.
        let mut computes = vec![0.0; places * places];
        for j in 0..places {
            for i in 0..j {
                computes[j * places + i] = rates.remote(profile.area_before[j] - profile.area_before[i]);
            }
        }
        for m in 1..=stages {
            let before: Vec<f64> = profile.places.iter().map(|&rows| rates.reduced(m - 1, rows)).collect();
            for j in 0..places {
                let step = Step::new(profile, rates, m, j);
                for i in (m - 1)..j {
                    let (compute, reduced) = (computes[j * places + i], before[i]);
                    for index in paths.of((m - 1) * places + i) {
                        let path = paths.paths[index];
                        let compute_end = path.compute_end.max(step.cast_end) + compute;
                        let reduce_lag = path.reduce_lag.max(compute_end - reduced);
                        let reduce_lag = reduce_lag.max(step.least_next_lag(compute_end));
                        paths.add(Path { compute_end, reduce_lag, place: j as u16, from: index as u32 });
                    }
                }
                paths.close_state();
            }
            solved.keep(profile, rates, &paths, m);
        }
        solved
    }

    /// Keeps the best path to cut the whole list into `m` stages.
    fn keep(&mut self, profile: &Profile, rates: &Rates, paths: &Paths, m: usize) {
        let start = self.cuts.len();
        self.cuts.resize(start + m + 1, 0);
        let Some(mut path) = paths.first((m + 1) * self.places - 1).map(|index| &paths.paths[index]) else {
            self.seconds.push(f64::INFINITY);
            return;
        };
        self.seconds.push(path.reduce_lag + rates.reduced(m, profile.places[self.places - 1]));
        for stage in (1..=m).rev() {
            self.cuts[start + stage] = path.place;
            path = &paths.paths[path.from as usize];
        }
    }

    /// The number of stages with rows, at most `stages`, that is predicted to end first; fewer where two agree.
    pub(crate) fn best_up_to(&self, stages: usize) -> usize {
        (0..=stages).fold(0, |best, m| if self.seconds[m] < self.seconds[best] { m } else { best })
    }

    /// The largest number of stages, at most `stages`, that can all have rows.
    pub(crate) fn most_up_to(&self, stages: usize) -> usize {
        stages.min(self.places - 1)
    }

    /// Indices into the profile's places: where the first of `m` stages starts, then where each ends.
    pub(crate) fn cut(&self, m: usize) -> &[u16] {
        let start = m * (m + 1) / 2;
        &self.cuts[start..=start + m]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The makespan of given cuts, stage by stage, with a lane for computation, one for casts and one for reduces.
    fn makespan(profile: &Profile, rates: &Rates, cut: &[usize]) -> f64 {
        let mut compute_end = rates.local(profile.local_area);
        let (mut cast_end, mut reduce_end) = (0.0, compute_end);
        for stage in cut.windows(2) {
            let rows = (profile.places[stage[1]] - profile.places[stage[0]]) as f64;
            cast_end += rates.cast_alpha + rows * rates.cast_row;
            let area = profile.area_before[stage[1]] - profile.area_before[stage[0]];
            compute_end = f64::max(compute_end, cast_end) + rates.remote(area);
            reduce_end = f64::max(reduce_end, compute_end) + rates.reduce_alpha + rows * rates.reduce_row;
        }
        f64::max(compute_end, reduce_end)
    }

    /// All paths to cut `0 ..= last` into `m` stages with rows.
    fn all_cuts(last: usize, m: usize) -> Vec<Vec<usize>> {
        if m == 0 {
            return if last == 0 { vec![vec![0]] } else { Vec::new() };
        }
        let shorter = (m - 1..last).flat_map(|place| all_cuts(place, m - 1));
        shorter.map(|cut| [cut, vec![last]].concat()).collect()
    }

    fn profiles() -> impl Strategy<Value = Profile> {
        (proptest::collection::vec((1..9_usize, 0..5000_u64), 0..9), 0..20_000_u64).prop_map(
            |(cells, local_area)| {
                let (mut places, mut area_before) = (vec![0], vec![0]);
                for (blocks, area) in cells {
                    places.push(places[places.len() - 1] + blocks * counterpoint_plan::KEY_BLOCK);
                    area_before.push(area_before[area_before.len() - 1] + area);
                }
                Profile { places, area_before, local_area, hosted_area: 0 }
            },
        )
    }

    fn rates() -> impl Strategy<Value = Rates> {
        (0.0..0.5_f64, 0.0..0.5_f64, 0.0..0.5_f64, 0.0..0.01_f64, 0.0..0.5_f64, 0.0..0.01_f64).prop_map(
            |(launch, passed, cast_alpha, cast_row, reduce_alpha, reduce_row)| Rates {
                launch,
                remote_launch: launch + passed,
                pair: 1e-3,
                cast_alpha,
                cast_row,
                reduce_alpha,
                reduce_row,
            },
        )
    }

    proptest! {
        #[test]
        fn no_other_cuts_end_sooner(profile in profiles(), rates in rates(), forward: bool) {
            let rates = if forward { Rates { reduce_alpha: 0.0, reduce_row: 0.0, ..rates } } else { rates };
            let most = 5;
            let solved = Cuts::solve(&profile, &rates, most);
            let last = profile.places.len() - 1;
            for m in 0..=most {
                let best = all_cuts(last, m)
                    .iter()
                    .map(|cut| makespan(&profile, &rates, cut))
                    .fold(f64::INFINITY, f64::min);
                if best.is_infinite() {
                    prop_assert!(solved.seconds[m].is_infinite());
                    continue;
                }
                prop_assert!((solved.seconds[m] - best).abs() <= 1e-12 * best.max(1.0), "{} {best}", solved.seconds[m]);
                let cut: Vec<usize> = solved.cut(m).iter().map(|&index| index as usize).collect();
                prop_assert!((makespan(&profile, &rates, &cut) - best).abs() <= 1e-12 * best.max(1.0));
            }
        }
    }
}

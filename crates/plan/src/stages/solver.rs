use super::profile::Profile;

/// Predicted costs of one rank in one direction, linear in rows and pairs.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Rates {
    /// Seconds to launch one stage's computation.
    pub(crate) launch: f64,
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
    /// Seconds of computing `area` pairs.
    pub(crate) fn compute(&self, area: u64) -> f64 {
        if area == 0 { 0.0 } else { self.launch + area as f64 * self.pair }
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

/// One way to cut up to a place.
#[derive(Clone, Copy, Debug)]
struct Way {
    /// When the last stage's computation ends.
    compute_end: f64,
    /// The latest `compute_end(s) - (s - 1) reduce_alpha - start(s) reduce_row` of the stages so far. Group-reduces run one
    /// after the other, each after its stage's computation, so that with `m` stages over `L` rows the last one ends at
    /// `m reduce_alpha + L reduce_row` after it: this is all that later stages need to know of earlier ones.
    reduce_lag: f64,
    /// The place where the last stage starts, and which way led there.
    from: (u16, u8),
}

/// Ways of which none is better than another in both figures. More than a few are hardly ever seen, and the rarest case
/// of one more drops the way that reaches its end last.
#[derive(Clone, Copy, Debug)]
struct Front {
    ways: [Way; FRONT],
    len: u8,
}

const FRONT: usize = 4;

impl Front {
    const EMPTY: Front = Front {
        ways: [Way { compute_end: f64::INFINITY, reduce_lag: f64::INFINITY, from: (0, 0) }; FRONT],
        len: 0,
    };

    fn ways(&self) -> &[Way] {
        &self.ways[..self.len as usize]
    }

    /// The way that ends first, seen from the last place. In a forward the lag is the end of the last computation.
    fn first(&self) -> Option<usize> {
        (0..self.ways().len()).reduce(|first, index| {
            if self.ways[index].reduce_lag < self.ways[first].reduce_lag { index } else { first }
        })
    }

    fn add(&mut self, way: Way) {
        if self
            .ways()
            .iter()
            .any(|other| other.compute_end <= way.compute_end && other.reduce_lag <= way.reduce_lag)
        {
            return;
        }
        let mut kept = 0;
        for index in 0..self.len as usize {
            let other = self.ways[index];
            if way.compute_end <= other.compute_end && way.reduce_lag <= other.reduce_lag {
                continue;
            }
            self.ways[kept] = other;
            kept += 1;
        }
        if kept == FRONT {
            let late = (0..FRONT).fold(0, |late, index| {
                if self.ways[index].compute_end > self.ways[late].compute_end { index } else { late }
            });
            if way.compute_end >= self.ways[late].compute_end {
                self.len = kept as u8;
                return;
            }
            self.ways[late] = way;
        } else {
            self.ways[kept] = way;
            kept += 1;
        }
        self.len = kept as u8;
    }
}

impl Cuts {
    /// Solves for `1 ..= stages` remote stages by dynamic programming over the profile's places. With
    /// `cast_end(s) = cast_end(s-1) + cast(s)` and `compute_end(s) = max(compute_end(s-1), cast_end(s)) + compute(s)`,
    /// the end of all casts up to place `j` depends on `s` and `j` alone, so a state is a place and a number of stages.
    pub(crate) fn solve(profile: &Profile, rates: &Rates, stages: usize) -> Self {
        let places = profile.places.len();
        let local = rates.compute(profile.local_area);
        let mut solved = Self { seconds: Vec::with_capacity(stages + 1), cuts: vec![0], places };
        solved.seconds.push(if places == 1 { local } else { f64::INFINITY });
        // fronts[m * places + j]: the ways to have the first m stages end at place j that may still win.
        let mut fronts = vec![Front::EMPTY; (stages + 1) * places];
        fronts[0].add(Way { compute_end: local, reduce_lag: f64::NEG_INFINITY, from: (0, 0) });
        let length = profile.places[places - 1] as f64;
        for m in 1..=stages {
            let (before, now) = fronts.split_at_mut(m * places);
            let before = &before[(m - 1) * places..];
            for j in m..places {
                let cast_end = m as f64 * rates.cast_alpha + profile.places[j] as f64 * rates.cast_row;
                let front = &mut now[j];
                for i in m - 1..j {
                    let compute = rates.compute(profile.area_before[j] - profile.area_before[i]);
                    let reduced_before =
                        (m - 1) as f64 * rates.reduce_alpha + profile.places[i] as f64 * rates.reduce_row;
                    for (index, way) in before[i].ways().iter().enumerate() {
                        let compute_end = way.compute_end.max(cast_end) + compute;
                        let reduce_lag = way.reduce_lag.max(compute_end - reduced_before);
                        front.add(Way { compute_end, reduce_lag, from: (i as u16, index as u8) });
                    }
                }
            }
            let end = &now[places - 1];
            solved.seconds.push(match end.first() {
                Some(first) => {
                    end.ways[first].reduce_lag + m as f64 * rates.reduce_alpha + length * rates.reduce_row
                }
                None => f64::INFINITY,
            });
            solved.keep(m, &fronts);
        }
        solved
    }

    /// Walks back from the end of the list and keeps the cuts into `m` stages.
    fn keep(&mut self, m: usize, fronts: &[Front]) {
        let start = self.cuts.len();
        self.cuts.resize(start + m + 1, 0);
        let mut place = self.places - 1;
        let Some(mut way) = fronts[m * self.places + place].first() else { return };
        for stage in (1..=m).rev() {
            self.cuts[start + stage] = place as u16;
            let (from, index) = fronts[stage * self.places + place].ways[way].from;
            (place, way) = (from as usize, index as usize);
        }
    }

    /// Predicted makespan when the rank may leave some of `stages` idle.
    pub(crate) fn seconds_up_to(&self, stages: usize) -> f64 {
        self.seconds[self.best_up_to(stages)]
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
        let mut compute_end = rates.compute(profile.local_area);
        let (mut cast_end, mut reduce_end) = (0.0, compute_end);
        for stage in cut.windows(2) {
            let rows = (profile.places[stage[1]] - profile.places[stage[0]]) as f64;
            cast_end += rates.cast_alpha + rows * rates.cast_row;
            let area = profile.area_before[stage[1]] - profile.area_before[stage[0]];
            compute_end = f64::max(compute_end, cast_end) + rates.compute(area);
            reduce_end = f64::max(reduce_end, compute_end) + rates.reduce_alpha + rows * rates.reduce_row;
        }
        f64::max(compute_end, reduce_end)
    }

    /// All ways to cut `0 ..= last` into `m` stages with rows.
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
                    places.push(places[places.len() - 1] + blocks * crate::KEY_BLOCK);
                    area_before.push(area_before[area_before.len() - 1] + area);
                }
                Profile { places, area_before, local_area }
            },
        )
    }

    fn rates() -> impl Strategy<Value = Rates> {
        (0.0..0.5_f64, 0.0..0.5_f64, 0.0..0.01_f64, 0.0..0.5_f64, 0.0..0.01_f64).prop_map(
            |(launch, cast_alpha, cast_row, reduce_alpha, reduce_row)| Rates {
                launch,
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

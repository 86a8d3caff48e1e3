//! Searches for the fastest groups of a layer's forward, whatever it is that says how long things take.

use crate::{
    CostModel, LinearKind, LinearPlan, LinearSpec, LinkUse, PassCurves, PlanError, ProductStart, WaveGroups,
    compositions,
};

/// Says how long a forward and its parts take: a machine that runs them, or a simulator.
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

    /// Seconds of the forward with the groups of a plan.
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
    /// Rows of a wave in each rank's tokens.
    pub wave: usize,
    /// The most groups that are looked at.
    pub most_groups: usize,
    /// See [`PassCosts::starts`](crate::PassCosts::starts).
    pub starts: ProductStart,
    /// See [`PassCosts::link`](crate::PassCosts::link).
    pub link: LinkUse,
    /// See [`PassCosts::speed_beside`](crate::PassCosts::speed_beside).
    pub speed_beside: f64,
}

impl GroupSearcher {
    /// Waves of the forward.
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
        // The costs are of automatic groups only.
        LinearPlan::new(self.spec, self.tp_size, groups, &CostModel::H200)
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
        mut told: impl FnMut(SearchStep),
    ) -> Result<(LinearPlan, f64), C::Error> {
        let waves = self.waves()?;
        let all = compositions(waves, self.most_groups).count();
        let mut best: Option<(LinearPlan, f64)> = None;
        for (done, groups) in compositions(waves, self.most_groups).enumerate() {
            let plan = self.of_waves(&groups)?;
            told(SearchStep { what: format!("groups of {:?} waves", groups), done, all });
            let seconds = clock.pass(&plan)?;
            if best.as_ref().is_none_or(|(_, least)| seconds < *least) {
                best = Some((plan, seconds));
            }
        }
        // A forward has at least one wave, so there is at least one sequence.
        let whole = self.plan(WaveGroups::Fixed(1))?;
        Ok(best.unwrap_or((whole, f64::INFINITY)))
    }

    /// Times products and collectives of some sizes by themselves, and returns the groups that are fastest by these times, with
    /// the seconds expected.
    ///
    /// # Errors
    /// When the clock fails.
    pub fn predictive<C: PassClock>(
        &self,
        clock: &mut C,
        mut told: impl FnMut(SearchStep),
    ) -> Result<(LinearPlan, f64), C::Error> {
        let whole = self.plan(WaveGroups::Fixed(1))?;
        let rows = whole.tokens_of(0).len();
        let waves = self.waves()?;
        let sizes = sampled(waves).map(|waves| (waves * self.wave).min(rows));
        let mut sizes: Vec<usize> = sizes.collect();
        sizes.dedup();
        let all = 2 * sizes.len() + 2;
        let (mut product, mut travel, mut back) = (Curve::default(), Curve::default(), Curve::default());
        let owners = match whole.spec.kind {
            LinearKind::Column => (self.tp_size - 1).max(1),
            LinearKind::Row => self.tp_size,
        };
        for (index, &size) in sizes.iter().enumerate() {
            told(SearchStep { what: format!("a product of {} rows", size * owners), done: 2 * index, all });
            product.add(size * owners, clock.product(size * owners)?);
            told(SearchStep { what: format!("a collective of {size} rows"), done: 2 * index + 1, all });
            let [there, home] = clock.travel(size)?;
            travel.add(size, there);
            back.add(size, home);
        }
        told(SearchStep { what: "a product of a rank's own rows".to_owned(), done: all - 2, all });
        product.add(rows, clock.product(rows)?);
        told(SearchStep { what: "putting groups together".to_owned(), done: all - 1, all });
        let curves = PassCurves {
            join: clock.join()?,
            starts: self.starts,
            link: self.link,
            product: &|rows| product.at(rows),
            travel: &|rows| travel.at(rows),
            back: &|rows| back.at(rows),
            speed_beside: self.speed_beside,
        };
        let Some(costs) = whole.pass_costs(self.wave, &curves) else {
            return Ok((whole, product.at(self.spec.tokens)));
        };
        let groups = costs.fastest(self.most_groups);
        Ok((self.of_waves(&groups)?, costs.seconds(&groups)))
    }
}

/// Numbers of waves that are timed: all small ones, then each half as much again as the one before, and all.
fn sampled(waves: usize) -> impl Iterator<Item = usize> {
    let sizes = std::iter::successors(Some(1), move |&size| {
        let next = if size < 8 { size + 1 } else { size * 3 / 2 };
        (size < waves).then_some(next.min(waves))
    });
    sizes.take_while(move |&size| size <= waves.max(1))
}

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
    use super::*;

    #[test]
    fn curves_and_their_points() {
        assert_eq!(sampled(1).collect::<Vec<_>>(), [1]);
        assert_eq!(sampled(10).collect::<Vec<_>>(), [1, 2, 3, 4, 5, 6, 7, 8, 10]);
        assert_eq!(sampled(32).last(), Some(32));
        let mut curve = Curve::default();
        curve.add(4, 3.0);
        curve.add(2, 1.0);
        assert_eq!([1, 2, 3, 4, 8].map(|size| curve.at(size)), [1.0, 1.0, 2.0, 3.0, 6.0]);
    }
}

//! Whether query rows are away, and which: proposals are weighed by bytes or by predicted seconds, and the best is kept.

use counterpoint_mask::{Band, Mask, Range};

use crate::division::{Division, Owners};
use crate::hosting::{Away, MOST_PIECES, UnweighedOffload, assign, pieces, proposals};
use crate::{AttentionSpec, PlanConfig, PlanError, Planning, Prediction, QueryExchange, StageCount, stages};

/// The division of `mask` for these owners; or, where rows that are away make it better, the best one for them or for those
/// that `redispatch` finds, knowing which query rows are away. Ways in more than [`MOST_PIECES`] pieces are passed over.
pub(crate) fn choose(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
    owners: Owners,
    redispatch: impl Fn(&[Range]) -> Result<Owners, PlanError>,
) -> Result<Division, PlanError> {
    let work = owners.work(mask);
    let Owners { q_dispatch, k_dispatch, k_runs, .. } = &owners;
    let proposals = proposals(&work, q_dispatch, k_dispatch, k_runs, spec, config);
    let without = Division { owners, work, hosted: Vec::new(), unweighed: None };
    if proposals.is_empty() {
        return Ok(without);
    }
    let mut aim = Aim::of(&without, spec, config, planning)?;
    let (mut best, mut unweighed) = (None, None);
    // One at a time: of thousands of ranks each takes hundreds of megabytes.
    let mut weigh = |owners: Owners, work: &[Vec<Band>], away: &Away| {
        planning.check()?;
        let pieces = pieces(work, away, &owners.q_dispatch, &owners.k_runs);
        if pieces > MOST_PIECES {
            unweighed = Some(UnweighedOffload { pieces });
            return Ok(());
        }
        let (work, hosted) = assign(work, away, &owners.q_dispatch, &owners.q_runs, &owners.k_runs);
        let division = Division { owners, work, hosted, unweighed: None };
        if aim.is_nearer(&division, spec, config, planning)? {
            best = Some(division);
        }
        Ok(())
    };
    for away in proposals {
        let rows = without.owners.global(&away);
        let other = redispatch(&rows)?;
        if other != without.owners {
            let (work, away) = (other.work(mask), other.local(&rows));
            weigh(other, &work, &away)?;
        }
        weigh(without.owners.clone(), &without.work, &away)?;
    }
    Ok(Division { unweighed, ..best.unwrap_or(without) })
}

/// Predicted, of a forward and of a backward.
fn seconds(
    division: &Division,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
) -> Result<(f64, f64), PlanError> {
    // Who computes what, and with it every bit of a result, must not depend on the stages that were asked for.
    let config = PlanConfig { stages: StageCount::Auto.into(), ..*config };
    let outline = stages::outline(division.clone(), spec, &config, planning)?;
    let prediction = Prediction::of_outline(&outline, spec, &config);
    Ok((prediction.forward_seconds(), prediction.backward_seconds()))
}

/// What the best way to divide work is the nearest to.
enum Aim {
    /// The least of those seen so far, if any was.
    FewestBytes(Option<u64>),
    /// Seconds of a forward and of a backward without rows that are away, of which neither may take longer, and the least of both
    /// together so far.
    Soonest { limit: (f64, f64), least: f64 },
}

impl Aim {
    fn of(
        without: &Division,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<Self, PlanError> {
        Ok(match config.query_exchange {
            QueryExchange::FewestBytes => Self::FewestBytes(None),
            _ => {
                let limit = seconds(without, spec, config, planning)?;
                Self::Soonest { limit, least: limit.0 + limit.1 }
            }
        })
    }

    /// Whether it is nearer than all before it.
    fn is_nearer(
        &mut self,
        division: &Division,
        spec: &AttentionSpec,
        config: &PlanConfig,
        planning: &Planning<'_>,
    ) -> Result<bool, PlanError> {
        Ok(match self {
            Self::FewestBytes(least) => {
                let bytes = division.bytes(spec);
                let is_nearer = least.is_none_or(|least| bytes < least);
                if is_nearer {
                    *least = Some(bytes);
                }
                is_nearer
            }
            Self::Soonest { limit, least } => {
                let (forward, backward) = seconds(division, spec, config, planning)?;
                let is_nearer = forward <= limit.0 && backward <= limit.1 && forward + backward < *least;
                if is_nearer {
                    *least = forward + backward;
                }
                is_nearer
            }
        })
    }
}

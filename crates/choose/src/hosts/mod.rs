//! Whether query rows are offloaded, and which: proposals are weighed by bytes or by predicted seconds, and the best is kept.

mod pairs;
mod proposals;
mod steps;

use std::fmt;

use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{AttentionSpec, Division, HostedRows, Owners, PlanError, Planning};

use crate::closed_form::Prediction;
use crate::config::{PlanConfig, QueryExchange};
use crate::pass_stages::StageCount;
use crate::stages;
use proposals::proposals;
pub(crate) use steps::over_nodes;

/// The most that are weighed: seconds of one core (0.1 to 1.2 us a piece on an EPYC, whether neighbours can be joined or not) and some
/// hundred megabytes. Rows that are worth sending are few, and come in thousands of pieces.
const MOST_PIECES: u64 = 1 << 23;

/// Rows are offloaded with a part of their work where that moves at most this part of the bytes that whole rows move.
const MOST_BYTES_IN_PART: f64 = 0.98;

/// Query offload that was asked for and not weighed, because it comes in too many pieces.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnweighedOffload {
    /// Pieces of work, one for each owner of keys that neighbouring rows see.
    pub pieces: u64,
}

impl fmt::Display for UnweighedOffload {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { pieces } = self;
        write!(
            f,
            "query offload comes in {pieces} pieces here and was not weighed; at most {MOST_PIECES} are: use fewer ranks, or larger chunks"
        )
    }
}

/// Whether any rows of a division, none of which is computed elsewhere, are worth a look.
pub(crate) fn any(without: &Division, spec: &AttentionSpec, config: &PlanConfig) -> bool {
    !proposals(without, spec, config).is_empty() || !pairs::proposals(without, spec, config).is_empty()
}

/// The division of `mask` for these owners; or, where offloaded rows make it better, the best one for them or for those
/// that `redispatch` finds, knowing which query rows are offloaded. Ways in more than [`MOST_PIECES`] pieces are passed over, and counted.
pub(crate) fn choose(
    mask: &Mask,
    spec: &AttentionSpec,
    config: &PlanConfig,
    planning: &Planning<'_>,
    owners: Owners,
    redispatch: impl Fn(&[Range]) -> Result<Owners, PlanError>,
) -> Result<(Division, Option<UnweighedOffload>), PlanError> {
    let without = Division::new(mask, owners);
    let (proposals, in_part) = (proposals(&without, spec, config), pairs::proposals(&without, spec, config));
    if proposals.is_empty() && in_part.is_empty() {
        return Ok((without, None));
    }
    let mut aim = Aim::of(&without, spec, config, planning)?;
    let (mut best, mut unweighed) = (None, None);
    // Of offloaded rows with all of their work, which need no second pass over results.
    let mut whole_bytes: Option<u64> = None;
    // One at a time: of thousands of ranks each takes hundreds of megabytes.
    let mut weigh = |division: &Division, hosted: &[Vec<HostedRows>], is_whole: bool| {
        planning.check()?;
        let pieces = division.hosted_pieces(hosted);
        if pieces > MOST_PIECES {
            unweighed = Some(UnweighedOffload { pieces });
            return Ok(());
        }
        let division = division.with_hosts(hosted);
        let bytes = division.bytes(spec);
        if is_whole {
            whole_bytes = Some(whole_bytes.map_or(bytes, |least| least.min(bytes)));
        } else if whole_bytes.is_some_and(|least| bytes as f64 > MOST_BYTES_IN_PART * least as f64) {
            return Ok(());
        }
        if aim.is_nearer(&division, spec, config, planning)? {
            best = Some(division);
        }
        Ok(())
    };
    for offloaded in proposals {
        let rows = without.owners().global(&offloaded);
        let other = redispatch(&rows)?;
        if other != *without.owners() {
            let offloaded = HostedRows::by_all(&other.local(&rows));
            weigh(&Division::new(mask, other), &offloaded, true)?;
        }
        weigh(&without, &HostedRows::by_all(&offloaded), true)?;
    }
    for hosted in in_part {
        weigh(&without, &hosted, false)?;
    }
    let best = match best {
        // As it is made of its plan again: bands are cut where hosts change, whatever was asked for.
        Some(division) if division.is_hosted_in_part() => without.with_hosts(&division.hosted_rows()),
        best => best.unwrap_or(without),
    };
    Ok((best, unweighed))
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
    /// Seconds of a forward and of a backward without offloaded rows, of which neither may take longer, and the least of both
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

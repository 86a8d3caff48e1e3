//! Step tables: what a rank's device needs of a plan, made ahead and handed over as bytes, with what they belong to.

use counterpoint_plan::ByteFormat;
use counterpoint_schedule::Program;
use serde::{Deserialize, Serialize};

use crate::{DescribedDevice, ExecError, PlanIdentity, TablesFault};

/// Tile schedules, and what else is searched for attention of a plan, of one rank on a device like the rank's. The process that trains makes
/// them, on any of its threads, or another one, which needs no device.
#[derive(Clone, Debug, PartialEq)]
pub struct StepTables<D: DescribedDevice>(Content<D>);

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(bound = "")]
struct Content<D: DescribedDevice> {
    rank: usize,
    device: D,
    plan: PlanIdentity,
    /// Of the forward, and of the backward where there is one.
    programs: Vec<D::Tables>,
}

/// Where tables are for, in words.
#[derive(Serialize, Deserialize)]
struct Place {
    kind: String,
    device: String,
}

/// The number counts up when tables of the same plan change, too: a test of crate `cuda` has recorded them.
const FORMAT: ByteFormat = ByteFormat::new(*b"CPST", "step tables", 1);

impl<D: DescribedDevice> StepTables<D> {
    pub(super) fn of_programs(
        device: &D,
        programs: &[Program],
        plan: &PlanIdentity,
    ) -> Result<Self, ExecError> {
        let rank = programs.first().map_or(0, |program| program.rank);
        let programs = programs.iter().map(|program| device.tables(program)).collect::<Result<_, _>>()?;
        Ok(Self(Content { rank, device: device.clone(), plan: plan.clone(), programs }))
    }

    /// The rank whose they are.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Those of each Program.
    pub(super) fn programs(&self) -> &[D::Tables] {
        &self.0.programs
    }

    /// Whether they are this rank's, on its device, of so many passes of this plan.
    pub(super) fn check(
        &self,
        rank: usize,
        device: &D,
        plan: &PlanIdentity,
        passes: usize,
    ) -> Result<(), TablesFault> {
        let content = &self.0;
        if content.rank != rank {
            return Err(TablesFault::Rank { theirs: content.rank });
        }
        if content.device != *device {
            let [theirs, own] = [&content.device, device].map(ToString::to_string);
            return Err(TablesFault::Device { theirs, own });
        }
        if let Some(difference) = plan.difference(&content.plan) {
            let crate::PlanDifference { what, own, other } = difference;
            return Err(TablesFault::Plan { what, theirs: other, own });
        }
        if content.programs.len() != passes {
            return Err(TablesFault::Pass { theirs: content.programs.len(), own: passes });
        }
        Ok(())
    }

    /// All of them as bytes, for another process of the same version.
    pub fn to_bytes(&self) -> Vec<u8> {
        // What others, whose devices are of another kind, read of it comes first.
        let place = Place { kind: D::KIND.to_owned(), device: self.0.device.to_string() };
        FORMAT.write(&(place, &self.0))
    }

    /// The inverse of [`StepTables::to_bytes`]. Memory is bounded by that of the bytes.
    ///
    /// # Errors
    /// [`TablesFault`] for bytes that this version has not made, or that are not as they were.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self, TablesFault> {
        let (place, rest) = FORMAT.read_first::<Place>(bytes)?;
        if place.kind != D::KIND {
            return Err(TablesFault::Device { theirs: place.device, own: D::KIND.to_owned() });
        }
        Ok(Self(rest.read()?))
    }
}

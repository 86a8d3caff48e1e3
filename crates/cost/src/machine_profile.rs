//! Profiles of machines: what `doctor --calibrate` measured, in a versioned JSON file, and the built-in H200.

use serde::{Deserialize, Serialize};
use thiserror::Error;

use crate::figure_limits::{COSTS, check_figure};
use crate::{CostError, CostModel, WorkerSharing};

/// The version of the format. It changes with the meaning of a field, not when one is added.
pub const PROFILE_VERSION: u32 = 1;

/// What a machine was measured to do, as a file holds it. Unknown fields are left alone, so that a later program may add some.
///
/// Rates and costs are those of one rank that has a device of its own.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MachineProfile {
    /// [`PROFILE_VERSION`] of whoever wrote it.
    pub version: u32,
    /// What it is of, such as `NVIDIA H200`.
    pub machine: String,
    /// Devices that were there.
    pub devices: usize,
    /// Who measured, and how, for people.
    #[serde(default)]
    pub source: String,
    /// What work costs.
    pub cost: CostModel,
    /// Group collectives by transport.
    #[serde(default)]
    pub transports: Vec<TransportMeasurement>,
    /// Overlap policies, the fastest first.
    #[serde(default)]
    pub policies: Vec<PolicyMeasurement>,
}

/// What a transport takes for collectives in which each rank sends and receives as much.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct TransportMeasurement {
    /// Its name on the command line.
    pub transport: String,
    /// Group-casts, ascending by size.
    pub cast: Vec<LinkPoint>,
    /// Group-reduces, ascending by size.
    pub reduce: Vec<LinkPoint>,
}

/// One size of a collective.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct LinkPoint {
    /// Bytes that each rank sends.
    pub bytes: u64,
    /// Seconds on the stream.
    pub seconds: f64,
}

/// What an overlap policy was measured to bring.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PolicyMeasurement {
    /// Its name on the command line.
    pub policy: String,
    /// Seconds of the measured forward and backward together.
    pub seconds: f64,
    /// Share of the communication that ran under computation, of what could.
    pub efficiency: f64,
}

/// Why a profile cannot be used.
#[derive(Clone, Debug, PartialEq, Error)]
#[non_exhaustive]
pub enum ProfileError {
    /// Not JSON, or not of a profile's form.
    #[error("it is not a machine profile ({reason}); measure one with `counterpoint doctor --calibrate`")]
    Form {
        /// What is wrong, with line and column.
        reason: String,
    },
    /// Written by a program that means something else by it.
    #[error(
        "it is of version {found}, and this program reads version {PROFILE_VERSION}; measure this machine again with \
         `counterpoint doctor --calibrate`"
    )]
    Version {
        /// Of the profile.
        found: u32,
    },
    /// Measured elsewhere.
    #[error(
        "it is of {found}, and this is {wanted}; measure this machine with `counterpoint doctor --calibrate`, or simulate the \
         other one"
    )]
    Machine {
        /// What it is of.
        found: String,
        /// What is planned for.
        wanted: String,
    },
    /// A figure that no time can be predicted with.
    #[error("{0}; measure this machine again with `counterpoint doctor --calibrate`")]
    Cost(#[from] CostError),
}

/// The version alone: it says whether the rest can be understood.
#[derive(Deserialize)]
struct Versioned {
    version: u32,
}

impl MachineProfile {
    /// An H200 on NVLink, as measured for this program's own documents.
    pub fn h200() -> Self {
        Self {
            version: PROFILE_VERSION,
            machine: "NVIDIA H200".to_owned(),
            devices: 2,
            source: "built in: benches/runs/2026-11-22-h200-x2-whole".to_owned(),
            cost: CostModel { sharing: Some(WorkerSharing::H200), ..CostModel::H200 },
            transports: Vec::new(),
            policies: Vec::new(),
        }
    }

    /// Reads what [`MachineProfile::to_json`] wrote.
    ///
    /// # Errors
    /// Text that is no profile, another version, figures that no time can be predicted with.
    pub fn from_json(text: &str) -> Result<Self, ProfileError> {
        let form = |error: serde_json::Error| ProfileError::Form { reason: error.to_string() };
        let Versioned { version } = serde_json::from_str(text).map_err(form)?;
        if version != PROFILE_VERSION {
            return Err(ProfileError::Version { found: version });
        }
        let profile: Self = serde_json::from_str(text).map_err(form)?;
        profile.validate()?;
        Ok(profile)
    }

    /// Whether times can be predicted with what it holds.
    ///
    /// # Errors
    /// A figure that no machine could have; sizes of collectives that do not ascend.
    pub fn validate(&self) -> Result<(), ProfileError> {
        self.cost.validate()?;
        for transport in &self.transports {
            for (field, points) in
                [("transports.cast", &transport.cast), ("transports.reduce", &transport.reduce)]
            {
                points.iter().try_for_each(|point| check_figure(field, point.seconds, COSTS))?;
                let sizes = points.iter().map(|point| point.bytes);
                let mut pairs = sizes.clone().zip(sizes.skip(1));
                if let Some((_, bytes)) = pairs.find(|(before, bytes)| bytes <= before) {
                    let (value, wanted) = (format!("{bytes} bytes"), "ascending by size".to_owned());
                    return Err(CostError { field, value, wanted }.into());
                }
            }
        }
        for policy in &self.policies {
            check_figure("policies.seconds", policy.seconds, COSTS)?;
            check_figure("policies.efficiency", policy.efficiency, -COSTS.end()..=*COSTS.end())?;
        }
        Ok(())
    }

    /// The profile as a file holds it.
    pub fn to_json(&self) -> String {
        let mut text = serde_json::to_string_pretty(self).expect("numbers and strings always serialise");
        text.push('\n');
        text
    }

    /// Refuses a profile of another machine.
    ///
    /// # Errors
    /// [`ProfileError::Machine`].
    pub fn check_machine(&self, machine: &str) -> Result<(), ProfileError> {
        if self.machine == machine {
            return Ok(());
        }
        Err(ProfileError::Machine { found: self.machine.clone(), wanted: machine.to_owned() })
    }
}

impl TransportMeasurement {
    /// Seconds of a group-cast of so many bytes a rank; `None` without measurements.
    pub fn cast_seconds(&self, bytes: u64) -> Option<f64> {
        between(&self.cast, bytes)
    }

    /// Seconds of a group-reduce.
    pub fn reduce_seconds(&self, bytes: u64) -> Option<f64> {
        between(&self.reduce, bytes)
    }
}

/// Along the lines between neighbouring points; past the last one at its rate.
fn between(points: &[LinkPoint], bytes: u64) -> Option<f64> {
    let (first, last) = (points.first()?, points.last()?);
    if bytes <= first.bytes {
        return Some(first.seconds);
    }
    let share = |a: &LinkPoint, b: &LinkPoint| {
        let part = (bytes - a.bytes) as f64 / (b.bytes - a.bytes).max(1) as f64;
        a.seconds + part * (b.seconds - a.seconds)
    };
    let inside = points.windows(2).find(|pair| bytes <= pair[1].bytes);
    let beyond = || last.seconds * bytes as f64 / last.bytes.max(1) as f64;
    Some(inside.map_or_else(beyond, |pair| share(&pair[0], &pair[1])))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_profile_survives_its_file() {
        let mut profile = MachineProfile::h200();
        profile.policies.push(PolicyMeasurement {
            policy: "kernel-barrier".to_owned(),
            seconds: 0.25,
            efficiency: 0.9,
        });
        assert_eq!(MachineProfile::from_json(&profile.to_json()), Ok(profile));
    }

    #[test]
    fn fields_of_later_programs_are_left_alone_and_missing_lists_are_empty() {
        let cost = serde_json::to_string(&CostModel { tiles: None, ..CostModel::H200 }).unwrap();
        let text =
            format!(r#"{{"version": 1, "machine": "X", "devices": 1, "colour": "red", "cost": {cost}}}"#);
        let profile = MachineProfile::from_json(&text).unwrap();
        assert!(profile.transports.is_empty() && profile.cost.tiles.is_none());
    }

    #[test]
    fn what_cannot_be_used_is_refused_with_its_reason() {
        let refused = |text: &str| MachineProfile::from_json(text).unwrap_err();
        assert!(matches!(refused("{"), ProfileError::Form { .. }));
        assert!(matches!(refused(r#"{"version": 1}"#), ProfileError::Form { .. }));
        assert_eq!(refused(r#"{"version": 7, "machine": 3}"#), ProfileError::Version { found: 7 });
        let mut profile = MachineProfile::h200();
        profile.cost.link.bytes_per_second = 0.0;
        assert!(matches!(refused(&profile.to_json()), ProfileError::Cost(_)));
        let mut profile = MachineProfile::h200();
        profile.cost.tiles.as_mut().unwrap().workers = 0;
        assert!(matches!(refused(&profile.to_json()), ProfileError::Cost(_)));
        // Sizes that do not ascend.
        let mut profile = MachineProfile::h200();
        let point = |bytes| LinkPoint { bytes, seconds: 1e-3 };
        let (cast, reduce) = (vec![point(8), point(4)], Vec::new());
        profile.transports.push(TransportMeasurement { transport: "x".to_owned(), cast, reduce });
        assert!(refused(&profile.to_json()).to_string().contains("transports.cast"));
        let error = MachineProfile::h200().check_machine("NVIDIA B200").unwrap_err().to_string();
        assert!(error.contains("NVIDIA H200") && error.contains("NVIDIA B200"), "{error}");
        assert_eq!(MachineProfile::h200().check_machine("NVIDIA H200"), Ok(()));
    }

    #[test]
    fn sizes_between_two_points_lie_on_their_line() {
        let point = |bytes, seconds| LinkPoint { bytes, seconds };
        let points = [point(100, 1.0), point(200, 3.0)];
        let at = |bytes| between(&points, bytes).unwrap();
        assert_eq!([at(1), at(100), at(150), at(200), at(400)], [1.0, 1.0, 2.0, 3.0, 6.0]);
        assert_eq!(between(&[], 1), None);
    }
}

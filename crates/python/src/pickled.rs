//! Plans as bytes, for pickles: trainers wait for those that workers have made.

use std::fmt;
use std::sync::Arc;

use counterpoint_choose::PlanConfig;
use counterpoint_plan::{AttentionSpec, BytesFault, Plan};
use serde::{Deserialize, Serialize};

use crate::error::Raised;
use crate::site::Choices;
use crate::solution::Content;

/// What a plan was made of and with: small, as JSON, which types have that say themselves how they are written.
#[derive(Serialize, Deserialize)]
struct Made {
    mask: Arc<counterpoint_mask::Mask>,
    spec: AttentionSpec,
    config: PlanConfig,
    choices: Choices,
    deterministic: bool,
    seconds: f64,
}

impl Content {
    /// All of it.
    pub(crate) fn to_bytes(&self) -> Result<Vec<u8>, PickleFault> {
        let Self { mask, spec, config, plan, choices, deterministic, seconds } = self;
        let (mask, choices) = (mask.clone(), choices.clone());
        let (spec, config) = (*spec, *config);
        let made = Made { mask, spec, config, choices, deterministic: *deterministic, seconds: *seconds };
        Ok(Plan::BYTES.write(&(serde_json::to_string(&made)?, plan)))
    }

    /// The inverse.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Result<Self, PickleFault> {
        let (made, plan) = Plan::BYTES.read_first::<&str>(bytes)?;
        let Made { mask, spec, config, choices, deterministic, seconds } = serde_json::from_str(made)?;
        Ok(Self { mask, spec, config, plan: plan.read()?, choices, deterministic, seconds })
    }
}

/// Why a plan cannot be pickled or read again.
pub(crate) enum PickleFault {
    Bytes(BytesFault),
    Json(serde_json::Error),
}

impl From<BytesFault> for PickleFault {
    fn from(fault: BytesFault) -> Self {
        Self::Bytes(fault)
    }
}

impl From<serde_json::Error> for PickleFault {
    fn from(fault: serde_json::Error) -> Self {
        Self::Json(fault)
    }
}

impl fmt::Display for PickleFault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a pickled plan cannot be read: ")?;
        match self {
            Self::Bytes(fault) => fault.fmt(f),
            Self::Json(fault) => fault.fmt(f),
        }
    }
}

impl Raised for PickleFault {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

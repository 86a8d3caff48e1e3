//! The small problem of staged attention that several checks run.

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_exec::{AttentionInputs, ExecError, Pass, ProgramFault, random_inputs};
use counterpoint_mask::{Mask, MaskError};
use counterpoint_plan::{AttentionSpec, DType, Plan};

/// A small problem of attention whose ranks exchange keys in stages.
pub(super) struct StagedAttention {
    pub(super) spec: AttentionSpec,
    pub(super) plan: Plan,
    pub(super) inputs: AttentionInputs,
}

impl StagedAttention {
    /// Inputs come from `seed`, those of the backward among them if the pass has one.
    ///
    /// # Errors
    /// When the mask was refused, or does not fit the ranks.
    pub(super) fn new(
        mask: Result<Mask, MaskError>,
        ranks: usize,
        stages: usize,
        seed: u64,
        pass: Pass,
    ) -> Result<Self, ExecError> {
        let spec = AttentionSpec::new(4, 2, 64, DType::Bf16);
        let refuse = |reason: String| ExecError::Program {
            program: "attention".to_owned(),
            rank: 0,
            reason: ProgramFault::NotPlanned { reason },
        };
        let mask = mask.map_err(|error| refuse(error.to_string()))?;
        let config = PlanConfig {
            chunk_size: Some(128),
            stages: StageCount::Fixed(stages).into(),
            ..PlanConfig::new(ranks)
        };
        let plan = plan_mask(&mask, &spec, &config).map_err(|error| refuse(error.to_string()))?;
        let inputs = random_inputs(&mask, &spec, seed, pass);
        Ok(Self { spec, plan, inputs })
    }
}

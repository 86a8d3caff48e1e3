//! A device that spoils what the CPU computes: what a selftest must notice.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, ExpertInputs, ExpertOptions, ExpertOutputs, HostData, HostTensor,
    LinearConfig, LinearInputs, LinearOutputs, Pass, RunConfig, WorldConfig,
};
use counterpoint_plan::{AttentionSpec, DType, LinearPlan, Plan, Routing};
use counterpoint_schedule::Program;

use super::{CpuSubject, Subject, SubjectError};

/// One, which knows how many runs came before.
pub(super) struct Spoiled<A, L> {
    attention: A,
    linear: L,
    runs: AtomicUsize,
}

impl<A> Spoiled<A, fn(&mut LinearOutputs, usize)> {
    pub(super) fn attention(spoil: A) -> Self {
        Self { attention: spoil, linear: |_, _| (), runs: AtomicUsize::new(0) }
    }
}

impl<L> Spoiled<fn(&mut AttentionOutputs, usize), L> {
    pub(super) fn linear(spoil: L) -> Self {
        Self { attention: |_, _| (), linear: spoil, runs: AtomicUsize::new(0) }
    }
}

impl<A: Fn(&mut AttentionOutputs, usize), L: Fn(&mut LinearOutputs, usize)> Subject for Spoiled<A, L> {
    fn device(&self) -> String {
        "spoiled".to_owned()
    }

    fn dtypes(&self) -> &[DType] {
        &[DType::Bf16, DType::F32]
    }

    fn same_in_any_stages(&self) -> Pass {
        CpuSubject.same_in_any_stages()
    }

    fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionOutputs, SubjectError> {
        let mut outputs = CpuSubject.run(plan, spec, inputs, config)?;
        (self.attention)(&mut outputs, self.runs.fetch_add(1, Ordering::Relaxed));
        Ok(outputs)
    }

    fn run_linear(
        &self,
        plan: &LinearPlan,
        inputs: &LinearInputs,
        config: &LinearConfig,
    ) -> Result<LinearOutputs, SubjectError> {
        let mut outputs = CpuSubject.run_linear(plan, inputs, config)?;
        (self.linear)(&mut outputs, self.runs.fetch_add(1, Ordering::Relaxed));
        Ok(outputs)
    }

    fn run_experts(
        &self,
        options: ExpertOptions,
        routing: &Arc<Routing>,
        inputs: &ExpertInputs,
        config: WorldConfig,
    ) -> Result<ExpertOutputs, SubjectError> {
        CpuSubject.run_experts(options, routing, inputs, config)
    }

    fn run_alone(&self, program: &Program, inputs: &[&HostTensor]) -> Result<Vec<HostTensor>, SubjectError> {
        CpuSubject.run_alone(program, inputs)
    }
}

/// Adds to the middle element of a tensor, where there is one.
pub(super) fn shift(tensor: &mut HostTensor, by: f64) {
    let middle = tensor.len() / 2;
    match tensor.data_mut() {
        HostData::F32(values) => values[middle] += by as f32,
        HostData::Bf16(values) => values[middle] += half::bf16::from_f64(by),
        other => panic!("{other:?}"),
    }
}

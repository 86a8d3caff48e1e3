//! `bench cp --step`: whole steps, enqueued operation by operation, compared with replayed as a CUDA graph.

use crate::gpu::StepBench;
use counterpoint_console::{
    CliError, Progress,
    arguments::{PassOverlaps, dtype_name},
    launched::ended,
    rank_machine::RankMachine,
};
use counterpoint_cuda::CudaMachine;
use counterpoint_exec::Pass;
use counterpoint_mask::MaskPreset;
use counterpoint_reference::{Sample, check_sample};
use counterpoint_report::{BenchRow, Rate, Statistics, format_ratio, format_seconds};
use serde_json::json;

use super::{Bench, SAMPLED_KEYS, SAMPLED_ROWS};
use crate::attention::{BACKWARD, FORWARD, Section, shape_text, verified};
use crate::masks;
use counterpoint_console::FlagFault;

impl Bench<'_> {
    /// Whole steps by the host's clock, enqueued operation by operation and replayed as one CUDA graph.
    pub(super) fn measure_steps(&self, masks: &[MaskPreset]) -> Result<Section, CliError> {
        let RankMachine::Cuda(machine) = self.ranks else {
            return Err(CliError::flag("--step", "(whole steps)", FlagFault::ForGpus));
        };
        let mut section = Section::new(format!(
            "steps of distributed attention, {} tokens a rank on {} GPUs by {}, {}, {}; vs baseline: enqueued",
            self.tokens,
            machine.devices().len(),
            machine.transport(),
            self.ranks.name(),
            self.policies_text()
        ));
        let progress = Progress::new();
        for &mask in masks {
            progress.step(format!("{}, steps", mask.name()));
            for &overlap in &self.overlaps {
                self.step(machine, mask, overlap, &mut section)?;
            }
        }
        Ok(section)
    }

    fn step(
        &self,
        machine: &CudaMachine,
        name: MaskPreset,
        asked: PassOverlaps,
        section: &mut Section,
    ) -> Result<(), CliError> {
        let mask = masks::load(name, self.inputs.q.rows())?;
        let planned = self.planned(&mask, self.topology, self.exchanges()[0], asked)?;
        let (solution, policies) = (&planned.solution, planned.policies);
        let reduction = self.reduction();
        let mut step = StepBench::new(machine, &solution.plan, &self.spec, &self.inputs, policies, reduction)
            .map_err(ended)?;
        let flops = self.spec.flops_forward(mask.area()) + self.spec.flops_backward(mask.area());
        let iterations = self.arguments.iterations as usize;
        let mut enqueued: Option<f64> = None;
        for (how, is_graph) in [("enqueued", false), ("replayed", true)] {
            let seconds = if is_graph { step.replayed(iterations) } else { step.enqueued(iterations) };
            let Some(seconds) = Statistics::of(&seconds.map_err(ended)?) else { continue };
            let outputs = step.outputs().map_err(ended)?;
            let pass = Pass::ForwardBackward;
            let sample = Sample::random(&mask, &self.spec, pass, SAMPLED_ROWS, SAMPLED_KEYS, mask.area());
            let check = check_sample(&mask, &self.spec, &self.inputs, &outputs, &sample);
            let median = seconds.median;
            let ranks = self.topology.world_size;
            let row = BenchRow {
                name: format!("attention step, {how}{}", self.policy_text(asked, policies)),
                shape: shape_text(&self.inputs.q, &self.inputs.k),
                dtype: dtype_name(self.spec.dtype).to_owned(),
                mask: Some(name.name().to_owned()),
                device: self.ranks.name().to_owned(),
                ranks,
                seconds,
                rate: Some(Rate::Compute { tflops: flops / median / ranks as f64 / 1e12 }),
                ratio: enqueued.map(|enqueued| enqueued / median),
                verified: verified(&check, &[FORWARD, BACKWARD].concat()),
            };
            let detail = json!({
                "by": "counterpoint",
                "pass": "step",
                "transport": machine.transport().to_string(),
                "area": mask.area(),
                "tokens_per_rank": self.tokens,
                "heads_q": self.spec.heads_q,
                "heads_kv": self.spec.heads_kv,
                "head_dim": self.spec.head_dim,
                "overlap": policies.to_string(),
                "asked": asked.to_string(),
                "deterministic": self.arguments.deterministic,
            });
            section.add(row, detail, &check);
            match enqueued {
                None => enqueued = Some(median),
                Some(enqueued) => section.findings.push(format!(
                    "{}: a replay takes {} less than the step enqueued ({})",
                    name.name(),
                    format_seconds((enqueued - median).max(0.0)),
                    format_ratio(enqueued / median)
                )),
            }
        }
        Ok(())
    }
}

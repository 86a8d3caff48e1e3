//! Proof on CPU ranks that staged attention hides communication: a link as slow as the computation, every overlap policy.

use std::time::Duration;

use counterpoint_choose::{PlanConfig, StageCount, plan_mask};
use counterpoint_console::{
    CliError, Progress, arguments::dtype_name, device, input::random_inputs, mask_argument,
};
use counterpoint_exec::{AttentionInputs, AttentionRun, Pass, RunConfig, SlowLink, run_attention};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, Plan};
use counterpoint_reference::{CheckReport, compare_with_reference, reference_attention};
use counterpoint_report::{BenchRow, Rate, Statistics, format_seconds, median};
use counterpoint_schedule::{OverlapPolicy, StartOrder, Timeline};
use serde_json::json;

use super::{BACKWARD, FORWARD, Goals, Section, Sizes, shape_text, verified};

/// Ranks that share the machine.
const RANKS: usize = 2;
/// Remote stages of each pass.
const STAGES: usize = 4;
/// What a run that hides all it can may take, over the longer of computation and communication. The first stage's
/// communication and the last one's computation have little to overlap with.
const OF_LONGER: f64 = 1.25;
/// Communication is not made shorter than this, or waking threads up would be most of it.
const SHORTEST: f64 = 0.02;

/// A staged run over a link that is as slow as its computation, under each policy: does communication really run while
/// computation runs?
pub(super) fn measure(sizes: &Sizes, progress: &Progress) -> Result<Section, CliError> {
    let case = Case::new(sizes)?;
    progress.step("the reference");
    let reference = reference_attention(&case.mask, &case.spec, &case.inputs);
    progress.step("a run without a link, to see how slow it must be");
    let link = case.link_as_slow_as_computation()?;

    // The first run of each policy does not count, and is the one that is checked.
    let mut all = Vec::new();
    for start in StartOrder::ALL {
        let policy = OverlapPolicy::new(start);
        let run = case.run(policy, Some(link))?;
        let check = compare_with_reference(case.spec.dtype, &reference, &[], &run.outputs);
        all.push(Measured { policy, check, forward: Samples::default(), backward: Samples::default() });
    }
    // Interleaved, so that all meet the same disturbance by other programs.
    for iteration in 1..=sizes.iterations {
        for measured in &mut all {
            progress.step(format!("{}, {iteration} of {}", measured.policy, sizes.iterations));
            let run = case.run(measured.policy, Some(link))?;
            measured.forward.add(&run.forward);
            run.backward.iter().for_each(|backward| measured.backward.add(backward));
        }
    }

    let mut section = Section::new(format!(
        "staged attention on {RANKS} ranks over a link of {} a collective and {:.3} GB/s; vs baseline: sequential over it",
        format_seconds(link.alpha.as_secs_f64()),
        link.bytes_per_second / 1e9
    ));
    let [sequential, ..] = &all[..] else { return Ok(section) };
    for measured in &all {
        case.add_row(&mut section, "forward", measured, &measured.forward, &sequential.forward, sizes.goals);
        case.add_row(
            &mut section,
            "backward",
            measured,
            &measured.backward,
            &sequential.backward,
            sizes.goals,
        );
    }
    Ok(section)
}

/// Runs under one policy.
struct Measured {
    policy: OverlapPolicy,
    check: CheckReport,
    forward: Samples,
    backward: Samples,
}

struct Case {
    name: String,
    plan: Plan,
    mask: Mask,
    spec: AttentionSpec,
    inputs: AttentionInputs,
}

impl Case {
    fn new(sizes: &Sizes) -> Result<Self, CliError> {
        let name = format!("causal:{}", sizes.rows);
        let mask = mask_argument::load(&name)?;
        let heads = (sizes.heads / 2).max(1);
        let spec = sizes.spec(heads, heads, DType::F32);
        let config = PlanConfig {
            // A few key blocks a stage, a chunk every so often: the cuts matter less than that there are some.
            chunk_size: Some(sizes.rows / 16),
            stages: StageCount::Fixed(STAGES).into(),
            ..PlanConfig::new(RANKS)
        };
        let plan = plan_mask(&mask, &spec, &config).map_err(CliError::of_choice)?;
        let inputs = random_inputs(&mask, &spec, 7, Pass::ForwardBackward);
        Ok(Self { name, plan, mask, spec, inputs })
    }

    /// The row of one pass under one policy, compared with the same pass run sequentially.
    fn add_row(
        &self,
        section: &mut Section,
        pass: &str,
        measured: &Measured,
        samples: &Samples,
        sequential: &Samples,
        goals: Goals,
    ) {
        let Some(total) = Statistics::of(&samples.total) else { return };
        let area = self.mask.area();
        let (flops, tensors) = match pass {
            "forward" => (self.spec.flops_forward(area), FORWARD),
            _ => (self.spec.flops_backward(area), BACKWARD),
        };
        let proof = Proof {
            total: total.min,
            compute: fastest(&sequential.compute),
            moved: fastest(&sequential.moved),
        };
        let row = BenchRow {
            name: format!("{pass}, {}", measured.policy),
            shape: shape_text(&self.inputs.q, &self.inputs.k),
            dtype: dtype_name(self.spec.dtype).to_owned(),
            mask: Some(self.name.clone()),
            device: device::cpu_name(),
            ranks: RANKS,
            seconds: total,
            rate: Some(Rate::Compute { tflops: flops / total.median / RANKS as f64 / 1e12 }),
            ratio: Some(median(&sequential.total) / total.median),
            verified: verified(&measured.check, tensors),
        };
        if row.verified.passed() {
            section.findings.push(proof.text(pass, measured.policy, goals));
        }
        let detail = json!({
            "policy": measured.policy.to_string(),
            "stages": STAGES,
            "sequential_compute_seconds": proof.compute,
            "sequential_communication_seconds": proof.moved,
            "total_over_longer": proof.over_longer(),
            "total_over_sum": proof.over_sum(),
            "overlap_efficiency": median(&samples.efficiency),
        });
        section.add(row, detail, &measured.check);
    }

    fn run(&self, policy: OverlapPolicy, slow_link: Option<SlowLink>) -> Result<AttentionRun, CliError> {
        let config = RunConfig { policy: policy.into(), slow_link, ..RunConfig::default() };
        run_attention(&self.plan, &self.spec, &self.inputs, &config)
            .map_err(|source| CliError::Run { source })
    }

    /// A link over which the forward's communication takes as long as its computation.
    fn link_as_slow_as_computation(&self) -> Result<SlowLink, CliError> {
        let policy = OverlapPolicy::SEQUENTIAL;
        let mut compute = f64::INFINITY;
        for _ in 0..3 {
            compute = compute.min(self.run(policy, None)?.forward.overlap().compute_seconds);
        }
        let seconds = compute.max(SHORTEST);
        let rows =
            self.plan.ranks.iter().map(|rank| rank.recv_rows().max(rank.send_rows())).max().unwrap_or(0);
        let bytes = rows as f64 * self.spec.kv_row_bytes() as f64;
        // A fifth of the time for starting collectives, the rest for bytes.
        Ok(SlowLink {
            alpha: Duration::from_secs_f64(0.2 * seconds / STAGES as f64),
            bytes_per_second: bytes.max(1.0) / (0.8 * seconds),
            network: None,
        })
    }
}

/// Seconds of one pass, by repetition.
#[derive(Clone, Default)]
struct Samples {
    total: Vec<f64>,
    compute: Vec<f64>,
    moved: Vec<f64>,
    efficiency: Vec<f64>,
}

impl Samples {
    fn add(&mut self, timeline: &Timeline) {
        let overlap = timeline.overlap();
        self.total.push(timeline.makespan());
        self.compute.push(overlap.compute_seconds);
        self.moved.push(overlap.communication_seconds);
        self.efficiency.extend(overlap.efficiency);
    }
}

fn fastest(samples: &[f64]) -> f64 {
    Statistics::of(samples).map_or(f64::NAN, |statistics| statistics.min)
}

/// The fastest total compared with what computation and communication take one after the other.
struct Proof {
    total: f64,
    compute: f64,
    moved: f64,
}

impl Proof {
    fn over_longer(&self) -> f64 {
        self.total / self.compute.max(self.moved)
    }

    /// In the backward the last gradients travel to their owners after the last computation, so that the goal is the forward's.
    fn text(&self, pass: &str, policy: OverlapPolicy, goals: Goals) -> String {
        let text = format!(
            "{pass}, {policy}: {}; computation {}, communication {}: {:.2}x the longer, {:.2}x their sum",
            format_seconds(self.total),
            format_seconds(self.compute),
            format_seconds(self.moved),
            self.over_longer(),
            self.over_sum(),
        );
        if !policy.overlaps() || pass != "forward" {
            return text;
        }
        goals.judge(&text, &format!("{OF_LONGER}x the longer"), self.over_longer() <= OF_LONGER)
    }

    fn over_sum(&self) -> f64 {
        self.total / (self.compute + self.moved)
    }
}

//! `counterpoint bench attention --device cuda`.

mod peers;
mod sizes;

use crate::gpu::{AttentionBench, BenchCase, BenchPass};
use crate::rows::all_right;
use counterpoint_console::{
    self as console, CliError, Progress, Schema, arguments::dtype_name, input::random_inputs,
};
use counterpoint_cuda::{CudaError, CudaMachine, Device, Timing};
use counterpoint_exec::{AttentionInputs, ExecError, Pass};
use counterpoint_mask::{Mask, MaskPreset};
use counterpoint_plan::AttentionSpec;
use counterpoint_reference::{CheckReport, Sample, check_sample};
use counterpoint_report::{BenchRow, Rate, Statistics};
use serde_json::json;

use super::{BACKWARD, FORWARD, OUT_OF_BOUNDS, Section, shape_text, verified};
use crate::arguments::{BenchAttentionArguments, BenchKernels};
use crate::interleaved::run_order;
use crate::masks;
use crate::pytorch::{Peers, TIMED};
use peers::{PeerResult, PeerRow};
use sizes::Sizes;

/// Rows and keys that are compared with the definition, in f64: enough to see a wrong tile or head, and soon done.
const SAMPLED_ROWS: usize = 32;
const SAMPLED_KEYS: usize = 8;

/// Measures the kernels of one GPU, interleaved with peers where they are asked for.
pub(super) fn run(arguments: &BenchAttentionArguments) -> Result<(), CliError> {
    let sizes = Sizes::of(arguments);
    // Without a GPU there is nothing to compare either.
    let machine = machine(sizes.kernels).map_err(|source| CliError::Cuda { source })?;
    let mut peers = peers::start(arguments, &sizes)?;
    console::note_development_build();
    let (mut wrong, mut peer_rows) = (Vec::new(), Vec::new());
    for &(heads_q, heads_kv) in &sizes.heads {
        for &seqlen in &sizes.seqlens {
            let shape = Shape::new(&machine, &sizes, heads_q, heads_kv, seqlen)?;
            let (section, rows) = shape.measure(&sizes, &mut peers)?;
            section.print(Schema::BenchAttention, arguments.json)?;
            if arguments.json {
                rows.iter().try_for_each(|row| console::print_json(Schema::BenchAttentionPeer, row))?;
            }
            wrong.extend(section.wrong);
            peer_rows.extend(rows);
        }
    }
    if !arguments.json {
        peers::print(&peer_rows)?;
    }
    all_right(OUT_OF_BOUNDS, &wrong)?;
    peers.end()
}

/// The first GPU, with the kernels asked for.
fn machine(kernels: BenchKernels) -> Result<CudaMachine, CudaError> {
    let device = Device::open(0)?;
    let device = match kernels {
        BenchKernels::Native => device,
        BenchKernels::Portable => device.portable(),
    };
    CudaMachine::new(vec![device], Timing::Off)
}

/// Seconds of a pass's runs, interleaved with those of peers.
fn interleaved(
    case: &mut BenchCase<'_>,
    pass: BenchPass,
    sizes: &Sizes,
    peers: &mut Peers<PeerResult>,
    of_peers: &[usize],
) -> Result<Vec<f64>, ExecError> {
    if of_peers.is_empty() {
        return case.seconds(pass, sizes.by(), sizes.iterations);
    }
    let mut seconds = Vec::new();
    for round in 0..sizes.iterations.div_ceil(TIMED) {
        for next in run_order(round, 1 + of_peers.len()) {
            match next.checked_sub(1) {
                None => seconds.extend(case.seconds(pass, sizes.by(), TIMED)?),
                Some(at) => peers.run_often(of_peers[at]),
            }
        }
    }
    Ok(seconds)
}

/// One length and one number of heads, with random inputs on the GPU.
struct Shape {
    spec: AttentionSpec,
    inputs: AttentionInputs,
    bench: AttentionBench,
    device: String,
}

impl Shape {
    fn new(
        machine: &CudaMachine,
        sizes: &Sizes,
        heads_q: usize,
        heads_kv: usize,
        seqlen: usize,
    ) -> Result<Self, CliError> {
        let spec = AttentionSpec::new(heads_q, heads_kv, sizes.head_dim, sizes.element());
        // Inputs do not depend on the mask; they need one for its length.
        let longest = masks::load(MaskPreset::Full, seqlen)?;
        let inputs = random_inputs(&longest, &spec, seqlen as u64, Pass::ForwardBackward);
        let bench =
            AttentionBench::new(machine, &spec, &inputs).map_err(|source| CliError::Run { source })?;
        let device = machine.devices()[0].properties().name.clone();
        Ok(Self { spec, inputs, bench, device })
    }

    /// Rows of ours, and those of peers.
    fn measure(
        &self,
        sizes: &Sizes,
        peers: &mut Peers<PeerResult>,
    ) -> Result<(Section, Vec<PeerRow>), CliError> {
        let shape = shape_text(&self.inputs.q, &self.inputs.k);
        let mut section = Section::new(format!(
            "{} attention kernels on {}, {}",
            masks::value_name(&sizes.kernels),
            self.device,
            sizes.clock_text()
        ));
        let progress = Progress::new();
        let passes = sizes.timed();
        let (seqlen, heads) = (self.inputs.q.rows(), (self.spec.heads_q, self.spec.heads_kv));
        let mut peer_rows = Vec::new();
        for &name in &sizes.masks {
            progress.step(format!("{}, {shape}", name.name()));
            let mask = masks::load(name, self.inputs.q.rows())?;
            let failed = |source| CliError::Run { source };
            let mut case = self.bench.case(&mask).map_err(failed)?;
            if masks::has_peers(name) {
                peers.prepare(&peers::case(name, seqlen, heads));
            }
            for &pass in &passes {
                // The other passes are worth knowing.
                if let Err(error) = case.prepare(pass) {
                    console::note(&format!("error: {pass} of {}, {shape}: {error}", name.name()));
                    section.wrong.push(format!("{pass} of {} did not run", name.name()));
                    continue;
                }
                let check = self.check(&mask, &case, pass)?;
                let of_peers = if masks::has_peers(name) { peers::of_pass(peers, pass) } else { Vec::new() };
                let seconds = interleaved(&mut case, pass, sizes, peers, &of_peers).map_err(failed)?;
                let Some(seconds) = Statistics::of(&seconds) else { continue };
                let flops = match pass {
                    BenchPass::Forward => self.spec.flops_forward(mask.area()),
                    BenchPass::Backward | BenchPass::Deterministic => self.spec.flops_backward(mask.area()),
                };
                let (what, key, tensors) = match pass {
                    BenchPass::Forward => ("attention forward", "forward", FORWARD),
                    BenchPass::Backward => ("attention backward", "backward", BACKWARD),
                    BenchPass::Deterministic => {
                        ("attention backward, deterministic", "deterministic", BACKWARD)
                    }
                };
                let row = BenchRow {
                    name: what.to_owned(),
                    shape: shape.clone(),
                    dtype: dtype_name(self.spec.dtype).to_owned(),
                    mask: Some(name.name().to_owned()),
                    device: self.device.clone(),
                    ranks: 1,
                    seconds,
                    rate: Some(Rate::Compute { tflops: flops / seconds.median / 1e12 }),
                    ratio: None,
                    verified: verified(&check, tensors),
                };
                let detail = json!({
                    "by": "counterpoint",
                    "kernels": masks::value_name(&sizes.kernels),
                    "pass": key,
                    "area": mask.area(),
                    "seqlen": self.inputs.q.rows(),
                    "heads_q": self.spec.heads_q,
                    "heads_kv": self.spec.heads_kv,
                    "head_dim": self.spec.head_dim,
                });
                if !of_peers.is_empty() && row.verified.passed() {
                    peer_rows.extend(peers::rows(peers, pass, &row, sizes, seqlen, heads));
                }
                section.add(row, detail, &check);
            }
        }
        Ok((section, peer_rows))
    }

    /// What the pass wrote over poisoned outputs, against the definition.
    fn check(&self, mask: &Mask, case: &BenchCase<'_>, pass: BenchPass) -> Result<CheckReport, CliError> {
        let outputs = case.outputs(pass).map_err(|source| CliError::Run { source })?;
        let looked_at = match pass {
            BenchPass::Forward => Pass::Forward,
            BenchPass::Backward | BenchPass::Deterministic => Pass::ForwardBackward,
        };
        let sample = Sample::random(mask, &self.spec, looked_at, SAMPLED_ROWS, SAMPLED_KEYS, mask.area());
        Ok(check_sample(mask, &self.spec, &self.inputs, &outputs, &sample))
    }
}

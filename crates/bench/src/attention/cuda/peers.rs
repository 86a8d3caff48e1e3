//! `bench attention --peers`: what users of PyTorch would pick for a mask, interleaved with ours.

use counterpoint_console::{self as console, CliError, PeersFault};
use counterpoint_mask::MaskPreset;
use counterpoint_report::{BenchRow, Column, Rate, Statistics, geometric_mean, table};
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::sizes::Sizes;
use crate::arguments::BenchAttentionArguments;
use crate::gpu::BenchPass;
use crate::masks::{self, value_name};
use crate::pytorch::{InterleavedRanks, PeerVariant, Peers, PyTorchNeeds, Script, peer_folder};

/// What the script says of a way.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PeerResult {
    by: String,
    /// Empty where a peer has only one.
    variant: String,
    pass: String,
    error_over_bound: f64,
}

/// A variant of a peer, compared with ours.
#[derive(Clone, Debug, Serialize)]
pub(super) struct PeerRow {
    by: String,
    variant: String,
    pass: String,
    mask: String,
    shape: String,
    seqlen: usize,
    heads_q: usize,
    heads_kv: usize,
    head_dim: usize,
    dtype: String,
    clock: String,
    device: String,
    seconds: Statistics,
    tflops: f64,
    error_over_bound: f64,
    ours_seconds: f64,
    ours_tflops: f64,
    /// Its time over ours.
    ratio: f64,
}

const TITLE: &str = "Each peer's fastest variant and ours, interleaved: its time over ours\n";
const COLUMNS: [Column; 8] = [
    Column::name("mask"),
    Column::name("pass"),
    Column::name("shape"),
    Column::name("by"),
    Column::text("variant", 2),
    Column::number("TFLOP/s", 1),
    Column::number("ours", 1),
    Column::number("ratio", 0),
];

/// Starts the peers, if any are asked for, in the machine's own `python3`.
pub(super) fn start(
    arguments: &BenchAttentionArguments,
    sizes: &Sizes,
) -> Result<Peers<PeerResult>, CliError> {
    let cuda = &arguments.cuda;
    if cuda.peers.is_empty() {
        return Ok(Peers::new(Vec::new()));
    }
    if !sizes.masks.iter().copied().any(masks::has_peers) {
        return Err(CliError::no_peers(PeersFault::NoMask));
    }
    let passes: Vec<&str> = sizes.timed().into_iter().filter_map(name_of).collect();
    if passes.is_empty() {
        return Err(CliError::no_peers(PeersFault::NoDeterministicBackward));
    }
    let folder = cuda.peer_folder.as_deref().map(peer_folder).transpose()?;
    let script = Script::unpack("attention.py")?;
    let mut command = script.command();
    command.args(["--peers", &cuda.peers.join(","), "--passes", &passes.join(",")]);
    command.args(["--head-dim", &sizes.head_dim.to_string(), "--dtype", &value_name(&sizes.dtype)]);
    command.args(["--clock", &value_name(&sizes.clock)]);
    if let Some(folder) = folder {
        command.arg("--folder").arg(folder);
    }
    Ok(Peers::new(vec![InterleavedRanks::start(script, vec![command], PyTorchNeeds::OneGpu)?]))
}

/// A mask on a shape, as the script knows it.
pub(super) fn case(mask: MaskPreset, seqlen: usize, heads: (usize, usize)) -> serde_json::Value {
    json!({ "mask": mask.name(), "seqlen": seqlen, "heads_q": heads.0, "heads_kv": heads.1 })
}

/// Which of the case's ways run that pass: of a deterministic backward none.
pub(super) fn of_pass(peers: &Peers<PeerResult>, pass: BenchPass) -> Vec<usize> {
    peers.those(|known| name_of(pass) == Some(known.pass.as_str()))
}

fn name_of(pass: BenchPass) -> Option<&'static str> {
    match pass {
        BenchPass::Forward => Some("forward"),
        BenchPass::Backward => Some("backward"),
        BenchPass::Deterministic => None,
    }
}

/// What the case's ways took of a pass, with the row of `ours`.
pub(super) fn rows(
    peers: &Peers<PeerResult>,
    pass: BenchPass,
    ours: &BenchRow,
    sizes: &Sizes,
    seqlen: usize,
    heads: (usize, usize),
) -> Vec<PeerRow> {
    let Some(Rate::Compute { tflops: ours_tflops }) = ours.rate else { return Vec::new() };
    let row = |variant: &PeerVariant<PeerResult>| {
        let seconds = Statistics::of(&variant.seconds)?;
        let PeerResult { by, variant, pass, error_over_bound } = variant.known.clone();
        let ratio = seconds.median / ours.seconds.median;
        Some(PeerRow {
            by,
            variant,
            pass,
            mask: ours.mask.clone().unwrap_or_default(),
            shape: ours.shape.clone(),
            seqlen,
            heads_q: heads.0,
            heads_kv: heads.1,
            head_dim: sizes.head_dim,
            dtype: ours.dtype.clone(),
            clock: value_name(&sizes.clock),
            device: ours.device.clone(),
            seconds,
            // It computes as much.
            tflops: ours_tflops / ratio,
            error_over_bound,
            ours_seconds: ours.seconds.median,
            ours_tflops,
            ratio,
        })
    };
    let wanted = name_of(pass);
    let of_pass = peers.variants().iter().filter(|variant| wanted == Some(variant.known.pass.as_str()));
    of_pass.filter_map(row).collect()
}

/// Prints the fastest variants, if there are any, and what to read from them.
pub(super) fn print(rows: &[PeerRow]) -> Result<(), CliError> {
    let fastest = fastest(rows);
    if fastest.is_empty() {
        return Ok(());
    }
    let cells = fastest.iter().map(|row| row.cells());
    console::print(&(TITLE.to_owned() + &table(&COLUMNS, cells, &console::style()) + "\n"))?;
    summaries(&fastest).iter().try_for_each(|line| console::print(line))
}

/// Of each case, pass and peer the variant that took least time.
fn fastest(rows: &[PeerRow]) -> Vec<&PeerRow> {
    let mut found: Vec<&PeerRow> = Vec::new();
    for row in rows {
        match found.iter_mut().find(|other| other.case() == row.case() && other.by == row.by) {
            Some(other) if other.ratio <= row.ratio => {}
            Some(other) => *other = row,
            None => found.push(row),
        }
    }
    found
}

/// A line for each peer and pass.
fn summaries(fastest: &[&PeerRow]) -> Vec<String> {
    let mut seen: Vec<(&str, &str)> = Vec::new();
    for row in fastest {
        let which = (row.by.as_str(), row.pass.as_str());
        if !seen.contains(&which) {
            seen.push(which);
        }
    }
    let line = |(by, pass): (&str, &str)| {
        let same: Vec<_> = fastest.iter().filter(|row| row.by == by && row.pass == pass).collect();
        let ratios: Vec<f64> = same.iter().map(|row| row.ratio).collect();
        let worst = same.iter().min_by(|a, b| a.ratio.total_cmp(&b.ratio))?;
        let (mean, cases) = (geometric_mean(&ratios)?, console::count(same.len(), "case"));
        let (least, mask, shape) = (worst.ratio, &worst.mask, &worst.shape);
        Some(format!("{by}, {pass}: {cases}, geometric mean {mean:.3}, worst {least:.3} ({mask}, {shape})\n"))
    };
    seen.into_iter().filter_map(line).collect()
}

impl PeerRow {
    fn case(&self) -> (&str, &str, &str) {
        (&self.mask, &self.pass, &self.shape)
    }

    fn cells(&self) -> Vec<String> {
        vec![
            self.mask.clone(),
            self.pass.clone(),
            self.shape.clone(),
            self.by.clone(),
            self.variant.clone(),
            format!("{:.0}", self.tflops),
            format!("{:.0}", self.ours_tflops),
            format!("{:.3}", self.ratio),
        ]
    }
}

#[cfg(test)]
mod tests {
    use clap::ValueEnum;

    use super::*;
    use crate::arguments::{BenchClock, BenchDType};
    use crate::pytorch::{assert_strings, text_of};

    /// Both sides must know the same names.
    #[test]
    fn names_are_those_of_the_script() {
        let with_peers = MaskPreset::ALL.into_iter().filter(|mask| masks::has_peers(*mask));
        assert_strings("one_gpu/masks.py", with_peers.map(MaskPreset::name));
        for dtype in BenchDType::value_variants() {
            assert!(text_of("one_gpu/tensors.py").contains(&format!("\"{}\": torch.", value_name(dtype))));
        }
        let clocks: Vec<String> = BenchClock::value_variants().iter().map(value_name).collect();
        assert_strings("one_gpu/clock.py", clocks.iter().map(String::as_str));
        assert_strings("one_gpu/tensors.py", ["forward", "backward"]);
        assert_strings("one_gpu/case.py", ["by", "variant", "pass", "error_over_bound", "cudnn_flex", "ffa"]);
        assert_strings("one_gpu/backends.py", ["cudnn", "flash", "flex"]);
        let line = r#"{"by": "ffa", "variant": "tuned", "pass": "backward", "error_over_bound": 0.2}"#;
        let known: PeerResult = serde_json::from_str(line).unwrap();
        assert_eq!(Some(known.pass.as_str()), name_of(BenchPass::Backward));
    }

    #[test]
    fn the_fastest_variant_of_each_peer_counts() {
        let row = |by: &str, variant: &str, mask: &str, ratio: f64| PeerRow {
            by: by.to_owned(),
            variant: variant.to_owned(),
            pass: "forward".to_owned(),
            mask: mask.to_owned(),
            shape: "8192 x 16 x 128".to_owned(),
            seqlen: 8192,
            heads_q: 16,
            heads_kv: 16,
            head_dim: 128,
            dtype: "bf16".to_owned(),
            clock: "device".to_owned(),
            device: "a GPU".to_owned(),
            seconds: Statistics::of(&[ratio]).unwrap(),
            tflops: 600.0 / ratio,
            error_over_bound: 0.1,
            ours_seconds: 1.0,
            ours_tflops: 600.0,
            ratio,
        };
        let rows = [
            row("ffa", "default", "full", 1.5),
            row("ffa", "tuned", "full", 1.0),
            row("cudnn", "", "full", 1.1),
            row("ffa", "default", "causal", 4.0),
            row("ffa", "tuned", "causal", 5.0),
        ];
        let found = fastest(&rows);
        let named: Vec<_> =
            found.iter().map(|row| (row.by.as_str(), row.variant.as_str(), row.ratio)).collect();
        assert_eq!(named, [("ffa", "tuned", 1.0), ("cudnn", "", 1.1), ("ffa", "default", 4.0)]);
        assert_eq!(
            summaries(&found),
            [
                "ffa, forward: 2 cases, geometric mean 2.000, worst 1.000 (full, 8192 x 16 x 128)\n",
                "cudnn, forward: 1 case, geometric mean 1.100, worst 1.100 (full, 8192 x 16 x 128)\n"
            ]
        );
    }
}

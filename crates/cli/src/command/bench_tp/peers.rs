use std::process::Command;

use counterpoint_plan::{Activations, LinearKind};
use serde::Deserialize;

use super::row::Row;
use crate::arguments::{BenchTpArguments, BenchTpPass};
use crate::command::pytorch::{Script, lacks_gpus, on_gpus, run_all_heard};
use crate::console;
use crate::error::CliError;

/// CUDA's own number of connections, which it uses where the variable is not set.
const USUAL_CONNECTIONS: u32 = 8;

/// A row of the script.
#[derive(Debug, Deserialize)]
struct PeerRow {
    by: String,
    kind: LinearKind,
    pass: BenchTpPass,
    activations: Activations,
    shape: [usize; 3],
    connections: String,
    seconds: PeerSeconds,
    tflops: f64,
}

#[derive(Debug, Deserialize)]
struct PeerSeconds {
    median: f64,
}

const HEADER: &str = "\nPyTorch beside the fastest of the rows above: its time over ours\n\
                      by        kind    pass      activations        shape               connections        us  TFLOP/s   \
                      ours us  ratio  ours by";

/// Times PyTorch's ways to run a tensor-parallel layer, in the machine's own `python3`, one process a GPU, after our rows: they need the GPUs. Once for each number of
/// connections, which CUDA reads when it starts.
pub(super) fn run(
    connections: &[u32],
    arguments: &BenchTpArguments,
    tp_size: usize,
    shapes: &[[usize; 3]],
    rows: &[Row],
) -> Result<(), CliError> {
    if !arguments.json {
        console::print(&format!("{HEADER}\n"))?;
    }
    let script = Script::unpack("tensor_parallel.py")?;
    for &connections in connections {
        let process = || {
            let mut command = command(&script, arguments, shapes);
            match connections {
                USUAL_CONNECTIONS => command.env_remove("CUDA_DEVICE_MAX_CONNECTIONS"),
                number => command.env("CUDA_DEVICE_MAX_CONNECTIONS", number.to_string()),
            };
            command
        };
        let heard = |line: &str| match arguments.json {
            true => console::print(&format!("{line}\n")),
            false => match serde_json::from_str::<PeerRow>(line) {
                Ok(row) => console::print(&row.line(rows)),
                // Not a row: words of PyTorch.
                Err(_) => {
                    console::note(line);
                    Ok(())
                }
            },
        };
        run_all_heard(on_gpus(tp_size, process)?, &lacks_gpus(tp_size), heard)?;
    }
    Ok(())
}

fn command(script: &Script, arguments: &BenchTpArguments, shapes: &[[usize; 3]]) -> Command {
    fn names<T: serde::Serialize>(values: &[T]) -> String {
        let name = |value: &T| serde_json::to_value(value).ok()?.as_str().map(str::to_owned);
        values.iter().filter_map(name).collect::<Vec<_>>().join(",")
    }
    let kinds: Vec<LinearKind> = arguments.kinds.iter().map(|kind| kind.kind()).collect();
    let activations: Vec<Activations> =
        arguments.activations.iter().map(|activations| activations.activations()).collect();
    let shapes: Vec<String> =
        shapes.iter().map(|shape| shape.map(|size| size.to_string()).join(":")).collect();
    let mut command = script.command();
    command.args(["--json", "--shapes", &shapes.join(","), "--kinds", &names(&kinds)]);
    command.args(["--passes", &names(&arguments.passes), "--activations", &names(&activations)]);
    command.args(["--iterations", &arguments.iterations.to_string()]);
    command
}

impl PeerRow {
    fn line(&self, ours: &[Row]) -> String {
        let [tokens, hidden, local] = self.shape;
        let word = |value: &dyn std::fmt::Debug| format!("{value:?}").to_lowercase();
        let same = |row: &&Row| {
            (row.kind, row.pass, row.activations, row.shape)
                == (self.kind, self.pass, self.activations, self.shape)
                && row.wrong.is_none()
        };
        let best = ours.iter().filter(same).min_by(|a, b| a.seconds.median.total_cmp(&b.seconds.median));
        let seconds = best.map_or(f64::NAN, |row| row.seconds.median);
        let how = best.map_or_else(String::new, |row| {
            format!("{} {}, {}", row.policy, row.transport, console::count(row.groups, "group"))
        });
        format!(
            "{:8}  {:6}  {:8}  {:17}  {:18}  {:>11}  {:8.1}  {:7.1}  {:8.1}  {:5.3}  {how}\n",
            self.by,
            word(&self.kind),
            word(&self.pass),
            word(&self.activations),
            format!("{tokens}:{hidden}:{local}"),
            self.connections,
            1e6 * self.seconds.median,
            self.tflops,
            1e6 * seconds,
            self.seconds.median / seconds,
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::command::pytorch::text_of;

    /// What the script prints is what is read here, and both know the same names.
    #[test]
    fn rows_of_the_script_are_understood() {
        let line = r#"{"by": "megatron", "kind": "column", "pass": "backward", "activations": "sequence_parallel",
            "shape": [8192, 8192, 7168], "ranks": 2, "connections": "unset", "seconds": {"median": 2e-3, "min": 1e-3},
            "tflops": 962.0, "error_over_bound": 0.3}"#;
        let row: PeerRow = serde_json::from_str(line).unwrap();
        assert_eq!((row.pass, row.activations), (BenchTpPass::Backward, Activations::SequenceParallel));
        let text = row.line(&[]);
        for word in ["megatron", "column", "8192:8192:7168", "2000.0", "NaN"] {
            assert!(text.contains(word), "{word} in {text}");
        }
        for (file, names) in [
            ("tensor_parallel.py", ["column", "row", "replicated", "sequence_parallel"].as_slice()),
            ("layers/passes.py", ["forward", "backward", "megatron", "async_tp"].as_slice()),
        ] {
            for name in names {
                assert!(text_of(file).contains(&format!("\"{name}\"")), "{name}");
            }
        }
    }
}

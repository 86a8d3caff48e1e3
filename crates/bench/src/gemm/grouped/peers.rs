//! `bench gemm --experts --peers`: the grouped products of PyTorch and DeepGEMM, interleaved with ours.

use counterpoint_console::{CliError, PeersFault};
use counterpoint_cost::ProblemSize;
use counterpoint_cuda::kernel::ElementType;
use serde::Deserialize;
use serde_json::json;

use crate::arguments::BenchGemmArguments;
use crate::gpu::ExpertProducts;
use crate::pytorch::{InterleavedRanks, Peers, PyTorchNeeds, Script, peer_folder};

/// What the script says of a way.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub(super) struct PeerResult {
    pub(super) by: String,
    /// Empty where a peer has only one.
    pub(super) variant: String,
    pub(super) error_over_bound: f64,
}

/// Starts the peers, if any are asked for, in the machine's own `python3`.
pub(super) fn start(
    arguments: &BenchGemmArguments,
    element: ElementType,
) -> Result<Peers<PeerResult>, CliError> {
    if arguments.peers.is_empty() {
        return Ok(Peers::new(Vec::new()));
    }
    if element != ElementType::Bf16 {
        return Err(CliError::no_peers(PeersFault::Bf16Alone));
    }
    let folder = arguments.peer_folder.as_deref().map(peer_folder).transpose()?;
    let script = Script::unpack("grouped_gemm.py")?;
    let mut command = script.command();
    command.args(["--peers", &arguments.peers.join(",")]);
    if let Some(folder) = folder {
        command.arg("--folder").arg(folder);
    }
    Ok(Peers::new(vec![InterleavedRanks::start(script, vec![command], PyTorchNeeds::OneGpu)?]))
}

/// Products, as the script knows them.
pub(super) fn case(products: &ExpertProducts) -> serde_json::Value {
    let ProblemSize { m, n, k } = products.size;
    json!({ "layout": products.layout.name(), "m": m, "n": n, "k": k, "rows": products.rows })
}

#[cfg(test)]
mod tests {
    use counterpoint_cuda::kernel::GemmLayout;

    use super::*;
    use crate::pytorch::{assert_strings, text_of};

    /// Both sides must know the same names.
    #[test]
    fn names_are_those_of_the_script() {
        assert_strings("experts/problem.py", GemmLayout::ALL.map(GemmLayout::name));
        assert_strings("experts/peers.py", ["torch", "deepgemm"]);
        assert!(
            text_of("experts/peers.py")
                .contains("by=peer, variant=variant, adds=runner.adds, error_over_bound=error")
        );
        let line = r#"{"by": "deepgemm", "variant": "ends", "adds": false, "error_over_bound": 0.2}"#;
        let known: PeerResult = serde_json::from_str(line).unwrap();
        assert_eq!(known.variant, "ends");
        let size = [256, 64, 128].into();
        let (layout, element, rows) = (GemmLayout::Nn, ElementType::Bf16, vec![100, 156]);
        let case = case(&ExpertProducts { layout, element, size, rows, sm_margin: 0 });
        for field in case.as_object().unwrap().keys() {
            assert!(text_of("experts/problem.py").contains(&format!("    {field}: ")), "{field}");
        }
    }
}

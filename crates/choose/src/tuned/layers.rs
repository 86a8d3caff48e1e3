//! What tuned passes of linear layers are distinguished by.

use counterpoint_cost::ProblemSize;
use counterpoint_plan::{DType, GemmCollective, LinearDirection, LinearSpec, Topology};
use serde::{Deserialize, Serialize};

use super::{TunedPass, TunedPlace};

/// What a tuned plan is for. It is used for nothing else.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct TunedShape {
    /// Name of the device, as the system gives it.
    pub device: String,
    /// What moves rows between ranks.
    pub transport: String,
    /// Ranks that share the layer.
    pub ranks: usize,
    /// Of them, those of one node.
    pub ranks_per_node: usize,
    /// The pass.
    pub pass: TunedPass,
    /// What travels concurrently with the pass's product of `y` or `dx`.
    pub collective: GemmCollective,
    /// The size of that product, of all ranks.
    #[serde(flatten)]
    pub product: ProblemSize,
    /// Element type.
    pub dtype: DType,
    /// Whether the layer has a bias.
    pub bias: bool,
}

impl TunedShape {
    /// That of a pass of a layer; `None` where nothing travels in it.
    pub fn of(spec: &LinearSpec, pass: TunedPass, topology: Topology, place: &TunedPlace) -> Option<Self> {
        let Topology { world_size: ranks, ranks_per_node } = topology;
        let collective = GemmCollective::of_pass(spec, pass.direction()).filter(|_| ranks > 1)?;
        let LinearSpec { tokens: m, in_features, out_features, dtype, has_bias: bias, .. } = *spec;
        let (n, k) = match pass.direction() {
            LinearDirection::Forward => (out_features, in_features),
            LinearDirection::Backward { .. } => (in_features, out_features),
        };
        let product = ProblemSize { m, n, k };
        let TunedPlace { device, transport } = place.clone();
        Some(Self { device, transport, ranks, ranks_per_node, pass, collective, product, dtype, bias })
    }
}

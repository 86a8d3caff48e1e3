//! Transformers by their sizes, Llama 3 and GPT-3 built in: the linear layers and attention of one layer.

use serde::Serialize;

use crate::{
    Activations, AttentionSpec, DType, LinearBound, LinearField, LinearKind, LinearSpec, PlanError, bytes,
};

/// The sizes of a decoder of equal layers: attention and a feed-forward block, each behind a norm.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub struct TransformerSpec {
    /// Name on the command line.
    pub name: &'static str,
    /// Layers.
    pub layers: usize,
    /// Elements of a token between blocks.
    pub hidden: usize,
    /// Query heads.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Elements inside the feed-forward block.
    pub feed_forward: usize,
    /// Whether the block multiplies two projections of its input (SwiGLU), or has one.
    pub gated: bool,
}

/// A linear layer of a transformer's layer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerLinear {
    /// Such as `qkv`.
    pub name: &'static str,
    /// The layer.
    pub spec: LinearSpec,
}

impl TransformerSpec {
    /// Models whose sizes are built in.
    pub const PRESETS: [TransformerSpec; 2] = [Self::LLAMA3_70B, Self::GPT3_175B];

    /// Llama 3 70B ("The Llama 3 Herd of Models", arXiv 2407.21783, table 3).
    pub const LLAMA3_70B: TransformerSpec = TransformerSpec {
        name: "llama3-70b",
        layers: 80,
        hidden: 8192,
        heads_q: 64,
        heads_kv: 8,
        head_dim: 128,
        feed_forward: 28_672,
        gated: true,
    };

    /// GPT-3 175B ("Language Models are Few-Shot Learners", arXiv 2005.14165, table 2.1).
    pub const GPT3_175B: TransformerSpec = TransformerSpec {
        name: "gpt3-175b",
        layers: 96,
        hidden: 12_288,
        heads_q: 96,
        heads_kv: 96,
        head_dim: 128,
        feed_forward: 49_152,
        gated: false,
    };

    /// Checks that tensor parallelism over `tp_size` ranks can share the heads.
    ///
    /// # Errors
    /// [`PlanError::Linear`] when it does not divide the query heads.
    pub fn check_tensor_parallel(&self, tp_size: usize) -> Result<(), PlanError> {
        if tp_size > 0 && self.heads_q.is_multiple_of(tp_size) {
            return Ok(());
        }
        let wanted = LinearBound::DividesHeads { heads_q: self.heads_q };
        Err(PlanError::Linear { field: LinearField::TpSize, value: tp_size, wanted })
    }

    /// Checks that the bytes of all layers can be counted, on so many ranks.
    ///
    /// # Errors
    /// [`PlanError::Bytes`].
    pub fn check_bytes(&self, ranks: usize) -> Result<(), PlanError> {
        let [layers, hidden, heads_q, heads_kv, head_dim, feed_forward] =
            [self.layers, self.hidden, self.heads_q, self.heads_kv, self.head_dim, self.feed_forward]
                .map(|size| size as f64);
        let widths = 2.0 * (heads_q + heads_kv) * head_dim + 3.0 * feed_forward;
        bytes::check(ranks, [[layers, hidden, widths]], DType::F64.size())
    }

    /// The four linear layers of a layer, in the order of the forward, over so many tokens.
    pub fn linears(&self, tokens: usize, activations: Activations, dtype: DType) -> [LayerLinear; 4] {
        let heads = (self.heads_q + 2 * self.heads_kv) * self.head_dim;
        let projections = if self.gated { 2 } else { 1 };
        let linear = |name, kind, in_features, out_features| {
            let spec =
                LinearSpec { kind, activations, tokens, in_features, out_features, has_bias: false, dtype };
            LayerLinear { name, spec }
        };
        [
            linear("qkv", LinearKind::Column, self.hidden, heads),
            linear("attention output", LinearKind::Row, self.heads_q * self.head_dim, self.hidden),
            linear("up", LinearKind::Column, self.hidden, projections * self.feed_forward),
            linear("down", LinearKind::Row, self.feed_forward, self.hidden),
        ]
    }

    /// The attention of one rank of a tensor-parallel group: its share of the heads.
    pub fn attention(&self, tp_size: usize, dtype: DType) -> AttentionSpec {
        // Where ranks are more than key heads, several have the same one.
        let heads_kv = (self.heads_kv / tp_size).max(1);
        AttentionSpec::new(self.heads_q / tp_size, heads_kv, self.head_dim, dtype)
    }

    /// Parameters of the linear layers of a layer.
    pub fn layer_parameters(&self) -> u64 {
        let linears = self.linears(1, Activations::SequenceParallel, DType::Bf16);
        linears.iter().map(|linear| (linear.spec.in_features * linear.spec.out_features) as u64).sum()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Without embeddings (0.6 G of GPT-3's, twice 1.05 G of Llama's) and norms, the names say how many there are.
    #[test]
    fn presets_have_the_parameters_of_their_names() {
        let billions = |spec: TransformerSpec| (spec.layer_parameters() * spec.layers as u64) as f64 / 1e9;
        let llama = billions(TransformerSpec::LLAMA3_70B);
        let gpt = billions(TransformerSpec::GPT3_175B);
        assert!((llama - 68.45).abs() < 0.1, "{llama}");
        assert!((gpt - 173.9).abs() < 0.1, "{gpt}");
    }

    #[test]
    fn heads_are_shared_out() {
        let llama = TransformerSpec::LLAMA3_70B;
        assert_eq!(llama.attention(8, DType::Bf16).heads_kv, 1);
        assert_eq!(llama.attention(16, DType::Bf16).heads_kv, 1);
        assert!(llama.check_tensor_parallel(16).is_ok());
        let text = llama.check_tensor_parallel(24).unwrap_err().to_string();
        assert!(text.contains("24") && text.contains("64"), "{text}");
    }
}

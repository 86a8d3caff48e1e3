//! The attention problem apart from its mask: element types, heads, scale, softcap, sink, and its FLOPs and bytes.

use serde::{Deserialize, Serialize};

use crate::{PlanError, bytes};

/// Element type of a tensor.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum DType {
    /// 64-bit IEEE float.
    F64,
    /// 32-bit IEEE float.
    F32,
    /// bfloat16.
    Bf16,
    /// 16-bit IEEE float.
    F16,
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

impl std::fmt::Display for GradientShares {
    /// The name on the command line.
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(match self {
            GradientShares::Accumulators => "accumulators",
            GradientShares::Elements => "elements",
        })
    }
}

impl DType {
    /// All of them.
    pub const ALL: [DType; 4] = [DType::F64, DType::F32, DType::Bf16, DType::F16];

    /// The name on the command line and in files.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::Bf16 => "bf16",
            DType::F16 => "f16",
        }
    }

    /// Bytes of one element.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::Bf16 | DType::F16 => 2,
        }
    }

    /// The type in which statistics and sums of this type are held: f64 for f64, else f32.
    pub const fn accumulator(self) -> DType {
        match self {
            DType::F64 => DType::F64,
            _ => DType::F32,
        }
    }
}

/// An attention problem, apart from its mask. Shapes as `q [seqlen_q, heads_q, head_dim]`,
/// `k [seqlen_k, heads_kv, head_dim]`, `v [seqlen_k, heads_kv, head_dim_v]`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct AttentionSpec {
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a query or key row of one head.
    pub head_dim: usize,
    /// Elements of a value row of one head.
    pub head_dim_v: usize,
    /// Type of q, k, v, out and of their gradients.
    pub dtype: DType,
    /// Factor on `q k^T`, usually `1 / sqrt(head_dim)`.
    pub scale: f64,
    /// `s = softcap * tanh(s / softcap)` when above 0.
    pub softcap: f64,
    /// Rows of the sink tensor `[seqlen_sink, heads_q]`; 0 without a sink.
    pub seqlen_sink: usize,
    /// In which type ranks send their partial sums of dk and dv.
    #[serde(default)]
    pub gradient_shares: GradientShares,
    /// Whether a forward also gives `max_logits`: the largest score of each query head, over all ranks.
    #[serde(default)]
    pub max_logits: bool,
    /// Whether a backward also takes `dlse`, the gradient of `lse`.
    #[serde(default)]
    pub dlse: bool,
}

/// In which type a rank that has computed partial sums of the gradients of another one's keys and values sends them. The owner adds these in the
/// accumulator's type and rounds once.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum GradientShares {
    /// In the accumulator's type.
    #[default]
    Accumulators,
    /// In the tensors' type, where nothing needs them in one order: of bf16 half as many bytes, each rounded. The largest error of
    /// dk and dv may then be more than twice a plain implementation's, by a rounding of the largest element.
    Elements,
}

impl AttentionSpec {
    /// The usual: values as wide as keys, scale `1 / sqrt(head_dim)`, no softcap, no sink, no statistic besides `lse`.
    pub fn new(heads_q: usize, heads_kv: usize, head_dim: usize, dtype: DType) -> Self {
        let scale = (head_dim as f64).sqrt().recip();
        Self {
            heads_q,
            heads_kv,
            head_dim,
            head_dim_v: head_dim,
            dtype,
            scale,
            softcap: 0.0,
            seqlen_sink: 0,
            gradient_shares: GradientShares::default(),
            max_logits: false,
            dlse: false,
        }
    }

    /// Checks that what travels of so many rows of queries and of keys can be counted, on so many ranks.
    ///
    /// # Errors
    /// [`PlanError::Bytes`].
    pub fn check_bytes(&self, [rows_q, rows_k]: [usize; 2], ranks: usize) -> Result<(), PlanError> {
        // Of both passes: a row of queries once in each tensor's type and once, of keys twice, in the accumulator's.
        const TIMES: usize = 3;
        let dims = self.head_dim as f64 + self.head_dim_v as f64 + 1.0;
        let tensor = |rows: usize, heads: usize| [rows as f64, heads as f64, dims];
        let elements = [
            tensor(rows_q, self.heads_q),
            tensor(rows_k, self.heads_kv),
            tensor(self.seqlen_sink, self.heads_q),
        ];
        bytes::check(ranks, elements, TIMES * self.dtype.accumulator().size())
    }

    /// Bytes of one key row and one value row together.
    pub fn kv_row_bytes(&self) -> usize {
        self.heads_kv * (self.head_dim + self.head_dim_v) * self.dtype.size()
    }

    /// In how many parts `rows` keys and values come to a computation that is under way, where one stage does all work: few enough
    /// that signalling each costs nothing, and more where there is much to come.
    pub fn delivery_parts(&self, rows: usize) -> usize {
        const PART_BYTES: usize = 8 << 20;
        const MOST_PARTS: usize = 8;
        (rows * self.kv_row_bytes() / PART_BYTES).clamp(1, MOST_PARTS)
    }

    /// The type of partial sums of dk and dv that travel, where nothing needs them exact; see [`GradientShares`].
    pub fn gradient_share_dtype(&self) -> DType {
        match self.gradient_shares {
            GradientShares::Elements => self.dtype,
            GradientShares::Accumulators => self.dtype.accumulator(),
        }
    }

    /// Bytes of the partial gradients of one key row and one value row together.
    pub fn kv_gradient_row_bytes(&self) -> usize {
        self.heads_kv * (self.head_dim + self.head_dim_v) * self.gradient_share_dtype().size()
    }

    /// Bytes that travel in a forward and a backward for one key row that a rank receives.
    pub fn exchanged_key_bytes(&self) -> u64 {
        (2 * self.kv_row_bytes() + self.kv_gradient_row_bytes()) as u64
    }

    /// Likewise for one query row that a host receives.
    pub fn exchanged_query_bytes(&self) -> u64 {
        (self.hosted_forward_bytes().total() + self.hosted_backward_bytes().total()) as u64
    }

    /// Bytes that travel in a forward for one hosted query row and one host; see [`HostedWork`](crate::HostedWork).
    pub fn hosted_forward_bytes(&self) -> HostedRowBytes {
        HostedRowBytes {
            tensors: self.heads_q * self.head_dim * self.dtype.size(),
            statistics: 0,
            results: self.heads_q * (self.head_dim_v + 1) * self.dtype.accumulator().size(),
        }
    }

    /// Likewise in a backward.
    pub fn hosted_backward_bytes(&self) -> HostedRowBytes {
        HostedRowBytes {
            tensors: self.heads_q * (self.head_dim + self.head_dim_v) * self.dtype.size(),
            statistics: 2 * self.heads_q * self.dtype.accumulator().size(),
            results: self.heads_q * self.head_dim * self.dtype.accumulator().size(),
        }
    }

    /// Floating-point operations of the forward over `area` unmasked pairs: `2 (head_dim + head_dim_v)` a pair and
    /// query head, which is `4 area heads_q head_dim` when the two agree.
    pub fn flops_forward(&self, area: u64) -> f64 {
        2.0 * area as f64 * self.heads_q as f64 * (self.head_dim + self.head_dim_v) as f64
    }

    /// Floating-point operations of the backward: 2.5 times the forward's (five matrix products against two).
    pub fn flops_backward(&self, area: u64) -> f64 {
        2.5 * self.flops_forward(area)
    }
}

/// Bytes of what travels of one hosted query row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HostedRowBytes {
    /// To the host, in the tensors' type: q, in the backward dout as well.
    pub tensors: usize,
    /// To the host, in the accumulator's type: lse and delta in the backward.
    pub statistics: usize,
    /// Back from the host, in the accumulator's type: partial out and lse, in the backward partial dq.
    pub results: usize,
}

impl HostedRowBytes {
    /// All of it.
    pub fn total(&self) -> usize {
        self.tensors + self.statistics + self.results
    }
}

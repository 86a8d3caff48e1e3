/// What the rows' statistics of a forward begin with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateBegin {
    /// Nothing was seen yet.
    Start,
    /// The state that an earlier stage left.
    Continue,
}

/// What a forward leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum StateEnd {
    /// A state, for a later stage to go on from.
    State,
    /// out and lse.
    Result,
}

/// Addresses of a forward's tensors, which are dense and aligned to 16 bytes. Those that a forward of its kind does not use
/// may be 0.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AttentionForwardTensors {
    /// `[rows_q, heads_q, head_dim]`.
    pub q: u64,
    /// `[rows_k, heads_kv, head_dim]`.
    pub k: u64,
    /// `[rows_k, heads_kv, head_dim_v]`.
    pub v: u64,
    /// `[seqlen_sink, heads_q]`, f32.
    pub sink: u64,
    /// Rows of the sink; 0 when there is none.
    pub seqlen_sink: u32,
    /// `[rows_q, heads_q, head_dim_v]`; every element is written.
    pub out: u64,
    /// `[rows_q, heads_q]`, f32; every element is written.
    pub lse: u64,
    /// State: `[rows_q, heads_q, head_dim_v]`, f32.
    pub acc: u64,
    /// State: `[rows_q, heads_q]`, f32.
    pub row_max: u64,
    /// State: `[rows_q, heads_q]`, f32.
    pub row_sum: u64,
}

/// A statistic of every row and head, f32: lse or delta, at `row * row_stride + head * head_stride`.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowStatistics {
    /// Address of lse, multiplied by whatever makes `lse_factor` right.
    pub lse: u64,
    /// Address of delta, likewise.
    pub delta: u64,
    /// Elements from row to row.
    pub row_stride: u64,
    /// Elements from head to head.
    pub head_stride: u64,
    /// What makes `lse` minus the logarithm base 2 of the rows' sums.
    pub lse_factor: f32,
    /// What makes `delta` minus the delta.
    pub delta_factor: f32,
}

impl RowStatistics {
    /// lse, a natural logarithm, and delta as attention defines them, both `[rows_q, heads_q]`.
    pub fn plain(lse: u64, delta: u64, heads_q: usize) -> Self {
        let lse_factor = -std::f32::consts::LOG2_E;
        Self { lse, delta, row_stride: heads_q as u64, head_stride: 1, lse_factor, delta_factor: -1.0 }
    }
}

/// Addresses of a backward's tensors, which are dense and aligned to 16 bytes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionBackwardTensors {
    /// `[rows_q, heads_q, head_dim]`.
    pub q: u64,
    /// `[rows_k, heads_kv, head_dim]`.
    pub k: u64,
    /// `[rows_k, heads_kv, head_dim_v]`.
    pub v: u64,
    /// `[rows_q, heads_q, head_dim_v]`.
    pub dout: u64,
    /// lse and delta of the whole rows.
    pub statistics: RowStatistics,
    /// `[rows_q, heads_q, head_dim]`, f32; added to.
    pub dq: u64,
    /// `[rows_k, heads_kv, head_dim]`; every element is written.
    pub dk: u64,
    /// `[rows_k, heads_kv, head_dim_v]`; every element is written.
    pub dv: u64,
}

/// The type in which dk and dv are written.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GradientType {
    /// That of the tensors: these are the results.
    Element,
    /// f32: these are shares of a sum.
    Float,
}

//! One attention operation as cost models see it: its bands, heads and sizes.

use counterpoint_mask::Band;
use counterpoint_tiles::Interruption;

/// One attention operation, as far as its time goes.
#[derive(Clone, Copy, Debug)]
pub struct AttentionWork<'a> {
    /// The work, in rows of the queries and of the keys.
    pub bands: &'a [Band],
    /// Query rows.
    pub q_rows: usize,
    /// Key rows.
    pub k_rows: usize,
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a query or key row of one head.
    pub head_dim: usize,
    /// Elements of a value row of one head.
    pub head_dim_v: usize,
    /// Whether a state is begun from or left, which not every kernel does.
    pub staged: bool,
    /// Bytes besides operands and results: a state read or written, sums cleared or rounded.
    pub passed_bytes: u64,
    /// Seconds that the run has computed before it: the clock has fallen meanwhile.
    pub computed_seconds: f64,
    /// When nobody wants to know what it takes any more: what is said then counts for nothing.
    pub interruption: Interruption<'a>,
}

impl AttentionWork<'_> {
    /// Floating-point operations of the forward over one pair of one query head.
    pub(crate) fn pair_flops(&self) -> f64 {
        2.0 * (self.head_dim + self.head_dim_v) as f64
    }

    /// The same of all unmasked pairs and heads.
    pub(crate) fn flops(&self) -> f64 {
        let area: u64 = self.bands.iter().map(Band::area).sum();
        area as f64 * self.heads_q as f64 * self.pair_flops()
    }
}

//! Shapes of attention tensors on the CPU, the tile size that follows from them, and checks of lengths.

/// Heads and their sizes: `q [rows, heads_q, head_dim]`, `k [rows, heads_kv, head_dim]`,
/// `v [rows, heads_kv, head_dim_v]`. Query head `h` reads key head `h / (heads_q / heads_kv)`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadShape {
    /// Query heads; a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a query or key row of one head.
    pub head_dim: usize,
    /// Elements of a value row of one head.
    pub head_dim_v: usize,
}

impl HeadShape {
    /// Query heads that read one key head.
    pub fn group(&self) -> usize {
        self.heads_q / self.heads_kv
    }

    pub(crate) fn check(&self) {
        assert!(
            self.heads_kv > 0 && self.heads_q > 0 && self.heads_q.is_multiple_of(self.heads_kv),
            "{} query heads over {} key heads",
            self.heads_q,
            self.heads_kv
        );
        assert!(self.head_dim > 0 && self.head_dim_v > 0, "head_dim 0");
    }

    /// Query rows of a tile. The heads of a group share key blocks and are stacked, so a tile of a wide group has fewer
    /// rows. A function of the shape alone, so that a row meets the same operations however the keys are cut.
    pub(crate) fn tile_rows(&self) -> usize {
        let wanted = (TILE_HEIGHT / self.group()).max(MIN_TILE_ROWS);
        // A power of two, so that tiles and key blocks meet at the diagonal of a causal mask.
        1 << wanted.ilog2()
    }
}

/// Rows of the matrix products of a tile: (rows) x (heads of a group). Packing a key block is shared by so many rows.
const TILE_HEIGHT: usize = 256;
const MIN_TILE_ROWS: usize = 16;

/// The number of rows of a tensor whose rows have `row_elements` elements.
///
/// # Panics
/// When its length is not a multiple of that.
pub(crate) fn rows_of<T>(name: &str, tensor: &[T], row_elements: usize) -> usize {
    assert!(
        tensor.len().is_multiple_of(row_elements),
        "{name}: {} elements in rows of {row_elements}",
        tensor.len()
    );
    tensor.len() / row_elements
}

/// # Panics
/// When a tensor does not have `rows` rows of `row_elements` elements.
pub(crate) fn check_len<T>(name: &str, tensor: &[T], rows: usize, row_elements: usize) {
    assert!(
        tensor.len() == rows * row_elements,
        "{name}: {} elements, {rows} rows of {row_elements} wanted",
        tensor.len()
    );
}

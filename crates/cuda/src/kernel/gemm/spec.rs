//! What a GEMM launch computes: sizes, layouts, epilogue, rows in pieces, signals, and what no kernel takes.

use std::sync::Arc;

use super::GemmFault;
use super::rows::{self, GemmRows};
use crate::kernel::{ElementType, Scalar};
use counterpoint_tiles::gemm::{GemmLayout, GemmShape, ProblemSize, TileOrder};

/// Tensors that A's rows may be put together from (`kGemmSources`).
pub const GEMM_SOURCES: usize = 16;
/// Ranges of rows in which D may lie (`kGemmDestinations`): those of a receiver, or those of them that are one piece of A.
pub const GEMM_DESTINATIONS: usize = 8;

/// What becomes of a product.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GemmEpilogue {
    /// It is stored.
    Store,
    /// A row `[n]` of the operands' type is added to every row of it, in f32, then it is stored.
    StoreBias,
    /// It is added to what D holds, `main_grad` say, each element once a launch. It is rounded to D's type before and after:
    /// into f32 nothing is lost before the sum.
    Accumulate,
}

/// Who is notified when tiles have been stored.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub enum GemmSignals {
    /// Nobody.
    #[default]
    None,
    /// Others on this GPU: a counter for each group of tiles rises. `sizes` says how many units of the order each group has.
    Device {
        /// Units of each group, in the order in which they are begun.
        sizes: Arc<[u32]>,
    },
    /// The same, visible to every GPU of the system, wherever the counters are.
    System {
        /// As above.
        sizes: Arc<[u32]>,
    },
    /// Others on this GPU: a counter for each receiver of D.
    Receivers,
}

/// How many CTAs a product has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum GemmGrid {
    /// As many as there are multiprocessors for: each computes one unit of tiles after another, and stores one while it multiplies the
    /// next. Fastest where it has those multiprocessors to itself; one that comes late has the whole product wait for its units.
    #[default]
    Persistent,
    /// Two for each unit, which the GPU places as multiprocessors become free: for products that run with kernels of other streams, which
    /// take theirs between two units.
    PerUnit,
}

/// A matrix product `D[m, n] = A B`, as one launch computes it. Sums are f32.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmSpec {
    /// M, N and K.
    pub size: ProblemSize,
    /// Rows of all products of the pass that it is one of: parts of k follow from these, so that they are alike in all of them.
    pub pass_rows: usize,
    /// Columns of the product that it has all or some of: parts of k follow from these too.
    pub pass_columns: usize,
    /// How A and B lie in memory.
    pub layout: GemmLayout,
    /// Elements of A and B.
    pub element: ElementType,
    /// Elements of D: that type, or f32.
    pub output: Scalar,
    /// Elements from one row in memory to the next, of A, B and D; each a multiple of 16 bytes.
    pub strides: [usize; 3],
    /// What becomes of the product.
    pub epilogue: GemmEpilogue,
    /// The rows that A has in memory, one piece after the other. Where they are K ([`GemmLayout::Tn`]), all pieces but the
    /// end of a tensor have multiples of 64 of them.
    pub sources: Vec<GemmRows>,
    /// Rows of D of each of its receivers, one after the other; each has its rows as a tensor of its own, in its own memory
    /// or a peer's.
    pub receivers: Vec<usize>,
    /// Or columns of D of each of its receivers, one after the other: each has all rows, as a tensor that has its columns and no others.
    /// None where receivers have rows.
    pub column_receivers: Vec<usize>,
    /// Who is notified of tiles.
    pub signals: GemmSignals,
    /// The order of tiles. No bit of a result depends on it.
    pub order: TileOrder,
    /// Multiprocessors to leave to others, by a grid that is persistent. No bit of a result depends on it.
    pub sm_margin: u32,
    /// How many CTAs compute it. No bit of a result depends on it.
    pub grid: GemmGrid,
}

impl GemmSpec {
    /// A product of contiguous tensors, stored in the operands' type, with nothing special about it.
    pub fn new(m: usize, n: usize, k: usize, layout: GemmLayout, element: ElementType) -> Self {
        let output = element.scalar();
        let strides = [layout.a_dims(m, k)[1], layout.b_dims(n, k)[1], n];
        Self {
            size: ProblemSize { m, n, k },
            pass_rows: m,
            pass_columns: n,
            layout,
            element,
            output,
            strides,
            epilogue: GemmEpilogue::Store,
            sources: vec![GemmRows { tensor: 0, first: 0, count: layout.a_dims(m, k)[0] }],
            receivers: vec![m],
            column_receivers: Vec::new(),
            signals: GemmSignals::None,
            order: TileOrder::Grouped,
            sm_margin: 0,
            grid: GemmGrid::Persistent,
        }
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> f64 {
        self.size.flops()
    }

    /// Tensors that D goes to.
    pub(super) fn receiver_count(&self) -> usize {
        if self.column_receivers.is_empty() { self.receivers.len() } else { self.column_receivers.len() }
    }

    /// Whether tiles of this shape lie in one receiver each.
    pub(super) fn fits_columns(&self, shape: &GemmShape) -> bool {
        let Some((_, before)) = self.column_receivers.split_last() else { return true };
        before.iter().all(|columns| columns.is_multiple_of(shape.columns as usize))
    }

    /// Rows of D, with every range of rows filled up to whole tiles.
    pub(super) fn tiled_rows(&self) -> usize {
        rows::tile_rows(self) * counterpoint_tiles::gemm::TILE_ROWS
    }

    /// Why no kernel takes it.
    pub(super) fn check(&self) -> Result<(), GemmFault> {
        /// Tiles are numbered by 16 bits.
        const MOST: usize = 1 << 22;
        let ProblemSize { m, n, k } = self.size;
        for (name, size) in [("m", m), ("n", n), ("k", k)] {
            if size == 0 || size > MOST {
                return Err(GemmFault::Size { name, size, most: MOST });
            }
        }
        if self.pass_rows < m {
            return Err(GemmFault::RowsOfPass { rows: m, pass: self.pass_rows });
        }
        if self.pass_columns < n {
            return Err(GemmFault::ColumnsOfPass { columns: n, pass: self.pass_columns });
        }
        if self.output != Scalar::F32 && self.output != self.element.scalar() {
            let (output, element) = (self.output.name(), self.element.name());
            return Err(GemmFault::Output { output, element });
        }
        let dims = [self.layout.a_dims(m, k)[1], self.layout.b_dims(n, k)[1], n];
        let bytes = [self.element.bytes() as u64, self.element.bytes() as u64, self.output.bytes()];
        for (index, name) in ["A", "B", "D"].into_iter().enumerate() {
            let (stride, columns) = (self.strides[index], dims[index]);
            if stride < columns {
                return Err(GemmFault::Overlap { name, stride, columns });
            }
            if !(stride as u64 * bytes[index]).is_multiple_of(16) {
                return Err(GemmFault::Stride { name, stride, bytes: bytes[index] });
            }
        }
        rows::check(self)
    }
}

/// Addresses of a launch's tensors; all but the counters are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTensors<'a> {
    /// A's tensors.
    pub a: &'a [u64],
    /// B.
    pub b: u64,
    /// D, of each receiver.
    pub d: &'a [u64],
    /// The bias `[n]`, under [`GemmEpilogue::StoreBias`].
    pub bias: u64,
    /// Counters, one u32 a group (one, where groups are receivers), of each receiver, where there are [`GemmSignals`]. A launch adds to
    /// those of the receiver that a tile goes to; see [`Gemm::signals_of`](super::Gemm::signals_of).
    pub counters: &'a [u64],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut GemmSpec)) -> String {
        let mut spec = GemmSpec::new(512, 384, 128, GemmLayout::Nt, ElementType::Bf16);
        change(&mut spec);
        spec.check().unwrap_err().to_string()
    }

    #[test]
    fn what_no_kernel_takes_is_refused_with_figures() {
        assert_eq!(GemmSpec::new(1, 8, 8, GemmLayout::Nn, ElementType::F16).check(), Ok(()));
        let in_columns =
            |columns: &'static [usize]| move |spec: &mut GemmSpec| spec.column_receivers = columns.to_vec();
        assert!(refused(in_columns(&[128, 128])).contains("[128, 128]"));
        assert!(refused(in_columns(&[100, 284])).contains("multiples of 16 bytes"));
        assert!(refused(in_columns(&[32; 12])).contains("12 receivers"));
        let both =
            |spec: &mut GemmSpec| (spec.receivers, spec.column_receivers) = (vec![64; 8], vec![192; 2]);
        assert!(refused(both).contains("rows"));
        assert!(refused(|spec| spec.size.k = 0).contains("k is 0"));
        assert!(refused(|spec| spec.pass_rows = 256).contains("512 rows of a pass of 256"));
        assert!(refused(|spec| spec.strides[0] = 100).contains("A are 100 elements apart, but have 128"));
        assert!(refused(|spec| spec.strides[1] = 132).contains("132 elements of 2 bytes apart"));
        assert!(refused(|spec| spec.output = Scalar::F16).contains("f16 of operands in bf16"));
        assert!(refused(|spec| spec.receivers = vec![64; 9]).contains("receivers"));
        let odd = GemmSpec::new(16, 16, 20, GemmLayout::Nt, ElementType::Bf16);
        assert!(odd.check().unwrap_err().to_string().contains("pad them"));
        // Along m and n it is those that must fit, and k may be what it likes.
        assert_eq!(GemmSpec::new(16, 16, 21, GemmLayout::Tn, ElementType::Bf16).check(), Ok(()));
    }
}

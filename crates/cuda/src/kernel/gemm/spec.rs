use std::sync::Arc;

use super::order::TileOrder;
use super::shape::TILE_ROWS;
use crate::kernel::{ElementType, Scalar};

/// Receivers of one product's rows (`kGemmDestinations`).
pub const GEMM_DESTINATIONS: usize = 8;

/// How the operands of `D[m, n] = A B` lie in memory, row after row. The letters are those of BLAS: `n` as it is, `t` transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum GemmLayout {
    /// A `[m, k]`, B `[n, k]`: a linear layer's forward.
    Nt,
    /// A `[m, k]`, B `[k, n]`: its gradient of the input.
    Nn,
    /// A `[k, m]`, B `[k, n]`: its gradient of the weight.
    Tn,
}

impl GemmLayout {
    /// All of them.
    pub const ALL: [Self; 3] = [Self::Nt, Self::Nn, Self::Tn];

    /// As it stands in kernels' names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Nt => "nt",
            Self::Nn => "nn",
            Self::Tn => "tn",
        }
    }

    /// Rows and columns of A in memory.
    pub const fn a_dims(self, m: usize, k: usize) -> [usize; 2] {
        match self {
            Self::Nt | Self::Nn => [m, k],
            Self::Tn => [k, m],
        }
    }

    /// Rows and columns of B in memory.
    pub const fn b_dims(self, n: usize, k: usize) -> [usize; 2] {
        match self {
            Self::Nt => [n, k],
            Self::Nn | Self::Tn => [k, n],
        }
    }
}

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

/// Who is told when tiles have been stored.
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
    /// The same, told to every GPU of the system, wherever the counters are.
    System {
        /// As above.
        sizes: Arc<[u32]>,
    },
}

/// A matrix product `D[m, n] = A B`, as one launch computes it. Sums are f32.
#[derive(Clone, Debug, PartialEq)]
pub struct GemmSpec {
    /// Rows of D.
    pub m: usize,
    /// Columns of D.
    pub n: usize,
    /// Terms of each element.
    pub k: usize,
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
    /// Among how many receivers the rows of D are dealt in equal, contiguous shares; each has its share as a tensor of its
    /// own, in its own memory or a peer's.
    pub destinations: usize,
    /// Who is told of tiles.
    pub signals: GemmSignals,
    /// The order of tiles. No bit of a result depends on it.
    pub order: TileOrder,
    /// Multiprocessors to leave to others. No bit of a result depends on it.
    pub sm_margin: u32,
}

impl GemmSpec {
    /// A product of contiguous tensors, stored in the operands' type, with nothing special about it.
    pub fn new(m: usize, n: usize, k: usize, layout: GemmLayout, element: ElementType) -> Self {
        let output = element.scalar();
        let strides = [layout.a_dims(m, k)[1], layout.b_dims(n, k)[1], n];
        Self {
            m,
            n,
            k,
            layout,
            element,
            output,
            strides,
            epilogue: GemmEpilogue::Store,
            destinations: 1,
            signals: GemmSignals::None,
            order: TileOrder::Grouped,
            sm_margin: 0,
        }
    }

    /// Multiplications and additions.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Rows of D that one destination has.
    pub(super) fn rows_per_destination(&self) -> usize {
        self.m / self.destinations.max(1)
    }

    /// Why no kernel takes it.
    pub(super) fn check(&self) -> Result<(), String> {
        /// Tiles are numbered by 16 bits.
        const MOST: usize = 1 << 22;
        let Self { m, n, k, .. } = *self;
        for (name, size) in [("m", m), ("n", n), ("k", k)] {
            if size == 0 || size > MOST {
                return Err(format!("{name} is {size}; it takes 1 to {MOST}"));
            }
        }
        if self.output != Scalar::F32 && self.output != self.element.scalar() {
            let (output, element) = (self.output.name(), self.element.name());
            return Err(format!("a result in {output} of operands in {element}; it takes f32 or {element}"));
        }
        let dims = [self.layout.a_dims(m, k)[1], self.layout.b_dims(n, k)[1], n];
        let bytes = [self.element.bytes() as u64, self.element.bytes() as u64, self.output.bytes()];
        for (index, name) in ["A", "B", "D"].into_iter().enumerate() {
            let (stride, columns) = (self.strides[index], dims[index]);
            if stride < columns {
                return Err(format!("rows of {name} are {stride} elements apart, but have {columns}"));
            }
            if !(stride as u64 * bytes[index]).is_multiple_of(16) {
                return Err(format!(
                    "rows of {name} are {stride} elements of {} bytes apart, which is no multiple of 16 bytes; pad them",
                    bytes[index]
                ));
            }
        }
        let destinations = self.destinations;
        if destinations == 0 || destinations > GEMM_DESTINATIONS {
            return Err(format!("{destinations} destinations; it takes 1 to {GEMM_DESTINATIONS}"));
        }
        if destinations > 1
            && (!m.is_multiple_of(destinations) || !(m / destinations).is_multiple_of(TILE_ROWS))
        {
            return Err(format!(
                "{m} rows among {destinations} destinations; each must have a multiple of {TILE_ROWS}"
            ));
        }
        Ok(())
    }
}

/// Addresses of a launch's tensors; all but the counters are multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GemmTensors<'a> {
    /// A.
    pub a: u64,
    /// B.
    pub b: u64,
    /// D, of each destination: `m / destinations` rows.
    pub d: &'a [u64],
    /// The bias `[n]`, under [`GemmEpilogue::StoreBias`].
    pub bias: u64,
    /// Counters, one u32 a group, of each destination, where there are [`GemmSignals`]. A launch adds to those of the
    /// destination that a tile goes to; see [`Gemm::signals_of`](super::Gemm::signals_of).
    pub counters: &'a [u64],
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(change: impl FnOnce(&mut GemmSpec)) -> String {
        let mut spec = GemmSpec::new(512, 384, 128, GemmLayout::Nt, ElementType::Bf16);
        change(&mut spec);
        spec.check().unwrap_err()
    }

    #[test]
    fn what_no_kernel_takes_is_told_with_figures() {
        assert_eq!(GemmSpec::new(1, 8, 8, GemmLayout::Nn, ElementType::F16).check(), Ok(()));
        assert!(refused(|spec| spec.k = 0).contains("k is 0"));
        assert!(refused(|spec| spec.strides[0] = 100).contains("A are 100 elements apart, but have 128"));
        assert!(refused(|spec| spec.strides[1] = 132).contains("132 elements of 2 bytes apart"));
        assert!(refused(|spec| spec.output = Scalar::F16).contains("f16 of operands in bf16"));
        assert!(refused(|spec| spec.destinations = 9).contains("9 destinations"));
        assert!(refused(|spec| spec.destinations = 8).contains("512 rows among 8"));
        let odd = GemmSpec::new(16, 16, 20, GemmLayout::Nt, ElementType::Bf16);
        assert!(odd.check().unwrap_err().contains("pad them"));
        // Along m and n it is those that must fit, and k may be what it likes.
        assert_eq!(GemmSpec::new(16, 16, 21, GemmLayout::Tn, ElementType::Bf16).check(), Ok(()));
    }
}

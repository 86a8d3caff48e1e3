//! How the operands of a matrix product lie in memory.

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

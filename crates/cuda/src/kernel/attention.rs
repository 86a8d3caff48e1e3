//! What every attention launcher is given, forward and backward: the element type, the bands, heads and options.

use std::sync::Arc;

use counterpoint_mask::Band;
use half::{bf16, f16};

use super::Scalar;
use crate::TensorMapElement;

/// The type of the elements of q, k, v, out and their gradients. Statistics and sums are f32.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ElementType {
    /// 8 bits of exponent.
    Bf16,
    /// 5 bits of exponent.
    F16,
}

impl ElementType {
    /// Both.
    pub const ALL: [Self; 2] = [Self::Bf16, Self::F16];

    /// As it stands in kernels' names.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Bf16 => "bf16",
            Self::F16 => "f16",
        }
    }

    /// The same among those that kernels convert.
    pub const fn scalar(self) -> Scalar {
        match self {
            Self::Bf16 => Scalar::Bf16,
            Self::F16 => Scalar::F16,
        }
    }

    /// The value of the kernels' macro `ELEMENT_BF16`.
    pub const fn define(self) -> u32 {
        match self {
            Self::Bf16 => 1,
            Self::F16 => 0,
        }
    }

    /// As the copy engine calls it.
    pub const fn tensor_map_element(self) -> TensorMapElement {
        match self {
            Self::Bf16 => TensorMapElement::Bf16,
            Self::F16 => TensorMapElement::F16,
        }
    }

    /// Bytes of one element.
    pub const fn bytes(self) -> usize {
        match self {
            Self::Bf16 => size_of::<bf16>(),
            Self::F16 => size_of::<f16>(),
        }
    }
}

/// What one launch of attention computes: which pairs, the tensors' shapes and the options. The same for forward and
/// backward, and for every architecture.
#[derive(Clone, Debug, PartialEq)]
pub struct AttentionProblem {
    /// The unmasked pairs, as disjoint bands of (query row, key row) of the tensors.
    pub bands: Arc<[Band]>,
    /// Rows of q, out and their gradients.
    pub rows_q: usize,
    /// Rows of k, v and their gradients.
    pub rows_k: usize,
    /// The last of them, which arrive while the kernel runs, from memory of their own.
    pub rows_arriving: usize,
    /// Query heads, a multiple of `heads_kv`.
    pub heads_q: usize,
    /// Key and value heads.
    pub heads_kv: usize,
    /// Elements of a row of one head of q and k.
    pub head_dim: usize,
    /// Elements of a row of one head of v and out.
    pub head_dim_v: usize,
    /// The elements' type.
    pub element: ElementType,
    /// Scores are `scale * q k^T`.
    pub scale: f32,
    /// Scores become `softcap * tanh(score / softcap)`.
    pub softcap: Option<f32>,
    /// Multiprocessors to leave to others: persistent kernels launch that many blocks fewer.
    pub sm_margin: u32,
    /// Whether two runs must give the same bits.
    pub deterministic: bool,
}

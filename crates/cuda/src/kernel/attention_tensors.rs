//! What the launchers of attention are given, the same for every architecture.
//!
//! A launcher is made once for a problem and launched many times: `new(setup, problem, mode)` compiles its kernels, builds
//! the tile schedule and puts it, and whatever else it needs, into device memory by the stream `setup`, which it waits for.
//! `launch(stream, tensors)` then allocates nothing and waits for nothing.
//!
//! Tensors are row-major, and dense where they are not [`HeadRows`]; addresses are those of their first elements, aligned to 16 bytes.
//! Rows of a head have a multiple of 8 elements (others are padded before they come here).

use super::AttentionFault;
use super::link_barrier::LinkArrivals;
use crate::{CudaError, TensorMapSpec};

/// What a stage of the forward goes on from and what it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct ForwardMode {
    /// Whether it goes on from the state of an earlier stage.
    pub continues: bool,
    /// What it leaves.
    pub end: ForwardModeEnd,
    /// Whether the largest score of each query head is wanted.
    pub max_logits: bool,
}

/// What a stage of the forward leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ForwardModeEnd {
    /// The state, for a later stage.
    State,
    /// The results of the rows over these keys alone, in f32 and without a sink, to be merged with others.
    Partial,
    /// The results.
    Result {
        /// Rows of the sink; 0 without one.
        seqlen_sink: usize,
    },
}

/// Addresses of the state between stages. `row_max` is in the unit of the kernel that wrote it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTensors {
    /// `[rows_q, heads_q, head_dim_v]`, f32.
    pub acc: u64,
    /// `[rows_q, heads_q]`, f32.
    pub row_max: u64,
    /// `[rows_q, heads_q]`, f32.
    pub row_sum: u64,
}

/// Addresses of the results of a forward. Every element is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ResultTensors {
    /// `[seqlen_sink, heads_q]`, f32; 0 without one.
    pub sink: u64,
    /// `[rows_q, heads_q, head_dim_v]`.
    pub out: u64,
    /// `[rows_q, heads_q]`, f32, natural logarithm.
    pub lse: u64,
}

/// Keys and values that arrive while a kernel runs.
#[derive(Clone, Copy, Debug)]
pub struct ArrivingTensors {
    /// `[rows_arriving, heads_kv, head_dim]`.
    pub k: u64,
    /// `[rows_arriving, heads_kv, head_dim_v]`.
    pub v: u64,
    /// How the kernel learns that they are there.
    pub arrivals: LinkArrivals,
}

impl ArrivingTensors {
    /// What a launch was given of so many rows.
    pub(super) fn of(given: Option<Self>, rows_arriving: usize) -> Result<Self, CudaError> {
        match given {
            Some(arriving) => Ok(arriving),
            None if rows_arriving == 0 => Ok(Self { k: 0, v: 0, arrivals: LinkArrivals::NONE }),
            None => {
                let reason = AttentionFault::NoArrivals { rows: rows_arriving }.into();
                Err(CudaError::Launch { kernel: "attention".to_owned(), reason })
            }
        }
    }
}

/// Where a tensor is that kernels read, `[rows, heads, elements]`: elements lie side by side, and heads and rows may lie apart.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadRows {
    /// Of its first element.
    pub address: u64,
    /// Bytes from a head to the next and from a row to the next, multiples of 16; `None` where it is dense, the only form that portable
    /// kernels take.
    pub strides: Option<[u64; 2]>,
}

impl From<u64> for HeadRows {
    /// A dense tensor.
    fn from(address: u64) -> Self {
        Self { address, strides: None }
    }
}

impl HeadRows {
    /// The address of a tensor that `kernel` takes as dense.
    pub(super) fn dense(self, kernel: &str) -> Result<u64, CudaError> {
        if self.strides.is_some() {
            let reason = AttentionFault::NotDense.into();
            return Err(CudaError::Launch { kernel: kernel.to_owned(), reason });
        }
        Ok(self.address)
    }

    /// Applied to the map of its tensor.
    pub(super) fn map(self, spec: TensorMapSpec) -> TensorMapSpec {
        self.strides.map_or(spec, |strides| spec.strides(strides))
    }
}

/// Addresses of the tensors of a forward.
#[derive(Clone, Copy, Debug)]
pub struct ForwardTensors {
    /// `[rows_q, heads_q, head_dim]`.
    pub q: HeadRows,
    /// `[rows_k, heads_kv, head_dim]`.
    pub k: HeadRows,
    /// `[rows_k, heads_kv, head_dim_v]`.
    pub v: HeadRows,
    /// Of the last rows of k and v, where the problem has some that arrive.
    pub arriving: Option<ArrivingTensors>,
    /// Of the stage before, where the mode continues it.
    pub begin: Option<StateTensors>,
    /// What is left, as the mode says.
    pub end: ForwardTarget,
    /// `[heads_q]`, f32, where the mode wants them: takes what is larger than what is there.
    pub max_logits: Option<u64>,
}

impl ForwardTensors {
    /// The address of `max_logits`; 0 where `mode` does not want them.
    pub(super) fn largest(&self, mode: &ForwardMode, kernel: &str) -> Result<u64, CudaError> {
        match (mode.max_logits, self.max_logits) {
            (true, Some(address)) => Ok(address),
            (false, None) => Ok(0),
            (wanted, given) => {
                let reason = AttentionFault::MaxLogits { wanted, given }.into();
                Err(CudaError::Launch { kernel: kernel.to_owned(), reason })
            }
        }
    }
}

/// Where a forward leaves what it leaves.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ForwardTarget {
    /// With [`ForwardModeEnd::State`]. It may be the state that the stage began from.
    State(StateTensors),
    /// With [`ForwardModeEnd::Partial`], where `out` is f32 and there is no sink, and with [`ForwardModeEnd::Result`].
    Result(ResultTensors),
}

/// Addresses of the tensors of the row statistic of a backward.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct DeltaTensors {
    /// `[rows_q, heads_q, head_dim_v]`.
    pub out: u64,
    /// As `out`.
    pub dout: u64,
    /// `[rows_q, heads_q]`, f32.
    pub lse: u64,
    /// `[rows_q, heads_q]`, f32: the gradient of `lse`, if there is one.
    pub dlse: Option<u64>,
    /// `[rows_q, heads_q]`, f32; written.
    pub delta: u64,
    /// (`sink`, `dsink`), both `[seqlen_sink, heads_q]`, f32; the second is written.
    pub sink: Option<(u64, u64)>,
}

/// What is in `dq` before a launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum DqBegin {
    /// Anything: sums begin at zero.
    Anything,
    /// Zeros before the first launch, and then what the last launch of the same value has left: sums begin at zero.
    Persistent,
    /// Sums, which are gone on with.
    Sums,
}

/// What a stage of the backward does besides its sums.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct BackwardMode {
    /// What is in `dq` before it.
    pub dq: DqBegin,
    /// Whether `dq` is then whole, and rounded to the elements' type.
    pub rounds_queries: bool,
    /// Whether `dk` and `dv` are in the elements' type; otherwise they are f32.
    pub rounds_keys: bool,
}

/// Addresses of the tensors of a backward.
#[derive(Clone, Copy, Debug)]
pub struct BackwardTensors {
    /// `[rows_q, heads_q, head_dim]`.
    pub q: HeadRows,
    /// `[rows_k, heads_kv, head_dim]`.
    pub k: HeadRows,
    /// `[rows_k, heads_kv, head_dim_v]`.
    pub v: HeadRows,
    /// As in [`ForwardTensors::arriving`].
    pub arriving: Option<ArrivingTensors>,
    /// `[rows_q, heads_q, head_dim_v]`.
    pub dout: u64,
    /// `[rows_q, heads_q]`, f32, of the whole row, natural logarithm.
    pub lse: u64,
    /// `[rows_q, heads_q]`, f32, of the whole row.
    pub delta: u64,
    /// `[rows_q, heads_q, head_dim]`, f32.
    pub dq: u64,
    /// As `dq`, in the elements' type, where the mode rounds it; every element is written.
    pub rounded_dq: Option<u64>,
    /// `[rows_k, heads_kv, head_dim]`, of the type that the mode says; every element is written.
    pub dk: u64,
    /// `[rows_k, heads_kv, head_dim_v]`, likewise.
    pub dv: u64,
    /// As `dk` and `dv`, of results: where rows go that nobody else has gradients of ([`super::AttentionBackward::round_alone`]).
    pub rounded: Option<[u64; 2]>,
    /// Of the last keys, where their rows of `dk` and `dv` go instead; not by portable kernels.
    pub owners: Option<GradientOwners>,
}

/// Where the gradients of keys go that belong elsewhere.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GradientOwners {
    /// The first such key; all after it are.
    pub first_row: usize,
    /// Of a table in the device's memory: for each of these keys the address of its row of dk, then of dv, each aligned to 16 bytes, on
    /// any GPU that this one reaches.
    pub addresses: u64,
}

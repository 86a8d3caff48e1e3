//! The kernels of every element type, each compiled once, in this crate: others call them without compiling them again.

use std::convert::Infallible;
use std::ops::ControlFlow;

use counterpoint_schedule::Accumulate;
use half::{bf16, f16};
use rayon::ThreadPool;

use crate::attention_backward::{self, BackwardArgs};
use crate::attention_delta::{self, DeltaArgs};
use crate::attention_finish::{self, FinishArgs};
use crate::attention_forward::{self, ForwardArgs};
use crate::element::HostElement;
use crate::gemm::{self, GemmArgs};
use crate::key_rows::{Arrived, TakeKeys};
use crate::real::Real;
use crate::rms_norm::{self, RmsNormArgs};
use crate::rms_norm_backward::{self, RmsNormBackwardArgs};

/// An element type that kernels read, with the kernels themselves. Call them by the functions of this crate.
pub trait KernelElement: HostElement<Accumulator: Real + KernelResult<Self>> + KernelResult<Self> {
    #[doc(hidden)]
    fn forward(
        args: ForwardArgs<'_, Self>,
        arriving_rows: usize,
        threads: &ThreadPool,
        arrived: Arrived<'_, Self>,
    ) -> ControlFlow<()>;
    #[doc(hidden)]
    fn partial(
        out: &mut [Self::Accumulator],
        lse: &mut [Self::Accumulator],
        row_sum: &[Self::Accumulator],
        head_dim_v: usize,
        threads: &ThreadPool,
    );
    #[doc(hidden)]
    fn finish(args: FinishArgs<'_, Self>, threads: &ThreadPool);
    #[doc(hidden)]
    fn delta(args: DeltaArgs<'_, Self>, threads: &ThreadPool);
    #[doc(hidden)]
    fn rms_norm(args: RmsNormArgs<'_, Self>, threads: &ThreadPool);
    #[doc(hidden)]
    fn rms_norm_backward(args: RmsNormBackwardArgs<'_, Self>, threads: &ThreadPool);
}

/// A type in which kernels that read `T` leave results: `T` itself, or that of its sums.
pub trait KernelResult<T>: HostElement {
    #[doc(hidden)]
    fn backward(
        args: BackwardArgs<'_, T, Self>,
        arriving_rows: usize,
        threads: &ThreadPool,
        arrived: Arrived<'_, T>,
    ) -> ControlFlow<()>
    where
        T: KernelElement;
    #[doc(hidden)]
    fn gemm(args: GemmArgs<'_, T, Self>, threads: &ThreadPool)
    where
        T: KernelElement;
    #[doc(hidden)]
    fn column_sum(src: &[&[T]], dst: &mut [Self], accumulate: Accumulate, threads: &ThreadPool)
    where
        T: KernelElement;
}

macro_rules! instantiate {
    ($type:ty, results: $($result:ty),+) => {
        impl KernelElement for $type {
            fn forward(
                args: ForwardArgs<'_, Self>,
                arriving_rows: usize,
                threads: &ThreadPool,
                arrived: Arrived<'_, Self>,
            ) -> ControlFlow<()> {
                attention_forward::forward(args, arriving_rows, threads, arrived)
            }
            fn partial(
                out: &mut [Self::Accumulator],
                lse: &mut [Self::Accumulator],
                row_sum: &[Self::Accumulator],
                head_dim_v: usize,
                threads: &ThreadPool,
            ) {
                attention_finish::partial(out, lse, row_sum, head_dim_v, threads);
            }
            fn finish(args: FinishArgs<'_, Self>, threads: &ThreadPool) {
                attention_finish::finish(args, threads);
            }
            fn delta(args: DeltaArgs<'_, Self>, threads: &ThreadPool) {
                attention_delta::delta(args, threads);
            }
            fn rms_norm(args: RmsNormArgs<'_, Self>, threads: &ThreadPool) {
                rms_norm::rms_norm(args, threads);
            }
            fn rms_norm_backward(args: RmsNormBackwardArgs<'_, Self>, threads: &ThreadPool) {
                rms_norm_backward::rms_norm_backward(args, threads);
            }
        }
        $(impl KernelResult<$type> for $result {
            fn backward(
                args: BackwardArgs<'_, $type, Self>,
                arriving_rows: usize,
                threads: &ThreadPool,
                arrived: Arrived<'_, $type>,
            ) -> ControlFlow<()> {
                attention_backward::backward(args, arriving_rows, threads, arrived)
            }
            fn gemm(args: GemmArgs<'_, $type, Self>, threads: &ThreadPool) {
                gemm::gemm(args, threads);
            }
            fn column_sum(src: &[&[$type]], dst: &mut [Self], accumulate: Accumulate, threads: &ThreadPool) {
                gemm::column_sum(src, dst, accumulate, threads);
            }
        })+
    };
}
instantiate!(f64, results: f64);
instantiate!(f32, results: f32);
instantiate!(bf16, results: bf16, f32);
instantiate!(f16, results: f16, f32);

/// One stage of the blocked attention forward: each tile of query rows loops over its key blocks in ascending order and
/// carries an online softmax (Milakov and Gimelshein 2018; FlashAttention-2, Dao 2023, algorithm 1) in `row_max`,
/// `row_sum`, `acc`. A tile skips the blocks that it sees nothing of. The stage that leaves results normalises a tile
/// right after its loop.
///
/// The operations that a row meets are a function of the unmasked pairs, the shape and the grid of
/// [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK) alone: the result is the same, bit for bit, for any number of threads, for keys split at
/// multiples of the block into consecutive calls, and for any cutting of the mask into bands.
///
/// A number of `q` that is not finite makes `row_sum` of its row and head NaN, if the row sees anything; one of `k` or
/// `v` that of the rows that see it, in the query heads that read it. No other row of the state changes by a bit. A NaN in
/// `row_sum` becomes NaN in `out` and `lse`; a sink that is NaN or `+inf` makes them NaN in its head.
///
/// # Panics
/// When a tensor's length does not fit the others or a band leaves the tensors.
pub fn attention_forward<T: KernelElement>(args: ForwardArgs<'_, T>, threads: &ThreadPool) {
    let Ok(()) = attention_forward_arriving::<T, Infallible>(args, 0, threads, |take| {
        take(&[], &[]);
        Ok(())
    });
}

/// [`attention_forward`] whose bands go on over `arriving_rows` rows of keys after those of `k`, which arrive meanwhile. Tiles
/// that see none of them are computed first. Then `arrived` is called, which waits for these rows and hands them on, and the others
/// are computed.
///
/// # Errors
/// That of `arrived`.
///
/// # Panics
/// As [`attention_forward`]; when the rows of `k` are no multiple of [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK).
pub fn attention_forward_arriving<T: KernelElement, E>(
    args: ForwardArgs<'_, T>,
    arriving_rows: usize,
    threads: &ThreadPool,
    arrived: impl FnMut(TakeKeys<'_, T>) -> Result<(), E>,
) -> Result<(), E> {
    keeping_the_error(arrived, |arrived| T::forward(args, arriving_rows, threads, arrived))
}

/// One stage of the blocked attention backward (FlashAttention-2, Dao 2023, algorithm 2, with the sums in a fixed
/// order): a thread takes a key block through the query tiles that see it, in ascending order, with five matrix
/// products a tile; `dk` and `dv` of the block stay with the thread. A tile's `dq` receives its key blocks in ascending
/// order: a thread that comes to a tile early waits for the block before it. Blocks are begun in ascending order, so
/// whoever is waited for is at work already, and threads follow each other one tile apart.
///
/// Deterministic as [`attention_forward`] is: same bits for any number of threads, any cutting into bands, and in `dq` for keys split
/// at multiples of [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK) into consecutive calls.
///
/// A row and head with a number of `q`, `dout`, `lse` or `delta` that is not finite (`lse = -inf` is: the row saw nothing)
/// makes NaN its `dq` and the `dk`, `dv` of the columns that it sees. A column with one in `k` or `v` makes NaN the `dq`
/// of the rows that see it and, if any does, its own `dk` and `dv`. No other element changes by a bit. (After a forward,
/// rows that see such a column have `lse = NaN` and reach all the columns that they see.)
///
/// # Panics
/// When a tensor's length does not fit the others or a band leaves the tensors.
pub fn attention_backward<T: KernelElement, G: KernelResult<T>>(
    args: BackwardArgs<'_, T, G>,
    threads: &ThreadPool,
) {
    let Ok(()) = attention_backward_arriving::<T, G, Infallible>(args, 0, threads, |take| {
        take(&[], &[]);
        Ok(())
    });
}

/// [`attention_backward`] whose bands, `dk` and `dv` go on over `arriving_rows` rows of keys after those of `k`, which arrive
/// meanwhile. `arrived` waits for these rows and hands them on; the others' blocks are computed before.
///
/// # Errors
/// That of `arrived`.
///
/// # Panics
/// As [`attention_backward`]; when the rows of `k` are no multiple of [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK).
pub fn attention_backward_arriving<T: KernelElement, G: KernelResult<T>, E>(
    args: BackwardArgs<'_, T, G>,
    arriving_rows: usize,
    threads: &ThreadPool,
    arrived: impl FnMut(TakeKeys<'_, T>) -> Result<(), E>,
) -> Result<(), E> {
    keeping_the_error(arrived, |arrived| G::backward(args, arriving_rows, threads, arrived))
}

/// Runs a kernel that only hears whether the keys have come, and gives the error of the wait for them.
fn keeping_the_error<T, E>(
    mut arrived: impl FnMut(TakeKeys<'_, T>) -> Result<(), E>,
    kernel: impl FnOnce(Arrived<'_, T>) -> ControlFlow<()>,
) -> Result<(), E> {
    let mut result = Ok(());
    let _ = kernel(&mut |take| {
        result = arrived(take);
        if result.is_ok() { ControlFlow::Continue(()) } else { ControlFlow::Break(()) }
    });
    result
}

/// Partial results of rows, to be merged with others: the state of a forward over some of their keys, normalised in place, in the type
/// that it is in. `out` holds `acc` and becomes the partial out, `lse` holds `row_max` and becomes its logarithm.
///
/// # Panics
/// When a tensor's length does not fit the others.
pub fn attention_partial<T: KernelElement>(
    out: &mut [T::Accumulator],
    lse: &mut [T::Accumulator],
    row_sum: &[T::Accumulator],
    head_dim_v: usize,
    threads: &ThreadPool,
) {
    T::partial(out, lse, row_sum, head_dim_v, threads);
}

/// Brings the sink into merged partial results, rounds, and puts the rows in their places.
///
/// # Panics
/// When a tensor's length does not fit the others or a row leaves them.
pub fn attention_finish<T: KernelElement>(args: FinishArgs<'_, T>, threads: &ThreadPool) {
    T::finish(args, threads);
}

/// `delta = rowsum(dout * out) - dlse`, and these rows' part of `dsink_t = -sum_rows exp(sink_t - lse) delta`.
///
/// A row and head whose `lse` is NaN or `+inf`, or whose `dout` holds a number that is not finite, gets `delta = NaN`
/// and makes `dsink` of that head NaN. Where `out` is all 0, as in rows that saw nothing, `rowsum(dout * out)` is 0 whatever `dout`
/// holds. `dlse` does not count where `lse` is `-inf`.
///
/// # Panics
/// When a tensor's length does not fit the others.
pub fn attention_delta<T: KernelElement>(args: DeltaArgs<'_, T>, threads: &ThreadPool) {
    T::delta(args, threads);
}

/// `out[rows] = a b + bias`, or added to what is there: summed over `k` in one order, in the accumulator type, and rounded
/// once.
///
/// # Panics
/// When the shapes do not fit.
pub fn gemm<T: KernelElement, D: KernelResult<T>>(args: GemmArgs<'_, T, D>, threads: &ThreadPool) {
    D::gemm(args, threads);
}

/// `dst = ` or `+=` the sum of all rows, each column in the order of rows.
///
/// # Panics
/// When the shapes do not fit.
pub fn column_sum<T: KernelElement, D: KernelResult<T>>(
    src: &[&[T]],
    dst: &mut [D],
    accumulate: Accumulate,
    threads: &ThreadPool,
) {
    D::column_sum(src, dst, accumulate, threads);
}

/// `h = src + residual`, rounded, and `out = h / sqrt(mean of h's squares + epsilon) weight`, row by row (Zhang and Sennrich, arXiv
/// 1910.07467). Calculated in the accumulator type, element after element, whatever the threads.
pub fn rms_norm<T: KernelElement>(args: RmsNormArgs<'_, T>, threads: &ThreadPool) {
    T::rms_norm(args, threads);
}

/// With `s = 1 / sqrt(mean of h's squares + epsilon)` and `g = dout weight`, row by row `dh = s (g - h s^2 mean(g h)) + dsum`, and
/// `dweight` the sum over the rows of `dout h s`. Calculated in the accumulator type, element after element and row after row,
/// whatever the threads.
pub fn rms_norm_backward<T: KernelElement>(args: RmsNormBackwardArgs<'_, T>, threads: &ThreadPool) {
    T::rms_norm_backward(args, threads);
}

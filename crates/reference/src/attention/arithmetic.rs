//! Steps in the type that a problem is solved in, and roundings to the type that it is compared with.

use counterpoint_cpu_kernels::Real;
use counterpoint_exec::{HostElement, HostTensor, convert_element, with_host_element};
use counterpoint_plan::DType;
use half::{bf16, f16};

/// Values rounded once to a type.
pub(super) fn rounded<A: Real>(values: &[A], dtype: DType) -> Vec<f64> {
    values.iter().map(|x| round(x.to_f64(), dtype)).collect()
}

/// A value as a matrix product in `dtype` takes it.
pub(super) fn operand<A: Real>(value: A, dtype: DType) -> A {
    A::from_f64(round(value.to_f64(), dtype))
}

fn round(x: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F64 => x,
        DType::F32 => f64::from(x as f32),
        DType::Bf16 => convert_element::<f64, bf16>(x).to_f64(),
        DType::F16 => convert_element::<f64, f16>(x).to_f64(),
    }
}

/// The elements of a tensor in the type that the problem is solved in.
pub(super) fn convert_all<A: HostElement>(tensor: &HostTensor) -> Vec<A> {
    with_host_element!(tensor.dtype(), T => {
        tensor.as_slice::<T>().unwrap_or(&[]).iter().map(|&x| convert_element(x)).collect()
    })
}

/// The same for a tensor `[rows, heads, dim]`, as `[heads, rows, dim]`.
pub(super) fn convert_by_head<A: HostElement>(tensor: &HostTensor) -> Vec<A> {
    let &[rows, heads, dim] = tensor.shape() else { return convert_all(tensor) };
    let mut by_head = Vec::with_capacity(tensor.len());
    with_host_element!(tensor.dtype(), T => {
        let values = tensor.as_slice::<T>().unwrap_or(&[]);
        for head in 0..heads {
            for row in 0..rows {
                by_head.extend(row_of(values, row, head, heads, dim).iter().map(|&x| convert_element::<T, A>(x)));
            }
        }
    });
    by_head
}

/// The elements `[i, j]` of a tensor `[_, columns, dim]`.
pub(super) fn row_of<A>(tensor: &[A], i: usize, j: usize, columns: usize, dim: usize) -> &[A] {
    let at = (i * columns + j) * dim;
    &tensor[at..at + dim]
}

/// In a few independent sums, which is also how a compiler would like it.
pub(super) fn dot<A: Real>(a: &[A], b: &[A]) -> A {
    const LANES: usize = 8;
    let mut sums = [A::ZERO; LANES];
    let (a, b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    let rest = a.remainder().iter().zip(b.remainder());
    let rest = rest.fold(A::ZERO, |sum, (&x, &y)| sum + x * y);
    for (a, b) in a.zip(b) {
        for ((sum, &x), &y) in sums.iter_mut().zip(a).zip(b) {
            *sum += x * y;
        }
    }
    sums.into_iter().fold(rest, |sum, x| sum + x)
}

pub(super) fn add_scaled<A: Real>(sum: &mut [A], factor: A, row: &[A]) {
    for (sum, &x) in sum.iter_mut().zip(row) {
        *sum += factor * x;
    }
}

pub(super) fn square<A: Real>(row: &[A]) -> f64 {
    row.iter().map(|x| x.to_f64().powi(2)).sum()
}

/// A scaled dot product under softcap, and the slope of that by the product: `sech^2`, which keeps its digits where
/// `1 - tanh^2` has none.
pub(super) fn capped<A: Real>(product: A, softcap: f64) -> (A, A) {
    let cap = A::from_f64(softcap);
    let x = (product / cap).to_f64();
    (cap * A::from_f64(x.tanh()), A::from_f64(sech_squared(x)))
}

pub(super) fn sech_squared(x: f64) -> f64 {
    x.cosh().powi(2).recip()
}

/// The library's exponential, not the kernels' own: the reference shares no numerics with what it judges.
pub(super) fn exp<A: Real>(x: A) -> A {
    A::from_f64(x.to_f64().exp())
}

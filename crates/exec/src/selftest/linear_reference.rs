use counterpoint_plan::{DType, LinearKind, LinearPlan};
use counterpoint_schedule::WeightGradient;
use rayon::prelude::*;

use crate::{HostTensor, LinearInputs, LinearOutputs};

/// A tensor of a layer in f64, with what its elements' bounds follow from.
#[derive(Clone, Debug, Default)]
pub(super) struct Exact {
    /// Products, without what they are added to.
    product: Vec<f64>,
    /// Sums over ranks of the magnitudes of their shares, which are rounded before they are summed; 0 where there is one rank.
    shares: Vec<f64>,
    /// Roots of the sums of squares of the terms.
    norms: Vec<f64>,
    /// Terms of a sum.
    terms: usize,
}

/// A whole layer in f64, by its definition.
#[derive(Clone, Debug)]
pub(super) struct LinearReference {
    /// `[tokens, out_features]`
    y: Exact,
    /// `[tokens, in_features]`
    dx: Exact,
    /// `[out_features, in_features]`
    dweight: Exact,
    /// `[out_features]`
    dbias: Exact,
}

impl LinearReference {
    /// Of these inputs, which have a `dy`; shares are those of the plan's ranks.
    pub(super) fn new(plan: &LinearPlan, inputs: &LinearInputs) -> Self {
        let spec = &plan.spec;
        let (t, k, n) = (spec.tokens, spec.in_features, spec.out_features);
        let (x, w) = (inputs.x.to_f64(), inputs.weight.to_f64());
        let dy = inputs.dy.as_ref().map_or_else(|| vec![0.0; t * n], HostTensor::to_f64);
        let (w_t, dy_t) = (transposed(&w, n, k), transposed(&dy, t, n));
        let ranks = |kind| if spec.kind == kind { plan.tp_size } else { 1 };
        let mut y = product(&x, &w_t, [t, n, k], ranks(LinearKind::Row));
        if let Some(bias) = &inputs.bias {
            let bias = bias.to_f64();
            for (index, value) in y.product.iter_mut().enumerate() {
                *value += bias[index % n];
                if y.shares[index] > 0.0 {
                    y.shares[index] += bias[index % n].abs();
                }
            }
        }
        Self {
            y,
            dx: product(&dy, &w, [t, k, n], ranks(LinearKind::Column)),
            dweight: product(&dy_t, &x, [n, k, t], 1),
            dbias: product(&dy_t, &vec![1.0; t], [n, 1, t], 1),
        }
    }
}

fn transposed(x: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    let mut out = vec![0.0; x.len()];
    for row in 0..rows {
        for column in 0..columns {
            out[column * rows + row] = x[row * columns + column];
        }
    }
    out
}

/// `a [m, k]` times `b [k, n]`, whose terms `ranks` ranks share.
fn product(a: &[f64], b: &[f64], [m, n, k]: [usize; 3], ranks: usize) -> Exact {
    let rows: Vec<[Vec<f64>; 3]> = (0..m)
        .into_par_iter()
        .map(|row| {
            let (mut sum, mut shares, mut squares) = (vec![0.0; n], vec![0.0; n], vec![0.0; n]);
            let mut share = vec![0.0; n];
            for rank in 0..ranks {
                share.fill(0.0);
                for term in rank * k / ranks..(rank + 1) * k / ranks {
                    let factor = a[row * k + term];
                    for ((share, square), b) in share.iter_mut().zip(&mut squares).zip(&b[term * n..][..n]) {
                        let value = factor * b;
                        *share += value;
                        *square += value * value;
                    }
                }
                for ((sum, shares), share) in sum.iter_mut().zip(&mut shares).zip(&share) {
                    *sum += share;
                    *shares += if ranks > 1 { share.abs() } else { 0.0 };
                }
            }
            squares.iter_mut().for_each(|square| *square = square.sqrt());
            [sum, shares, squares]
        })
        .collect();
    let mut exact = Exact { terms: k, ..Exact::default() };
    for [sum, shares, norms] in rows {
        exact.product.extend(sum);
        exact.shares.extend(shares);
        exact.norms.extend(norms);
    }
    exact
}

/// Half a unit in the last place of 1.
fn half_unit(dtype: DType) -> f64 {
    2f64.powi(match dtype {
        DType::F64 => -53,
        DType::F32 => -24,
        DType::Bf16 => -8,
        DType::F16 => -11,
    })
}

/// The largest share that an element of a layer's results has of what it may err, or what is missing or too much.
///
/// An element may err by half a unit of its type, of its value and of the product that is added to it; by half a unit of each
/// rank's share, which is rounded before it is summed; and by what a sum loses whose every step of 16 terms may cut off a unit
/// of a partial sum, which is taken to be within 4 standard deviations.
pub(super) fn share_of_bound(
    plan: &LinearPlan,
    inputs: &LinearInputs,
    gradient: WeightGradient,
    reference: &LinearReference,
    outputs: &LinearOutputs,
) -> Result<f64, String> {
    let dtype = plan.spec.dtype;
    let (weight, bias) = match &inputs.main_grad {
        Some((weight, bias)) => (Some(weight), bias.as_ref()),
        None => (None, None),
    };
    let gradients = gradient != WeightGradient::Frozen;
    let mut worst = 0.0;
    for (name, found, wanted, exact, before) in [
        ("y", Some(&outputs.y), true, &reference.y, None),
        ("dx", outputs.dx.as_ref(), inputs.dy.is_some(), &reference.dx, None),
        ("dweight", outputs.dweight.as_ref(), gradients, &reference.dweight, weight),
        ("dbias", outputs.dbias.as_ref(), gradients && plan.spec.has_bias, &reference.dbias, bias),
    ] {
        match found {
            None if wanted => return Err(format!("there is no {name}")),
            Some(_) if !wanted => return Err(format!("there is a {name}, which nobody asked for")),
            Some(found) => {
                let share =
                    judge(found, exact, before, dtype).map_err(|reason| format!("{name}: {reason}"))?;
                worst = f64::max(worst, share);
            }
            None => {}
        }
    }
    Ok(worst)
}

fn judge(
    found: &HostTensor,
    exact: &Exact,
    before: Option<&HostTensor>,
    dtype: DType,
) -> Result<f64, String> {
    let (values, before) = (found.to_f64(), before.map(HostTensor::to_f64));
    if values.len() != exact.product.len() {
        return Err(format!("{} elements, not {}", values.len(), exact.product.len()));
    }
    let sums = half_unit(dtype.accumulator());
    let steps = (exact.terms as f64 / 16.0).ceil() + 2.0;
    // Elements of f16 may be smaller than it has normal numbers.
    let smallest = if dtype == DType::F16 { 2f64.powi(-24) } else { 0.0 };
    let mut worst = 0.0;
    for (index, value) in values.into_iter().enumerate() {
        let product = exact.product[index];
        let right = product + before.as_ref().map_or(0.0, |before| before[index]);
        let shares = exact.shares[index];
        let bound = 1.02 * half_unit(found.dtype()) * (right.abs() + product.abs())
            + 1.02 * half_unit(dtype) * shares
            + steps * 2.0 * sums * (4.0 * exact.norms[index] + shares + product.abs() + right.abs())
            + smallest;
        let share = (value - right).abs() / bound;
        if share.is_nan() || share > 1.0 {
            return Err(format!("element {index} is {value:e}, not {right:e}: {share:.2} of its bound"));
        }
        worst = f64::max(worst, share);
    }
    Ok(worst)
}

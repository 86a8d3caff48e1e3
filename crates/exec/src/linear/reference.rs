use counterpoint_plan::{DType, LinearKind, LinearPlan};
use counterpoint_schedule::WeightGradient;
use rayon::prelude::*;

use super::{LinearInputs, LinearOutputs};
use crate::host_element::with_host_element;
use crate::{HostElement, HostTensor};

/// Which elements of a layer's results are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearSample {
    /// All of them.
    Whole,
    /// Those of so many rows and columns of every tensor, spread from the first to the last.
    Spread(usize),
}

impl LinearSample {
    fn of(self, length: usize) -> Vec<usize> {
        match self {
            Self::Spread(count) if count < length => {
                let last = count.max(2) - 1;
                (0..=last).map(|index| index * (length - 1) / last).collect()
            }
            _ => (0..length).collect(),
        }
    }
}

/// Some rows and columns of a result in f64, with what its elements' bounds follow from.
struct Exact {
    rows: Vec<usize>,
    columns: Vec<usize>,
    /// Products, without what they are added to.
    product: Vec<f64>,
    /// Sums over ranks of the magnitudes of their shares, which are rounded before they are summed; 0 where there is one rank.
    shares: Vec<f64>,
    /// Roots of the sums of squares of the terms.
    norms: Vec<f64>,
    /// Terms of a sum.
    terms: usize,
}

/// A matrix in f64, of which some rows or columns were taken.
struct Matrix {
    values: Vec<f64>,
    columns: usize,
}

fn rows_of(tensor: &HostTensor, rows: &[usize]) -> Matrix {
    let columns = tensor.row_elements();
    let values = with_host_element!(tensor.dtype(), T => {
        let elements = tensor.as_slice::<T>().unwrap_or(&[]);
        let of_row = |row: &usize| elements[row * columns..(row + 1) * columns].iter().map(|x| HostElement::to_f64(*x));
        rows.iter().flat_map(of_row).collect()
    });
    Matrix { values, columns }
}

/// Columns as rows.
fn columns_of(tensor: &HostTensor, columns: &[usize]) -> Matrix {
    let width = tensor.row_elements();
    let values = with_host_element!(tensor.dtype(), T => {
        let elements = tensor.as_slice::<T>().unwrap_or(&[]);
        let of_column = |column: &usize| elements.iter().skip(*column).step_by(width.max(1)).map(|x| HostElement::to_f64(*x));
        columns.iter().flat_map(of_column).collect()
    });
    Matrix { values, columns: tensor.rows() }
}

/// `a [m, k]` times `b [n, k]` transposed, whose terms `ranks` ranks share.
fn product(a: &Matrix, b: &Matrix, ranks: usize) -> [Vec<f64>; 3] {
    let k = a.columns;
    let rows: Vec<[Vec<f64>; 3]> = a
        .values
        .par_chunks_exact(k)
        .map(|row| {
            let (mut sums, mut magnitudes, mut norms) = (Vec::new(), Vec::new(), Vec::new());
            for column in b.values.chunks_exact(k) {
                let (mut sum, mut magnitude, mut squares) = (0.0, 0.0, 0.0);
                for rank in 0..ranks {
                    let terms = rank * k / ranks..(rank + 1) * k / ranks;
                    let mut share = 0.0;
                    for (x, y) in row[terms.clone()].iter().zip(&column[terms]) {
                        share += x * y;
                        squares += x * y * x * y;
                    }
                    sum += share;
                    magnitude += if ranks > 1 { f64::abs(share) } else { 0.0 };
                }
                sums.push(sum);
                magnitudes.push(magnitude);
                norms.push(f64::sqrt(squares));
            }
            [sums, magnitudes, norms]
        })
        .collect();
    let [mut sums, mut magnitudes, mut norms] = [const { Vec::new() }; 3];
    for [of_sums, of_magnitudes, of_norms] in rows {
        sums.extend(of_sums);
        magnitudes.extend(of_magnitudes);
        norms.extend(of_norms);
    }
    [sums, magnitudes, norms]
}

fn exact(rows: Vec<usize>, columns: Vec<usize>, a: &Matrix, b: &Matrix, ranks: usize) -> Exact {
    let [product, shares, norms] = product(a, b, ranks);
    Exact { rows, columns, product, shares, norms, terms: a.columns }
}

/// `y = x W^T + bias`
fn exact_y(plan: &LinearPlan, inputs: &LinearInputs, sample: LinearSample) -> Exact {
    let spec = &plan.spec;
    let (rows, columns) = (sample.of(spec.tokens), sample.of(spec.out_features));
    let ranks = if spec.kind == LinearKind::Row { plan.tp_size } else { 1 };
    let (a, b) = (rows_of(&inputs.x, &rows), rows_of(&inputs.weight, &columns));
    let mut y = exact(rows, columns, &a, &b, ranks);
    if let Some(bias) = &inputs.bias {
        let bias = rows_of(bias, &y.columns).values;
        for (index, (product, shares)) in y.product.iter_mut().zip(&mut y.shares).enumerate() {
            let bias = bias[index % y.columns.len()];
            *product += bias;
            *shares += if ranks > 1 { bias.abs() } else { 0.0 };
        }
    }
    y
}

/// `dx = dy W`
fn exact_dx(plan: &LinearPlan, inputs: &LinearInputs, dy: &HostTensor, sample: LinearSample) -> Exact {
    let spec = &plan.spec;
    let (rows, columns) = (sample.of(spec.tokens), sample.of(spec.in_features));
    let ranks = if spec.kind == LinearKind::Column { plan.tp_size } else { 1 };
    let (a, b) = (rows_of(dy, &rows), columns_of(&inputs.weight, &columns));
    exact(rows, columns, &a, &b, ranks)
}

/// `dW = dy^T x`
fn exact_dweight(plan: &LinearPlan, inputs: &LinearInputs, dy: &HostTensor, sample: LinearSample) -> Exact {
    let spec = &plan.spec;
    let (rows, columns) = (sample.of(spec.out_features), sample.of(spec.in_features));
    let (a, b) = (columns_of(dy, &rows), columns_of(&inputs.x, &columns));
    exact(rows, columns, &a, &b, 1)
}

/// Sums of `dy`'s columns.
fn exact_dbias(plan: &LinearPlan, dy: &HostTensor, sample: LinearSample) -> Exact {
    let rows = sample.of(plan.spec.out_features);
    let ones = Matrix { values: vec![1.0; plan.spec.tokens], columns: plan.spec.tokens };
    let a = columns_of(dy, &rows);
    exact(rows, vec![0], &a, &ones, 1)
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

/// Compares results of a layer with its definition in f64: the largest share that an element has of what it may err, 1 at most,
/// or what is wrong, missing or too much.
///
/// An element may err by half a unit of its type, of its value and of the product that is added to it; by half a unit of each
/// rank's share, which is rounded before it is summed; and by what a sum loses whose every step of 16 terms may cut off a unit
/// of a partial sum, which is taken to be within 4 standard deviations.
///
/// # Errors
/// What is wrong, in words.
pub fn check_linear(
    plan: &LinearPlan,
    inputs: &LinearInputs,
    gradient: WeightGradient,
    outputs: &LinearOutputs,
    sample: LinearSample,
) -> Result<f64, String> {
    let dtype = plan.spec.dtype;
    let mut worst = judge("y", &outputs.y, &exact_y(plan, inputs, sample), None, dtype)?;
    let (weight, bias) = match &inputs.main_grad {
        Some((weight, bias)) => (Some(weight), bias.as_ref()),
        None => (None, None),
    };
    let backward = inputs.dy.is_some();
    let gradients = backward && gradient != WeightGradient::Frozen;
    for (name, found, wanted) in [
        ("dx", &outputs.dx, backward),
        ("dweight", &outputs.dweight, gradients),
        ("dbias", &outputs.dbias, gradients && plan.spec.has_bias),
    ] {
        if found.is_some() != wanted {
            return Err(format!(
                "{name} is {}",
                if wanted { "missing" } else { "there, which nobody asked for" }
            ));
        }
        let (Some(found), Some(dy)) = (found, &inputs.dy) else { continue };
        let (exact, before) = match name {
            "dx" => (exact_dx(plan, inputs, dy, sample), None),
            "dweight" => (exact_dweight(plan, inputs, dy, sample), weight),
            _ => (exact_dbias(plan, dy, sample), bias),
        };
        worst = f64::max(worst, judge(name, found, &exact, before, dtype)?);
    }
    Ok(worst)
}

fn judge(
    name: &str,
    found: &HostTensor,
    exact: &Exact,
    before: Option<&HostTensor>,
    dtype: DType,
) -> Result<f64, String> {
    let pick = |tensor: &HostTensor| -> Vec<f64> {
        let width = tensor.row_elements();
        let rows = rows_of(tensor, &exact.rows).values;
        rows.chunks_exact(width).flat_map(|row| exact.columns.iter().map(|&column| row[column])).collect()
    };
    let ends = [exact.rows.last(), exact.columns.last()].map(|last| last.copied().unwrap_or(0));
    if found.rows() <= ends[0] || found.row_elements() <= ends[1] {
        return Err(format!("{name} is {:?}, which is too small", found.shape()));
    }
    let (values, before) = (pick(found), before.map(pick));
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
            let width = exact.columns.len();
            let (row, column) = (exact.rows[index / width], exact.columns[index % width]);
            return Err(format!(
                "{name}[{row}, {column}] is {value:e}, not {right:e}: {share:.2} of its bound"
            ));
        }
        worst = f64::max(worst, share);
    }
    Ok(worst)
}

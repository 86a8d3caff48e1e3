//! The definition of a linear layer in f64, and the comparison of results with it.

use counterpoint_exec::{
    HostElement, HostTensor, LinearInputs, LinearOutputs, LinearTensor, with_host_element,
};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, LinearKind, LinearPlan, LinearSpec};
use counterpoint_schedule::WeightGradient;
use rayon::prelude::*;

use crate::WrongResult;

/// Which elements of a layer's results are compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LinearSample {
    /// All of them.
    Whole,
    /// Those of so many rows and columns of every tensor, spread from the first to the last.
    Spread(usize),
}

impl LinearSample {
    /// Of a tensor whose rows, or columns, are these: those that are compared, ascending.
    pub fn of(self, range: Range) -> Vec<usize> {
        let length = range.len();
        match self {
            Self::Spread(count) if count < length => {
                let last = count.max(2) - 1;
                (0..=last).map(|index| range.start + index * (length - 1) / last).collect()
            }
            _ => (range.start..range.end).collect(),
        }
    }
}

/// When what ranks give to a sum is rounded to the tensors' type.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SumRounding {
    /// Each rank's partial sum once, as it is made.
    #[default]
    Partials,
    /// The sum so far at every rank that adds to it as well, as NCCL's rings do.
    EverySum,
}

/// Elements of a result that are compared, by rows and columns of the whole, and where the part that there is begins.
struct Places {
    rows: Vec<usize>,
    columns: Vec<usize>,
    first: [usize; 2],
}

impl Places {
    /// Of a rank's part of a tensor of `[rows, columns]`, or of all of it.
    fn of(
        plan: &LinearPlan,
        tensor: LinearTensor,
        rank: Option<usize>,
        size: [usize; 2],
        sample: LinearSample,
    ) -> Self {
        let whole = size.map(|size| Range::new(0, size));
        let [rows, columns] = rank.map_or(whole, |rank| tensor.window(plan, rank, size));
        let first = [rows.start, columns.start];
        Self { rows: sample.of(rows), columns: sample.of(columns), first }
    }
}

/// Some rows and columns of a result in f64, with what its elements' bounds follow from.
struct Exact {
    places: Places,
    /// Products, without what they are added to.
    product: Vec<f64>,
    /// Sums over ranks of the magnitudes of their partial sums, which are rounded before they are summed; 0 where there is one rank.
    partials: Vec<f64>,
    /// Roots of the sums of squares of the terms.
    norms: Vec<f64>,
    /// K.
    k: usize,
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

/// `a [m, k]` times `b [n, k]` transposed, whose K is divided among `ranks` ranks.
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
                    let own = rank * k / ranks..(rank + 1) * k / ranks;
                    let mut partial = 0.0;
                    for (x, y) in row[own.clone()].iter().zip(&column[own]) {
                        partial += x * y;
                        squares += x * y * x * y;
                    }
                    sum += partial;
                    magnitude += if ranks > 1 { f64::abs(partial) } else { 0.0 };
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

fn exact(places: Places, a: &Matrix, b: &Matrix, ranks: usize) -> Exact {
    let [product, partials, norms] = product(a, b, ranks);
    Exact { places, product, partials, norms, k: a.columns }
}

/// `y = x W^T + bias`
fn exact_y(plan: &LinearPlan, inputs: &LinearInputs, places: Places) -> Exact {
    let ranks = if plan.spec.kind == LinearKind::Row { plan.tp_size } else { 1 };
    let (a, b) = (rows_of(&inputs.x, &places.rows), rows_of(&inputs.weight, &places.columns));
    let mut y = exact(places, &a, &b, ranks);
    if let Some(bias) = &inputs.bias {
        let bias = rows_of(bias, &y.places.columns).values;
        for (index, (product, partials)) in y.product.iter_mut().zip(&mut y.partials).enumerate() {
            let bias = bias[index % bias.len()];
            *product += bias;
            *partials += if ranks > 1 { bias.abs() } else { 0.0 };
        }
    }
    y
}

/// `dx = dy W`
fn exact_dx(plan: &LinearPlan, inputs: &LinearInputs, dy: &HostTensor, places: Places) -> Exact {
    let ranks = if plan.spec.kind == LinearKind::Column { plan.tp_size } else { 1 };
    let (a, b) = (rows_of(dy, &places.rows), columns_of(&inputs.weight, &places.columns));
    exact(places, &a, &b, ranks)
}

/// `dW = dy^T x`
fn exact_dweight(inputs: &LinearInputs, dy: &HostTensor, places: Places) -> Exact {
    let (a, b) = (columns_of(dy, &places.rows), columns_of(&inputs.x, &places.columns));
    exact(places, &a, &b, 1)
}

/// Sums of `dy`'s columns.
fn exact_dbias(plan: &LinearPlan, dy: &HostTensor, places: Places) -> Exact {
    let ones = Matrix { values: vec![1.0; plan.spec.tokens], columns: plan.spec.tokens };
    let a = columns_of(dy, &places.rows);
    exact(places, &a, &ones, 1)
}

/// Half a unit in the last place of 1: the largest error of rounding a number once, relative to it.
pub fn half_unit(dtype: DType) -> f64 {
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
/// rank's partial sum, which is rounded before it is summed, once more for each sum in between that is rounded too; and by what a sum loses whose every step of 16 terms may cut off a unit
/// of a partial sum, which is taken to be within 4 standard deviations.
///
/// # Errors
/// What is missing or too much, and the first element that is out of its bound.
pub fn check_linear(
    plan: &LinearPlan,
    inputs: &LinearInputs,
    gradient: WeightGradient,
    outputs: &LinearOutputs,
    sample: LinearSample,
    rounding: SumRounding,
) -> Result<f64, WrongResult> {
    check_part(plan, None, inputs, gradient, outputs, sample, rounding)
}

/// The same of what one rank has: its parts of the results.
///
/// # Errors
/// As [`check_linear`].
pub fn check_linear_part(
    plan: &LinearPlan,
    rank: usize,
    inputs: &LinearInputs,
    gradient: WeightGradient,
    outputs: &LinearOutputs,
    sample: LinearSample,
    rounding: SumRounding,
) -> Result<f64, WrongResult> {
    check_part(plan, Some(rank), inputs, gradient, outputs, sample, rounding)
}

/// Of one rank, or of all of them put together.
fn check_part(
    plan: &LinearPlan,
    rank: Option<usize>,
    inputs: &LinearInputs,
    gradient: WeightGradient,
    outputs: &LinearOutputs,
    sample: LinearSample,
    rounding: SumRounding,
) -> Result<f64, WrongResult> {
    // Of what is rounded in a type, halves of its units: partial sums, and sums between the first and the last.
    let roundings = match rounding {
        SumRounding::Partials => 1,
        SumRounding::EverySum => plan.tp_size.max(2) - 1,
    };
    let LinearSpec { tokens, in_features, out_features, dtype, has_bias, .. } = plan.spec;
    let places = |tensor, size| Places::of(plan, tensor, rank, size, sample);
    let y = exact_y(plan, inputs, places(LinearTensor::Output, [tokens, out_features]));
    let mut worst = judge("y", &outputs.y, &y, None, (dtype, roundings))?;
    let (weight, bias) = match &inputs.main_grad {
        Some((weight, bias)) if !matches!(gradient, WeightGradient::Replaced(_)) => {
            (Some(weight), bias.as_ref())
        }
        _ => (None, None),
    };
    let backward = inputs.dy.is_some();
    let gradients = backward && gradient != WeightGradient::Frozen;
    for (name, found, wanted) in [
        ("dx", &outputs.dx, backward),
        ("dweight", &outputs.dweight, gradients),
        ("dbias", &outputs.dbias, gradients && has_bias),
    ] {
        if found.is_some() != wanted {
            let name = name.to_owned();
            return Err(if wanted { WrongResult::Missing { name } } else { WrongResult::Unasked { name } });
        }
        let (Some(found), Some(dy)) = (found, &inputs.dy) else { continue };
        let (exact, before) = match name {
            "dx" => (exact_dx(plan, inputs, dy, places(LinearTensor::Input, [tokens, in_features])), None),
            "dweight" => {
                let places = places(LinearTensor::Weight, [out_features, in_features]);
                (exact_dweight(inputs, dy, places), weight)
            }
            _ => (exact_dbias(plan, dy, places(LinearTensor::Bias, [out_features, 1])), bias),
        };
        worst = f64::max(worst, judge(name, found, &exact, before, (dtype, roundings))?);
    }
    Ok(worst)
}

fn judge(
    name: &str,
    found: &HostTensor,
    exact: &Exact,
    before: Option<&HostTensor>,
    (dtype, roundings): (DType, usize),
) -> Result<f64, WrongResult> {
    let Places { rows, columns, first } = &exact.places;
    let (Some(last_row), Some(last_column)) = (rows.last(), columns.last()) else { return Ok(0.0) };
    let pick = |tensor: &HostTensor, [first_row, first_column]: [usize; 2]| -> Vec<f64> {
        let width = tensor.row_elements();
        let rows: Vec<usize> = rows.iter().map(|row| row - first_row).collect();
        let values = rows_of(tensor, &rows).values;
        let of_row =
            |row: &[f64]| columns.iter().map(|column| row[column - first_column]).collect::<Vec<_>>();
        values.chunks_exact(width).flat_map(of_row).collect()
    };
    if found.rows() + first[0] <= *last_row || found.row_elements() + first[1] <= *last_column {
        return Err(WrongResult::TooSmall { name: name.to_owned(), shape: found.shape().to_vec() });
    }
    let (values, before) = (pick(found, *first), before.map(|before| pick(before, [0; 2])));
    let sums = half_unit(dtype.accumulator());
    let steps = (exact.k as f64 / 16.0).ceil() + 2.0;
    // Elements of f16 may be smaller than it has normal numbers.
    let smallest = if dtype == DType::F16 { 2f64.powi(-24) } else { 0.0 };
    let mut worst = 0.0;
    for (index, value) in values.into_iter().enumerate() {
        let product = exact.product[index];
        let right = product + before.as_ref().map_or(0.0, |before| before[index]);
        let partials = exact.partials[index];
        let bound = 1.02 * half_unit(found.dtype()) * (right.abs() + product.abs())
            + 1.02 * half_unit(dtype) * roundings as f64 * partials
            + steps * 2.0 * sums * (4.0 * exact.norms[index] + partials + product.abs() + right.abs())
            + smallest;
        let share = (value - right).abs() / bound;
        if share.is_nan() || share > 1.0 {
            let (row, column) = (rows[index / columns.len()], columns[index % columns.len()]);
            let name = name.to_owned();
            return Err(WrongResult::Element { name, row, column, found: value, right, share });
        }
        worst = f64::max(worst, share);
    }
    Ok(worst)
}

#[cfg(test)]
mod tests {
    use counterpoint_exec::random_linear_inputs;
    use counterpoint_plan::{Activations, WaveGroups};
    use half::bf16;

    use super::*;

    /// Of four ranks a sum that is rounded at every rank may err by three partial sums' roundings, any other by one.
    #[test]
    fn sums_that_are_rounded_at_every_rank_may_err_more() {
        let spec = LinearSpec {
            kind: LinearKind::Row,
            activations: Activations::Replicated,
            tokens: 4,
            in_features: 64,
            out_features: 4,
            has_bias: false,
            dtype: DType::Bf16,
        };
        let plan = LinearPlan::new(spec, 4, WaveGroups::Fixed(1)).unwrap();
        let inputs = random_linear_inputs(&spec, None, 1, false);
        let places = Places::of(&plan, LinearTensor::Output, None, [4, 4], LinearSample::Whole);
        let exact = exact_y(&plan, &inputs, places);
        let judged = |roundings: f64, rounding| {
            let off = |(y, partials): (&f64, &f64)| {
                bf16::from_f64(y + roundings * half_unit(DType::Bf16) * partials)
            };
            let y: Vec<bf16> = exact.product.iter().zip(&exact.partials).map(off).collect();
            let y = HostTensor::from_vec(vec![4, 4], y);
            let outputs = LinearOutputs { y, dx: None, dweight: None, dbias: None };
            let gradient = WeightGradient::Frozen;
            check_linear(&plan, &inputs, gradient, &outputs, LinearSample::Whole, rounding).is_ok()
        };
        assert!(judged(1.0, SumRounding::Partials) && !judged(2.9, SumRounding::Partials));
        assert!(judged(2.9, SumRounding::EverySum) && !judged(6.0, SumRounding::EverySum));
    }
}

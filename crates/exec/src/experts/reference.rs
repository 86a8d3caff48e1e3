//! The definition of a layer of experts in f64, token by token, and the comparison of results with it.

use counterpoint_mask::Range;
use counterpoint_plan::{DType, ExpertKind, ExpertSpec, Routing};

use crate::linear::half_unit;
use crate::{ExecError, HostTensor, LinearSample};

/// Tensors of a layer of experts: of activations each rank's, of weights those of all experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertInputs {
    /// Of a dispatch `[tokens, in_features]`, of a combine `[rows, in_features]`.
    pub x: Vec<HostTensor>,
    /// `[experts x out_features, in_features]`
    pub weight: HostTensor,
    /// As `y`, for a backward.
    pub dy: Option<Vec<HostTensor>>,
    /// What gradients of the weights are added to, as the weights.
    pub main_grad: Option<HostTensor>,
}

/// Results of a layer of experts, likewise.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertOutputs {
    /// Of a dispatch `[rows, out_features]`, of a combine `[tokens, out_features]`.
    pub y: Vec<HostTensor>,
    /// As `x`.
    pub dx: Option<Vec<HostTensor>>,
    /// As the weights: the gradient, or what it was added to.
    pub dweight: Option<HostTensor>,
}

/// A row of an expert: which rank's which token it is, on which rank it lies and where.
struct Routed {
    expert: usize,
    source: usize,
    token: usize,
    here: usize,
    row: usize,
}

/// Sums in f64, and those of the terms' magnitudes.
struct Exact {
    columns: usize,
    sums: Vec<f64>,
    magnitudes: Vec<f64>,
}

impl Exact {
    fn new(rows: usize, columns: usize) -> Self {
        Self { columns, sums: vec![0.0; rows * columns], magnitudes: vec![0.0; rows * columns] }
    }

    fn add(&mut self, row: usize, column: usize, term: f64) {
        self.sums[row * self.columns + column] += term;
        self.magnitudes[row * self.columns + column] += term.abs();
    }
}

/// Compares results with the definition, token by token: all rows, and of those the columns that the sample names.
///
/// # Errors
/// [`ExecError::Tensor`] with the first element that is not what it must be.
pub fn check_experts(
    spec: &ExpertSpec,
    routing: &Routing,
    inputs: &ExpertInputs,
    outputs: &ExpertOutputs,
    sample: LinearSample,
) -> Result<(), ExecError> {
    let routed = routed(routing);
    let f64s = |tensors: &[HostTensor]| tensors.iter().map(HostTensor::to_f64).collect::<Vec<_>>();
    let (x, weight) = (f64s(&inputs.x), inputs.weight.to_f64());
    let (k, n) = (spec.in_features, spec.out_features);
    let (ins, outs) = (sample.of(Range::new(0, k)), sample.of(Range::new(0, n)));
    let checks = |name: &str, found: &[HostTensor], columns: &[usize], exact: Vec<Exact>, terms: usize| {
        found.iter().zip(exact).enumerate().try_for_each(|(rank, (found, exact))| {
            check(&format!("{name} of rank {rank}"), found, columns, &exact, terms)
        })
    };
    let exact = |rows: &dyn Fn(usize) -> usize, columns: &[usize]| -> Vec<Exact> {
        (0..routing.ranks()).map(|rank| Exact::new(rows(rank), columns.len())).collect()
    };
    let rows_of = |rank: usize| routed.iter().filter(|routed| routed.here == rank).count();
    let tokens_of = |rank: usize| routing.tokens(rank);
    // Where `x` and `y` of a row are.
    let (at_x, at_y) =
        (|routed: &Routed| place(spec.kind, routed)[0], |routed: &Routed| place(spec.kind, routed)[1]);
    let (rows_x, rows_y): (&dyn Fn(usize) -> usize, &dyn Fn(usize) -> usize) = match spec.kind {
        ExpertKind::Dispatch => (&tokens_of, &rows_of),
        ExpertKind::Combine => (&rows_of, &tokens_of),
    };
    let mut y = exact(rows_y, &outs);
    for one in &routed {
        let ((from, row), (to, place)) = (at_x(one), at_y(one));
        let x = &x[from][row * k..(row + 1) * k];
        for (at, out) in outs.iter().enumerate() {
            let weight = &weight[(one.expert * n + out) * k..][..k];
            x.iter().zip(weight).for_each(|(x, w)| y[to].add(place, at, x * w));
        }
    }
    checks("y", &outputs.y, &outs, y, k)?;
    let (Some(dy), Some(found)) = (&inputs.dy, &outputs.dx) else { return Ok(()) };
    let dy = f64s(dy);
    let mut dx = exact(rows_x, &ins);
    for one in &routed {
        let ((to, place), (from, row)) = (at_x(one), at_y(one));
        for (feature, dy) in dy[from][row * n..(row + 1) * n].iter().enumerate() {
            let weight = &weight[(one.expert * n + feature) * k..][..k];
            ins.iter().enumerate().for_each(|(at, column)| dx[to].add(place, at, dy * weight[*column]));
        }
    }
    checks("dx", found, &ins, dx, n)?;
    let Some(found) = &outputs.dweight else { return Ok(()) };
    let mut gradient = Exact::new(routing.experts() * n, ins.len());
    if let Some(before) = &inputs.main_grad {
        for (row, values) in before.to_f64().chunks_exact(k).enumerate() {
            ins.iter().enumerate().for_each(|(at, column)| gradient.add(row, at, values[*column]));
        }
    }
    for one in &routed {
        let ((from, row), (of, place)) = (at_x(one), at_y(one));
        let (x, dy) = (&x[from][row * k..(row + 1) * k], &dy[of][place * n..(place + 1) * n]);
        for (feature, dy) in dy.iter().enumerate() {
            let row = one.expert * n + feature;
            ins.iter().enumerate().for_each(|(at, column)| gradient.add(row, at, dy * x[*column]));
        }
    }
    let most = routing.rows().into_iter().max().unwrap_or(0);
    check("the gradient of the weights", found, &ins, &gradient, most)
}

/// All rows of all experts, in the order in which they lie on their ranks.
fn routed(routing: &Routing) -> Vec<Routed> {
    let mut all = Vec::new();
    let mut rows = vec![0; routing.ranks()];
    for expert in 0..routing.experts() {
        let here = routing.rank_of(expert as u32);
        for source in 0..routing.ranks() {
            for token in 0..routing.tokens(source) {
                if routing.experts_of_token(source, token).contains(&(expert as u32)) {
                    all.push(Routed { expert, source, token, here, row: rows[here] });
                    rows[here] += 1;
                }
            }
        }
    }
    all
}

/// Rank and row of a row's `x`, and of its `y`.
fn place(kind: ExpertKind, routed: &Routed) -> [(usize, usize); 2] {
    let (token, row) = ((routed.source, routed.token), (routed.here, routed.row));
    match kind {
        ExpertKind::Dispatch => [token, row],
        ExpertKind::Combine => [row, token],
    }
}

/// An element is a sum of products, rounded on its rank, on its way and at its end.
fn check(
    name: &str,
    found: &HostTensor,
    columns: &[usize],
    exact: &Exact,
    terms: usize,
) -> Result<(), ExecError> {
    let wrong = |reason: String| Err(ExecError::Tensor { name: name.to_owned(), reason });
    let width = found.row_elements();
    let rows = exact.sums.len() / exact.columns.max(1);
    if found.rows() != rows && exact.columns > 0 {
        return wrong(format!("has {} rows; it must have {rows}", found.rows()));
    }
    let summed = half_unit(match found.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    });
    let unit = 3.0 * half_unit(found.dtype()) + (terms as f64).sqrt().mul_add(4.0, 8.0) * summed;
    let values = found.to_f64();
    for (row, (sums, magnitudes)) in exact
        .sums
        .chunks_exact(exact.columns.max(1))
        .zip(exact.magnitudes.chunks_exact(exact.columns.max(1)))
        .enumerate()
    {
        for (at, column) in columns.iter().enumerate() {
            let (value, wanted) = (values[row * width + column], sums[at]);
            // NaN is within no bound.
            let is_right = (value - wanted).abs() <= unit * magnitudes[at];
            if !is_right {
                return wrong(format!("is {value} in row {row}, column {column}; it must be {wanted}"));
            }
        }
    }
    Ok(())
}

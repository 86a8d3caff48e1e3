//! The definition of a layer of experts in f64, token by token, and the comparison of results with it.

use counterpoint_exec::{
    ExecError, ExpertInputs, ExpertOutputs, HostElement, HostTensor, TensorFault, with_host_element,
};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, ExpertKind, ExpertSpec, Routing};

use crate::linear::{LinearSample, half_unit};

/// A row of an expert: which rank's which token it is, on which rank it lies and where.
struct Routed {
    expert: usize,
    source: usize,
    token: usize,
    here: usize,
    row: usize,
}

/// Elements of a result that are compared: sums in f64, and those of the terms' magnitudes.
struct Exact {
    /// Rows of the result.
    count: usize,
    rows: Vec<usize>,
    columns: Vec<usize>,
    sums: Vec<f64>,
    magnitudes: Vec<f64>,
}

impl Exact {
    fn new(count: usize, columns: usize, sample: LinearSample) -> Self {
        let (rows, columns) = (sample.of(Range::new(0, count)), sample.of(Range::new(0, columns)));
        let zeros = vec![0.0; rows.len() * columns.len()];
        Self { count, rows, columns, sums: zeros.clone(), magnitudes: zeros }
    }

    /// Where a row of the result is here; `None` for one that is not compared.
    fn place(&self, row: usize) -> Option<usize> {
        self.rows.binary_search(&row).ok()
    }

    /// Adds the products of two rows to one of the columns at a place.
    fn add_products(&mut self, place: usize, column: usize, a: &[f64], b: &[f64]) {
        let at = place * self.columns.len() + column;
        for (a, b) in a.iter().zip(b) {
            self.sums[at] += a * b;
            self.magnitudes[at] += (a * b).abs();
        }
    }

    /// Adds to the columns at a place.
    fn add(&mut self, place: usize, terms: impl IntoIterator<Item = f64>) {
        let first = place * self.columns.len();
        for (at, term) in (first..).zip(terms) {
            self.sums[at] += term;
            self.magnitudes[at] += term.abs();
        }
    }
}

/// These columns of these rows in f64, row by row.
fn elements(
    tensor: &HostTensor,
    rows: impl IntoIterator<Item = usize>,
    columns: impl IntoIterator<Item = usize, IntoIter: Clone>,
) -> Vec<f64> {
    let (width, columns) = (tensor.row_elements(), columns.into_iter());
    with_host_element!(tensor.dtype(), T => {
        let elements = tensor.as_slice::<T>().unwrap_or(&[]);
        let of_row = |row: usize| columns.clone().map(move |column| HostElement::to_f64(elements[row * width + column]));
        rows.into_iter().flat_map(of_row).collect()
    })
}

/// Compares results with the definition, token by token: of every tensor of a rank, and of the weights of all experts, the rows and columns
/// that the sample names.
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
    let (x, weight) = (&inputs.x, &inputs.weight);
    let (k, n) = (spec.in_features, spec.out_features);
    let checks = |name: &str, found: &[HostTensor], exact: Vec<Exact>, terms: usize| {
        let mut ranks = found.iter().zip(exact).enumerate();
        ranks.try_for_each(|(rank, (found, exact))| {
            check(&format!("{name} of rank {rank}"), found, &exact, terms)
        })
    };
    let exact = |rows: &dyn Fn(usize) -> usize, columns: usize| -> Vec<Exact> {
        (0..routing.ranks()).map(|rank| Exact::new(rows(rank), columns, sample)).collect()
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
    let mut y = exact(rows_y, n);
    for one in &routed {
        let ((from, row), (to, row_y)) = (at_x(one), at_y(one));
        let Some(place) = y[to].place(row_y) else { continue };
        let x = elements(&x[from], [row], 0..k);
        for feature in 0..y[to].columns.len() {
            let of_expert = one.expert * n + y[to].columns[feature];
            let weight = elements(weight, [of_expert], 0..k);
            y[to].add_products(place, feature, &x, &weight);
        }
    }
    checks("y", &outputs.y, y, k)?;
    let (Some(dy), Some(found)) = (&inputs.dy, &outputs.dx) else { return Ok(()) };
    let mut dx = exact(rows_x, k);
    for one in &routed {
        let ((to, row_x), (from, row)) = (at_x(one), at_y(one));
        let Some(place) = dx[to].place(row_x) else { continue };
        let columns = dx[to].columns.clone();
        let weight = elements(weight, one.expert * n..(one.expert + 1) * n, columns.iter().copied());
        let dy = elements(&dy[from], [row], 0..n);
        for (dy, weight) in dy.iter().zip(weight.chunks_exact(columns.len().max(1))) {
            dx[to].add(place, weight.iter().map(|weight| dy * weight));
        }
    }
    checks("dx", found, dx, n)?;
    let Some(found) = &outputs.dweight else { return Ok(()) };
    let mut gradient = Exact::new(routing.experts() * n, k, sample);
    let (features, columns) = (gradient.rows.clone(), gradient.columns.clone());
    if let Some(before) = &inputs.main_grad {
        for (place, feature) in features.iter().enumerate() {
            gradient.add(place, elements(before, [*feature], columns.iter().copied()));
        }
    }
    for one in &routed {
        let ((from, row), (of, row_y)) = (at_x(one), at_y(one));
        let of_expert = |expert: usize| features.partition_point(|feature| *feature < expert * n);
        let places = of_expert(one.expert)..of_expert(one.expert + 1);
        let x = elements(&x[from], [row], columns.iter().copied());
        let of_features = features[places.clone()].iter().map(|feature| feature - one.expert * n);
        for (place, dy) in places.zip(elements(&dy[of], [row_y], of_features)) {
            gradient.add(place, x.iter().map(|x| dy * x));
        }
    }
    let most = routing.rows().iter().copied().max().unwrap_or(0);
    check("the gradient of the weights", found, &gradient, most)
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
fn check(name: &str, found: &HostTensor, exact: &Exact, terms: usize) -> Result<(), ExecError> {
    let wrong = |fault: TensorFault| Err(ExecError::tensor(name, fault));
    let Exact { count, rows, columns, sums, magnitudes } = exact;
    if found.rows() != *count && !columns.is_empty() {
        return wrong(TensorFault::Rows { rows: found.rows(), wanted: format!("it must have {count}") });
    }
    let summed = half_unit(match found.dtype() {
        DType::F64 => DType::F64,
        _ => DType::F32,
    });
    let unit = 3.0 * half_unit(found.dtype()) + (terms as f64).sqrt().mul_add(4.0, 8.0) * summed;
    let values = elements(found, rows.iter().copied(), columns.iter().copied());
    for (at, value) in values.into_iter().enumerate() {
        let wanted = sums[at];
        // NaN is within no bound.
        let is_right = (value - wanted).abs() <= unit * magnitudes[at];
        if !is_right {
            let (row, column) = (rows[at / columns.len()], columns[at % columns.len()]);
            return wrong(TensorFault::Wrong { row, column, value, wanted });
        }
    }
    Ok(())
}

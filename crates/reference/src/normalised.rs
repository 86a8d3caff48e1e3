//! The definition in f64 of a linear layer with a residual and an RMSNorm behind it, and of its gradients.

use counterpoint_exec::{HostTensor, LinearInputs};
use counterpoint_schedule::NormSpec;

/// Tensors of such a layer, in global order, all tokens.
#[derive(Clone, Copy, Debug)]
pub struct NormalisedInputs<'a> {
    /// Those of the layer; its `dy` is the gradient of what was normalised.
    pub linear: &'a LinearInputs,
    /// `[tokens, out_features]`
    pub residual: Option<&'a HostTensor>,
    /// `[out_features]`
    pub norm_weight: Option<&'a HostTensor>,
    /// What else goes into the gradient of `sum`, `[tokens, out_features]`.
    pub dsum: Option<&'a HostTensor>,
}

/// What they give, row by row.
#[derive(Clone, Debug, PartialEq)]
pub struct NormalisedReference {
    /// The layer's result and the residual, `[tokens, out_features]`.
    pub sum: Vec<f64>,
    /// That normalised.
    pub y: Vec<f64>,
    /// The gradient of `sum`, which is that of the residual.
    pub dsum: Vec<f64>,
    /// `[tokens, in_features]`
    pub dx: Vec<f64>,
    /// `[out_features, in_features]`
    pub dweight: Vec<f64>,
    /// `[out_features]`
    pub dbias: Vec<f64>,
    /// `[out_features]`
    pub dnorm_weight: Vec<f64>,
}

/// `a [m, k]` times `b [k, n]`.
fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let element = |at: usize| (0..k).map(|term| a[at / n * k + term] * b[term * n + at % n]).sum();
    (0..m * n).map(element).collect()
}

/// `a [rows, columns]` transposed.
fn transposed(a: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..rows * columns).map(|at| a[at % rows * columns + at / rows]).collect()
}

/// By the definition: `sum = x W^T + bias + residual`, `y = sum / sqrt(mean of its squares + epsilon) norm_weight`, and the derivatives of
/// `y dy + sum dsum`.
pub fn reference_normalised(inputs: &NormalisedInputs<'_>, norm: &NormSpec) -> NormalisedReference {
    let LinearInputs { x, weight, bias, dy, .. } = inputs.linear;
    let (tokens, k, n) = (x.rows(), x.row_elements(), weight.rows());
    let [x, weight] = [x, weight].map(HostTensor::to_f64);
    let wide = |tensor: Option<&HostTensor>, length: usize, otherwise: f64| {
        tensor.map_or_else(|| vec![otherwise; length], HostTensor::to_f64)
    };
    let (bias, residual) = (wide(bias.as_ref(), n, 0.0), wide(inputs.residual, tokens * n, 0.0));
    let (scale, dy) = (wide(inputs.norm_weight, n, 1.0), wide(dy.as_ref(), tokens * n, 0.0));
    let mut sum = product(&x, &transposed(&weight, n, k), [tokens, k, n]);
    sum.iter_mut().enumerate().for_each(|(at, sum)| *sum += bias[at % n] + residual[at]);
    let mut dsum = wide(inputs.dsum, tokens * n, 0.0);
    let (mut y, mut dnorm_weight) = (Vec::new(), vec![0.0; n]);
    for (row, h) in sum.chunks_exact(n).enumerate() {
        let root = (h.iter().map(|h| h * h).sum::<f64>() / n as f64 + norm.epsilon).sqrt();
        let normalised: Vec<f64> = h.iter().map(|h| h / root).collect();
        y.extend(normalised.iter().zip(&scale).map(|(x, w)| x * w));
        let dy = &dy[row * n..(row + 1) * n];
        let along: f64 = (0..n).map(|at| dy[at] * scale[at] * normalised[at]).sum::<f64>() / n as f64;
        for at in 0..n {
            dsum[row * n + at] += (dy[at] * scale[at] - normalised[at] * along) / root;
            dnorm_weight[at] += dy[at] * normalised[at];
        }
    }
    let dx = product(&dsum, &weight, [tokens, n, k]);
    let dweight = product(&transposed(&dsum, tokens, n), &x, [n, tokens, k]);
    let dbias = (0..n).map(|at| dsum.iter().skip(at).step_by(n).sum()).collect();
    NormalisedReference { sum, y, dsum, dx, dweight, dbias, dnorm_weight }
}

#[cfg(test)]
mod tests {
    use counterpoint_exec::{random_linear_inputs, random_tensor};
    use counterpoint_plan::{Activations, DType, LinearKind, LinearSpec};

    use super::*;

    /// Derivatives are differences of the function itself.
    #[test]
    fn gradients_are_derivatives() {
        let (tokens, n) = (2, 4);
        let spec = LinearSpec {
            kind: LinearKind::Row,
            activations: Activations::Replicated,
            tokens,
            in_features: 3,
            out_features: n,
            has_bias: true,
            dtype: DType::F64,
        };
        let linear = random_linear_inputs(&spec, None, 3, true);
        let [residual, dsum] = [5, 6].map(|seed| random_tensor(vec![tokens, n], DType::F64, seed));
        let weight = random_tensor(vec![n], DType::F64, 7);
        let norm = NormSpec::new(1e-3);
        let of = |linear: &LinearInputs, weight: &HostTensor| {
            let inputs = NormalisedInputs {
                linear,
                residual: Some(&residual),
                norm_weight: Some(weight),
                dsum: Some(&dsum),
            };
            reference_normalised(&inputs, &norm)
        };
        let loss = |found: &NormalisedReference| -> f64 {
            let dot = |a: &[f64], b: &HostTensor| a.iter().zip(b.to_f64()).map(|(a, b)| a * b).sum::<f64>();
            dot(&found.y, linear.dy.as_ref().unwrap()) + dot(&found.sum, &dsum)
        };
        let found = of(&linear, &weight);
        let moved = |tensor: &HostTensor, at: usize| {
            let mut values = tensor.to_f64();
            values[at] += 1e-6;
            HostTensor::from_vec(tensor.shape().to_vec(), values)
        };
        let slope = |moved: NormalisedReference| (loss(&moved) - loss(&found)) / 1e-6;
        let close = |slope: f64, right: f64| assert!((slope - right).abs() < 1e-4, "{slope} {right}");
        for (at, &right) in found.dx.iter().enumerate() {
            close(slope(of(&LinearInputs { x: moved(&linear.x, at), ..linear.clone() }, &weight)), right);
        }
        for (at, &right) in found.dweight.iter().enumerate() {
            let weight_moved = LinearInputs { weight: moved(&linear.weight, at), ..linear.clone() };
            close(slope(of(&weight_moved, &weight)), right);
        }
        for (at, &right) in found.dnorm_weight.iter().enumerate() {
            close(slope(of(&linear, &moved(&weight, at))), right);
        }
    }
}

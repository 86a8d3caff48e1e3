use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType};
use serde::Serialize;

use crate::reference::{Reference, Sample, SampledRows, plain_attention, reference_attention};
use crate::{AttentionInputs, AttentionOutputs, HostTensor};

/// How far the results of a run are from the dense f64 reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckReport {
    /// Whether every tensor is within its bounds.
    pub passed: bool,
    /// One entry a tensor.
    pub tensors: Vec<TensorCheck>,
}

/// How far one tensor is from the reference.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct TensorCheck {
    /// Such as `dq`.
    pub name: String,
    /// Largest absolute difference of two elements; infinite when one is NaN or infinite and the other is not the same.
    pub max_abs_error: f64,
    /// Bound on it, for types that have one.
    pub max_abs_bound: Option<f64>,
    /// Frobenius norm of the difference over that of what `relative_to` says.
    pub relative_error: f64,
    /// What the error is measured against.
    pub relative_to: RelativeTo,
    /// Bound on it.
    pub relative_bound: f64,
    /// Whether it is within its bounds.
    pub passed: bool,
}

/// What an error is measured against.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum RelativeTo {
    /// The reference. For `lse`, whose absolute error is what counts, at least 1 an element.
    Reference,
    /// The terms of the reference's sums: for a tensor that nearly vanishes by cancellation, where no floating-point sum
    /// could stay within the bound against the reference itself.
    Terms,
}

impl RelativeTo {
    /// The measure's name in tables.
    pub const fn measure(self) -> &'static str {
        match self {
            RelativeTo::Reference => "relative Frobenius",
            RelativeTo::Terms => "relative to its terms",
        }
    }
}

impl CheckReport {
    /// Largest relative error of all tensors.
    pub fn relative_error(&self) -> f64 {
        self.tensors.iter().map(|tensor| tensor.relative_error).fold(0.0, f64::max)
    }
}

/// Relative Frobenius error allowed to results whose statistics are f32.
const F32_BOUND: f64 = 1e-5;
/// Likewise f64.
const F64_BOUND: f64 = 1e-12;
/// The relative error of rounding once to bf16.
const BF16_ROUNDING: f64 = 1.0 / 512.0;
/// Likewise f16.
const F16_ROUNDING: f64 = 1.0 / 4096.0;
/// How many times the error of a plain implementation is allowed to bf16 and f16.
const PLAIN_FACTOR: f64 = 2.0;

/// Compares the results of a run with the dense f64 reference on the same inputs. f64 and f32 have fixed bounds on the
/// relative error; bf16 and f16 may err twice as much as a plain implementation in that type does on the same inputs, in
/// the largest and in the relative error. Minus infinities of `lse` must be in the same places.
///
/// It covers finite inputs: a result that is NaN, as it must be where an input is not finite, never passes.
///
/// # Panics
/// When a tensor's shape does not fit `mask` and `spec`.
pub fn check_attention(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    outputs: &AttentionOutputs,
) -> CheckReport {
    let reference = reference_attention(mask, spec, inputs);
    let plain = matches!(spec.dtype, DType::Bf16 | DType::F16).then(|| plain_attention(mask, spec, inputs));
    compare_with_reference(spec.dtype, &reference, plain.as_ref(), outputs)
}

/// As [`check_attention`], with a reference at hand and, for bf16 and f16, the yardstick.
pub fn compare_with_reference(
    dtype: DType,
    reference: &Reference,
    plain: Option<&Reference>,
    outputs: &AttentionOutputs,
) -> CheckReport {
    let mut tensors = vec![
        check_tensor(
            "out",
            dtype,
            &outputs.out.to_f64(),
            &reference.out,
            plain.map(|p| &p.out[..]),
            reference.noise.out,
        ),
        check_lse(dtype, &outputs.lse.to_f64(), &reference.lse),
    ];
    if let Some(expected) = &reference.gradients {
        let plain = plain.and_then(|plain| plain.gradients.as_ref());
        let noise = reference.noise;
        let mut check = |name: &str, tensor: &Option<HostTensor>, expected, plain, noise| {
            tensors.push(match tensor {
                Some(tensor) => check_tensor(name, dtype, &tensor.to_f64(), expected, plain, noise),
                None => missing(name),
            });
        };
        check("dq", &outputs.dq, &expected.dq, plain.map(|p| &p.dq[..]), noise.dq);
        check("dk", &outputs.dk, &expected.dk, plain.map(|p| &p.dk[..]), noise.dk);
        check("dv", &outputs.dv, &expected.dv, plain.map(|p| &p.dv[..]), noise.dv);
        if let Some(dsink) = &expected.dsink {
            tensors.push(match &outputs.dsink {
                Some(tensor) => check_dsink(dtype, &tensor.to_f64(), dsink, noise.dsink),
                None => missing("dsink"),
            });
        }
    }
    CheckReport { passed: tensors.iter().all(|tensor| tensor.passed), tensors }
}

/// As [`check_attention`] on some rows and keys only, in time linear in the sequence: for sequences that are too long for the
/// dense reference. Gradients of keys are compared with sums over the `lse` and `out` of all rows as they came out of the
/// run, which the sampled rows vouch for. A sink's gradient is not looked at.
///
/// # Panics
/// When a tensor's shape does not fit `mask` and `spec`.
pub fn check_sample(
    mask: &Mask,
    spec: &AttentionSpec,
    inputs: &AttentionInputs,
    outputs: &AttentionOutputs,
    sample: &Sample,
) -> CheckReport {
    let exact = SampledRows::exact(mask, spec, inputs, outputs, sample);
    let plain = matches!(spec.dtype, DType::Bf16 | DType::F16)
        .then(|| SampledRows::plain(mask, spec, inputs, outputs, sample));
    let actual = SampledRows::of(outputs, sample);
    let mut tensors = Vec::new();
    for (name, rows) in exact.tensors() {
        let values = actual.tensor(name).unwrap_or(&[]);
        tensors.push(match name {
            "lse" => check_lse(spec.dtype, values, rows),
            _ => {
                check_tensor(name, spec.dtype, values, rows, plain.as_ref().and_then(|p| p.tensor(name)), 0.0)
            }
        });
    }
    CheckReport { passed: tensors.iter().all(|tensor| tensor.passed), tensors }
}

fn check_tensor(
    name: &str,
    dtype: DType,
    values: &[f64],
    expected: &[f64],
    plain: Option<&[f64]>,
    noise: f64,
) -> TensorCheck {
    let error = Difference::of(values, expected);
    let yardstick = plain.map(|plain| Difference::of(plain, expected));
    // A plain result may be exact by chance, a tensor of one element above all. What is made of rounded values cannot be
    // expected to come closer than their rounding, nor f32 sums than theirs.
    let base = match dtype {
        DType::F64 => F64_BOUND,
        DType::F32 => F32_BOUND,
        DType::Bf16 => BF16_ROUNDING,
        DType::F16 => F16_ROUNDING,
    };
    let largest = expected.iter().fold(0.0, |max: f64, x| max.max(x.abs()));
    let max_abs_bound = yardstick
        .as_ref()
        .map(|yardstick| (base * largest).max(F32_BOUND * noise).max(PLAIN_FACTOR * yardstick.max));
    let against = |norm: f64, relative_to| {
        let plain = yardstick.as_ref().map_or(0.0, |yardstick| PLAIN_FACTOR * yardstick.relative_to(norm));
        TensorCheck::new(name, &error, norm, relative_to, base.max(plain), max_abs_bound)
    };
    let norm = norm(expected);
    let check = against(norm, RelativeTo::Reference);
    let vanishes = noise > norm && (norm == 0.0 || !check.passed);
    if vanishes { against(noise, RelativeTo::Terms) } else { check }
}

/// `dsink` is a few sums over all rows, made of the rounded `out`: a plain implementation's error is one draw of so few
/// that twice it says nothing. So it is compared with its terms, and four times their rounding is allowed.
fn check_dsink(dtype: DType, values: &[f64], expected: &[f64], noise: f64) -> TensorCheck {
    let rounding = match dtype {
        DType::F64 | DType::F32 => return check_tensor("dsink", dtype, values, expected, None, noise),
        DType::Bf16 => BF16_ROUNDING,
        DType::F16 => F16_ROUNDING,
    };
    let error = Difference::of(values, expected);
    TensorCheck::new("dsink", &error, noise, RelativeTo::Terms, 4.0 * rounding, None)
}

fn check_lse(dtype: DType, values: &[f64], expected: &[f64]) -> TensorCheck {
    let finite: Vec<f64> = expected.iter().copied().filter(|x| x.is_finite()).collect();
    let norm = norm(&finite).max((finite.len() as f64).sqrt());
    let bound = if dtype == DType::F64 { F64_BOUND } else { F32_BOUND };
    TensorCheck::new("lse", &Difference::of(values, expected), norm, RelativeTo::Reference, bound, None)
}

fn missing(name: &str) -> TensorCheck {
    TensorCheck {
        name: name.to_owned(),
        max_abs_error: f64::INFINITY,
        max_abs_bound: None,
        relative_error: f64::INFINITY,
        relative_to: RelativeTo::Reference,
        relative_bound: 0.0,
        passed: false,
    }
}

impl TensorCheck {
    fn new(
        name: &str,
        error: &Difference,
        norm: f64,
        relative_to: RelativeTo,
        relative_bound: f64,
        max_abs_bound: Option<f64>,
    ) -> Self {
        let relative_error = error.relative_to(norm);
        let passed = relative_error <= relative_bound && max_abs_bound.is_none_or(|bound| error.max <= bound);
        Self {
            name: name.to_owned(),
            max_abs_error: error.max,
            max_abs_bound,
            relative_error,
            relative_to,
            relative_bound,
            passed,
        }
    }
}

/// The size of a difference of two tensors.
struct Difference {
    max: f64,
    frobenius: f64,
}

impl Difference {
    fn of(values: &[f64], expected: &[f64]) -> Self {
        if values.len() != expected.len() {
            return Self { max: f64::INFINITY, frobenius: f64::INFINITY };
        }
        let (mut max, mut squares) = (0.0f64, 0.0);
        for (&value, &expected) in values.iter().zip(expected) {
            if value == expected {
                continue; // also two equal infinities
            }
            let error = (value - expected).abs();
            let error = if error.is_nan() { f64::INFINITY } else { error };
            max = max.max(error);
            squares += error * error;
        }
        Self { max, frobenius: squares.sqrt() }
    }

    fn relative_to(&self, norm: f64) -> f64 {
        if self.frobenius == 0.0 { 0.0 } else { self.frobenius / norm }
    }
}

fn norm(values: &[f64]) -> f64 {
    values.iter().map(|x| x * x).sum::<f64>().sqrt()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::HostData;
    use crate::reference::NoiseNorms;

    fn outputs(out: Vec<f64>, lse: Vec<f64>) -> AttentionOutputs {
        AttentionOutputs {
            out: HostTensor::new(vec![out.len()], HostData::F64(out)),
            lse: HostTensor::new(vec![lse.len()], HostData::F64(lse)),
            dq: None,
            dk: None,
            dv: None,
            dsink: None,
        }
    }

    fn reference() -> Reference {
        Reference {
            out: vec![1.0, 2.0],
            lse: vec![0.5, f64::NEG_INFINITY],
            gradients: None,
            noise: NoiseNorms::default(),
        }
    }

    fn passed(out: Vec<f64>, lse: Vec<f64>) -> bool {
        compare_with_reference(DType::F64, &reference(), None, &outputs(out, lse)).passed
    }

    #[test]
    fn equal_results_pass_and_wrong_ones_do_not() {
        let inf = f64::INFINITY;
        assert!(passed(vec![1.0, 2.0], vec![0.5, -inf]));
        assert!(passed(vec![1.0, 2.0 + 1e-13], vec![0.5, -inf]));
        assert!(!passed(vec![1.0, 2.0 + 1e-11], vec![0.5, -inf]));
        assert!(!passed(vec![1.0, f64::NAN], vec![0.5, -inf]));
        assert!(!passed(vec![1.0, 2.0], vec![0.5, -1e30]));
        assert!(!passed(vec![1.0, 2.0], vec![-inf, -inf]));
        assert!(!passed(vec![1.0, 2.0], vec![0.5, inf]));
        assert!(!passed(vec![1.0], vec![0.5, -inf]));
    }

    #[test]
    fn a_missing_gradient_does_not_pass() {
        let mut reference = reference();
        reference.gradients =
            Some(crate::reference::ReferenceGradients { dq: vec![], dk: vec![], dv: vec![], dsink: None });
        let report = compare_with_reference(
            DType::F64,
            &reference,
            None,
            &outputs(vec![1.0, 2.0], vec![0.5, f64::NEG_INFINITY]),
        );
        assert!(!report.passed);
    }
}

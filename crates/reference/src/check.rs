//! Results of attention compared with the reference: errors, their bounds, and whether they are within them.

use std::fmt;
use std::rc::Rc;

use counterpoint_exec::{AttentionInputs, AttentionOutputs, HostTensor};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, GradientShares};
use serde::Serialize;

use crate::attention::{
    F32_BOUND, F64_BOUND, Reference, ReferenceGradients, Sample, SampledRows, plain_attention,
    plain_attention_from, reference_attention,
};

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
    /// The reference. For `lse` and `max_logits`, whose absolute error is what counts, at least 1 an element.
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

/// Its errors and their bounds in one line.
impl fmt::Display for TensorCheck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {:.2e} of {:.2e}", self.name, self.relative_error, self.relative_bound)?;
        match self.max_abs_bound {
            Some(bound) => write!(f, ", largest {:.2e} of {bound:.2e}", self.max_abs_error),
            None => Ok(()),
        }
    }
}

impl CheckReport {
    /// The tensors that are out of bounds, in words; empty when all are within.
    pub fn failures(&self) -> String {
        let wrong = self.tensors.iter().filter(|tensor| !tensor.passed);
        wrong.map(TensorCheck::to_string).collect::<Vec<_>>().join("; ")
    }

    /// Partial sums of dk and dv that travel as elements are each rounded once before they are added: of the largest elements that may be one more
    /// rounding. The bound on the relative error stays.
    fn allow_rounded_partials(&mut self, dtype: DType, reference: &Reference) {
        let Some(gradients) = &reference.gradients else { return };
        for tensor in &mut self.tensors {
            let expected = match tensor.name.as_str() {
                "dk" => &gradients.dk,
                "dv" => &gradients.dv,
                _ => continue,
            };
            if let Some(bound) = tensor.max_abs_bound {
                tensor.bound_largest(bound + worst_rounding(dtype) * largest(expected));
            }
        }
        self.passed = self.tensors.iter().all(|tensor| tensor.passed);
    }

    /// Largest relative error of all tensors.
    pub fn relative_error(&self) -> f64 {
        self.tensors.iter().map(|tensor| tensor.relative_error).fold(0.0, f64::max)
    }
}

/// The relative error of rounding once to bf16, at worst twice that.
const BF16_ROUNDING: f64 = 1.0 / 512.0;
/// Likewise f16.
const F16_ROUNDING: f64 = 1.0 / 4096.0;
/// How many times the error of a plain implementation is allowed to bf16 and f16.
const PLAIN_FACTOR: f64 = 2.0;
/// How many times its even share of its terms' rounding one element of a tensor that vanishes may be off: rows that see more than others have
/// larger shares (17 times was seen in a dq of 12 rows and 8 heads).
const EVEN_SHARES: f64 = 32.0;

/// Compares the results of a run with the dense f64 reference on the same inputs. f64 and f32 have fixed bounds on the
/// relative error; bf16 and f16 may err twice as much as a plain implementation in that type does on the same inputs, in
/// the largest and in the relative error; its backward may take the `out` of the run or its own. Minus infinities of `lse` must be in the same places.
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
    check_against(spec, (&reference, plain.as_ref()), outputs, |out| {
        Rc::new(plain_attention_from(mask, spec, inputs, out))
    })
}

/// As [`check_attention`], with the reference at hand and, for bf16 and f16, the yardstick. What that yardstick refuses is
/// measured by a second one before it counts as wrong, whose gradients are computed from the `out` of the run, as `from_out` does.
pub(crate) fn check_against(
    spec: &AttentionSpec,
    (reference, plain): (&Reference, Option<&Reference>),
    outputs: &AttentionOutputs,
    from_out: impl FnOnce(&HostTensor) -> Rc<Reference>,
) -> CheckReport {
    let compare = |plain: &[&Reference]| {
        let mut report = compare_with_reference(spec.dtype, reference, plain, outputs);
        if spec.gradient_shares == GradientShares::Elements {
            report.allow_rounded_partials(spec.dtype, reference);
        }
        if spec.max_logits && outputs.max_logits.is_none() {
            report.tensors.push(missing("max_logits"));
            report.passed = false;
        }
        report
    };
    let report = compare(plain.as_slice());
    match plain {
        Some(plain) if !report.passed && outputs.out.shape().iter().product::<usize>() == plain.out.len() => {
            compare(&[plain, &from_out(&outputs.out)])
        }
        _ => report,
    }
}

/// Compares with a reference at hand; bf16 and f16 may err twice as much as the worst of the yardsticks.
pub fn compare_with_reference(
    dtype: DType,
    reference: &Reference,
    plain: &[&Reference],
    outputs: &AttentionOutputs,
) -> CheckReport {
    let mut tensors = vec![
        check_tensor(
            "out",
            dtype,
            &outputs.out.to_f64(),
            &reference.out,
            &plain.iter().map(|p| &p.out[..]).collect::<Vec<_>>(),
            reference.noise.out,
        ),
        check_statistic("lse", dtype, &outputs.lse.to_f64(), &reference.lse),
    ];
    if let Some(max_logits) = &outputs.max_logits {
        tensors.push(check_statistic("max_logits", dtype, &max_logits.to_f64(), &reference.max_logits));
    }
    if let Some(expected) = &reference.gradients {
        let plain: Vec<&ReferenceGradients> = plain.iter().filter_map(|p| p.gradients.as_ref()).collect();
        let noise = reference.noise;
        type Elements = fn(&ReferenceGradients) -> &[f64];
        let mut check = |name: &str, tensor: &Option<HostTensor>, of: Elements, noise| {
            let plain: Vec<&[f64]> = plain.iter().map(|&plain| of(plain)).collect();
            tensors.push(match tensor {
                Some(tensor) => check_tensor(name, dtype, &tensor.to_f64(), of(expected), &plain, noise),
                None => missing(name),
            });
        };
        check("dq", &outputs.dq, |gradients| &gradients.dq, noise.dq);
        check("dk", &outputs.dk, |gradients| &gradients.dk, noise.dk);
        check("dv", &outputs.dv, |gradients| &gradients.dv, noise.dv);
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
            "lse" => check_statistic(name, spec.dtype, values, rows),
            _ => {
                let plain: Vec<&[f64]> = plain.iter().filter_map(|plain| plain.tensor(name)).collect();
                let mut check = check_tensor(name, spec.dtype, values, rows, &plain, 0.0);
                check.allow_rounding_of_few(spec.dtype, rows, &plain);
                check
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
    plain: &[&[f64]],
    noise: f64,
) -> TensorCheck {
    let error = Difference::of(values, expected);
    let yardstick = plain.iter().map(|plain| Difference::of(plain, expected)).reduce(Difference::larger);
    // A plain result may be exact by chance, a tensor of one element above all. What is made of rounded values cannot be
    // expected to come closer than their rounding, nor f32 sums than theirs.
    let base = match dtype {
        DType::F64 => F64_BOUND,
        DType::F32 => F32_BOUND,
        DType::Bf16 => BF16_ROUNDING,
        DType::F16 => F16_ROUNDING,
    };
    let max_abs_bound = yardstick
        .as_ref()
        .map(|yardstick| (base * largest(expected)).max(F32_BOUND * noise).max(PLAIN_FACTOR * yardstick.max));
    let against = |norm: f64, relative_to, max_abs_bound| {
        let plain = yardstick.as_ref().map_or(0.0, |yardstick| PLAIN_FACTOR * yardstick.relative_to(norm));
        TensorCheck::new(name, &error, norm, relative_to, base.max(plain), max_abs_bound)
    };
    let norm = norm(expected);
    let check = against(norm, RelativeTo::Reference, max_abs_bound);
    let vanishes = noise > norm && (norm == 0.0 || !check.passed);
    // What vanishes is the rounding of its terms, of which a plain implementation's largest error is one draw: an element may
    // have several times its even share.
    let share = base * noise / (expected.len().max(1) as f64).sqrt();
    let of_terms = max_abs_bound.map(|bound| bound.max(EVEN_SHARES * share));
    if vanishes { against(noise, RelativeTo::Terms, of_terms) } else { check }
}

/// The largest error of rounding an element once, relative to the element.
fn worst_rounding(dtype: DType) -> f64 {
    match dtype {
        DType::F64 | DType::F32 => 0.0,
        DType::Bf16 => 2.0 * BF16_ROUNDING,
        DType::F16 => 2.0 * F16_ROUNDING,
    }
}

fn largest(values: &[f64]) -> f64 {
    values.iter().fold(0.0, |max: f64, x| max.max(x.abs()))
}

/// `dsink` is a few sums over all rows, made of the rounded `out`: a plain implementation's error is one draw of so few
/// that twice it says nothing. So it is compared with its terms, and four times their rounding is allowed.
fn check_dsink(dtype: DType, values: &[f64], expected: &[f64], noise: f64) -> TensorCheck {
    let rounding = match dtype {
        DType::F64 | DType::F32 => return check_tensor("dsink", dtype, values, expected, &[], noise),
        DType::Bf16 => BF16_ROUNDING,
        DType::F16 => F16_ROUNDING,
    };
    let error = Difference::of(values, expected);
    TensorCheck::new("dsink", &error, noise, RelativeTo::Terms, 4.0 * rounding, None)
}

fn check_statistic(name: &str, dtype: DType, values: &[f64], expected: &[f64]) -> TensorCheck {
    let finite: Vec<f64> = expected.iter().copied().filter(|x| x.is_finite()).collect();
    let norm = norm(&finite).max((finite.len() as f64).sqrt());
    let bound = if dtype == DType::F64 { F64_BOUND } else { F32_BOUND };
    TensorCheck::new(name, &Difference::of(values, expected), norm, RelativeTo::Reference, bound, None)
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

impl TensorCheck {
    /// Of a sample only a few elements are as large as the largest, and a rounding of those is most of a plain implementation's
    /// largest error: one draw, which may be next to nothing. So a result may be off by what plain is off and by one more
    /// rounding of the largest. The bound on the relative error, of all elements together, stays.
    fn allow_rounding_of_few(&mut self, dtype: DType, expected: &[f64], plain: &[&[f64]]) {
        if matches!(dtype, DType::F64 | DType::F32) {
            return;
        }
        let yardstick = plain.iter().map(|plain| Difference::of(plain, expected).max).fold(0.0, f64::max);
        let allowed = yardstick + worst_rounding(dtype) * largest(expected);
        self.bound_largest(self.max_abs_bound.map_or(allowed, |bound| bound.max(allowed)));
    }

    fn bound_largest(&mut self, bound: f64) {
        self.max_abs_bound = Some(bound);
        self.passed = self.relative_error <= self.relative_bound && self.max_abs_error <= bound;
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

    fn larger(self, other: Self) -> Self {
        Self { max: self.max.max(other.max), frobenius: self.frobenius.max(other.frobenius) }
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
    use crate::attention::NoiseNorms;
    use counterpoint_exec::HostData;
    use counterpoint_plan::GradientShares;

    fn outputs(out: Vec<f64>, lse: Vec<f64>) -> AttentionOutputs {
        AttentionOutputs {
            out: HostTensor::new(vec![out.len()], HostData::F64(out)),
            lse: HostTensor::new(vec![lse.len()], HostData::F64(lse)),
            max_logits: None,
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
            max_logits: vec![0.5],
            gradients: None,
            noise: NoiseNorms::default(),
        }
    }

    fn passed(out: Vec<f64>, lse: Vec<f64>) -> bool {
        compare_with_reference(DType::F64, &reference(), &[], &outputs(out, lse)).passed
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
            Some(crate::attention::ReferenceGradients { dq: vec![], dk: vec![], dv: vec![], dsink: None });
        let report = compare_with_reference(
            DType::F64,
            &reference,
            &[],
            &outputs(vec![1.0, 2.0], vec![0.5, f64::NEG_INFINITY]),
        );
        assert!(!report.passed);
    }

    /// A run whose `out` is the next number of its type has other gradients, and the second yardstick sees why.
    #[test]
    fn gradients_are_judged_on_the_out_that_they_were_computed_from() {
        let mask = Mask::causal(40).expect("a valid length");
        let spec = AttentionSpec {
            heads_q: 2,
            heads_kv: 1,
            head_dim: 16,
            head_dim_v: 16,
            dtype: DType::Bf16,
            scale: 0.25,
            softcap: 0.0,
            seqlen_sink: 0,
            gradient_shares: GradientShares::Accumulators,
            max_logits: false,
            dlse: false,
        };
        let inputs =
            counterpoint_exec::random_inputs(&mask, &spec, 5, counterpoint_exec::Pass::ForwardBackward);
        let plain = plain_attention(&mask, &spec, &inputs);
        let shape = vec![40, 2, 16];
        let tensor = |shape: &[usize], values: &[f64]| {
            HostTensor::new(
                shape.to_vec(),
                HostData::Bf16(values.iter().map(|&x| half::bf16::from_f64(x)).collect()),
            )
        };
        let next: Vec<f64> = plain
            .out
            .iter()
            .map(|&x| half::bf16::from_bits(half::bf16::from_f64(x).to_bits() ^ 1).to_f64())
            .collect();
        let out = tensor(&shape, &next);
        let own = plain_attention_from(&mask, &spec, &inputs, &tensor(&shape, &plain.out));
        let other = plain_attention_from(&mask, &spec, &inputs, &out);
        let [own, other] = [own, other].map(|r| r.gradients.expect("inputs have dout"));
        assert_ne!(own.dq, other.dq);
        assert_eq!(own.dv, other.dv);
    }
}

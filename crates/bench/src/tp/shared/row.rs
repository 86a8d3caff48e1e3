//! Rows of `bench tp --shared-input`: a pass of layers that share their input, compared with layers that share nothing.

use counterpoint_console::arguments::dtype_name;
use counterpoint_exec::Machine;
use counterpoint_reference::WrongResult;
use counterpoint_report::{Column, Statistics};
use serde::Serialize;

use super::{Shared, Variant};
use crate::arguments::{BenchTpPass, LayerShape};
use crate::rows::MeasuredRow;

/// One pass in one variant.
#[derive(Clone, Debug, Serialize)]
pub(super) struct SharedRow {
    layers: usize,
    pass: BenchTpPass,
    activations: String,
    /// Tokens, features of the input, features that a rank has of each output.
    shape: LayerShape,
    ranks: usize,
    device: String,
    dtype: String,
    /// What was asked for: a policy, or `auto`; `apart` of layers that share nothing, each as `auto`.
    overlap: String,
    /// What the pass ran under; of layers that share nothing the first one's.
    policy: String,
    transport: String,
    groups: usize,
    /// Of the slowest rank. Of layers that share nothing those of all, without the additions of their gradients of the input.
    seconds: Statistics,
    sequential_seconds: f64,
    apart_seconds: f64,
    /// Layers that share nothing over this.
    speedup: f64,
    /// The largest share of what an element may err.
    of_bound: f64,
    #[serde(skip)]
    pub(super) wrong: Option<String>,
}

impl SharedRow {
    pub(super) fn name(&self) -> String {
        let Self { layers, pass, activations, shape, policy, .. } = self;
        format!("{layers} layers {pass} {activations} {shape} {policy}")
    }
}

impl MeasuredRow<11> for SharedRow {
    const TABLE: [Column; 11] = [
        Column::name("layers").wide(6),
        Column::name("pass").wide(8),
        Column::name("activations").wide(17),
        Column::name("shape").wide(18),
        Column::name("policy").wide(38),
        Column::name("transport").wide(11),
        Column::number_name("groups"),
        Column::number("us", 0).wide(9),
        Column::number("sequential", 2).wide(9),
        Column::number("vs apart", 1).wide(9),
        Column::number("of bound", 3),
    ];

    fn cells(&self) -> [String; 11] {
        let us = |seconds: f64| format!("{:.1}", 1e6 * seconds);
        let policy =
            if self.overlap == APART { format!("{APART}: {}", self.policy) } else { self.policy.clone() };
        [
            self.layers.to_string(),
            self.pass.to_string(),
            self.activations.clone(),
            self.shape.to_string(),
            policy,
            self.transport.clone(),
            self.groups.to_string(),
            us(self.seconds.median),
            us(self.sequential_seconds),
            format!("{:.2}", self.speedup),
            format!("{:.2}", self.of_bound),
        ]
    }

    fn fault(&self) -> Option<String> {
        self.wrong.as_ref().map(|reason| format!("{}: {reason}", self.name()))
    }
}

/// What layers that share nothing are called.
pub(super) const APART: &str = "apart";

/// Of one of the variants, of which the first are apart, the second sequential.
pub(super) fn row<M: Machine>(
    case: &Shared<'_>,
    pass: BenchTpPass,
    at: usize,
    variant: &Variant<M>,
    variants: &[Variant<M>],
) -> Option<SharedRow> {
    let [apart, sequential, ..] = variants else { return None };
    let of = |variant: &Variant<M>| Statistics::of(&variant.seconds[at]);
    let (seconds, apart_seconds) = (of(variant)?, of(apart)?.median);
    let (policy, groups) = variant.passes[usize::from(pass == BenchTpPass::Backward)];
    Some(SharedRow {
        layers: case.layers,
        pass,
        activations: case.spec.activations.to_string(),
        shape: case.shape,
        ranks: case.tp_size,
        device: case.device.to_owned(),
        dtype: dtype_name(case.spec.dtype).to_owned(),
        overlap: variant.overlap.clone(),
        policy: policy.to_string(),
        transport: case.transport.to_string(),
        groups,
        sequential_seconds: of(sequential)?.median,
        apart_seconds,
        speedup: apart_seconds / seconds.median,
        seconds,
        of_bound: variant.checked.clone().unwrap_or(f64::INFINITY),
        wrong: match &variant.checked {
            Err(reason) => Some(reason.to_string()),
            Ok(_) if !variant.bits.is_empty() && variant.bits != sequential.bits => {
                Some(WrongResult::OtherBits.to_string())
            }
            Ok(_) => None,
        },
    })
}

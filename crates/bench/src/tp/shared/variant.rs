//! Layers of one input in one of the variants that are compared, made ready and checked against f64.

use counterpoint_exec::{
    ExecError, Group, HostElement, HostTensor, LayerGradient, LayerOverlap, LinearInputs, LinearLayer,
    LinearOptions, LinearOutputs, LinearTensor, Machine, RankBuffers, SharedInputLinear, dispatch,
};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, LinearPlan, LinearSpec, PlanError, WaveGroups};
use counterpoint_reference::{LinearSample, WrongResult, check_linear_part};
use counterpoint_schedule::{InputGradient, WeightGradient};
use half::{bf16, f16};

use super::row::APART;
use super::{Layers, Shared, Tensors, Variant};
use crate::tp::measured::digest;
use crate::tp::rounding;

/// Rows and columns of each result that are compared with f64.
const SAMPLED: usize = 12;

impl Shared<'_> {
    /// What its check compares: main gradients begin as zeros.
    fn checked_gradient(&self) -> WeightGradient {
        match self.gradient() {
            LayerGradient::Frozen => WeightGradient::Frozen,
            _ => WeightGradient::Written,
        }
    }

    /// Columns of the whole that are a layer's, rank after rank.
    fn columns_of(&self, layer: usize) -> Vec<Range> {
        let local = self.shape.local;
        let of_rank = |rank: usize| (rank * self.layers + layer) * local;
        (0..self.tp_size).map(|rank| Range::new(of_rank(rank), of_rank(rank) + local)).collect()
    }

    /// What each layer has of the inputs.
    pub(super) fn parts(&self) -> Result<Vec<LinearInputs>, ExecError> {
        let LinearInputs { x, weight, bias, dy, .. } = self.inputs;
        let of_layer = |layer: usize| {
            let columns = self.columns_of(layer);
            let joined = |dy: &HostTensor| {
                let parts: Vec<_> = columns.iter().map(|range| (dy, *range)).collect();
                side_by_side(dy.rows(), &parts)
            };
            Ok(LinearInputs {
                x: x.clone(),
                weight: dispatch(weight, &columns)?,
                bias: bias.as_ref().map(|bias| dispatch(bias, &columns)).transpose()?,
                dy: dy.as_ref().map(joined),
                main_grad: None,
            })
        };
        (0..self.layers).map(of_layer).collect()
    }

    /// Zeros in the shape of each layer's weight and bias, where gradients are added to something.
    fn zeros(&self) -> Option<[HostTensor; 2]> {
        let LayerGradient::Accumulated(dtype) = self.gradient() else { return None };
        let features = self.spec.out_features / self.layers;
        let zeros = |shape| HostTensor::zeros(shape, dtype);
        Some([zeros(vec![features, self.spec.in_features]), zeros(vec![features])])
    }

    /// Layers that share nothing, each as it is predicted or was tuned to be fastest.
    pub(super) fn apart<M: Machine>(
        &self,
        group: &Group<M>,
        parts: &[LinearInputs],
    ) -> Result<Variant<M>, ExecError> {
        let spec = LinearSpec { out_features: self.spec.out_features / self.layers, ..self.spec };
        let overlap = LayerOverlap::Predicted(Some(self.cost));
        let planned = overlap.passes(group.linear(), spec, self.gradient()).map_err(refused)?;
        let (mut layers, mut checked) = (Vec::new(), Ok(0.0));
        for inputs in parts {
            let mut layer = LinearLayer::with_passes(group, planned.clone(), self.gradient())?;
            let dy = inputs.dy.as_ref().unwrap_or(&inputs.x);
            let x = layer.scatter(LinearTensor::Input, &inputs.x)?;
            let dy = layer.scatter(LinearTensor::Output, dy)?;
            let weight = layer.scatter(LinearTensor::Weight, &inputs.weight)?;
            let bias =
                inputs.bias.as_ref().map(|bias| layer.scatter(LinearTensor::Bias, bias)).transpose()?;
            layer.bind_weight(&weight, bias.as_ref())?;
            let mut gradients = [None, None];
            if let Some([weight, bias]) = self.zeros() {
                let sums = layer.scatter(LinearTensor::Weight, &weight)?;
                let of_bias =
                    self.spec.has_bias.then(|| layer.scatter(LinearTensor::Bias, &bias)).transpose()?;
                layer.bind_main_grad(&sums, of_bias.as_ref())?;
                gradients = [Some(sums), of_bias];
            }
            let (y, dx) = (layer.forward(&x)?.result, layer.backward(&x, &dy)?.result);
            if let Some((weight, bias)) = layer.weight_gradient().filter(|_| gradients[0].is_none()) {
                gradients = [Some(weight), bias];
            }
            let [ys, dxs] = [layer.download(&y)?, layer.download(&dx)?];
            let [dweights, dbiases] =
                gradients.map(|parts| parts.map(|parts| layer.download(&parts)).transpose());
            let (dweights, dbiases) = (dweights?, dbiases?);
            for (at, (y, dx)) in ys.into_iter().zip(dxs).enumerate() {
                let of = |all: &Option<Vec<HostTensor>>| all.as_ref().map(|all| all[at].clone());
                let outputs = LinearOutputs { y, dx: Some(dx), dweight: of(&dweights), dbias: of(&dbiases) };
                checked = worse(
                    checked,
                    self.check(&planned.forward.plan, self.first_rank() + at, inputs, &outputs),
                );
            }
            layers.push(layer);
        }
        let passes = [&planned.forward, &planned.backward].map(|pass| (pass.policy, pass.plan.groups()));
        let (overlap, layers) = (APART.to_owned(), Layers::Apart(layers));
        Ok(Variant { overlap, passes, layers, checked, bits: Vec::new(), seconds: Vec::new() })
    }

    /// Layers that share their input and run so.
    pub(super) fn together<M: Machine>(
        &self,
        group: &Group<M>,
        name: String,
        overlap: LayerOverlap,
        parts: &[LinearInputs],
        tensors: &mut Option<Tensors<M>>,
    ) -> Result<Variant<M>, ExecError> {
        let LinearSpec { tokens, in_features, out_features, activations, has_bias, dtype, .. } = self.spec;
        let options = LinearOptions { activations, has_bias, dtype, gradient: self.gradient(), overlap };
        let features = vec![out_features / self.layers; self.layers];
        let gradient = InputGradient::Summed;
        let mut layers = SharedInputLinear::new(group, tokens, in_features, &features, &options, gradient)?;
        let tensors = match tensors {
            Some(tensors) => tensors,
            None => tensors.insert(upload(&layers, parts)?),
        };
        layers.bind_weights(&tensors.weights, &tensors.biases)?;
        let mut gradients = [Vec::new(), Vec::new()];
        if let Some([weight, bias]) = self.zeros() {
            let biases = if has_bias { vec![bias; self.layers] } else { Vec::new() };
            gradients[0] = layers.scatter_weights(&vec![weight; self.layers])?;
            gradients[1] = if has_bias { layers.scatter_biases(&biases)? } else { Vec::new() };
            layers.bind_main_grads(&gradients[0], &gradients[1])?;
        }
        let ys = layers.forward(&tensors.x)?.ys;
        let dx = layers.backward(&tensors.x, &tensors.dys)?.result;
        if let Some(written) = layers.weight_gradients().filter(|_| gradients[0].is_empty()) {
            gradients = [written, layers.bias_gradients().unwrap_or_default()];
        }
        let download = |all: &[RankBuffers<M>]| -> Result<Vec<Vec<HostTensor>>, ExecError> {
            all.iter().map(|parts| layers.download(parts)).collect()
        };
        let (ys, dxs) = (download(&ys)?, layers.download(&dx)?);
        let [dweights, dbiases] = [download(&gradients[0])?, download(&gradients[1])?];
        // As the one layer that has all their features.
        let plan = LinearPlan::new(self.spec, self.tp_size, WaveGroups::Fixed(1)).map_err(refused)?;
        let (mut checked, mut bits) = (Ok(0.0), Vec::new());
        for (rank, dx) in dxs.into_iter().enumerate() {
            let of_rank = |all: &[Vec<HostTensor>], rows: usize| {
                let parts: Vec<_> = all.iter().map(|layer| &layer[rank]).collect();
                let parts: Vec<_> =
                    parts.iter().map(|part| (*part, Range::new(0, part.len() / rows))).collect();
                (!parts.is_empty()).then(|| side_by_side(rows, &parts))
            };
            let y = of_rank(&ys, tokens).unwrap_or_else(|| HostTensor::zeros(vec![0, 0], dtype));
            let stacked =
                |all: &[Vec<HostTensor>], shape: &[usize]| of_rank(all, 1).map(|flat| flat.repeated(shape));
            let local = out_features / self.tp_size;
            let outputs = LinearOutputs {
                y,
                dx: Some(dx),
                dweight: stacked(&dweights, &[local, in_features]),
                dbias: stacked(&dbiases, &[local]),
            };
            bits.push(digest(&outputs));
            checked = worse(checked, self.check(&plan, self.first_rank() + rank, self.inputs, &outputs));
        }
        let passes = layers.passes();
        let passes = [&passes.forward, &passes.backward].map(|pass| (pass.policy, pass.plan.groups()));
        let layers = Layers::Together(Box::new(layers));
        Ok(Variant { overlap: name, passes, layers, checked, bits, seconds: Vec::new() })
    }

    fn check(
        &self,
        plan: &LinearPlan,
        rank: usize,
        inputs: &LinearInputs,
        outputs: &LinearOutputs,
    ) -> Result<f64, WrongResult> {
        let (sample, rounding) = (LinearSample::Spread(SAMPLED), rounding(self.transport));
        check_linear_part(plan, rank, inputs, self.checked_gradient(), outputs, sample, rounding)
            .map_err(|reason| reason.of_rank(rank))
    }
}

fn upload<M: Machine>(
    layers: &SharedInputLinear<M>,
    parts: &[LinearInputs],
) -> Result<Tensors<M>, ExecError> {
    let all = |of: fn(&LinearInputs) -> Option<&HostTensor>| -> Vec<HostTensor> {
        parts.iter().filter_map(of).cloned().collect()
    };
    let biases = all(|part| part.bias.as_ref());
    Ok(Tensors {
        x: layers.scatter_input(&parts[0].x)?,
        dys: layers.scatter_outputs(&all(|part| part.dy.as_ref()))?,
        weights: layers.scatter_weights(&all(|part| Some(&part.weight)))?,
        biases: if biases.is_empty() { Vec::new() } else { layers.scatter_biases(&biases)? },
    })
}

/// The larger share of a bound, or what is wrong.
pub(super) fn worse(
    before: Result<f64, WrongResult>,
    next: Result<f64, WrongResult>,
) -> Result<f64, WrongResult> {
    Ok(f64::max(before?, next?))
}

fn refused(error: PlanError) -> ExecError {
    ExecError::tensor("layer", error)
}

/// Columns of tensors of one type, each taken as so many rows, side by side.
fn side_by_side(rows: usize, parts: &[(&HostTensor, Range)]) -> HostTensor {
    fn laid<T: HostElement>(rows: usize, parts: &[(&HostTensor, Range)]) -> HostTensor {
        let columns: usize = parts.iter().map(|(_, range)| range.len()).sum();
        let mut elements = Vec::with_capacity(rows * columns);
        for row in 0..rows {
            for (tensor, range) in parts {
                let (values, width) = (tensor.as_slice::<T>().unwrap_or(&[]), tensor.len() / rows);
                elements.extend_from_slice(&values[row * width + range.start..row * width + range.end]);
            }
        }
        HostTensor::from_vec(vec![rows, columns], elements)
    }
    match parts.first().map_or(DType::F32, |(tensor, _)| tensor.dtype()) {
        DType::F64 => laid::<f64>(rows, parts),
        DType::F32 => laid::<f32>(rows, parts),
        DType::Bf16 => laid::<bf16>(rows, parts),
        DType::F16 => laid::<f16>(rows, parts),
    }
}

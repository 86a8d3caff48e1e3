//! Row-parallel layers with a residual and an RMSNorm behind them in `bench tp`, and the check of the norm against f64.

use std::borrow::Cow;
use std::ops::{Deref, DerefMut};

use counterpoint_exec::{
    ExecError, Group, HostTensor, LayerGradient, LinearInputs, LinearLayer, LinearTensor, Machine,
    PlannedPasses, RankBuffers, RowParallelLinearRmsNorm, random_tensor,
};
use counterpoint_measure::Processes;
use counterpoint_plan::Activations;
use counterpoint_reference::{
    LinearSample, NormGradients, NormalisedRows, WrongResult, check_rms_norm, check_rms_norm_backward,
};
use counterpoint_schedule::NormSpec;

/// Rows that are compared; all go into the gradient of the weight.
const SAMPLED: usize = 12;

/// What is behind a layer under `--rms-norm`.
pub(super) const NORM: NormSpec = NormSpec::new(1e-5);

/// A layer, alone or with a norm behind it. Once each pass has run by [`Layer::first`], both run as a [`LinearLayer`].
pub(super) enum Layer<M: Machine> {
    Alone(LinearLayer<M>),
    Normalised(RowParallelLinearRmsNorm<M>),
}

impl<M: Machine> Deref for Layer<M> {
    type Target = LinearLayer<M>;

    fn deref(&self) -> &LinearLayer<M> {
        match self {
            Self::Alone(layer) => layer,
            Self::Normalised(layer) => layer,
        }
    }
}

impl<M: Machine> DerefMut for Layer<M> {
    fn deref_mut(&mut self) -> &mut LinearLayer<M> {
        match self {
            Self::Alone(layer) => layer,
            Self::Normalised(layer) => layer,
        }
    }
}

/// What the layer itself gave, in its first forward and backward.
pub(super) struct First<'a, M: Machine> {
    pub(super) y: RankBuffers<M>,
    pub(super) dx: RankBuffers<M>,
    /// What these follow from: of a layer with a norm behind it, its `dy` is what the norm's backward gave.
    pub(super) inputs: Cow<'a, LinearInputs>,
    /// The largest share of what an element of the norm's results may err, or what is wrong with them.
    pub(super) norm: Result<f64, WrongResult>,
}

impl<M: Machine> Layer<M> {
    pub(super) fn new(
        group: &Group<M>,
        passes: PlannedPasses,
        gradient: LayerGradient,
        norm: Option<NormSpec>,
    ) -> Result<Self, ExecError> {
        Ok(match norm {
            None => Self::Alone(LinearLayer::with_passes(group, passes, gradient)?),
            Some(norm) => {
                Self::Normalised(RowParallelLinearRmsNorm::with_passes(group, passes, gradient, norm)?)
            }
        })
    }

    /// Runs each pass once. A residual is of zeros, so that what is normalised is the layer's own result, which has bounds.
    pub(super) fn first<'a>(
        &mut self,
        x: &RankBuffers<M>,
        dy: &RankBuffers<M>,
        inputs: &'a LinearInputs,
        processes: Processes<'_>,
    ) -> Result<First<'a, M>, ExecError> {
        let layer = match self {
            Self::Alone(layer) => {
                let (y, dx) = (layer.forward(x)?.result, layer.backward(x, dy)?.result);
                return Ok(First { y, dx, inputs: Cow::Borrowed(inputs), norm: Ok(0.0) });
            }
            Self::Normalised(layer) => layer,
        };
        let spec = layer.plan().spec;
        let norm = layer.norm();
        let rows = vec![spec.tokens, spec.out_features];
        let zeros = layer.scatter(LinearTensor::Output, &HostTensor::zeros(rows, spec.dtype))?;
        let weight = random_tensor(vec![spec.out_features], spec.dtype, 1);
        let bound = layer.scatter_norm_weight(&weight)?;
        layer.bind_norm_weight(&bound)?;
        let forward = layer.forward(x, Some(&zeros))?;
        let backward = layer.backward(x, &forward.sum, dy, Some(&zeros))?;
        let dweights = layer.download(&backward.dnorm_weight.unwrap_or_default())?;
        let [sums, ys, dys, dhs] =
            [&forward.sum, &forward.y, dy, &backward.dresidual].map(|parts| layer.download(parts));
        let (sums, ys, dys, dhs) = (sums?, ys?, dys?, dhs?);
        let sample = LinearSample::Spread(SAMPLED);
        let of_rank = |rank: usize| -> Result<f64, WrongResult> {
            let rows = NormalisedRows { sum: &sums[rank], weight: Some(&weight), epsilon: norm.epsilon };
            let gradients =
                NormGradients { dout: &dys[rank], dsum: None, dh: &dhs[rank], dweight: dweights.get(rank) };
            let forward = check_rms_norm(&rows, &ys[rank], sample)?;
            Ok(forward.max(check_rms_norm_backward(&rows, &gradients, sample)?))
        };
        let worst = (0..sums.len()).try_fold(0.0, |worst, rank| Ok(f64::max(worst, of_rank(rank)?)));
        let dy = match (processes, spec.activations) {
            (Processes::One, _) => layer.gather(LinearTensor::Output, &backward.dresidual)?,
            // Every rank has all rows, or those behind the ones of the rank before.
            (Processes::Each(_), Activations::Replicated) => dhs[0].clone(),
            (Processes::Each(_), Activations::SequenceParallel) => processes.rows(dhs)?,
        };
        let inputs = Cow::Owned(LinearInputs { dy: Some(dy), ..inputs.clone() });
        Ok(First { y: forward.sum, dx: backward.dx, inputs, norm: worst })
    }
}

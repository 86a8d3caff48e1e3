//! Where the tensors of `counterpoint attention` come from: a file or a seed, whole or one rank's rows.

use counterpoint_console::{
    CliError,
    arguments::{Device, scale_of},
    input::{Problem, TensorFile, flags_divide, random_inputs, random_rows},
};
use counterpoint_exec::AttentionInputs;
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, RankPlan};

use super::pass;
use crate::arguments::{AttentionArguments, TensorArguments};
use counterpoint_console::FlagFault;

/// Tensors that are known to fit the mask, not yet read or drawn.
pub(super) enum Tensors {
    File(Problem),
    Random { spec: AttentionSpec, seed: u64 },
}

impl Tensors {
    /// Checks shapes and types against the mask.
    pub(super) fn of(arguments: &AttentionArguments, mask: &Mask) -> Result<Self, CliError> {
        let (run, gradient_shares) = (&arguments.run, arguments.planning.gradient_shares);
        let Some(path) = &arguments.tensors.input else {
            // A type that the device takes.
            let dtype = arguments.tensors.dtype.unwrap_or(match run.device {
                Device::Cpu => DType::F32,
                Device::Cuda => DType::Bf16,
            });
            let spec = random_spec(&arguments.tensors, dtype, mask, run.scale, run.softcap)?;
            let spec = AttentionSpec { gradient_shares, max_logits: run.max_logits, ..spec };
            return Ok(Self::Random { spec, seed: arguments.tensors.seed.unwrap_or(0) });
        };
        let problem = Problem::new(TensorFile::open(path)?, mask, run.backward, run.scale, run.softcap)?;
        Ok(Self::File(problem.asking(gradient_shares, run.max_logits)))
    }

    /// Their shapes.
    pub(super) fn spec(&self) -> &AttentionSpec {
        match self {
            Self::File(problem) => problem.spec(),
            Self::Random { spec, .. } => spec,
        }
    }

    /// The file, where there is one.
    pub(super) fn file(&self) -> Option<&TensorFile> {
        match self {
            Self::File(problem) => Some(problem.file()),
            Self::Random { .. } => None,
        }
    }

    /// Whether there is a dout that a run without the backward does not read.
    pub(super) fn has_unused_dout(&self) -> bool {
        matches!(self, Self::File(problem) if problem.has_unused_dout())
    }

    /// Reads or draws them.
    pub(super) fn read(
        &mut self,
        arguments: &AttentionArguments,
        mask: &Mask,
    ) -> Result<AttentionInputs, CliError> {
        match self {
            Self::File(problem) => problem.read(
                &[Range::new(0, mask.seqlen_q())],
                &[Range::new(0, mask.seqlen_k())],
                arguments.tensors.allow_non_finite,
            ),
            Self::Random { spec, seed } => Ok(random_inputs(mask, spec, *seed, pass(arguments))),
        }
    }

    /// Reads or draws a rank's rows of them, and nothing else.
    pub(super) fn read_rank(
        &mut self,
        arguments: &AttentionArguments,
        rank: &RankPlan,
    ) -> Result<AttentionInputs, CliError> {
        match self {
            Self::File(problem) => {
                problem.read(&rank.q_ranges, &rank.k_ranges, arguments.tensors.allow_non_finite)
            }
            Self::Random { spec, seed } => {
                Ok(random_rows(&rank.q_ranges, &rank.k_ranges, spec, *seed, pass(arguments)))
            }
        }
    }
}

fn random_spec(
    tensors: &TensorArguments,
    dtype: DType,
    mask: &Mask,
    scale: Option<f64>,
    softcap: f64,
) -> Result<AttentionSpec, CliError> {
    if let Some(seqlen) = tensors.seqlen
        && (seqlen != mask.seqlen_q() || seqlen != mask.seqlen_k())
    {
        let fault = FlagFault::OfMask { queries: mask.seqlen_q(), keys: mask.seqlen_k() };
        return Err(CliError::flag("--seqlen", seqlen.to_string(), fault));
    }
    let heads_q = tensors.heads_q.unwrap_or(8);
    let heads_kv = tensors.heads_kv.unwrap_or(heads_q);
    flags_divide(heads_q, heads_kv)?;
    let head_dim = tensors.head_dim.unwrap_or(128);
    Ok(AttentionSpec {
        heads_q,
        heads_kv,
        head_dim,
        head_dim_v: head_dim,
        dtype,
        scale: scale_of(scale, head_dim, dtype.accumulator())?,
        softcap,
        seqlen_sink: 0,
        gradient_shares: GradientShares::default(),
        max_logits: false,
        dlse: false,
    })
}

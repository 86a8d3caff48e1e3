//! Whether the tensors of a file make an attention problem for the mask: names, types, heads and lengths.

use counterpoint_exec::{AttentionInputs, HostData, HostTensor};
use counterpoint_mask::{Mask, Range};
use counterpoint_plan::{AttentionSpec, DType, GradientShares};
use safetensors::Dtype;

use super::refuse_non_finite;
use super::tensor_file::TensorFile;
use crate::arguments::scale_of;
use crate::error::CliError;
use crate::input_fault::InputFault;

/// A file of tensors whose names, types and shapes fit the mask and each other. No element has been read yet, so that
/// everything else that may be wrong is found first.
#[derive(Debug)]
pub struct Problem {
    file: TensorFile,
    spec: AttentionSpec,
    backward: bool,
    has_unused_dout: bool,
}

impl Problem {
    /// Checks the headers of `file`. `scale` of `None` is `1 / sqrt(head_dim)`.
    pub fn new(
        file: TensorFile,
        mask: &Mask,
        backward: bool,
        scale: Option<f64>,
        softcap: f64,
    ) -> Result<Self, CliError> {
        refuse_extra(&file)?;
        let q = Header::of(&file, "q", &["seqlen_q", "heads_q", "head_dim"])?;
        let k = Header::of(&file, "k", &["seqlen_k", "heads_kv", "head_dim"])?;
        let v = Header::of(&file, "v", &["seqlen_k", "heads_kv", "head_dim_v"])?;
        let dout = if backward {
            Some(Header::of(&file, "dout", &["seqlen_q", "heads_q", "head_dim_v"])?)
        } else {
            None
        };
        for other in [Some(&k), Some(&v), dout.as_ref()].into_iter().flatten() {
            if other.dtype != q.dtype {
                let (dtype, queries) = (other.dtype, q.dtype);
                return Err(file.wrong(other.name, InputFault::UnlikeQueries { dtype, queries }));
            }
        }
        for header in [&q, &k, &v] {
            header.nowhere_zero(&[1, 2])?;
        }
        q.axis_is(0, mask.seqlen_q(), "the mask's seqlen_q")?;
        k.axis_is(0, mask.seqlen_k(), "the mask's seqlen_k")?;
        v.axis_is(0, mask.seqlen_k(), "the mask's seqlen_k")?;
        v.axis_is(1, k.shape[1], "those of `k`")?;
        k.axis_is(2, q.shape[2], "that of `q`")?;
        heads_divide(q.shape[1], k.shape[1], || file.path().display().to_string())?;
        if let Some(dout) = &dout {
            dout.axis_is(0, q.shape[0], "that of `q`")?;
            dout.axis_is(1, q.shape[1], "those of `q`")?;
            dout.axis_is(2, v.shape[2], "that of `v`")?;
        }
        let seqlen_sink = match file.header("sink") {
            None => 0,
            Some(_) => sink_rows(&file, &q)?,
        };
        let spec = AttentionSpec {
            heads_q: q.shape[1],
            heads_kv: k.shape[1],
            head_dim: q.shape[2],
            head_dim_v: v.shape[2],
            dtype: q.float,
            scale: scale_of(scale, q.shape[2], q.float.accumulator())?,
            softcap,
            seqlen_sink,
            gradient_shares: GradientShares::default(),
            max_logits: false,
            dlse: false,
        };
        let has_unused_dout = !backward && file.header("dout").is_some();
        Ok(Self { file, spec, backward, has_unused_dout })
    }

    /// The same with gradients that travel so, and the largest scores if they are wanted.
    pub fn asking(mut self, gradient_shares: GradientShares, max_logits: bool) -> Self {
        (self.spec.gradient_shares, self.spec.max_logits) = (gradient_shares, max_logits);
        self
    }

    /// The shapes.
    pub fn spec(&self) -> &AttentionSpec {
        &self.spec
    }

    /// The file that the tensors are in.
    pub fn file(&self) -> &TensorFile {
        &self.file
    }

    /// Whether there is a dout that a run without the backward does not read.
    pub fn has_unused_dout(&self) -> bool {
        self.has_unused_dout
    }

    /// Reads these rows of queries and keys, and refuses NaN and infinity in them unless they are allowed.
    pub fn read(
        &mut self,
        q_rows: &[Range],
        k_rows: &[Range],
        allow_non_finite: bool,
    ) -> Result<AttentionInputs, CliError> {
        let mut tensor = |name, rows: &[Range]| {
            let tensor = self.file.read_rows(name, rows)?;
            if !allow_non_finite {
                refuse_non_finite(self.file.path(), name, &tensor, rows)?;
            }
            Ok(tensor)
        };
        let (q, k, v) = (tensor("q", q_rows)?, tensor("k", k_rows)?, tensor("v", k_rows)?);
        let dout = if self.backward { Some(tensor("dout", q_rows)?) } else { None };
        let all_of_sink = [Range::new(0, self.spec.seqlen_sink)];
        let sink = if self.spec.seqlen_sink > 0 { Some(tensor("sink", &all_of_sink)?) } else { None };
        let sink = sink.map(|sink| widened(sink, self.spec.dtype.accumulator()));
        Ok(AttentionInputs { q, k, v, sink, dout, dlse: None })
    }
}

/// Query heads must be a multiple of key heads. `whence` names where they come from, a file or flags.
fn heads_divide(heads_q: usize, heads_kv: usize, whence: impl Fn() -> String) -> Result<(), CliError> {
    if heads_q.is_multiple_of(heads_kv) {
        return Ok(());
    }
    Err(CliError::Heads { whence: whence(), heads_q, heads_kv })
}

/// `heads_divide` of what flags say.
pub fn flags_divide(heads_q: usize, heads_kv: usize) -> Result<(), CliError> {
    heads_divide(heads_q, heads_kv, || "--heads-q and --heads-kv".to_owned())
}

fn refuse_extra(file: &TensorFile) -> Result<(), CliError> {
    match file.names().find(|name| !["q", "k", "v", "sink", "dout"].contains(name)) {
        Some(extra) => Err(CliError::ExtraTensor { path: file.path().to_owned(), name: extra.to_owned() }),
        None => Ok(()),
    }
}

/// Sinks are kept in the accumulator's type: F32, or F64 with F64 tensors (where F32 is widened).
fn sink_rows(file: &TensorFile, q: &Header<'_>) -> Result<usize, CliError> {
    let sink = Header::of(file, "sink", &["seqlen_sink", "heads_q"])?;
    if sink.float != DType::F32 && sink.float != q.float.accumulator() {
        return Err(file.wrong("sink", InputFault::SinkType { dtype: sink.dtype, queries: q.dtype }));
    }
    sink.axis_is(1, q.shape[1], "those of `q`")?;
    sink.nowhere_zero(&[0])?;
    Ok(sink.shape[0])
}

/// The sink in the accumulator's type, which holds every number of the type that it may be given in.
fn widened(sink: HostTensor, accumulator: DType) -> HostTensor {
    match (sink.data(), accumulator) {
        (HostData::F32(values), DType::F64) => HostTensor::new(
            sink.shape().to_vec(),
            HostData::F64(values.iter().map(|&x| f64::from(x)).collect()),
        ),
        _ => sink,
    }
}

/// A tensor's header, of a type that attention takes and with the right number of dimensions.
struct Header<'a> {
    file: &'a TensorFile,
    name: &'static str,
    axes: &'static [&'static str],
    dtype: Dtype,
    float: DType,
    shape: &'a [usize],
}

impl<'a> Header<'a> {
    fn of(file: &'a TensorFile, name: &'static str, axes: &'static [&'static str]) -> Result<Self, CliError> {
        let (dtype, shape) = file.header(name).ok_or_else(|| file.missing(name))?;
        let float = file.float(name)?;
        if shape.len() != axes.len() {
            return Err(file.wrong(name, InputFault::Axes { shape: shape.to_vec(), axes }));
        }
        Ok(Self { file, name, axes, dtype, float, shape })
    }

    fn nowhere_zero(&self, axes: &[usize]) -> Result<(), CliError> {
        match axes.iter().find(|&&axis| self.shape[axis] == 0) {
            None => Ok(()),
            Some(&axis) => {
                let (axis, shape) = (self.axes[axis], self.shape.to_vec());
                Err(self.file.wrong(self.name, InputFault::Empty { axis, shape }))
            }
        }
    }

    fn axis_is(&self, axis: usize, wanted: usize, whose: &'static str) -> Result<(), CliError> {
        if self.shape[axis] == wanted {
            return Ok(());
        }
        let (length, shape, axis) = (self.shape[axis], self.shape.to_vec(), self.axes[axis]);
        Err(self.file.wrong(self.name, InputFault::Length { axis, length, shape, wanted, whose }))
    }
}

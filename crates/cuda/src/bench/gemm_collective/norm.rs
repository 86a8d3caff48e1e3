//! A residual and a norm behind a reduce-scatter: what is timed and how it is checked.

use counterpoint_exec::GemmCollectiveSpec;
use half::{bf16, f16};

use super::{Ranked, SEED};
use crate::kernel::{ElementType, RandomFill, ResidualNorm, ResidualNormTensors};
use crate::{CudaBuffer, CudaError, Device, DeviceBuffer, Stream};

/// What is added to the mean of squares.
pub(super) const EPSILON: f32 = 1e-5;
const RESIDUAL: u64 = 3 * SEED;
const WEIGHT: u64 = 4 * SEED;

/// A rank's tensors beside those of the product.
pub(super) struct NormTensors {
    kernel: ResidualNorm,
    element: ElementType,
    rank: usize,
    rows: usize,
    columns: usize,
    residual: DeviceBuffer,
    weight: DeviceBuffer,
    sum: DeviceBuffer,
    normed: DeviceBuffer,
}

impl NormTensors {
    /// Those of a rank's own rows, filled by `stream`.
    pub(super) fn new(
        stream: &Stream,
        spec: &GemmCollectiveSpec,
        element: ElementType,
        rank: usize,
    ) -> Result<Self, CudaError> {
        let (rows, columns) = (spec.m / spec.ranks, spec.n);
        let device: &Device = stream.device();
        let buffer = |rows: usize| DeviceBuffer::new(device, rows * columns * element.bytes());
        let kernel = ResidualNorm::new(device, element.scalar(), [rows, columns], EPSILON)?;
        let (residual, weight) = (buffer(rows)?, buffer(1)?);
        let (sum, normed) = (buffer(rows)?, buffer(rows)?);
        let fill = RandomFill::new(device, element.scalar())?;
        fill.launch(stream, &residual, RESIDUAL + rank as u64)?;
        fill.launch(stream, &weight, WEIGHT)?;
        Ok(Self { kernel, element, rank, rows, columns, residual, weight, sum, normed })
    }

    /// Gives them to a Program.
    pub(super) fn bind(&self, program: &mut Ranked, spec: &GemmCollectiveSpec) -> Result<(), CudaError> {
        let (rows, vector) = (vec![self.rows, self.columns], vec![self.columns]);
        let tensors = [
            ("residual", &self.residual, &rows),
            ("norm_weight", &self.weight, &vector),
            ("sum", &self.sum, &rows),
            ("y", &self.normed, &rows),
        ];
        tensors.into_iter().try_for_each(|(name, memory, shape)| {
            super::rank::bind(program, name, CudaBuffer::new(memory.clone(), shape, spec.dtype)?)
        })
    }

    /// The same behind rows that somebody else has summed.
    pub(super) fn launch(&self, stream: &Stream, src: &DeviceBuffer) -> Result<(), CudaError> {
        let tensors = ResidualNormTensors {
            src: src.address(),
            residual: self.residual.address(),
            weight: self.weight.address(),
            sum: self.sum.address(),
            dst: self.normed.address(),
        };
        // SAFETY: they have the rows and columns that the kernel was told, and live as long as this value.
        unsafe { self.kernel.launch(stream, &tensors) }
    }

    /// The largest share of an element's bound in a row, from the sums over ranks that it was made of.
    pub(super) fn of_bound(&self, stream: &Stream, row: usize, sums: &[f32]) -> Result<f64, CudaError> {
        let scalar = self.element.scalar();
        let value = |seed: u64, index: usize| f64::from(RandomFill::value(scalar, seed, index as u64));
        let found_sum = self.row(stream, &self.sum, row)?;
        let found = self.row(stream, &self.normed, row)?;
        let squares: f64 = found_sum.iter().map(|&sum| f64::from(sum) * f64::from(sum)).sum();
        let scale = 1.0 / (squares / self.columns as f64 + f64::from(EPSILON)).sqrt();
        let mut worst = 0.0;
        for (column, &sum) in sums.iter().enumerate() {
            let residual = value(RESIDUAL + self.rank as u64, row * self.columns + column);
            let wanted_sum = f64::from(sum) + residual;
            let wanted = f64::from(found_sum[column]) * scale * value(WEIGHT, column);
            let pairs = [(found_sum[column], wanted_sum), (found[column], wanted)];
            for share in pairs.map(|(found, wanted)| (f64::from(found) - wanted).abs() / self.bound(wanted)) {
                // Not `max`, which would overlook a NaN.
                worst = if share <= worst { worst } else { share };
            }
        }
        Ok(worst)
    }

    /// Half a unit in the last place, and what f32 loses before.
    fn bound(&self, wanted: f64) -> f64 {
        let (relative, least) = match self.element {
            ElementType::Bf16 => (2f64.powi(-9), 1e-38),
            ElementType::F16 => (2f64.powi(-12), 2f64.powi(-25)),
        };
        wanted.abs() * (relative * 1.01 + 1e-5) + least
    }

    fn row(&self, stream: &Stream, of: &DeviceBuffer, row: usize) -> Result<Vec<f32>, CudaError> {
        elements(stream, of, self.element, row * self.columns, self.columns)
    }
}

/// Some elements of a tensor.
pub(super) fn elements(
    stream: &Stream,
    of: &DeviceBuffer,
    element: ElementType,
    first: usize,
    count: usize,
) -> Result<Vec<f32>, CudaError> {
    let offset = first * element.bytes();
    Ok(match element {
        ElementType::Bf16 => of.download::<bf16>(stream, offset, count)?.into_iter().map(f32::from).collect(),
        ElementType::F16 => of.download::<f16>(stream, offset, count)?.into_iter().map(f32::from).collect(),
    })
}

//! The launcher of `rms_norm_backward.cuh`: the gradients of RMSNorm, with the same bits whatever SMs they run on.

use super::row_pieces::{PACK, pack_of};
use super::{ColumnSum, ColumnSumSpec, ElementType, GemmRows, MatrixUnit, RowsFault, Scalar, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DeviceBuffer, Function, KernelSource, Launch, Stream};

const KERNEL: &str = "rms_norm_backward";
const THREADS: u32 = 512;
/// The fewest rows of a block where there are so many, so that its sums are little compared with what it reads.
const FEWEST_ROWS: usize = 8;
/// The most blocks, and so rows of partial sums: some waves on every GPU.
const MOST_BLOCKS: usize = 512;

/// What was normalised.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RmsNormBackwardSpec {
    /// Rows of all tensors, which are contiguous.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Type of all tensors but the weight's gradient, which is of f32.
    pub element: ElementType,
    /// What was added to the mean of squares.
    pub epsilon: f32,
    /// Whether there is a weight, and so its gradient.
    pub has_weight: bool,
}

/// Addresses of a launch's tensors, multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RmsNormBackwardTensors {
    /// The gradient of the result, `[rows, columns]`.
    pub dout: u64,
    /// What was normalised, `[rows, columns]`.
    pub sum: u64,
    /// The weight and where its gradient goes, `[columns]` each, the second of f32.
    pub weight: Option<(u64, u64)>,
    /// What is added to the gradient of `sum`, `[rows, columns]`.
    pub dsum: Option<u64>,
    /// Where the gradient of `sum` goes, `[rows, columns]`.
    pub dh: u64,
}

/// The gradients of RMSNorm, prepared to run many times, one run at a time: the memory of its partial sums is its own. The order of the
/// additions depends on the number of rows alone.
#[derive(Debug)]
pub struct RmsNormBackward {
    function: Function,
    spec: RmsNormBackwardSpec,
    /// Sums of blocks, and what sums those.
    weight_gradient: Option<(DeviceBuffer, ColumnSum)>,
}

/// `RmsNormBackwardArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct RmsNormBackwardArguments {
    dout: u64,
    sum: u64,
    weight: u64,
    dsum: u64,
    dh: u64,
    partials: u64,
    rows: u32,
    rows_each: u32,
    columns: u32,
    epsilon: f32,
}

impl RmsNormBackward {
    /// Compiles or finds the kernels, and uploads what they need by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] for no rows or columns, or more than a kernel takes; when it cannot be compiled, or memory is short.
    pub fn new(stream: &Stream, spec: &RmsNormBackwardSpec) -> Result<Self, CudaError> {
        let RmsNormBackwardSpec { rows, columns, element, has_weight, .. } = *spec;
        if rows == 0 || columns == 0 || rows.max(columns) > u32::MAX as usize {
            let reason = RowsFault::Shape { rows, columns }.into();
            return Err(CudaError::Launch { kernel: KERNEL.to_owned(), reason });
        }
        let device = stream.device();
        let function = device.function(&source(device.arch(), element, pack_of(columns)))?;
        let blocks = rows.div_ceil(rows_of_block(rows));
        let weight_gradient = has_weight.then(|| -> Result<_, CudaError> {
            let spec = ColumnSumSpec {
                rows: vec![GemmRows { tensor: 0, first: 0, count: blocks }],
                columns,
                element: Scalar::F32,
                result: Scalar::F32,
                adds: false,
                sm_margin: 0,
            };
            let partials = DeviceBuffer::new(device, blocks * columns * size_of::<f32>())?;
            Ok((partials, ColumnSum::new(stream, &spec)?))
        });
        Ok(Self { function, spec: *spec, weight_gradient: weight_gradient.transpose()? })
    }

    /// Enqueues it.
    ///
    /// # Safety
    /// The tensors are those of the spec, its weight if it has one, and live until the kernels have run, as does this value; nothing else
    /// writes to what is read, or uses what is written, meanwhile.
    ///
    /// # Errors
    /// The driver's refusal.
    pub unsafe fn launch(&self, stream: &Stream, tensors: &RmsNormBackwardTensors) -> Result<(), CudaError> {
        let RmsNormBackwardSpec { rows, columns, epsilon, .. } = self.spec;
        let rows_each = rows_of_block(rows);
        let arguments = RmsNormBackwardArguments {
            dout: tensors.dout,
            sum: tensors.sum,
            weight: tensors.weight.map_or(0, |(weight, _)| weight),
            dsum: tensors.dsum.unwrap_or(0),
            dh: tensors.dh,
            partials: self.weight_gradient.as_ref().map_or(0, |(partials, _)| partials.address()),
            rows: rows as u32,
            rows_each: rows_each as u32,
            columns: columns as u32,
            epsilon,
        };
        let launch = Launch::linear(rows.div_ceil(rows_each) as u32, THREADS);
        // SAFETY: the arguments are those of the kernel in `source`, a test compares their layouts; partial sums have a row for each
        // block, by `new`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &launch, &(arguments,))? };
        let Some(((partials, sums), (_, dweight))) = self.weight_gradient.as_ref().zip(tensors.weight) else {
            return Ok(());
        };
        // SAFETY: the stream orders it behind who writes the partial sums; the rest is the caller's promise.
        unsafe { sums.launch(stream, &[partials.address()], dweight) }
    }
}

/// Rows that a block takes.
fn rows_of_block(rows: usize) -> usize {
    rows.div_ceil(MOST_BLOCKS).max(FEWEST_ROWS)
}

fn source(arch: Arch, element: ElementType, pack: usize) -> KernelSource {
    let element = element.scalar();
    let name = format!("rms_norm_backward_{}_{pack}", element.name());
    kernel_source(&name, arch)
        .line("#include \"rms_norm_backward.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("static_assert(kRmsNormBackwardThreads == {THREADS}, \"blocks\");"))
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line(format_args!("{name}(const __grid_constant__ RmsNormBackwardArguments arguments) {{"))
        .line(format_args!("  rms_norm_backward<{}, {pack}>(arguments);", element.cpp()))
        .line("}")
}

/// Every kernel that [`RmsNormBackward`] may ask for.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let all =
        ElementType::ALL.into_iter().flat_map(|element| [1, PACK].map(|pack| source(arch, element, pack)));
    all.map(|source| Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 128 }).collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!(
        "rms_norm_backward.cuh",
        RmsNormBackwardArguments { dout, sum, weight, dsum, dh, partials, rows, rows_each, columns, epsilon }
    )]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn blocks_are_few_and_have_all_rows() {
        for rows in [1, 7, 8, 9, 4096, 4097, 100_000] {
            let each = rows_of_block(rows);
            assert!(each >= FEWEST_ROWS && rows.div_ceil(each) <= MOST_BLOCKS);
        }
        assert_eq!(rows_of_block(8192), 16);
    }
}

//! The launcher of `row_check.cuh`: proof that a collective brought every row where it belongs.

use bytemuck::{NoUninit, Zeroable};

use super::scalar::Scalar;
use super::{MatrixUnit, Specialisation, blocks_of};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, Device, DeviceBuffer, Function, KernelSource, Launch, LaunchFault, Stream};

const THREADS: u32 = 256;

/// Rows that say whose they are, and the count of those that are not where they should be.
#[derive(Debug)]
pub struct RowCheck {
    fill: Function,
    check: Function,
    sm_count: u32,
}

/// Where a row comes from: `RowOrigin` of the kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, NoUninit, Zeroable)]
#[repr(C)]
pub struct RowOrigin {
    /// The rank, or all bits where nobody sent it.
    pub rank: u32,
    /// The row of that rank's tensor.
    pub row: u32,
}

impl RowOrigin {
    /// Nobody sent it.
    pub const NOBODY: Self = Self { rank: u32::MAX, row: 0 };

    /// The row of this rank's tensor.
    pub fn new(rank: usize, row: usize) -> Self {
        Self { rank: rank as u32, row: row as u32 }
    }
}

/// A tensor of rows, and which of its rank's it is.
#[derive(Clone, Copy, Debug)]
pub struct CheckedRows {
    /// Its first element's address.
    pub address: u64,
    /// Rows.
    pub rows: u64,
    /// Elements of one row.
    pub row_elements: u32,
    /// The rank.
    pub rank: u32,
    /// Its place among the rank's tensors.
    pub index: u32,
}

/// What the rows hold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RowContents {
    /// Other ranks' rows.
    Received,
    /// What they held before, and other ranks' rows added.
    Summed,
}

impl RowCheck {
    /// The kernels for an element type.
    ///
    /// # Errors
    /// When they cannot be compiled or loaded.
    pub fn new(device: &Device, scalar: Scalar) -> Result<Self, CudaError> {
        let arch = device.arch();
        let mut functions = device.functions(&[fill_source(arch, scalar), check_source(arch, scalar)])?;
        let (check, fill) = (functions.pop(), functions.pop());
        let (Some(fill), Some(check)) = (fill, check) else {
            let reason = LaunchFault::NotLoaded.into();
            return Err(CudaError::Launch { kernel: "row_check".to_owned(), reason });
        };
        Ok(Self { fill, check, sm_count: device.sm_count() })
    }

    /// Enqueues the making of a rank's rows.
    ///
    /// # Safety
    /// The tensor is as described, of the kernels' type, and lives until the kernel has run.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn fill(&self, stream: &Stream, rows: &CheckedRows) -> Result<(), CudaError> {
        let launch = Launch::linear(blocks_of(rows.rows, self.sm_count), THREADS);
        let arguments = (rows.address, rows.rows, rows.row_elements, rows.rank, rows.index);
        // SAFETY: the arguments are those of the kernel in `fill_source`; the rest is the caller's promise.
        unsafe { self.fill.launch(stream, &launch, &arguments) }
    }

    /// How many elements are not what `origins`, one a row, gave. Waits for the stream.
    ///
    /// # Safety
    /// As [`RowCheck::fill`]; there are as many origins as rows.
    ///
    /// # Errors
    /// When the driver refuses or memory is used up.
    pub unsafe fn wrong(
        &self,
        stream: &Stream,
        rows: &CheckedRows,
        origins: &DeviceBuffer,
        contents: RowContents,
    ) -> Result<u64, CudaError> {
        let wrong = DeviceBuffer::from_slice(stream, &[0u64])?;
        // SAFETY: the caller's promise.
        unsafe { self.count(stream, rows, origins, contents, &wrong) }?;
        Ok(wrong.download::<u64>(stream, 0, 1)?[0])
    }

    /// Enqueues the same: what is wrong is added to the word in `wrong`.
    ///
    /// # Safety
    /// As [`RowCheck::wrong`]; `wrong` has 8 bytes.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn count(
        &self,
        stream: &Stream,
        rows: &CheckedRows,
        origins: &DeviceBuffer,
        contents: RowContents,
        wrong: &DeviceBuffer,
    ) -> Result<(), CudaError> {
        let launch = Launch::linear(blocks_of(rows.rows, self.sm_count), THREADS);
        let sum = u32::from(contents == RowContents::Summed);
        let CheckedRows { address, rows, row_elements, rank, index } = *rows;
        let arguments = (address, origins.address(), rows, row_elements, rank, index, sum, wrong.address());
        // SAFETY: the arguments are those of the kernel in `check_source`; the rest is the caller's promise.
        unsafe { self.check.launch(stream, &launch, &arguments) }
    }
}

fn start(name: &str, arch: Arch) -> KernelSource {
    kernel_source(name, arch)
        .line("#include \"row_check.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
}

fn fill_source(arch: Arch, scalar: Scalar) -> KernelSource {
    let (name, kind) = (format!("row_fill_{}", scalar.name()), scalar.cpp());
    start(&name, arch)
        .line(format_args!("{name}({kind}* tensor, u64 rows, u32 row_elements, u32 rank, u32 index) {{"))
        .line("  counterpoint::row_fill(tensor, rows, row_elements, rank, index);")
        .line("}")
}

fn check_source(arch: Arch, scalar: Scalar) -> KernelSource {
    let (name, kind) = (format!("row_check_{}", scalar.name()), scalar.cpp());
    start(&name, arch)
        .line(format_args!(
            "{name}(const {kind}* tensor, const RowOrigin* origins, u64 rows, u32 row_elements,"
        ))
        .line("    u32 rank, u32 index, u32 is_sum, u64* wrong) {")
        .line("  counterpoint::row_check(tensor, origins, rows, row_elements, rank, index, is_sum, wrong);")
        .line("}")
}

/// Both kernels for every type.
pub(super) fn specialisations(arch: Arch) -> Vec<Specialisation> {
    let sources =
        Scalar::ALL.into_iter().flat_map(|scalar| [fill_source(arch, scalar), check_source(arch, scalar)]);
    sources
        .map(|source| Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 64 })
        .collect()
}

/// Types that the kernel shares.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![shared_layout!("row_check.cuh", RowOrigin { rank, row })]
}

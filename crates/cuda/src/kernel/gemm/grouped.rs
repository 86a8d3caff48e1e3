//! The launcher of `gemm/gemm_grouped.cuh`: a grouped GEMM, the products of several problems in one launch.

use counterpoint_tiles::gemm::{GemmLayout, GemmShape, TILE_ROWS, TilePair};

use super::problem_tiles::{BOXES, GemmBox};
use super::problems::GroupedGemmSpec;
use super::source::{GemmChoice, GemmEnds};
use super::{GEMM_DESTINATIONS, GEMM_SOURCES, GemmArguments, GemmFault, GemmGrid, check_arch, refused};
use crate::kernel::{Scalar, WaitLimit};
use crate::layout::{SharedLayout, shared_layout};
use crate::{
    CudaError, Device, DeviceBuffer, Function, Launch, Stream, Swizzle, TensorMap, TensorMapElement,
    TensorMapSpec,
};

/// Several products as one launch, prepared to run many times. An element's bits are those of [`Gemm`](super::Gemm) in a shape that has k in one
/// part, whatever else is computed together with it.
#[derive(Clone, Debug)]
pub struct GroupedGemm {
    function: Function,
    spec: GroupedGemmSpec,
    shape: GemmShape,
    tiles: DeviceBuffer,
    /// Empty unless A lies along m.
    k_sources: DeviceBuffer,
    /// Empty where the rows of every tile lie together in D.
    boxes: DeviceBuffer,
    units: u32,
    launch: Launch,
}

/// Addresses of a launch's tensors, multiples of 16.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct GroupedGemmTensors<'a> {
    /// A's tensors.
    pub a: &'a [u64],
    /// B's.
    pub b: &'a [u64],
    /// D.
    pub d: u64,
}

/// `GemmGroupedArguments` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct GemmGroupedArguments {
    gemm: GemmArguments,
    b_ends: TensorMap,
    boxes: u64,
    unused: [u64; 7],
}

impl GroupedGemm {
    /// Makes it ready in the shape that is estimated to be the fastest, and uploads its tiles by `stream`, which is waited for.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when no kernel takes it; when the kernel cannot be compiled, or memory is short.
    pub fn new(stream: &Stream, spec: &GroupedGemmSpec) -> Result<Self, CudaError> {
        let best = Self::shapes(stream.device(), spec)?[0];
        Self::of_shape(stream, spec, best)
    }

    /// The shapes that it can have on a device, the one that is estimated to be the fastest first.
    ///
    /// # Errors
    /// As [`GroupedGemm::new`].
    pub fn shapes(device: &Device, spec: &GroupedGemmSpec) -> Result<Vec<GemmShape>, CudaError> {
        check_arch(device)?;
        spec.check().map_err(refused)?;
        Ok(spec.shapes(device.sm_count()))
    }

    /// The same in a given shape, one of [`GroupedGemm::shapes`].
    ///
    /// # Errors
    /// As [`GroupedGemm::new`].
    pub fn with_shape(stream: &Stream, spec: &GroupedGemmSpec, shape: GemmShape) -> Result<Self, CudaError> {
        if !Self::shapes(stream.device(), spec)?.contains(&shape) {
            return Err(refused(GemmFault::Shape(shape.into())));
        }
        Self::of_shape(stream, spec, shape)
    }

    /// In a shape that there is a kernel for, of products that it takes.
    fn of_shape(stream: &Stream, spec: &GroupedGemmSpec, shape: GemmShape) -> Result<Self, CudaError> {
        let device = stream.device();
        let GemmShape { columns, warpgroups, .. } = shape;
        let (layout, element) = (spec.layout, spec.element);
        let choice =
            GemmChoice { columns, layout, element, ends: GemmEnds::OfProblems, warpgroups, handed_parts: 1 };
        let function = device.function(&choice.source())?;
        let launch = |clusters: u32| {
            Launch::linear(2 * clusters, GemmShape::THREADS)
                .cluster([2, 1, 1])
                .shared_bytes(GemmShape::shared_bytes(columns, layout))
        };
        let most = function.clusters_at_once(&launch(1))?;
        let clusters = (device.sm_count().saturating_sub(spec.sm_margin) / 2).min(most).max(1);
        let (units, boxes) = spec.units(&shape, clusters as usize).map_err(refused)?;
        let count = units.len() as u32;
        let tiles = DeviceBuffer::from_vec(stream, units.into_flattened())?;
        let k_sources = DeviceBuffer::from_vec(stream, spec.k_sources())?;
        let boxes = DeviceBuffer::from_vec(stream, boxes)?;
        let launch = launch(match spec.grid {
            GemmGrid::Persistent => clusters.min(count),
            GemmGrid::PerUnit => count,
        });
        // Of the problems the lists are left.
        let (rows_a, rows_b, problems) = (spec.rows_a.clone(), spec.rows_b.clone(), Vec::new());
        let spec = GroupedGemmSpec { rows_a, rows_b, problems, ..*spec };
        Ok(Self { function, spec, shape, tiles, k_sources, boxes, units: count, launch })
    }

    /// How it is cut up.
    pub fn shape(&self) -> GemmShape {
        self.shape
    }

    /// Enqueues the products. Nothing is allocated and nothing waits.
    ///
    /// # Safety
    /// As [`Gemm::launch`](super::Gemm::launch).
    ///
    /// # Errors
    /// As [`Gemm::launch`](super::Gemm::launch).
    pub unsafe fn launch(&self, stream: &Stream, tensors: &GroupedGemmTensors<'_>) -> Result<(), CudaError> {
        let arguments = self.arguments(tensors)?;
        // SAFETY: the arguments are those of the kernel in `GemmChoice::source`, a test compares their layouts; the rest is the
        // caller's promise.
        unsafe { self.function.launch(stream, &self.launch, &(arguments,)) }
    }

    fn arguments(&self, tensors: &GroupedGemmTensors<'_>) -> Result<GemmGroupedArguments, CudaError> {
        let Self { spec, shape, .. } = self;
        if tensors.a.len() != spec.rows_a.len() || tensors.b.len() != spec.rows_b.len() {
            let (a, b) = (tensors.a.len(), tensors.b.len());
            return Err(refused(GemmFault::GroupedAddresses { a, b }));
        }
        // Bound once for all tensor maps.
        let _bound = self.function.device().make_current()?;
        // Nobody looks at those that are not there.
        let mut a_maps = [self.map_of_a(tensors.a[0], spec.rows_a[0])?; GEMM_SOURCES];
        for (map, (&address, &rows)) in a_maps.iter_mut().zip(tensors.a.iter().zip(&spec.rows_a)).skip(1) {
            *map = self.map_of_a(address, rows)?;
        }
        let b_map = self.map_of_b(tensors.b[0], spec.rows_b[0])?;
        let b_ends = match (tensors.b.get(1), spec.rows_b.get(1)) {
            (Some(&address), Some(&rows)) => self.map_of_b(address, rows)?,
            _ => b_map,
        };
        let mut d_maps = [self.map_of_d(tensors.d, BOXES[0])?; GEMM_DESTINATIONS];
        for (map, rows) in d_maps.iter_mut().zip(BOXES).skip(1) {
            *map = self.map_of_d(tensors.d, rows)?;
        }
        let gemm = GemmArguments {
            a_maps,
            b_map,
            d_maps,
            d: [tensors.d; GEMM_DESTINATIONS],
            counters: [0; GEMM_DESTINATIONS],
            tiles: self.tiles.address(),
            k_sources: if self.k_sources.is_empty() { 0 } else { self.k_sources.address() },
            bias: 0,
            partial_sums: 0,
            parts_stored: 0,
            wait: WaitLimit::NONE,
            unit_count: self.units,
            splits: 1,
            serial_parts: 1,
            handed_parts: 1,
            // Of every tile by itself.
            k_blocks: 0,
            n: spec.n as u32,
            n_whole: spec.n as u32,
            d_stride: spec.strides[2] as u32,
            pairs_columns: u32::from(shape.pair == TilePair::Columns),
            wide: u32::from(spec.output == Scalar::F32),
            adds: u32::from(spec.adds),
            counters_of_peers: 0,
        };
        let boxes = if self.boxes.is_empty() { 0 } else { self.boxes.address() };
        Ok(GemmGroupedArguments { gemm, b_ends, boxes, unused: [0; 7] })
    }

    fn map_of_a(&self, address: u64, rows: usize) -> Result<TensorMap, CudaError> {
        let (columns, box_rows) = match (self.spec.layout, self.shape.pair) {
            (GemmLayout::Tn, _) => (self.spec.m, 64),
            (_, TilePair::Columns) => (self.spec.k, TILE_ROWS as u32 / 2),
            (_, TilePair::Rows) => (self.spec.k, TILE_ROWS as u32),
        };
        self.map_of_operand("A", address, [rows, columns], self.spec.strides[0], box_rows)
    }

    fn map_of_b(&self, address: u64, rows: usize) -> Result<TensorMap, CudaError> {
        let (columns, box_rows) = match (self.spec.layout, self.shape.pair) {
            (GemmLayout::Nn | GemmLayout::Tn, _) => (self.spec.n, 64),
            (GemmLayout::Nt, TilePair::Rows) => (self.spec.k, self.shape.columns / 2),
            (GemmLayout::Nt, TilePair::Columns) => (self.spec.k, self.shape.columns),
        };
        self.map_of_operand("B", address, [rows, columns], self.spec.strides[1], box_rows)
    }

    fn map_of_operand(
        &self,
        name: &str,
        address: u64,
        [rows, columns]: [usize; 2],
        stride: usize,
        box_rows: u32,
    ) -> Result<TensorMap, CudaError> {
        let element = self.spec.element.tensor_map_element();
        TensorMapSpec::new(element, address, [columns as u64, rows as u64], [64, box_rows])
            .strides([stride as u64 * u64::from(element.bytes())])
            .swizzle(Swizzle::Span128)
            .encode(self.function.device(), name)
    }

    /// D, of which so many rows are stored at once, 128 bytes of each.
    fn map_of_d(&self, address: u64, rows: u32) -> Result<TensorMap, CudaError> {
        let Self { spec, shape, .. } = self;
        let (kind, box_columns) = match spec.output {
            Scalar::F32 => (TensorMapElement::F32, shape.wide_columns()),
            _ => (spec.element.tensor_map_element(), shape.chunk_columns()),
        };
        TensorMapSpec::new(kind, address, [spec.n as u64, spec.rows_d as u64], [box_columns, rows])
            .strides([spec.strides[2] as u64 * u64::from(kind.bytes())])
            .swizzle(Swizzle::Span128)
            .encode(self.function.device(), "D")
    }
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("gemm/gemm_grouped.cuh", GemmBox { row, map }),
        shared_layout!("gemm/gemm_grouped.cuh", GemmGroupedArguments { gemm, b_ends, boxes, unused }),
    ]
}

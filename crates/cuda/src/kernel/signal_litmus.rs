//! The launcher of `signal_litmus.cuh`: a litmus test of a GEMM's per-tile signals.

use std::time::Duration;

use bytemuck::NoUninit;

use super::gemm::{Gemm, TileUnit};
use super::{ElementType, MatrixUnit, Specialisation};
use crate::headers::kernel_source;
use crate::layout::{SharedLayout, shared_layout};
use crate::{Arch, CudaError, DeviceBuffer, Function, KernelSource, Launch, Stream};

const THREADS: u32 = 128;

/// A kernel that reads a product's tiles as its signals are raised, and counts elements that are not of their round: whether a
/// product's signals keep what they promise.
#[derive(Debug)]
pub struct SignalLitmus {
    function: Function,
    tiles: DeviceBuffer,
    tile_count: u32,
    counts: DeviceBuffer,
    row_bytes: u64,
    rise: u32,
}

/// What was found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalLitmusResult {
    /// Words that were not of their round.
    pub wrong: u64,
    /// Tiles that were read.
    pub tiles: u64,
}

/// One round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SignalLitmusRound {
    /// The product's result.
    pub d: u64,
    /// The counters of its groups, of one unit each.
    pub counters: u64,
    /// From 1.
    pub round: u32,
    /// The bits that all elements have in this round.
    pub expected: u16,
    /// Whether the product is another GPU's.
    pub of_system: bool,
}

/// `SignalLitmusTile` of the kernel.
#[derive(Clone, Copy, Debug, NoUninit)]
#[repr(C)]
struct SignalLitmusTile {
    row: u32,
    rows: u32,
    column_byte: u32,
    bytes: u32,
}

/// `SignalLitmusCall` of the kernel.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
struct SignalLitmusCall {
    d: u64,
    row_bytes: u64,
    tiles: u64,
    counters: u64,
    wrong: u64,
    read: u64,
    limit: u64,
    tile_count: u32,
    rise: u32,
    round: u32,
    expected: u32,
    of_system: u32,
}

impl SignalLitmus {
    /// For a product whose units are groups of their own, whose elements are of two bytes and whose columns are whole tiles. Waits for
    /// `stream`, on whose GPU tiles will be read.
    ///
    /// # Errors
    /// When it cannot be compiled or loaded.
    pub fn new(stream: &Stream, product: &Gemm, columns: usize) -> Result<Self, CudaError> {
        let element = ElementType::Bf16.bytes();
        let tile = |unit: TileUnit| SignalLitmusTile {
            row: unit.rows.start as u32,
            rows: unit.rows.len() as u32,
            column_byte: (unit.columns.start * element) as u32,
            bytes: (unit.columns.len() * element) as u32,
        };
        let tiles: Vec<SignalLitmusTile> = product.units().map(tile).collect();
        Ok(Self {
            function: stream.device().function(&source(stream.device().arch()))?,
            tile_count: tiles.len() as u32,
            tiles: DeviceBuffer::from_slice(stream, &tiles)?,
            counts: DeviceBuffer::from_slice(stream, &[0u64; 2])?,
            row_bytes: (columns * element) as u64,
            rise: product.signals_of().first().copied().unwrap_or(0),
        })
    }

    /// Enqueues a round on so many blocks.
    ///
    /// # Safety
    /// `round` has the addresses of the product's result and counters, which live until the kernel has run, and the product of this
    /// round is enqueued and finds multiprocessors besides the blocks.
    ///
    /// # Errors
    /// When the driver refuses.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        round: &SignalLitmusRound,
        blocks: u32,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let counts = self.counts.address();
        let call = SignalLitmusCall {
            d: round.d,
            row_bytes: self.row_bytes,
            tiles: self.tiles.address(),
            counters: round.counters,
            wrong: counts,
            read: counts + 8,
            limit: u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX),
            tile_count: self.tile_count,
            rise: self.rise,
            round: round.round,
            expected: u32::from(round.expected) * 0x1_0001,
            of_system: u32::from(round.of_system),
        };
        // SAFETY: the argument is that of the kernel in `source`; the rest is the caller's promise.
        unsafe { self.function.launch(stream, &Launch::linear(blocks, THREADS), &(call,)) }
    }

    /// Tiles of a round.
    pub fn tiles(&self) -> u64 {
        u64::from(self.tile_count)
    }

    /// What was found in all rounds. Waits for `stream`.
    ///
    /// # Errors
    /// When the kernel failed.
    pub fn result(&self, stream: &Stream) -> Result<SignalLitmusResult, CudaError> {
        let counts = self.counts.download::<u64>(stream, 0, 2)?;
        Ok(SignalLitmusResult { wrong: counts[0], tiles: counts[1] })
    }
}

fn source(arch: Arch) -> KernelSource {
    kernel_source("signal_litmus", arch)
        .line("#include \"signal_litmus.cuh\"")
        .line("using namespace counterpoint;")
        .line(format_args!("extern \"C\" __global__ void __launch_bounds__({THREADS})"))
        .line("signal_litmus(const __grid_constant__ SignalLitmusCall call) { counterpoint::signal_litmus(call); }")
}

/// The only one.
pub(super) fn specialisations() -> Vec<Specialisation> {
    let source = source(Arch::SM_90A);
    vec![Specialisation { source, matrix_unit: MatrixUnit::None, register_limit: 255 }]
}

/// What host and kernel share.
pub(super) fn layouts() -> Vec<SharedLayout> {
    vec![
        shared_layout!("signal_litmus.cuh", SignalLitmusTile { row, rows, column_byte, bytes }),
        shared_layout!(
            "signal_litmus.cuh",
            SignalLitmusCall {
                d,
                row_bytes,
                tiles,
                counters,
                wrong,
                read,
                limit,
                tile_count,
                rise,
                round,
                expected,
                of_system,
            }
        ),
    ]
}

//! Tile schedules uploaded for the kernels that follow them.

use counterpoint_tiles::TileSchedule;

use crate::{CudaError, DeviceBuffer, Stream};

/// A tile schedule in a device's memory.
#[derive(Clone, Debug)]
pub struct DeviceSchedule {
    tiles: DeviceBuffer,
    runs: DeviceBuffer,
    bounds: DeviceBuffer,
    tile_count: u32,
}

impl DeviceSchedule {
    /// Uploads `schedule` by `stream`, which is waited for.
    ///
    /// # Errors
    /// When it does not fit into memory.
    pub fn new(stream: &Stream, schedule: &TileSchedule) -> Result<Self, CudaError> {
        Ok(Self {
            tiles: DeviceBuffer::from_slice(stream, schedule.tiles())?,
            runs: DeviceBuffer::from_slice(stream, schedule.runs())?,
            bounds: DeviceBuffer::from_slice(stream, schedule.bounds())?,
            tile_count: schedule.tiles().len() as u32,
        })
    }

    /// Addresses of the tiles, runs and bounds.
    pub(super) fn addresses(&self) -> [u64; 3] {
        [self.tiles.address(), self.runs.address(), self.bounds.address()]
    }

    /// Number of tiles.
    pub(super) fn tile_count(&self) -> u32 {
        self.tile_count
    }
}

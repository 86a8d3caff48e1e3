//! What the launchers of the portable attention kernels have in common: their sources, and a problem's tiles on the device.

use std::f32::consts::LOG2_E;

use counterpoint_tiles::{TileSchedule, TileScheduleConfig};

use super::device_schedule::DeviceSchedule;
use super::portable_shape::grid;
use super::{AttentionProblem, ElementType};
use crate::headers::kernel_source;
use crate::{Arch, CudaError, KernelSource, Launch, Stream};

/// One form of a kernel: of the function `attention/{function}.cuh` defines.
pub(super) struct PortableKernel<'a> {
    pub(super) function: &'static str,
    /// The type of its parameter.
    pub(super) arguments: &'static str,
    /// What this form is called.
    pub(super) name: &'a str,
    /// The type that its template is given.
    pub(super) config: &'a str,
    pub(super) element: ElementType,
    pub(super) cta: Cta,
}

/// What a CTA takes, and how many of them a multiprocessor has.
#[derive(Clone, Copy, Debug)]
pub(super) struct Cta {
    pub(super) threads: u32,
    /// Dynamic shared memory.
    pub(super) shared_bytes: u32,
    pub(super) per_sm: u32,
}

impl PortableKernel<'_> {
    pub(super) fn source(&self, arch: Arch) -> KernelSource {
        let Self { function, arguments, name, config, element, cta: Cta { shared_bytes, per_sm, .. } } =
            *self;
        kernel_source(name, arch)
            .define("ELEMENT_BF16", element.define())
            .line(format_args!("#include \"attention/{function}.cuh\""))
            .line("using namespace counterpoint;")
            .line(format_args!("using Config = {config};"))
            .line(format_args!("static_assert(Config::kSharedBytes == {shared_bytes}, \"shared memory\");"))
            .line(format_args!("extern \"C\" __global__ void __launch_bounds__(Config::kThreads, {per_sm})"))
            .line(format_args!("{name}(const __grid_constant__ {arguments} arguments) {{"))
            .line(format_args!("  {function}<Config>(arguments);"))
            .line("}")
    }
}

/// A problem's tiles.
///
/// # Errors
/// [`CudaError::Launch`] of `kernel` when there are more than a schedule holds.
pub(super) fn tiles(
    kernel: &str,
    problem: &AttentionProblem,
    config: &TileScheduleConfig,
) -> Result<TileSchedule, CudaError> {
    TileSchedule::new(&problem.bands, problem.rows_q, problem.rows_k, config)
        .map_err(|error| CudaError::Launch { kernel: kernel.to_owned(), reason: error.into() })
}

/// Uploads a problem's tiles by `setup`, which is waited for, with the launch that computes each for every one of `heads`.
///
/// # Errors
/// When memory is short.
pub(super) fn upload(
    setup: &Stream,
    problem: &AttentionProblem,
    tiles: &TileSchedule,
    heads: usize,
    cta: Cta,
) -> Result<(DeviceSchedule, Launch), CudaError> {
    let schedule = DeviceSchedule::new(setup, tiles)?;
    let items = u64::from(schedule.tile_count()) * heads as u64;
    let blocks = grid(items, cta.per_sm, setup.device().sm_count(), problem.sm_margin);
    let launch = Launch::linear(blocks, cta.threads).shared_bytes(cta.shared_bytes);
    Ok((schedule, launch))
}

/// What the exponential's argument is multiplied with for a `scale` of scores, and what scores are before they are capped, 0 where
/// they are not.
pub(super) fn exponential_scales(problem: &AttentionProblem, scale: f32) -> [f32; 2] {
    [problem.softcap.unwrap_or(scale) * LOG2_E, problem.softcap.map_or(0.0, |softcap| scale / softcap)]
}

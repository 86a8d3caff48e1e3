//! Kernel launches: grids, clusters, programmatic dependent launch, and arguments compared with the compiled kernel's.

use std::ffi::{c_uint, c_void};
use std::mem;
use std::ptr;

use cudarc::driver::sys::{CUlaunchAttribute, CUlaunchAttributeID, CUlaunchConfig, CUstream};

use crate::library::call;
use crate::{CudaError, Event, Function, LaunchFault, Stream};

/// The first CUDA whose launches mark an event once all blocks have begun.
const LAUNCH_COMPLETION: (u32, u32) = (12, 3);

/// How many threads a kernel is launched with, and how.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launch {
    grid: [u32; 3],
    block: [u32; 3],
    cluster: [u32; 3],
    dynamic_shared_bytes: u32,
    start: LaunchStart,
}

/// When a kernel may start.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LaunchStart {
    /// When all before it on its stream has finished.
    #[default]
    AfterPrevious,
    /// When every block of the kernel before it has exited or executed `griddepcontrol.launch_dependents`. The kernel itself
    /// must execute `griddepcontrol.wait` before it touches what the one before writes, or writes what that reads.
    /// ("Programmatic dependent launch", compute capability 9.0 and newer.)
    Overlapping,
}

impl Launch {
    /// `grid` blocks of `block` threads each.
    pub const fn new(grid: [u32; 3], block: [u32; 3]) -> Self {
        Self { grid, block, cluster: [1; 3], dynamic_shared_bytes: 0, start: LaunchStart::AfterPrevious }
    }

    /// Blocks in a row, of threads in a row.
    pub const fn linear(blocks: u32, threads: u32) -> Self {
        Self::new([blocks, 1, 1], [threads, 1, 1])
    }

    /// Dynamic shared memory of each block in bytes.
    #[must_use]
    pub const fn shared_bytes(mut self, bytes: u32) -> Self {
        self.dynamic_shared_bytes = bytes;
        self
    }

    /// Blocks of one cluster, which run on one group of multiprocessors and see each other's shared memory. The grid is a
    /// multiple of it.
    #[must_use]
    pub const fn cluster(mut self, cluster: [u32; 3]) -> Self {
        self.cluster = cluster;
        self
    }

    /// When it may start.
    #[must_use]
    pub const fn start(mut self, start: LaunchStart) -> Self {
        self.start = start;
        self
    }

    /// What the driver is given besides sizes, in the first of some places.
    fn attributes(&self) -> ([CUlaunchAttribute; 3], usize) {
        // SAFETY: the attribute is plain data for which all zeros are valid.
        let mut attributes: [CUlaunchAttribute; 3] = unsafe { mem::zeroed() };
        let mut count = 0;
        if self.cluster != [1; 3] {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
            // SAFETY: writing a member of the union of plain data.
            let dims = unsafe { &mut attributes[count].value.clusterDim };
            [dims.x, dims.y, dims.z] = self.cluster;
            count += 1;
        }
        if self.start == LaunchStart::Overlapping {
            attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
            attributes[count].value.programmaticStreamSerializationAllowed = 1;
            count += 1;
        }
        (attributes, count)
    }

    fn config(&self, stream: CUstream, attributes: &mut [CUlaunchAttribute]) -> CUlaunchConfig {
        CUlaunchConfig {
            gridDimX: self.grid[0],
            gridDimY: self.grid[1],
            gridDimZ: self.grid[2],
            blockDimX: self.block[0],
            blockDimY: self.block[1],
            blockDimZ: self.block[2],
            sharedMemBytes: self.dynamic_shared_bytes,
            hStream: stream,
            attrs: attributes.as_mut_ptr(),
            numAttrs: attributes.len() as c_uint,
        }
    }

    /// Why `function` cannot take it, where that can be known.
    fn check(&self, function: &Function, argument_bytes: &[usize]) -> Result<(), LaunchFault> {
        let attributes = function.attributes();
        let product = |dims: [u32; 3]| dims.iter().map(|&dim| u64::from(dim)).product::<u64>();
        if product(self.grid) == 0 || product(self.block) == 0 || product(self.cluster) == 0 {
            let Self { grid, block, cluster, .. } = *self;
            return Err(LaunchFault::Empty { grid, block, cluster });
        }
        if product(self.block) > u64::from(attributes.max_threads) {
            return Err(LaunchFault::Threads { block: self.block, most: attributes.max_threads });
        }
        if self.dynamic_shared_bytes as usize > attributes.max_dynamic_shared_bytes {
            return Err(LaunchFault::SharedMemory {
                bytes: self.dynamic_shared_bytes,
                available: attributes.max_dynamic_shared_bytes,
                static_bytes: attributes.static_shared_bytes,
            });
        }
        if (0..3).any(|axis| !self.grid[axis].is_multiple_of(self.cluster[axis])) {
            return Err(LaunchFault::Clusters { grid: self.grid, cluster: self.cluster });
        }
        if argument_bytes != function.argument_bytes() {
            let (given, wanted) = (argument_bytes.to_vec(), function.argument_bytes().to_vec());
            return Err(LaunchFault::Arguments { given, wanted });
        }
        Ok(())
    }
}

/// The arguments of a kernel: a tuple of plain values, in the kernel's order. Their number and sizes are compared with the
/// compiled kernel's at every launch.
pub trait KernelArguments {
    /// Calls `run` with a pointer to each value, and their sizes in bytes.
    fn with_pointers<R>(&self, run: impl FnOnce(&mut [*mut c_void], &[usize]) -> R) -> R;
}

macro_rules! arguments_of_tuple {
    ($($kind:ident $index:tt),*) => {
        impl<$($kind: Copy),*> KernelArguments for ($($kind,)*) {
            fn with_pointers<R>(&self, run: impl FnOnce(&mut [*mut c_void], &[usize]) -> R) -> R {
                let mut pointers = [$(ptr::from_ref(&self.$index).cast_mut().cast::<c_void>()),*];
                run(&mut pointers, &[$(size_of::<$kind>()),*])
            }
        }
    };
}

arguments_of_tuple!(A 0);
arguments_of_tuple!(A 0, B 1);
arguments_of_tuple!(A 0, B 1, C 2);
arguments_of_tuple!(A 0, B 1, C 2, D 3);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10);
arguments_of_tuple!(A 0, B 1, C 2, D 3, E 4, F 5, G 6, H 7, I 8, J 9, K 10, L 11);

impl Function {
    /// How many clusters of a launch run at once on a GPU that has nothing else to do.
    ///
    /// # Errors
    /// When the driver does not say.
    pub fn clusters_at_once(&self, launch: &Launch) -> Result<u32, CudaError> {
        let driver = self.device().bind()?;
        let (mut attributes, count) = launch.attributes();
        let config = launch.config(ptr::null_mut(), &mut attributes[..count]);
        let mut clusters = 0;
        // SAFETY: the function is loaded, the pointers are to locals.
        unsafe { call!(driver, cuOccupancyMaxActiveClusters(&mut clusters, self.raw(), &config)) }?;
        Ok(clusters.unsigned_abs())
    }

    /// Enqueues the kernel on `stream`. Nothing is allocated and nothing waits.
    ///
    /// # Safety
    /// The arguments are what the kernel was written for (their sizes are checked, their meaning cannot be): addresses of
    /// memory that lives until the kernel has run, large enough for what it reads and writes there.
    ///
    /// # Errors
    /// [`CudaError::Launch`] when the sizes do not fit the kernel, or the driver's refusal.
    pub unsafe fn launch(
        &self,
        stream: &Stream,
        launch: &Launch,
        arguments: &impl KernelArguments,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.launch_signalling(stream, launch, arguments, None) }
    }

    /// As [`Function::launch`]; `started` is marked once every block of the kernel has begun, where the driver can do that (from
    /// CUDA 12.3 on, not within a capture), else when the kernel may start. It takes no times.
    ///
    /// # Safety
    /// As [`Function::launch`].
    ///
    /// # Errors
    /// As [`Function::launch`].
    pub unsafe fn launch_signalling(
        &self,
        stream: &Stream,
        launch: &Launch,
        arguments: &impl KernelArguments,
        started: Option<&Event>,
    ) -> Result<(), CudaError> {
        let driver = stream.device().bind()?;
        let (mut attributes, mut count) = launch.attributes();
        match started {
            Some(started)
                if driver.version()? >= LAUNCH_COMPLETION && started.is_left_to_launch(stream)? =>
            {
                attributes[count].id = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT;
                attributes[count].value.launchCompletionEvent.event = started.raw();
                attributes[count].value.launchCompletionEvent.flags = 0;
                count += 1;
            }
            Some(started) => started.record(stream)?,
            None => {}
        }
        let config = launch.config(stream.raw(), &mut attributes[..count]);
        arguments.with_pointers(|pointers, bytes| {
            launch.check(self, bytes).map_err(|fault| CudaError::Launch {
                kernel: self.name().to_owned(),
                reason: fault.into(),
            })?;
            // SAFETY: the driver copies the arguments, whose number and sizes were checked, before it returns; the rest is
            // the caller's promise.
            unsafe {
                call!(driver, cuLaunchKernelEx(&config, self.raw(), pointers.as_mut_ptr(), ptr::null_mut()))
            }
        })
    }
}

//! Counts the functions of the driver that a thread calls: what proves that a call waits for nothing and allocates nothing.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::fmt;

use super::{Driver, call};
use crate::CudaError;

thread_local! {
    /// `None` while this thread does not count.
    static CALLS: RefCell<Option<DriverCalls>> = const { RefCell::new(None) };
}

/// How often a thread has called each function of the driver.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct DriverCalls(BTreeMap<&'static str, usize>);

/// Functions that wait for the device, whether that is what they are for or what they do besides.
const WAITING: [&str; 6] = [
    "cuCtxSynchronize",
    "cuStreamSynchronize",
    "cuEventSynchronize",
    "cuMemFree_v2",
    "cuMemFreeHost",
    "cuIpcCloseMemHandle",
];

/// Functions that make something: memory, streams, events, modules, graphs, mappings.
const MAKING: [&str; 8] = [
    "cuMemAlloc_v2",
    "cuMemHostAlloc",
    "cuStreamCreateWithPriority",
    "cuEventCreate",
    "cuModuleLoadData",
    "cuGraphInstantiateWithFlags",
    "cuIpcOpenMemHandle_v2",
    "cuIpcOpenEventHandle",
];

impl DriverCalls {
    /// Runs `work` and counts what this thread calls meanwhile, whatever other threads do.
    ///
    /// # Errors
    /// When there is no driver.
    pub fn of<R>(work: impl FnOnce() -> R) -> Result<(R, Self), CudaError> {
        Ok(Driver::get()?.count_calls(work))
    }

    /// The context that is current in this thread, as a number that distinguishes contexts; 0 for none.
    ///
    /// # Errors
    /// When there is no driver.
    pub fn current_context() -> Result<usize, CudaError> {
        let (driver, mut context) = (Driver::get()?, std::ptr::null_mut());
        // SAFETY: the pointer is to a local.
        unsafe { call!(driver, cuCtxGetCurrent(&mut context)) }?;
        Ok(context as usize)
    }

    /// Calls of the function of this C name.
    pub fn of_function(&self, name: &str) -> usize {
        self.0.get(name).copied().unwrap_or(0)
    }

    /// Calls in all.
    pub fn total(&self) -> usize {
        self.0.values().sum()
    }

    /// Calls that wait for the device.
    pub fn synchronizations(&self) -> usize {
        WAITING.iter().map(|name| self.of_function(name)).sum()
    }

    /// Calls that make memory, streams, events, modules, graphs or mappings.
    pub fn allocations(&self) -> usize {
        MAKING.iter().map(|name| self.of_function(name)).sum()
    }

    /// Calls that copy from the host to a device.
    pub fn uploads(&self) -> usize {
        self.of_function("cuMemcpyHtoDAsync_v2")
    }
}

impl fmt::Display for DriverCalls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let each: Vec<String> = self.0.iter().map(|(name, count)| format!("{name} {count}")).collect();
        f.write_str(&each.join(", "))
    }
}

/// A function is about to be called on this thread.
pub(super) fn note(name: &'static str) {
    // A thread that is going has nothing to count any more.
    let _ = CALLS.try_with(|calls| {
        if let Some(calls) = &mut *calls.borrow_mut() {
            *calls.0.entry(name).or_default() += 1;
        }
    });
}

/// Runs `work` with this thread's calls counted. Counts within counts are those of both.
pub(super) fn count<R>(work: impl FnOnce() -> R) -> (R, DriverCalls) {
    let before = CALLS.replace(Some(DriverCalls::default()));
    let result = work();
    let counted = CALLS.replace(before).unwrap_or_default();
    CALLS.with_borrow_mut(|calls| {
        if let Some(calls) = calls {
            counted.0.iter().for_each(|(name, count)| *calls.0.entry(name).or_default() += count);
        }
    });
    (result, counted)
}

#[cfg(test)]
mod tests {
    use super::super::table::function_table;
    use super::*;

    function_table! {
        /// Two functions of a driver that does nothing.
        counted Functions {
            cuStreamSynchronize(stream: u64);
            cuLaunchKernelEx(a: u64, b: *mut u32);
        }
    }

    unsafe extern "C" fn stream(stream: u64) -> u32 {
        stream as u32
    }

    unsafe extern "C" fn launch(a: u64, b: *mut u32) -> u32 {
        // SAFETY: the test passes a local.
        unsafe { *b += a as u32 };
        0
    }

    #[test]
    fn a_counted_table_counts_this_threads_calls_and_calls_the_functions() {
        static FUNCTIONS: Functions = Functions { cuStreamSynchronize: stream, cuLaunchKernelEx: launch };
        let counted = Functions::counted(&FUNCTIONS);
        let mut sum = 5;
        let mut both = || {
            // SAFETY: the functions above are harmless.
            unsafe { ((counted.cuStreamSynchronize)(7), (counted.cuLaunchKernelEx)(3, &mut sum)) }
        };
        assert_eq!(both(), (7, 0));
        let ((inner, results), calls) = count(|| {
            both();
            let (results, inner) = count(&mut both);
            // Those of other threads are not this one's.
            std::thread::scope(|scope| {
                // SAFETY: as above.
                scope.spawn(|| unsafe { (counted.cuStreamSynchronize)(1) });
            });
            (inner, results)
        });
        assert_eq!((results, sum), ((7, 0), 14));
        let expected =
            |times| DriverCalls([("cuStreamSynchronize", times), ("cuLaunchKernelEx", times)].into());
        assert_eq!((inner, calls.clone()), (expected(1), expected(2)));
        assert_eq!((calls.total(), calls.synchronizations(), calls.allocations()), (4, 2, 0));
        assert_eq!(calls.to_string(), "cuLaunchKernelEx 2, cuStreamSynchronize 2");
        assert_eq!(count(|| ()).1, DriverCalls::default());
        // This program has neither.
        let library = libloading::os::unix::Library::this().into();
        assert_eq!(Functions::resolve(&library).err(), Some("cuStreamSynchronize"));
    }
}

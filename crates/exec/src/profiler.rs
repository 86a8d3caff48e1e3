//! What profilers are given: which operation of which Program a thread enqueues, as ranges that nest.

use std::marker::PhantomData;

/// A tool that shows, next to what a device does, which operation of which Program the host enqueued it for.
pub trait Profiler: Send + Sync {
    /// A range begins on the calling thread, inside of those that this thread has begun and not ended.
    fn begin(&self, name: &str);

    /// The innermost range of the calling thread ends.
    fn end(&self);
}

/// A range of the thread that has made it. It ends with this value, also where an error or a panic ends that.
#[must_use = "a range is as long as this lives"]
pub(crate) struct ProfilerRange<'a> {
    profiler: Option<&'a dyn Profiler>,
    /// Another thread would end a range of its own.
    thread: PhantomData<*const ()>,
}

impl<'a> ProfilerRange<'a> {
    /// Begins a range, whose name is made only where there is a profiler.
    pub(crate) fn begin<N: AsRef<str>>(profiler: Option<&'a dyn Profiler>, name: impl FnOnce() -> N) -> Self {
        if let Some(profiler) = profiler {
            profiler.begin(name().as_ref());
        }
        Self { profiler, thread: PhantomData }
    }
}

impl Drop for ProfilerRange<'_> {
    fn drop(&mut self) {
        if let Some(profiler) = self.profiler {
            profiler.end();
        }
    }
}

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use super::{Cubin, KernelSource, compile};
use crate::CudaError;

/// The compiled form of each source, in their order; several are compiled at the same time.
pub(crate) fn cubins(sources: &[&KernelSource]) -> Vec<Result<Cubin, CudaError>> {
    let workers = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(sources.len());
    if workers <= 1 {
        return sources.iter().map(|source| compile(source)).collect();
    }
    let next = AtomicUsize::new(0);
    let work = || -> Vec<(usize, Result<Cubin, CudaError>)> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(source) = sources.get(index) else { return done };
            done.push((index, compile(source)));
        }
    };
    let mut results: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..workers).map(|_| scope.spawn(work)).collect();
        threads
            .into_iter()
            .flat_map(|thread| match thread.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            })
            .collect()
    });
    results.sort_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

//! Work on all cores, for kernels that are compiled at the same time.

use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

/// The result of `work` for each item, in their order, on as many threads as the machine has.
pub fn map_parallel<T: Sync, R: Send>(items: &[T], work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let workers = thread::available_parallelism().map_or(1, NonZeroUsize::get).min(items.len());
    if workers <= 1 {
        return items.iter().map(work).collect();
    }
    let next = AtomicUsize::new(0);
    let take = || -> Vec<(usize, R)> {
        let mut done = Vec::new();
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            let Some(item) = items.get(index) else { return done };
            done.push((index, work(item)));
        }
    };
    let mut results: Vec<_> = thread::scope(|scope| {
        // Where the system gives no thread, those that there are do the rest.
        let threads: Vec<_> =
            (1..workers).map_while(|_| thread::Builder::new().spawn_scoped(scope, take).ok()).collect();
        let own = take();
        let joined = threads.into_iter().map(|thread| thread.join());
        let others = joined.flat_map(|done| done.unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        own.into_iter().chain(others).collect()
    });
    results.sort_by_key(|&(index, _)| index);
    results.into_iter().map(|(_, result)| result).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn in_order() {
        let items: Vec<usize> = (0..100).collect();
        let square = |&item: &usize| item * item;
        assert_eq!(map_parallel(&items, square), items.iter().map(square).collect::<Vec<_>>());
        assert!(map_parallel(&[], square).is_empty());
    }
}

//! The work queue of CPU kernels: items in order to whichever thread is free.

use std::sync::{Mutex, MutexGuard, PoisonError};

use rayon::ThreadPool;

/// Hands `items` out one by one, in order, to the threads of `pool`, and returns when all are done. Each thread makes
/// its scratch once. `begin` sees the items in order, one at a time, each when it is handed out.
///
/// Put heavy items first where the order does not matter: the last ones level the load.
pub(crate) fn drain<I: Send, B, S>(
    pool: &ThreadPool,
    items: Vec<I>,
    begin: impl Fn(&I) -> B + Sync,
    scratch: impl Fn() -> S + Sync,
    work: impl Fn(I, B, &mut S) + Sync,
) {
    let workers = pool.current_num_threads().min(items.len());
    let queue = Mutex::new(items.into_iter());
    let take = || {
        let mut queue = lock(&queue);
        queue.next().map(|item| (begin(&item), item))
    };
    pool.scope(|scope| {
        for _ in 0..workers {
            scope.spawn(|_| {
                let mut scratch = scratch();
                while let Some((begun, item)) = take() {
                    work(item, begun, &mut scratch);
                }
            });
        }
    });
}

/// A panic of another worker ends the whole call anyway (the scope passes it on), so poison carries no news.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

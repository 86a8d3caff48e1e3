//! Connected ranks that nobody uses. Connecting them takes NCCL a second, which the next world of the same ranks need not wait for.

use std::collections::VecDeque;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use crate::lock;

/// Groups of ranks that are kept: as many as the passes of layers on two, three and four of a machine's GPUs. Each has buffers on its
/// devices.
const KEPT: usize = 16;

/// Ends of ranks that are connected with each other, by what distinguishes such groups. A clone is the same shelf.
pub(crate) struct Shelf<K, E>(Arc<Mutex<Groups<K, E>>>);

type Groups<K, E> = VecDeque<(K, Vec<E>)>;

impl<K: Clone + PartialEq, E> Shelf<K, E> {
    /// Of each group that lies here.
    pub(crate) fn keys(&self) -> Vec<K> {
        lock(&self.0).iter().map(|(key, _)| key.clone()).collect()
    }

    /// The ends of a group of this key, if one lies here.
    pub(crate) fn take(&self, key: &K) -> Option<Vec<E>> {
        let groups = &mut *lock(&self.0);
        let at = groups.iter().position(|(other, _)| other == key)?;
        groups.remove(at).map(|(_, ends)| ends)
    }

    /// The ends of a group for the ranks of a world. They come here once all are returned, unless one is spoilt or nobody has this
    /// shelf any more.
    pub(crate) fn lend(&self, key: K, ends: Vec<E>) -> Vec<Lent<K, E>> {
        let count = ends.len();
        let (home, spoilt) = (Arc::downgrade(&self.0), AtomicBool::new(false));
        let group = Arc::new(Group { key, ends, home, spoilt });
        (0..count).map(|rank| Lent { group: group.clone(), rank }).collect()
    }
}

/// One rank's end, until this goes.
pub(crate) struct Lent<K: Clone, E> {
    group: Arc<Group<K, E>>,
    rank: usize,
}

impl<K: Clone, E> Lent<K, E> {
    pub(crate) fn end(&self) -> &E {
        &self.group.ends[self.rank]
    }

    /// Those of all ranks of the group that are in this process.
    pub(crate) fn ends(&self) -> &[E] {
        &self.group.ends
    }

    /// Nobody is to use any end of this group again.
    pub(crate) fn spoil(&self) {
        self.group.spoilt.store(true, Ordering::SeqCst);
    }
}

struct Group<K: Clone, E> {
    key: K,
    ends: Vec<E>,
    home: Weak<Mutex<Groups<K, E>>>,
    spoilt: AtomicBool,
}

impl<K: Clone, E> Drop for Group<K, E> {
    fn drop(&mut self) {
        let Some(home) = self.home.upgrade().filter(|_| !self.spoilt.load(Ordering::SeqCst)) else { return };
        let ends = std::mem::take(&mut self.ends);
        let oldest = {
            let groups = &mut *lock(&home);
            groups.push_back((self.key.clone(), ends));
            if groups.len() > KEPT { groups.pop_front() } else { None }
        };
        // Ends take their time to go: not under the lock.
        drop(oldest);
    }
}

impl<K, E> Clone for Shelf<K, E> {
    fn clone(&self) -> Self {
        Self(self.0.clone())
    }
}

impl<K, E> Default for Shelf<K, E> {
    fn default() -> Self {
        Self(Arc::default())
    }
}

impl<K, E> fmt::Debug for Shelf<K, E> {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(formatter, "{} groups of connected ranks", lock(&self.0).len())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Counts those that are gone.
    struct End(Arc<Mutex<Vec<u32>>>, u32);

    impl Drop for End {
        fn drop(&mut self) {
            lock(&self.0).push(self.1);
        }
    }

    fn ends(gone: &Arc<Mutex<Vec<u32>>>, names: [u32; 2]) -> Vec<End> {
        names.into_iter().map(|name| End(gone.clone(), name)).collect()
    }

    #[test]
    fn a_group_comes_back_once_all_its_ranks_are_through() {
        let (gone, shelf) = (Arc::default(), Shelf::default());
        let mut lent = shelf.lend("a", ends(&gone, [1, 2]));
        assert_eq!((lent[0].end().1, lent[1].end().1), (1, 2));
        drop(lent.pop());
        assert!(shelf.take(&"a").is_none(), "rank 0 still has its end");
        drop(lent);
        assert_eq!(shelf.keys(), ["a"]);
        assert!(shelf.take(&"b").is_none());
        let taken = shelf.take(&"a").unwrap();
        assert_eq!(taken.iter().map(|end| end.1).collect::<Vec<_>>(), [1, 2], "in the order of ranks");
        assert!(shelf.take(&"a").is_none(), "nobody else gets it meanwhile");
        assert!(lock(&gone).is_empty());
    }

    #[test]
    fn what_one_rank_has_spoilt_nobody_gets_again() {
        let (gone, shelf) = (Arc::default(), Shelf::default());
        let mut lent = shelf.lend("a", ends(&gone, [1, 2]));
        let other = lent.pop().unwrap();
        drop(lent);
        other.spoil();
        drop(other);
        assert!(shelf.take(&"a").is_none());
        assert_eq!(*lock(&gone), [1, 2]);
    }

    #[test]
    fn few_groups_are_kept_and_none_without_a_shelf() {
        let (gone, shelf) = (Arc::default(), Shelf::default());
        for key in 0..=KEPT as u32 {
            drop(shelf.lend(key, ends(&gone, [2 * key, 2 * key + 1])));
        }
        assert_eq!(shelf.keys(), (1..=KEPT as u32).collect::<Vec<_>>(), "the oldest has gone");
        assert_eq!(*lock(&gone), [0, 1]);
        let lent = shelf.lend(99, ends(&gone, [98, 99]));
        drop(shelf);
        assert_eq!(lock(&gone).len(), 2 * (KEPT + 1));
        drop(lent);
        assert_eq!(lock(&gone)[2 * (KEPT + 1)..], [98, 99]);
    }
}

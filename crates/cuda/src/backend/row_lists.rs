//! Lists of rows on the device that passes of a routing share: each is made once, by the first that needs it.

use std::any::Any;
use std::sync::{Arc, Mutex, Weak};

use counterpoint_plan::ExpertRows;
use counterpoint_schedule::{BufferId, ExpertRowsOf, RowBlocks, RowsOrigin};

use crate::kernel::Scalar;
use crate::sync::lock;

/// What a list is made for, besides its rows: whatever it depends on that is no row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ListKey {
    /// The rows of one of an operation's launches, with the columns of what is multiplied and of the result, and the types of both.
    Launch { number: usize, columns: [usize; 2], scalars: [Scalar; 2] },
    /// Rows in blocks of k, of so many columns of a type.
    Blocks { columns: usize, scalar: Scalar },
}

/// Lists by the tables that their rows were read from. A list is there as long as somebody has those.
#[derive(Default)]
pub(crate) struct RowLists(Mutex<Vec<Entry>>);

/// Lists of things that are being made ready: nobody else may use them before they are on the device.
#[derive(Clone, Default)]
pub(crate) struct UnsentLists(Arc<Mutex<Vec<Entry>>>);

#[derive(Clone)]
struct Entry {
    tables: Weak<ExpertRows>,
    rows: ExpertRowsOf,
    key: ListKey,
    list: Arc<dyn Any + Send + Sync>,
}

impl Entry {
    fn is_of(&self, tables: &Arc<ExpertRows>, rows: ExpertRowsOf, key: &ListKey) -> bool {
        std::ptr::eq(self.tables.as_ptr(), Arc::as_ptr(tables)) && (self.rows, &self.key) == (rows, key)
    }
}

impl RowLists {
    /// The list of rows of such an origin, made for this; else what `make` makes, if anything, which goes to `unsent`.
    pub(super) fn of<T: Send + Sync + 'static, E>(
        &self,
        unsent: &UnsentLists,
        origin: &RowsOrigin,
        key: ListKey,
        make: impl FnOnce() -> Result<Option<T>, E>,
    ) -> Result<Option<Arc<T>>, E> {
        let Some((tables, rows)) = origin.tables() else { return Ok(make()?.map(Arc::new)) };
        for all in [&self.0, &*unsent.0] {
            let found = lock(all)
                .iter()
                .find(|entry| entry.is_of(tables, rows, &key))
                .map(|entry| entry.list.clone());
            if let Some(list) = found.and_then(|list| list.downcast::<T>().ok()) {
                return Ok(Some(list));
            }
        }
        let Some(list) = make()?.map(Arc::new) else { return Ok(None) };
        lock(&unsent.0).push(Entry { tables: Arc::downgrade(tables), rows, key, list: list.clone() });
        Ok(Some(list))
    }

    /// Lists that are on the device now, for all. Those of tables that are gone go.
    pub(super) fn add(&self, sent: &UnsentLists) {
        let gone: Vec<Entry> = {
            let (mut all, mut sent) = (lock(&self.0), lock(&sent.0));
            let gone = all.extract_if(.., |entry| entry.tables.strong_count() == 0).collect();
            all.append(&mut sent);
            gone
        };
        // What is freed asks the device: not while others wait for the lock.
        drop(gone);
    }
}

/// The buffers of some rows, in the order in which they first come.
pub(super) fn buffers_of<'a>(rows: impl IntoIterator<Item = &'a RowBlocks>) -> Vec<BufferId> {
    let mut buffers = Vec::new();
    rows.into_iter().for_each(|rows| rows.add_buffers(&mut buffers));
    buffers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn origin(tables: &Arc<ExpertRows>) -> RowsOrigin {
        RowsOrigin::of(tables, ExpertRowsOf::Tokens)
    }

    /// A list is everybody's once it has been sent, as long as its tables are there.
    #[test]
    fn lists_are_found_by_their_tables_and_what_they_are_for() {
        let tables = || Arc::new(ExpertRows::default());
        let (one, other) = (tables(), tables());
        let (lists, unsent) = (RowLists::default(), UnsentLists::default());
        let key = |columns| ListKey::Blocks { columns, scalar: Scalar::Bf16 };
        let found = |unsent: &UnsentLists, tables: &Arc<ExpertRows>, columns, new: i32| {
            let make = || Ok::<_, ()>(Some(new));
            *lists.of(unsent, &origin(tables), key(columns), make).unwrap().unwrap()
        };
        assert_eq!(found(&unsent, &one, 8, 1), 1);
        assert_eq!(found(&unsent, &one, 8, 2), 1);
        // Another thread makes something ready before these have been sent.
        assert_eq!(found(&UnsentLists::default(), &one, 8, 3), 3);
        lists.add(&unsent);
        assert_eq!(found(&UnsentLists::default(), &one, 8, 4), 1);
        assert_eq!(found(&UnsentLists::default(), &one, 16, 5), 5);
        assert_eq!(found(&UnsentLists::default(), &other, 8, 6), 6);
        let nothing = lists.of(&unsent, &RowsOrigin::default(), key(8), || Ok::<_, ()>(Some(7)));
        assert_eq!(nothing.unwrap().as_deref(), Some(&7));
        drop(one);
        lists.add(&unsent);
        assert!(lock(&lists.0).is_empty());
    }

    #[test]
    fn buffers_come_in_the_order_of_their_rows() {
        use counterpoint_schedule::RowBlock;
        let block = |buffer| RowBlock { buffer: BufferId(buffer), rows: counterpoint_mask::Range::new(0, 1) };
        let rows = |buffers: &[usize]| -> RowBlocks { buffers.iter().map(|&buffer| block(buffer)).collect() };
        assert_eq!(buffers_of([&rows(&[3, 3, 1, 3, 2])]), [3, 1, 2].map(BufferId));
        assert_eq!(buffers_of([&rows(&[3, 3]), &rows(&[]), &rows(&[1, 3])]), [3, 1].map(BufferId));
    }
}

//! Keys and values of a CPU attention kernel, some of which arrive while it runs.

use std::ops::ControlFlow;

use counterpoint_mask::Range;
use counterpoint_plan::KEY_BLOCK;

use crate::real::Element;
use crate::shape::HeadShape;
use crate::shape::{check_len, rows_of};
use crate::tile::gather;

/// What takes the keys and values that have arrived.
pub type TakeKeys<'a, T> = &'a mut dyn FnMut(&[T], &[T]);

/// Waits for keys and values that arrive while a kernel runs and hands them on; a break where they do not come.
pub(crate) type Arrived<'a, T> = &'a mut dyn FnMut(TakeKeys<'_, T>) -> ControlFlow<()>;

/// Keys and values of a launch: those that are there, and after them those that arrive.
#[derive(Clone, Copy)]
pub(crate) struct KeyRows<'a, T> {
    own: Keys<'a, T>,
    arrived: Keys<'a, T>,
    own_rows: usize,
    arriving_rows: usize,
}

#[derive(Clone, Copy)]
struct Keys<'a, T> {
    k: &'a [T],
    v: &'a [T],
}

impl<'a, T: Element> KeyRows<'a, T> {
    /// Those that are there.
    ///
    /// # Panics
    /// When lengths do not fit, or a block would hold rows of both.
    pub(crate) fn own(shape: &HeadShape, k: &'a [T], v: &'a [T], arriving_rows: usize) -> Self {
        let own_rows = rows_of("k", k, shape.heads_kv * shape.head_dim);
        check_len("v", v, own_rows, shape.heads_kv * shape.head_dim_v);
        assert!(
            arriving_rows == 0 || own_rows.is_multiple_of(KEY_BLOCK),
            "keys arrive after {own_rows} rows, not at a multiple of {KEY_BLOCK}"
        );
        Self { own: Keys { k, v }, arrived: Keys { k: &[], v: &[] }, own_rows, arriving_rows }
    }

    /// All of them.
    ///
    /// # Panics
    /// When lengths do not fit.
    pub(crate) fn with_arrived<'b>(&self, shape: &HeadShape, k: &'b [T], v: &'b [T]) -> KeyRows<'b, T>
    where
        'a: 'b,
    {
        check_len("arriving k", k, self.arriving_rows, shape.heads_kv * shape.head_dim);
        check_len("arriving v", v, self.arriving_rows, shape.heads_kv * shape.head_dim_v);
        KeyRows { arrived: Keys { k, v }, ..*self }
    }

    /// Rows of both.
    pub(crate) fn rows(&self) -> usize {
        self.own_rows + self.arriving_rows
    }

    /// Whether these rows are there from the start.
    pub(crate) fn has_from_the_start(&self, rows: &Range) -> bool {
        rows.end <= self.own_rows
    }

    /// Copies the rows of a block, of one head, to dense rows in the accumulator type.
    pub(crate) fn gather(
        &self,
        shape: &HeadShape,
        head: usize,
        rows: Range,
        k: &mut [T::Accumulator],
        v: &mut [T::Accumulator],
    ) {
        let HeadShape { heads_kv, head_dim: dim, head_dim_v: dim_v, .. } = *shape;
        let (keys, rows) = match self.has_from_the_start(&rows) {
            true => (self.own, rows),
            false => (self.arrived, Range::new(rows.start - self.own_rows, rows.end - self.own_rows)),
        };
        gather(keys.k, heads_kv * dim, rows, head * dim, dim, k);
        gather(keys.v, heads_kv * dim_v, rows, head * dim_v, dim_v, v);
    }
}

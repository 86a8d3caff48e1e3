//! Where the elements of a product's receivers, of rows or of columns, are among all of its result.

use std::ops::Range;

use counterpoint_cuda::kernel::GemmSpec;

/// Where a receiver's elements are in all of D.
pub(super) struct Place {
    rows: Range<usize>,
    /// Of a row.
    pub(super) bytes: Range<usize>,
}

impl Place {
    /// The bytes of each of its rows, where rows have so many.
    pub(super) fn lines(&self, row_bytes: usize) -> impl Iterator<Item = Range<usize>> {
        let Self { rows, bytes } = self;
        rows.clone().map(move |row| row * row_bytes + bytes.start..row * row_bytes + bytes.end)
    }
}

/// Those of all receivers.
pub(super) fn places_of(spec: &GemmSpec) -> Vec<Place> {
    let width = spec.output.bytes() as usize;
    let row = 0..spec.strides[2] * width;
    let ranges = |sizes: &[usize]| {
        let mut end = 0;
        let range = |size: &usize| {
            end += size;
            end - size..end
        };
        sizes.iter().map(range).collect::<Vec<_>>()
    };
    match &spec.column_receivers[..] {
        [] => ranges(&spec.receivers).into_iter().map(|rows| Place { rows, bytes: row.clone() }).collect(),
        columns => {
            let of = |columns: Range<usize>| Place {
                rows: 0..spec.size.m,
                bytes: columns.start * width..columns.end * width,
            };
            ranges(columns).into_iter().map(of).collect()
        }
    }
}

//! Lists of global rows, such as those that a rank receives, in their order.

use counterpoint_mask::Range;

/// A list of global rows, numbered by their place in the list.
#[derive(Clone, Debug)]
pub struct RowList {
    /// Disjoint, in the order of the list; neighbours that follow each other are one range.
    ranges: Vec<Range>,
    /// Place of each range's first row, and the length of the list at the end.
    places: Vec<usize>,
}

impl RowList {
    /// Of disjoint ranges, in the order of the list.
    pub fn new(ranges: Vec<Range>) -> Self {
        let mut places = Vec::with_capacity(ranges.len() + 1);
        let mut place = 0;
        for range in &ranges {
            places.push(place);
            place += range.len();
        }
        places.push(place);
        Self { ranges, places }
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.places[self.ranges.len()]
    }

    /// Whether it holds no row.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The ranges in the order of the list.
    pub fn ranges(&self) -> &[Range] {
        &self.ranges
    }

    /// The number of the range that holds the row at `place`, which must be below the length.
    pub fn range_at(&self, place: usize) -> usize {
        self.places.partition_point(|&start| start <= place) - 1
    }

    /// The global row at `place`, which must be below the length.
    pub fn row_at(&self, place: usize) -> usize {
        let index = self.range_at(place);
        self.ranges[index].start + (place - self.places[index])
    }

    /// The rows at places `[start, end)`, in the order of the list.
    pub fn rows(&self, start: usize, end: usize) -> Vec<Range> {
        if start >= end {
            return Vec::new();
        }
        let (first, last) = (self.range_at(start), self.range_at(end - 1));
        let mut rows = self.ranges[first..=last].to_vec();
        let count = rows.len();
        rows[count - 1].end = self.ranges[last].start + (end - self.places[last]);
        rows[0].start += start - self.places[first];
        rows
    }
}

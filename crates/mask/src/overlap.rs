//! The proof that slices share no pair: a sweep line over bands that names the first pair which two of them hold.

use std::cmp::Ordering;
use std::collections::BTreeSet;

use crate::Band;

/// Two bands that share a pair.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Overlap {
    /// Index of the first band.
    pub(crate) first: usize,
    /// Index of the second band, larger than `first`.
    pub(crate) second: usize,
    /// A row that both hold.
    pub(crate) row: usize,
    /// A column that both hold in that row.
    pub(crate) col: usize,
}

/// Finds two bands that share a pair, in `O(n log n)`, however many rectangles overlap.
///
/// A sweep from the first row to the last keeps the active bands in order of their columns (Shamos and Hoey,
/// "Geometric intersection problems", 1976). In a row a band holds one interval, and from a row to the next each end of
/// an interval moves right by 0 or 1: so two disjoint intervals with a third between them cannot meet in one step, and
/// two that are neighbours meet before they could swap. Hence the first row that any two bands share finds them as
/// neighbours, and it is enough to test the pairs that become neighbours when a band enters or leaves.
pub(crate) fn find_overlap(bands: &[Band]) -> Option<Overlap> {
    let bands: Vec<Option<Band>> = bands.iter().map(Band::trim).collect();
    let mut events = Vec::with_capacity(2 * bands.len());
    for (index, band) in bands.iter().enumerate() {
        if let Some(band) = band {
            events.push((band.q_range.start, Event::Enter, index));
            events.push((band.q_range.end, Event::Leave, index));
        }
    }
    events.sort_unstable();

    let test = |a: &Active, b: &Active| {
        let shared = bands[a.index]?.intersect(&bands[b.index]?).trim()?;
        let row = shared.q_range.start;
        Some(Overlap {
            first: a.index.min(b.index),
            second: a.index.max(b.index),
            row,
            col: shared.columns(row).start,
        })
    };
    let mut active = BTreeSet::new();
    for (_, event, index) in events {
        let Some(band) = &bands[index] else { continue };
        let this = Active::new(band, index);
        if event == Event::Leave {
            active.remove(&this);
        }
        let left = active.range(..&this).next_back();
        let right = active.range(&this..).next();
        let found = match event {
            Event::Leave => left.zip(right).and_then(|(left, right)| test(left, right)),
            Event::Enter => {
                left.and_then(|left| test(left, &this)).or_else(|| right.and_then(|right| test(&this, right)))
            }
        };
        if found.is_some() {
            return found;
        }
        if event == Event::Enter {
            active.insert(this);
        }
    }
    None
}

/// What happens in a row. A band leaves in the row after its last one, before another enters there: the two share
/// no row.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Leave,
    Enter,
}

/// A band under the sweep. Ordered by its first column in the later of two first rows: both bands hold columns there,
/// and as long as they share none their order is the same in every common row.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Active {
    first_row: i64,
    first_col: i64,
    diag_min: i64,
    index: usize,
}

impl Active {
    /// `band` is trimmed.
    fn new(band: &Band, index: usize) -> Self {
        Self {
            first_row: band.q_range.start as i64,
            first_col: band.k_range.start as i64,
            diag_min: band.diag_min,
            index,
        }
    }

    fn left(&self, row: i64) -> i64 {
        self.first_col.max(row + self.diag_min)
    }
}

impl Ord for Active {
    fn cmp(&self, other: &Self) -> Ordering {
        let row = self.first_row.max(other.first_row);
        self.left(row).cmp(&other.left(row)).then(self.index.cmp(&other.index))
    }
}

impl PartialOrd for Active {
    fn partial_cmp(&self, other: &Self) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

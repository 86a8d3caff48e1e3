//! How much of an attention can run before remote keys arrive, where one kernel waits for them inside.

use counterpoint_mask::{Band, Range};

use crate::CostModel;

/// What of an attention can be done before keys arrive that come while it runs, in unmasked pairs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReadyWork {
    /// All pairs.
    all: u64,
    /// Of query rows that see no key that arrives.
    ready: u64,
    /// Of the other query rows, with keys that are there.
    begun: u64,
    /// Those rows.
    waiting_rows: usize,
}

impl ReadyWork {
    /// Of `bands`, whose keys arrive from row `own_rows` on.
    pub fn of(bands: &[Band], own_rows: usize) -> Self {
        let area = |bands: &[Band]| bands.iter().map(Band::area).sum::<u64>();
        let mut own = Vec::with_capacity(bands.len());
        let mut waiting = Vec::with_capacity(bands.len());
        for band in bands {
            let (there, arriving) = band.cut_cols(own_rows);
            own.push(there);
            waiting.extend(arriving.trim().map(|band| band.q_range));
        }
        let waiting = Range::merged(waiting);
        // They are ascending, so a band looks at those that it touches and no others.
        let of_waiting = |band: &Band| -> u64 {
            let first = waiting.partition_point(|rows| rows.end <= band.q_range.start);
            let touched = waiting[first..].iter().take_while(|rows| rows.start < band.q_range.end);
            touched.map(|rows| band.clip(rows, &band.k_range).area()).sum()
        };
        let begun = own.iter().map(of_waiting).sum();
        Self {
            all: area(bands),
            ready: area(&own) - begun,
            begun,
            waiting_rows: waiting.iter().map(Range::len).sum(),
        }
    }

    /// The part of the whole: rows that need to wait for nothing, and of the others as many as `heads` of them are worked on at
    /// once, up to the last of `parts` in which keys arrive.
    pub fn part(&self, heads: usize, parts: usize, cost: &CostModel) -> f64 {
        let at_once = cost.tiles.map_or(0.0, |tiles| {
            let waiting = self.waiting_rows * heads;
            ((tiles.workers * tiles.forward.tile_rows) as f64 / waiting.max(1) as f64).min(1.0)
        });
        let arriving = (self.all - self.ready - self.begun) as f64;
        let taken = self.begun as f64 + arriving * (1.0 - 1.0 / parts.max(1) as f64);
        (self.ready as f64 + taken * at_once) / self.all.max(1) as f64
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Mask;

    use super::*;

    #[test]
    fn rows_that_see_nothing_that_arrives_are_ready() {
        let cost = CostModel { tiles: None, ..CostModel::H200 };
        let work = |mask: &str, own_rows: usize| {
            let mask: Mask = mask.parse().unwrap();
            ReadyWork::of(&mask.bands().collect::<Vec<_>>(), own_rows)
        };
        // Two documents, the second of which sees nothing but keys that arrive.
        assert_eq!(work("varlen-full:lengths=64,64", 64).part(1, 1, &cost), 0.5);
        assert_eq!(work("full:128", 64).part(1, 8, &cost), 0.0);
        assert_eq!(work("full:128", 128).part(1, 1, &cost), 1.0);
        let causal = work("causal:128", 64);
        assert_eq!((causal.ready, causal.begun, causal.waiting_rows), (64 * 65 / 2, 64 * 64, 64));
        // A GPU begins with the others too, and goes on as parts of their keys come.
        assert_eq!(work("full:128", 64).part(1, 1, &CostModel::H200), 0.5);
        assert_eq!(work("full:128", 64).part(1, 4, &CostModel::H200), 0.875);
        // Half of these rows are worked on at once.
        let rows = 2 * 132 * 128;
        let long = work(&format!("full:{rows}"), rows / 2);
        assert_eq!((long.part(1, 1, &CostModel::H200), long.part(1, 2, &CostModel::H200)), (0.25, 0.375));
    }
}

//! How often tiles read each segment of rows: by it a backward kernel knows that a segment of dq is finished.

use super::{TileDirection, TileSchedule};

impl TileSchedule {
    /// How many rows of each segment of `len` rows of the inner axis the tiles read in all: every row counts once for each
    /// tile that reads it. A kernel whose tiles add to such rows knows by it when a segment is finished. Rows that no tile
    /// reads count nothing.
    ///
    /// # Panics
    /// When `len` is 0.
    pub fn row_reads(&self, len: usize) -> Vec<u32> {
        let rows = match self.config.direction {
            TileDirection::Forward => self.k_rows,
            TileDirection::Backward => self.q_rows,
        };
        let segments = rows.div_ceil(len);
        // Of each segment, what its own partly read rows are, and by how many tiles more it is read whole than the one
        // before. Sums wrap as long as they are not whole.
        let mut reads = vec![0_u32; segments];
        let mut more = vec![0_u32; segments + 1];
        for run in self.tiles.iter().flat_map(|tile| self.runs_of(tile)) {
            let (start, end) = (run.start as usize, run.end as usize);
            let (first, last) = (start / len, (end - 1) / len);
            if first == last {
                reads[first] += (end - start) as u32;
                continue;
            }
            reads[first] += ((first + 1) * len - start) as u32;
            reads[last] += (end - last * len) as u32;
            more[first + 1] = more[first + 1].wrapping_add(1);
            more[last] = more[last].wrapping_sub(1);
        }
        let mut whole = 0_u32;
        for (reads, more) in reads.iter_mut().zip(more) {
            whole = whole.wrapping_add(more);
            *reads += whole * len as u32;
        }
        reads
    }
}

#[cfg(test)]
mod tests {
    use counterpoint_mask::Mask;

    use super::super::{TileDirection, TileSchedule, TileScheduleConfig};

    #[test]
    fn rows_count_once_for_each_tile() {
        for text in
            ["causal:1000", "varlen-causal:lengths=3,500,64,129,304", "sliding-window:777,left=100,right=3"]
        {
            let mask: Mask = text.parse().unwrap();
            let bands: Vec<_> = mask.bands().collect();
            let config = TileScheduleConfig::new(TileDirection::Backward, 128, 64);
            let schedule = TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), &config).unwrap();
            for len in [1, 64, 100, 2000] {
                let mut counted = vec![0; mask.seqlen_q().div_ceil(len)];
                for run in schedule.tiles().iter().flat_map(|tile| schedule.runs_of(tile)) {
                    (run.start..run.end).for_each(|row| counted[row as usize / len] += 1);
                }
                assert_eq!(schedule.row_reads(len), counted, "{text} by {len}");
            }
        }
    }
}

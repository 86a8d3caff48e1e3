//! Owners of rows in global order, and where rows lie on their owners.

use counterpoint_mask::Range;

use crate::Dispatch;

/// Neighbouring rows of one owner: as long as possible, so the next run belongs to somebody else.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Global rows.
    pub range: Range,
    /// Their owner.
    pub rank: u32,
    /// The owner's local row that holds `range.start`.
    pub local_start: usize,
}

impl Run {
    /// The owner's local rows that hold `rows`, which must lie inside the run.
    pub fn local(&self, rows: &Range) -> Range {
        let start = self.local_start + (rows.start - self.range.start);
        Range::new(start, start + rows.len())
    }
}

/// A dispatch seen from the sequence: who owns row `x`, in global order.
#[derive(Clone, Debug)]
pub struct Runs {
    runs: Vec<Run>,
    /// The run of every chunk; looking up a row costs one division.
    run_of_chunk: Vec<u32>,
    chunk_size: usize,
}

impl Runs {
    /// Of this dispatch.
    pub fn new(dispatch: &Dispatch) -> Self {
        let mut owner = vec![0_u32; dispatch.num_chunks()];
        for rank in 0..dispatch.cp_size() {
            for &chunk in dispatch.chunks(rank) {
                owner[chunk as usize] = rank as u32;
            }
        }
        let mut runs: Vec<Run> = Vec::new();
        let mut run_of_chunk = Vec::with_capacity(owner.len());
        // Local rows follow global order, so a rank's next local row is the number of its rows met so far.
        let mut met = vec![0_usize; dispatch.cp_size()];
        for (chunk, &rank) in owner.iter().enumerate() {
            let range = dispatch.chunk_range(chunk);
            match runs.last_mut() {
                Some(last) if last.rank == rank => last.range.end = range.end,
                _ => runs.push(Run { range, rank, local_start: met[rank as usize] }),
            }
            met[rank as usize] += range.len();
            run_of_chunk.push((runs.len() - 1) as u32);
        }
        Self { runs, run_of_chunk, chunk_size: dispatch.chunk_size() }
    }

    /// All runs in global order.
    pub fn all(&self) -> &[Run] {
        &self.runs
    }

    /// The runs that hold a row of `rows`, in global order; none when `rows` is empty.
    pub fn overlapping(&self, rows: &Range) -> &[Run] {
        if rows.is_empty() {
            return &[];
        }
        let first = self.run_of_chunk[rows.start / self.chunk_size] as usize;
        let last = self.run_of_chunk[(rows.end - 1) / self.chunk_size] as usize;
        &self.runs[first..=last]
    }
}

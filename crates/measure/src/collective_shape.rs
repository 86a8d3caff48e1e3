//! A collective of tokens by itself, timed and checked.

use counterpoint_exec::{Backend, ExecError, Machine};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GemmCollective};
use counterpoint_reference::LinearSample;
use counterpoint_schedule::{MatrixShape, RankOf, lower_collective, travel_seconds};

use crate::contents::Contents;
use crate::processes::Processes;
use crate::timed::{Expected, Repeats, check, run};

/// A collective of tokens by itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CollectiveShape {
    /// Which.
    pub collective: GemmCollective,
    /// Ranks.
    pub ranks: usize,
    /// Rows that each rank owns.
    pub rows: usize,
    /// Elements of a row.
    pub columns: usize,
    /// Element type.
    pub dtype: DType,
}

impl CollectiveShape {
    /// Bytes of all ranks' rows, which is the size of the collective as nccl-tests counts it.
    pub fn bytes(&self) -> u64 {
        (self.ranks * self.rows * self.columns * self.dtype.size()) as u64
    }

    /// Bytes that the link of each rank carries over those of the collective: what makes bus bandwidth of a rate.
    pub fn bus_factor(&self) -> f64 {
        let once = (self.ranks - 1) as f64 / self.ranks as f64;
        if self.collective == GemmCollective::AllReduce { 2.0 * once } else { once }
    }

    /// Times it: of every counted run, a rank's mean seconds of the gather or reduction, and of an all-reduce's way back. Elements of the
    /// sample's rows are compared with what they must be, all of a row.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when an element is not what it must be; whatever ends a run.
    pub fn measure<M: Machine>(
        &self,
        machine: &M,
        processes: Processes<'_>,
        timing: &Repeats,
        sample: LinearSample,
    ) -> Result<Vec<[f64; 2]>, ExecError> {
        let Self { collective, ranks, rows, columns, dtype } = *self;
        let shape = MatrixShape { rows, columns };
        let lower = |rank| lower_collective(collective, RankOf { rank, ranks }, shape, dtype);
        let (timelines, prepared) = run(machine, processes, ranks, timing, lower)?;
        let held = if collective == GemmCollective::ReduceScatter { rows } else { rows * ranks };
        let (rows, columns) = (sample.of(Range::new(0, held)), Vec::from_iter(0..columns));
        for rank in &prepared {
            let number = rank.backend().rank();
            check::<M>(rank, "to", [&rows, &columns], |row, column| self.wanted(number, row, column))?;
        }
        Ok(timelines.iter().map(|timeline| travel_seconds(collective, timeline)).collect())
    }

    /// An element of a rank's result.
    fn wanted(&self, rank: usize, row: usize, column: usize) -> Expected {
        let at = |row: usize| row * self.columns + column;
        let sum = |row: usize| (0..self.ranks).map(|from| Contents::of(from, 0).at(at(row))).sum();
        let value = match self.collective {
            GemmCollective::AllGather => Contents::of(row / self.rows, 0).at(at(row % self.rows)),
            GemmCollective::ReduceScatter => sum(rank * self.rows + row),
            GemmCollective::AllReduce => sum(row),
        };
        Expected { value, partials: 0.0 }
    }
}

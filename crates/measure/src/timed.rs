//! Programs on the ranks of a machine, to be timed: made ready, run some times, and their results looked at.

use std::time::Duration;

use counterpoint_exec::{Backend, ExecError, Group, Machine, Prepared, TensorFault, WorldConfig};
use counterpoint_reference::half_unit;
use counterpoint_schedule::{BufferRole, BufferSpec, Program, Timeline};

use crate::contents::Contents;
use crate::processes::Processes;

/// How things are timed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Repeats {
    /// Limit of every wait.
    pub limit: Duration,
    /// Runs before those that count.
    pub warmups: usize,
    /// Runs that count, at least 1; a time is their median, the lesser of the two in the middle.
    pub iterations: usize,
    /// Once two or more runs that count have taken so long together, no more follow; likewise one or more of those before them a quarter
    /// of it.
    pub enough: Duration,
}

pub(crate) type TimedRank<M> = Prepared<<M as Machine>::Backend, <M as Machine>::Transport>;

/// Runs every rank's Program on inputs that are [`Contents`]; the timelines of the counted runs, and the ranks here with the last one's
/// results. What a run must write is NaN before it.
pub(crate) fn run<M: Machine>(
    machine: &M,
    processes: Processes<'_>,
    ranks: usize,
    timing: &Repeats,
    lower: impl Fn(usize) -> Program,
) -> Result<(Vec<Timeline>, Vec<TimedRank<M>>), ExecError> {
    let config = WorldConfig { limit: timing.limit, poison: true, ..WorldConfig::default() };
    let programs: Vec<Program> = (0..ranks).map(lower).collect();
    let bytes = programs.iter().flat_map(|program| &program.buffers).map(BufferSpec::bytes);
    machine.check_memory(bytes.fold(0, u64::saturating_add), 0)?;
    let group = Group::connect(machine, ranks, config)?;
    let prepared = group.prepare(|rank| programs[rank].clone(), None);
    let mut prepared: Vec<TimedRank<M>> = prepared.map_err(|error| group.fail_with(error))?;
    for rank in &mut prepared {
        // What is added to has contents too.
        let is_given = |spec: &&BufferSpec| matches!(spec.role, BufferRole::Input | BufferRole::Updated);
        let inputs = rank.program().buffers.iter().filter(is_given);
        for (index, spec) in inputs.cloned().enumerate().collect::<Vec<_>>() {
            let elements = Contents::of(rank.program().rank, index).elements(spec.dtype);
            let buffer = rank.backend().upload_repeated(&spec, &elements)?;
            rank.bind(&spec.name, buffer)?;
        }
    }
    let mut runs = |most: usize, least: usize, enough: Duration| -> Result<Vec<Timeline>, ExecError> {
        let enough = enough.as_secs_f64();
        let (mut timelines, mut spent) = (Vec::new(), 0.0);
        while timelines.len() < most && (timelines.len() < least || spent < enough) {
            machine.barrier("a run")?;
            let timeline = processes.joined(Prepared::run_ranks(&mut prepared)?)?;
            spent += timeline.duration();
            timelines.push(timeline);
        }
        Ok(timelines)
    };
    runs(timing.warmups, 1, timing.enough / 4)?;
    let timelines = runs(timing.iterations.max(1), 2, timing.enough)?;
    Ok((timelines, prepared))
}

/// What an element of a result must be.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(crate) struct Expected {
    /// Without any rounding.
    pub(crate) value: f64,
    /// The sum of the magnitudes of the ranks' partial sums of it, each of which is rounded before they are summed; 0 where nothing is.
    pub(crate) partials: f64,
}

/// Compares elements of a rank's result with what they must be: those of these rows and columns.
///
/// # Errors
/// [`ExecError::Tensor`] with the first that is not.
pub(crate) fn check<M: Machine>(
    rank: &TimedRank<M>,
    name: &str,
    [rows, columns]: [&[usize]; 2],
    wanted: impl Fn(usize, usize) -> Expected,
) -> Result<(), ExecError> {
    let wrong = |reason: TensorFault| ExecError::tensor(name, reason);
    let buffer = rank.buffer(name).ok_or_else(|| wrong(TensorFault::Missing))?;
    let (backend, Program { name: program, rank: number, .. }) = (rank.backend(), rank.program());
    // Rows that lie together come at once.
    for rows in rows.chunk_by(|row, next| row + 1 == *next) {
        let tensor = backend.download_rows(buffer, rows[0]..rows[0] + rows.len())?;
        let (found, half, width) = (tensor.to_f64(), half_unit(tensor.dtype()), tensor.row_elements());
        for (index, &row) in rows.iter().enumerate() {
            for &column in columns {
                let Expected { value, partials } = wanted(row, column);
                let bound = 1.02 * half * (value.abs() + partials);
                let found = found[index * width + column];
                // NaN is within no bound.
                let is_right = (found - value).abs() <= bound;
                if !is_right {
                    return Err(wrong(TensorFault::WrongAfter {
                        row,
                        column,
                        value: found,
                        program: program.clone(),
                        rank: *number,
                        wanted: value,
                    }));
                }
            }
        }
    }
    Ok(())
}

/// The median; of an even number of times the lesser in the middle, for what holds a run up makes it longer.
pub(crate) fn median(times: impl Iterator<Item = f64>) -> f64 {
    let mut times: Vec<f64> = times.collect();
    times.sort_by(f64::total_cmp);
    times.get(times.len().saturating_sub(1) / 2).copied().unwrap_or(0.0)
}

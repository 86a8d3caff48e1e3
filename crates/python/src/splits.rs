//! How rows are cut for a group-cast and for the group-reduce that mirrors it, as a value of Python's.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use counterpoint_plan::{GroupPart, GroupPartError};
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;

use crate::error::{Raised, raise};
use crate::integers::{described, list, listed};
use crate::numbered::Numbers;
use crate::rows::rows_of;

impl Raised for GroupPartError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

/// How one rank's rows are cut for `group_cast`, and for `group_reduce`, which mirrors it. A value.
///
/// A group-cast reads rows that lie split after split, `input_split_sizes` of them, and sends each split to the ranks that `dst_ranks` has for
/// it: none, some or all, this one too. What comes lies split after split, `output_split_sizes` rows of the ranks `src_ranks`. From a
/// rank splits come in the order in which it sends them. A group-reduce goes the other way: it reads partial sums of `output_split_sizes`
/// rows and brings each split to its source, which combines what comes from all `dst_ranks`.
#[pyclass(frozen, eq, hash, module = "counterpoint._native")]
pub(crate) struct Splits {
    pub(crate) part: Arc<GroupPart>,
    hash: u64,
    number: u64,
}

static NUMBERS: Numbers<GroupPart> = Numbers::new();

impl PartialEq for Splits {
    fn eq(&self, other: &Self) -> bool {
        self.part == other.part
    }
}

impl Eq for Splits {}

impl Hash for Splits {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.hash.hash(state);
    }
}

impl Splits {
    fn of(part: GroupPart) -> Self {
        Self::numbered(Arc::new(part), NUMBERS.next())
    }

    fn numbered(part: Arc<GroupPart>, number: u64) -> Self {
        let mut hasher = DefaultHasher::new();
        part.hash(&mut hasher);
        Self { hash: hasher.finish(), part, number }
    }
}

#[pymethods]
impl Splits {
    #[new]
    fn new(
        py: Python<'_>,
        input_split_sizes: &Bound<'_, PyAny>,
        dst_ranks: &Bound<'_, PyAny>,
        output_split_sizes: &Bound<'_, PyAny>,
        src_ranks: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let wanted = "a list of whole numbers, none negative";
        let sent: Vec<usize> = list("input_split_sizes", wanted, input_split_sizes)?;
        let held: Vec<usize> = list("output_split_sizes", wanted, output_split_sizes)?;
        let sources: Vec<u32> = list("src_ranks", "a list of ranks", src_ranks)?;
        let of_splits = "a list that has, for each split, a list of ranks";
        let mistaken =
            |_| PyTypeError::new_err(format!("dst_ranks must be {of_splits}, not {}", described(dst_ranks)));
        let destinations = listed(dst_ranks)?.try_iter().map_err(mistaken)?;
        let destinations = destinations
            .map(|ranks| list::<u32>("dst_ranks", of_splits, &ranks?))
            .collect::<PyResult<Vec<_>>>()?;
        for (names, counts) in [
            (["input_split_sizes", "dst_ranks"], [sent.len(), destinations.len()]),
            (["output_split_sizes", "src_ranks"], [held.len(), sources.len()]),
        ] {
            if counts[0] != counts[1] {
                let message = format!(
                    "{} has {} splits and {} {}; each split has a size and its ranks",
                    names[0], counts[0], names[1], counts[1]
                );
                return Err(raise(py, "PlanError", &message, &[]));
            }
        }
        check_sum(py, "input_split_sizes", &sent)?;
        check_sum(py, "output_split_sizes", &held)?;
        let input = sent.into_iter().zip(destinations.iter().map(Vec::as_slice));
        Ok(Self::of(GroupPart::from_splits(input, held.into_iter().zip(sources))))
    }

    /// Of `rank` in an all-gather of `counts[r]` rows of every rank `r`; mirrored, a reduce-scatter.
    #[staticmethod]
    fn all_gather(py: Python<'_>, rank: usize, counts: &Bound<'_, PyAny>) -> PyResult<Self> {
        let counts: Vec<usize> = list("counts", "a list of a number of rows for each rank", counts)?;
        check_rank(py, rank, counts.len())?;
        check_sum(py, "counts", &counts)?;
        Ok(Self::of(GroupPart::all_gather_v(rank, &counts)))
    }

    /// Of `rank` in an all-to-all in which rank `s` sends `counts[s][d]` rows to rank `d`; mirrored, the way back.
    #[staticmethod]
    fn all_to_all(py: Python<'_>, rank: usize, counts: &Bound<'_, PyAny>) -> PyResult<Self> {
        let wanted = "an array of [ranks, ranks] numbers of rows";
        let mistaken =
            |_| PyTypeError::new_err(format!("counts must be {wanted}, not {}", described(counts)));
        let of_ranks = listed(counts)?.try_iter().map_err(mistaken)?;
        let counts = of_ranks
            .map(|of_rank| list("counts", wanted, &of_rank?))
            .collect::<PyResult<Vec<Vec<usize>>>>()?;
        check_rank(py, rank, counts.len())?;
        if let Some(short) = counts.iter().position(|of_rank| of_rank.len() != counts.len()) {
            let message = format!(
                "counts has {} rows and row {short} has {} numbers; it is [ranks, ranks]",
                counts.len(),
                counts[short].len()
            );
            return Err(raise(py, "PlanError", &message, &[]));
        }
        check_sum(py, "counts", &counts[rank])?;
        check_sum(py, "counts", counts.iter().map(|of_rank| &of_rank[rank]))?;
        Ok(Self::of(GroupPart::all_to_all_v(rank, &counts)))
    }

    /// By which compiled operators know it, as long as it lives.
    #[getter]
    fn number(&self) -> u64 {
        NUMBERS.keep(self.number, &self.part);
        self.number
    }

    /// The splits that a compiled operator was given as a number; `None` where they are gone.
    #[staticmethod]
    fn of_number(number: u64) -> Option<Self> {
        NUMBERS.find(number).map(|part| Self::numbered(part, number))
    }

    /// Rows of each split of the input.
    #[getter]
    fn input_split_sizes(&self) -> Vec<usize> {
        self.part.owned.iter().map(|split| split.rows.len()).collect()
    }

    /// Where each of them goes, in ascending order.
    #[getter]
    fn dst_ranks(&self) -> Vec<Vec<u32>> {
        self.part.owned.iter().map(|split| split.ranks.clone()).collect()
    }

    /// Rows of each split of the output.
    #[getter]
    fn output_split_sizes(&self) -> Vec<usize> {
        self.part.remote.iter().map(|split| split.rows.len()).collect()
    }

    /// Where each of them comes from.
    #[getter]
    fn src_ranks(&self) -> Vec<u32> {
        self.part.remote.iter().map(|split| split.rank).collect()
    }

    /// Rows of the input and of the output of a group-cast.
    #[getter]
    fn rows(&self) -> (usize, usize) {
        let [input, output] = rows_of(&self.part);
        (input, output)
    }

    fn __repr__(&self) -> String {
        format!(
            "Splits({:?}, {:?}, {:?}, {:?})",
            self.input_split_sizes(),
            self.dst_ranks(),
            self.output_split_sizes(),
            self.src_ranks()
        )
    }
}

/// Refuses rows that no number counts.
fn check_sum<'a>(py: Python<'_>, name: &str, sizes: impl IntoIterator<Item = &'a usize>) -> PyResult<()> {
    match sizes.into_iter().try_fold(0_usize, |sum, size| sum.checked_add(*size)) {
        Some(_) => Ok(()),
        None => {
            let message = format!("{name} add up to more rows than a computer can count");
            Err(raise(py, "PlanError", &message, &[]))
        }
    }
}

fn check_rank(py: Python<'_>, rank: usize, ranks: usize) -> PyResult<()> {
    if rank < ranks {
        return Ok(());
    }
    let message = format!("rank is {rank}, and counts is of {ranks} ranks");
    Err(raise(py, "PlanError", &message, &[]))
}

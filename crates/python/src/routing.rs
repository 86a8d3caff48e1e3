//! Which experts each token goes to, as a value of Python's.

use std::hash::{Hash, Hasher};
use std::sync::Arc;

use counterpoint_plan::{Routing as Native, RoutingError};
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::error::{Raised, engine, raise};
use crate::integers::{described, listed};
use crate::numbered::Numbers;

impl Raised for RoutingError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

static NUMBERS: Numbers<Native> = Numbers::new();

/// What makes a routing again, and of what: its experts, choices of a token, and the bytes of every rank's.
type Reduced<'py> = (Bound<'py, PyAny>, (usize, usize, Vec<Bound<'py, PyBytes>>));

/// The experts of every token of every rank, of one step. A value.
#[pyclass(frozen, eq, hash, module = "counterpoint._native")]
pub(crate) struct Routing {
    pub(crate) native: Arc<Native>,
    number: u64,
}

impl PartialEq for Routing {
    fn eq(&self, other: &Self) -> bool {
        self.native == other.native
    }
}

impl Eq for Routing {}

impl Hash for Routing {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.native.hash(state);
    }
}

#[pymethods]
impl Routing {
    /// Of a router's choices: for every rank an array `[tokens, choices]` of expert numbers, negative where a token has fewer. Experts lie
    /// on the ranks in equal ranges: the first ones on rank 0.
    #[staticmethod]
    fn top_k(py: Python<'_>, experts: usize, ids: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut choices = None;
        let mut of_ranks = Vec::new();
        let ids_of_ranks =
            ids.try_iter().map_err(|_| mistaken("ids", "a list of an array for each rank", ids))?;
        for (rank, of_rank) in ids_of_ranks.enumerate() {
            let (of_rank, name) = (of_rank?, format!("ids[{rank}]"));
            let mut fits = |token: usize, given: usize| match *choices.get_or_insert(given) {
                count if given == count && count > 0 => Ok(()),
                count => {
                    let message = format!(
                        "token {token} of {name} has {given} choices, and other tokens {count}; every token needs the same number, and at \
                         least one: -1 where it has fewer experts"
                    );
                    Err(raise(py, "PlanError", &message, &[]))
                }
            };
            let Some(Matrix { columns, numbers }) = matrix(&of_rank)? else {
                of_ranks.push(listed_ids(&name, &of_rank, fits)?);
                continue;
            };
            if !numbers.is_empty() || columns == 0 {
                fits(0, columns)?;
            }
            of_ranks.push(numbers);
        }
        engine(py, || Native::top_k(experts, choices.unwrap_or(1), &of_ranks)).map(Self::of)
    }

    /// Of rows that lie expert after expert, each of one expert, as a permutation of tokens leaves them: `counts[rank][expert]` of the
    /// `rows[rank]` that the rank has.
    #[staticmethod]
    fn from_counts(
        py: Python<'_>,
        experts: usize,
        counts: &Bound<'_, PyAny>,
        rows: &Bound<'_, PyAny>,
    ) -> PyResult<Self> {
        let wanted = "an array of [ranks, experts] whole numbers, none negative";
        let counts: Vec<Vec<usize>> = items("counts", wanted, counts)?
            .iter()
            .map(|of_rank| numbers("counts", wanted, of_rank))
            .collect::<PyResult<_>>()?;
        let rows = numbers("rows", "a number of rows for each rank, none negative", rows)?;
        engine(py, || Native::from_counts(experts, &counts, &rows)).map(Self::of)
    }

    /// By which compiled operators know it, as long as it lives.
    #[getter]
    fn number(&self) -> u64 {
        NUMBERS.keep(self.number, &self.native);
        self.number
    }

    /// The routing that a compiled operator was given as a number; `None` where it is gone.
    #[staticmethod]
    fn of_number(number: u64) -> Option<Self> {
        NUMBERS.find(number).map(|native| Self { native, number })
    }

    /// Experts of all ranks.
    #[getter]
    fn experts(&self) -> usize {
        self.native.experts()
    }

    /// Number of ranks.
    #[getter]
    fn ranks(&self) -> usize {
        self.native.ranks()
    }

    /// Tokens of each rank.
    #[getter]
    fn tokens(&self) -> Vec<usize> {
        (0..self.native.ranks()).map(|rank| self.native.tokens(rank)).collect()
    }

    /// Rows of each expert: the tokens of all ranks that go to it.
    #[getter]
    fn rows_of_experts(&self) -> Vec<usize> {
        self.native.rows().to_vec()
    }

    /// Rows of the experts of each rank.
    #[getter]
    fn rows(&self) -> Vec<usize> {
        rows_of_ranks(&self.native)
    }

    /// What the rows of a rank's experts are, in their order: the token, counted through those of all ranks, and the expert.
    fn sources(&self, rank: usize) -> PyResult<(Vec<i64>, Vec<i64>)> {
        let routing = &self.native;
        if rank >= routing.ranks() {
            return Err(PyIndexError::new_err(format!("rank {rank} of {}", routing.ranks())));
        }
        let here = routing.experts_of(rank);
        let counts = &routing.rows()[here.start..here.end];
        let tokens = routing.tokens_of_rows(rank).into_iter().map(i64::from).collect();
        let of_expert = |(&count, expert): (&usize, usize)| std::iter::repeat_n(expert as i64, count);
        let experts = counts.iter().zip(here.start..).flat_map(of_expert).collect();
        Ok((tokens, experts))
    }

    /// The same as the bytes of 64-bit numbers, which a tensor takes at once.
    fn source_bytes<'py>(
        &self,
        py: Python<'py>,
        rank: usize,
    ) -> PyResult<(Bound<'py, PyBytes>, Bound<'py, PyBytes>)> {
        let routing = &self.native;
        if rank >= routing.ranks() {
            return Err(PyIndexError::new_err(format!("rank {rank} of {}", routing.ranks())));
        }
        let tokens = routing.tokens_of_rows(rank);
        let size = size_of::<i64>() * tokens.len();
        let of_tokens = PyBytes::new_with(py, size, |bytes| {
            let places = bytes.as_chunks_mut::<{ size_of::<i64>() }>().0;
            let all = places.iter_mut().zip(&tokens);
            all.for_each(|(place, token)| *place = i64::from(*token).to_ne_bytes());
            Ok(())
        })?;
        let of_experts = PyBytes::new_with(py, size, |bytes| {
            let mut places = bytes.as_chunks_mut::<{ size_of::<i64>() }>().0;
            let here = routing.experts_of(rank);
            for (expert, &count) in (here.start..).zip(&routing.rows()[here.start..here.end]) {
                let (of_expert, later) = places.split_at_mut(count);
                of_expert.fill((expert as i64).to_ne_bytes());
                places = later;
            }
            Ok(())
        })?;
        Ok((of_tokens, of_experts))
    }

    /// The routing in which no expert has more rows than that, and how many were dropped: those of the last tokens of the last ranks.
    fn within(&self, rows_of_expert: usize) -> (Self, usize) {
        let (routing, dropped) = self.native.within(rows_of_expert);
        (Self::of(routing), dropped)
    }

    /// What `__reduce__` names: for every rank the bytes of `choices` 32-bit numbers a token.
    #[staticmethod]
    fn of_bytes(
        py: Python<'_>,
        experts: usize,
        choices: usize,
        ids: Vec<Bound<'_, PyBytes>>,
    ) -> PyResult<Self> {
        let number = |bytes: &[u8; 4]| u32::from_le_bytes(*bytes);
        let of_rank = |ids: Bound<'_, PyBytes>| ids.as_bytes().as_chunks().0.iter().map(number).collect();
        let ids: Vec<Vec<u32>> = ids.into_iter().map(of_rank).collect();
        engine(py, || Native::top_k(experts, choices, &ids)).map(Self::of)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let routing = &self.native;
        let of_rank =
            |rank: usize| (0..routing.tokens(rank)).map(move |token| routing.experts_of_token(rank, token));
        let choices = (0..routing.ranks()).flat_map(of_rank).map(<[u32]>::len).max().unwrap_or(0).max(1);
        let bytes_of = |rank: usize| {
            let missing = |given: &[u32]| std::iter::repeat_n(Native::NO_EXPERT, choices - given.len());
            let ids = of_rank(rank).flat_map(|given| given.iter().copied().chain(missing(given)));
            PyBytes::new(py, &ids.flat_map(u32::to_le_bytes).collect::<Vec<u8>>())
        };
        let ids = (0..routing.ranks()).map(bytes_of).collect();
        Ok((py.get_type::<Self>().getattr("of_bytes")?, (routing.experts(), choices, ids)))
    }

    fn __repr__(&self) -> String {
        let (tokens, rows) = (self.tokens(), self.rows());
        format!("Routing(experts={}, tokens={tokens:?}, rows={rows:?})", self.native.experts())
    }
}

impl Routing {
    fn of(native: Native) -> Self {
        Self { native: Arc::new(native), number: NUMBERS.next() }
    }
}

/// Rows of the experts of each rank.
pub(crate) fn rows_of_ranks(routing: &Native) -> Vec<usize> {
    let rows = routing.rows();
    let of_rank = |rank: usize| {
        let experts = routing.experts_of(rank);
        rows[experts.start..experts.end].iter().sum()
    };
    (0..routing.ranks()).map(of_rank).collect()
}

/// An expert of [`Native::top_k`]; what is too large for one's number is one that does not exist.
fn expert(id: i64) -> u32 {
    let most = Native::NO_EXPERT - 1;
    if id < 0 { Native::NO_EXPERT } else { id.min(i64::from(most)) as u32 }
}

/// Experts of the tokens of a rank that are no array of whole numbers, token after token, of which each `fits`.
fn listed_ids(
    name: &str,
    of_rank: &Bound<'_, PyAny>,
    mut fits: impl FnMut(usize, usize) -> PyResult<()>,
) -> PyResult<Vec<u32>> {
    let wanted = "an array of [tokens, choices] whole numbers";
    let mut flat = Vec::new();
    for (token, of_token) in items(name, wanted, &listed(of_rank)?)?.iter().enumerate() {
        let given: Vec<i64> = of_token.extract().map_err(|_| mistaken(name, wanted, of_rank))?;
        fits(token, given.len())?;
        flat.extend(given.into_iter().map(expert));
    }
    Ok(flat)
}

/// Experts of tokens, row after row.
struct Matrix {
    columns: usize,
    numbers: Vec<u32>,
}

/// The experts in an array of NumPy's or a tensor of PyTorch's, by its bytes: as lists of Python's 64 thousand take 3 ms. `None` where it is
/// something else than whole numbers with two axes.
fn matrix(value: &Bound<'_, PyAny>) -> PyResult<Option<Matrix>> {
    let array = match value.getattr_opt("numpy")? {
        // A tensor, which may lie on a GPU; without NumPy it has no array.
        Some(_) => {
            let on_host = value.call_method0("detach").and_then(|tensor| tensor.call_method0("cpu"));
            match on_host.and_then(|tensor| tensor.call_method0("numpy")) {
                Ok(array) => array,
                Err(_) => return Ok(None),
            }
        }
        None if value.hasattr("tobytes")? && value.hasattr("dtype")? => value.clone(),
        None => return Ok(None),
    };
    let dtype = array.getattr("dtype")?;
    let Ok(shape) = array.getattr("shape")?.extract::<Vec<usize>>() else { return Ok(None) };
    let (kind, size): (String, usize) =
        (dtype.getattr("kind")?.extract()?, dtype.getattr("itemsize")?.extract()?);
    let &[_, columns] = &shape[..] else { return Ok(None) };
    if !dtype.getattr("isnative")?.extract::<bool>()? {
        return Ok(None);
    }
    let bytes = array.call_method0("tobytes")?;
    let bytes = bytes.cast::<PyBytes>()?.as_bytes();
    /// The experts, as numbers of a type.
    macro_rules! numbers {
        ($number:ty) => {
            bytes
                .as_chunks::<{ size_of::<$number>() }>()
                .0
                .iter()
                .map(|bytes| expert(i64::try_from(<$number>::from_ne_bytes(*bytes)).unwrap_or(i64::MAX)))
                .collect()
        };
    }
    let numbers = match (kind.as_str(), size) {
        ("i", 8) => numbers!(i64),
        ("i", 4) => numbers!(i32),
        ("i", 2) => numbers!(i16),
        ("i", 1) => numbers!(i8),
        ("u", 8) => numbers!(u64),
        ("u", 4) => numbers!(u32),
        ("u", 2) => numbers!(u16),
        ("u", 1) => numbers!(u8),
        _ => return Ok(None),
    };
    Ok(Some(Matrix { columns, numbers }))
}

fn items<'py>(name: &str, wanted: &str, value: &Bound<'py, PyAny>) -> PyResult<Vec<Bound<'py, PyAny>>> {
    let iterator = listed(value)?.try_iter().map_err(|_| mistaken(name, wanted, value))?;
    iterator.collect()
}

fn numbers(name: &str, wanted: &str, value: &Bound<'_, PyAny>) -> PyResult<Vec<usize>> {
    listed(value)?.extract().map_err(|_| mistaken(name, wanted, value))
}

fn mistaken(name: &str, wanted: &str, value: &Bound<'_, PyAny>) -> PyErr {
    PyTypeError::new_err(format!("{name} must be {wanted}, not {}", described(value)))
}

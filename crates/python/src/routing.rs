//! Which experts each token goes to, as a value of Python's.

use std::sync::Arc;

use counterpoint_plan::{Routing as Native, RoutingError};
use pyo3::exceptions::{PyIndexError, PyTypeError};
use pyo3::prelude::*;

use crate::error::{Raised, engine, raise};
use crate::integers::{described, listed};

impl Raised for RoutingError {
    fn class(&self) -> &'static str {
        "PlanError"
    }
}

/// The experts of every token of every rank, of one step. A value.
#[pyclass(frozen, eq, hash, module = "counterpoint._native")]
#[derive(PartialEq, Eq, Hash)]
pub(crate) struct Routing {
    pub(crate) native: Arc<Native>,
}

#[pymethods]
impl Routing {
    /// Of a router's choices: for every rank an array `[tokens, choices]` of expert numbers, negative where a token has fewer. Experts lie
    /// on the ranks in equal stretches: the first ones on rank 0.
    #[staticmethod]
    fn top_k(py: Python<'_>, experts: usize, ids: &Bound<'_, PyAny>) -> PyResult<Self> {
        let mut choices = None;
        let mut of_ranks = Vec::new();
        for (rank, of_rank) in items("ids", "a list of an array for each rank", ids)?.iter().enumerate() {
            let name = format!("ids[{rank}]");
            let wanted = "an array of [tokens, choices] whole numbers";
            let mut flat = Vec::new();
            for (token, of_token) in items(&name, wanted, &listed(of_rank)?)?.iter().enumerate() {
                let given: Vec<i64> = of_token.extract().map_err(|_| mistaken(&name, wanted, of_rank))?;
                let count = *choices.get_or_insert(given.len());
                if given.len() != count || count == 0 {
                    let message = format!(
                        "token {token} of {name} has {} choices, and other tokens {count}; every token needs the same number, and at \
                         least one: -1 where it has fewer experts",
                        given.len()
                    );
                    return Err(raise(py, "PlanError", &message, &[]));
                }
                // What is too large for a number of an expert is one that does not exist.
                let expert = |id: i64| match id {
                    ..0 => Native::NO_EXPERT,
                    _ => u32::try_from(id).unwrap_or(Native::NO_EXPERT - 1).min(Native::NO_EXPERT - 1),
                };
                flat.extend(given.into_iter().map(expert));
            }
            of_ranks.push(flat);
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
        self.native.rows()
    }

    /// Rows of the experts of each rank.
    #[getter]
    fn rows(&self) -> Vec<usize> {
        rows_of_ranks(&self.native)
    }

    /// What the rows of a rank's experts are, in their order: the token, counted through those of all ranks, and the expert.
    fn sources(&self, rank: usize) -> PyResult<(Vec<usize>, Vec<usize>)> {
        let routing = &self.native;
        if rank >= routing.ranks() {
            return Err(PyIndexError::new_err(format!("rank {rank} of {}", routing.ranks())));
        }
        let here = routing.experts_of(rank);
        let mut of_experts = vec![Vec::new(); here.len()];
        let mut first = 0;
        for source in 0..routing.ranks() {
            for token in 0..routing.tokens(source) {
                let of_token = routing.experts_of_token(source, token).iter().map(|expert| *expert as usize);
                of_token
                    .filter(|expert| here.contains(*expert))
                    .for_each(|expert| of_experts[expert - here.start].push(first + token));
            }
            first += routing.tokens(source);
        }
        let experts =
            of_experts.iter().zip(here.start..).flat_map(|(rows, expert)| rows.iter().map(move |_| expert));
        let experts = experts.collect();
        Ok((of_experts.concat(), experts))
    }

    /// The routing in which no expert has more rows than that, and how many were dropped: those of the last tokens of the last ranks.
    fn within(&self, rows_of_expert: usize) -> (Self, usize) {
        let (routing, dropped) = self.native.within(rows_of_expert);
        (Self::of(routing), dropped)
    }

    fn __repr__(&self) -> String {
        let (tokens, rows) = (self.tokens(), self.rows());
        format!("Routing(experts={}, tokens={tokens:?}, rows={rows:?})", self.native.experts())
    }
}

impl Routing {
    fn of(native: Native) -> Self {
        Self { native: Arc::new(native) }
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

//! The proof that all ranks were started alike, or the first difference between them in words.

use serde::{Deserialize, Serialize};

use super::{Rendezvous, RendezvousError};
use crate::ExecError;

/// Something that all ranks must have alike, in words: `--mask`, `causal:4k`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Facet {
    /// What it is.
    pub what: String,
    /// What this rank has.
    pub value: String,
}

impl Facet {
    /// `what` is `value` here.
    pub fn new(what: &str, value: impl ToString) -> Self {
        Self { what: what.to_owned(), value: value.to_string() }
    }
}

impl Rendezvous {
    /// Compares what the ranks were given, which all ranks call with their own. Put what explains most first: the version of
    /// the program before what it computed.
    ///
    /// # Errors
    /// [`RendezvousError::Disagreement`] with the first facet that differs and who has what; whatever ended the job.
    pub fn agree(&self, place: &str, facets: &[Facet]) -> Result<(), ExecError> {
        let all = self.gather(place, &facets.to_vec())?;
        // All ranks find the same, so none needs to be notified.
        let all: Vec<(usize, &[Facet])> = all.iter().map(Vec::as_slice).enumerate().collect();
        first_difference(&all).map_or(Ok(()), |error| Err(error.into()))
    }
}

/// The first facet, in the order of the first rank, that some rank has otherwise or lacks; one that the first lacks after those.
pub(super) fn first_difference(all: &[(usize, &[Facet])]) -> Option<RendezvousError> {
    let names = all.iter().flat_map(|(_, facets)| facets.iter()).map(|facet| facet.what.as_str());
    for what in names {
        let mut values: Vec<(String, Vec<usize>)> = Vec::new();
        for &(rank, facets) in all {
            let facet = facets.iter().find(|facet| facet.what == what);
            let value = facet.map_or("missing", |facet| facet.value.as_str());
            match values.iter_mut().find(|(known, _)| known == value) {
                Some((_, ranks)) => ranks.push(rank),
                None => values.push((value.to_owned(), vec![rank])),
            }
        }
        if values.len() > 1 {
            return Some(RendezvousError::Disagreement { what: what.to_owned(), values });
        }
    }
    None
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_difference_names_the_ranks() {
        let facets = |mask: &str| vec![Facet::new("version", 1), Facet::new("--mask", mask)];
        let difference = |all: &[Vec<Facet>]| {
            first_difference(&all.iter().map(Vec::as_slice).enumerate().collect::<Vec<_>>())
        };
        assert_eq!(difference(&[facets("a"), facets("a")]), None);
        let error = difference(&[facets("a"), facets("b"), facets("a"), facets("c")]).unwrap();
        assert_eq!(
            error.to_string(),
            "the ranks disagree: --mask is a on ranks 0 and 2, b on rank 1 and c on rank 3; start all of them with the \
             same program and arguments"
        );
        let more =
            [facets("a"), vec![Facet::new("version", 1), Facet::new("--mask", "a"), Facet::new("x", 0)]];
        assert!(difference(&more).unwrap().to_string().contains("x is missing on rank 0 and 0 on rank 1"));
    }
}

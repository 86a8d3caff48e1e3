//! What is wrong with the results of a layer, of a norm or of a product.

use serde::{Deserialize, Serialize};
use thiserror::Error;

/// What is wrong with results, with the figures of the first element that is. It travels between processes.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum WrongResult {
    /// Another number of tensors than were asked for.
    #[error("{tensors} tensors")]
    Count {
        /// How many there are.
        tensors: usize,
    },
    /// A tensor is not there.
    #[error("{name} is missing")]
    Missing {
        /// The tensor.
        name: String,
    },
    /// A tensor that is not to be there.
    #[error("{name} is there, which nobody asked for")]
    Unasked {
        /// The tensor.
        name: String,
    },
    /// A tensor without the rows or columns that are compared.
    #[error("{name} is {shape:?}, which is too small")]
    TooSmall {
        /// The tensor.
        name: String,
        /// Its shape.
        shape: Vec<usize>,
    },
    /// An element of a product is out of its bound.
    #[error("{name}[{row}, {column}] is {found:e}, not {right:e}: {share:.2} of its bound")]
    Element {
        /// The tensor.
        name: String,
        /// The element's row.
        row: usize,
        /// Its column.
        column: usize,
        /// What it is.
        #[serde(with = "as_text")]
        found: f64,
        /// What it must be.
        #[serde(with = "as_text")]
        right: f64,
        /// How far it errs, as a share of its bound.
        #[serde(with = "as_text")]
        share: f64,
    },
    /// An element of a norm's results is out of its bound.
    #[error("{name}{index:?} is {found:.6e}, not {right:.6e} +- {bound:.1e}")]
    NormElement {
        /// The tensor.
        name: String,
        /// Which of its elements, by row and column where it has both.
        index: Vec<usize>,
        /// What it is.
        #[serde(with = "as_text")]
        found: f64,
        /// What it must be.
        #[serde(with = "as_text")]
        right: f64,
        /// How far it may err.
        #[serde(with = "as_text")]
        bound: f64,
    },
    /// An element of a sum that is rounded once.
    #[error("sum[{row}, {column}] is {found}, not {right}")]
    SumElement {
        /// Its row.
        row: usize,
        /// Its column.
        column: usize,
        /// What it is.
        #[serde(with = "as_text")]
        found: f64,
        /// What it must be.
        #[serde(with = "as_text")]
        right: f64,
    },
    /// The results of one rank.
    #[error("rank {rank}: {reason}")]
    OfRank {
        /// The rank.
        rank: usize,
        /// What is wrong with them.
        reason: Box<WrongResult>,
    },
    /// The results of a layer of experts.
    #[error(transparent)]
    Experts(#[from] counterpoint_exec::ExecError),
    /// Bits that a variant must share with the sequential run.
    #[error("its bits are not those of the sequential run")]
    OtherBits,
}

impl WrongResult {
    /// As it is said of one rank's results.
    #[must_use]
    pub fn of_rank(self, rank: usize) -> Self {
        Self::OfRank { rank, reason: Box::new(self) }
    }
}

/// Numbers as text: JSON has neither NaN nor infinities, and those are wrong results too.
mod as_text {
    use serde::{Deserialize, Deserializer, Serializer, de::Error};

    pub(super) fn serialize<S: Serializer>(number: &f64, to: S) -> Result<S::Ok, S::Error> {
        to.collect_str(number)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(from: D) -> Result<f64, D::Error> {
        String::deserialize(from)?.parse().map_err(D::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sentences_survive_the_way_to_another_process() {
        for found in [1.5, f64::NAN, f64::INFINITY, f64::NEG_INFINITY] {
            let wrong = WrongResult::Element {
                name: "y".to_owned(),
                row: 1,
                column: 2,
                found,
                right: 0.1,
                share: found,
            };
            let wrong = wrong.of_rank(3);
            let json = serde_json::to_string(&wrong).unwrap();
            let read: WrongResult = serde_json::from_str(&json).unwrap();
            assert_eq!(read.to_string(), wrong.to_string());
        }
        let norm = WrongResult::NormElement {
            name: "dweight".to_owned(),
            index: vec![4],
            found: 1.0,
            right: 2.0,
            bound: 0.5,
        };
        assert_eq!(norm.to_string(), "dweight[4] is 1.000000e0, not 2.000000e0 +- 5.0e-1");
    }
}

//! Parts of a selftest's cases for processes that examine it together.

use std::fmt;
use std::num::NonZeroUsize;
use std::str::FromStr;
use std::thread;

use thiserror::Error;

/// Which of a group's cases are examined: every `of`-th, beginning with number `index`. So several processes, on several GPUs or on
/// one, examine a group together, and each case once.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Share {
    index: usize,
    of: usize,
}

impl Share {
    /// Every case.
    pub const ALL: Self = Self { index: 0, of: 1 };

    /// All shares of `of`, at least one.
    pub fn each(of: usize) -> impl Iterator<Item = Self> {
        let of = of.max(1);
        (0..of).map(move |index| Self { index, of })
    }

    /// Whether the case with this number is in it.
    pub fn takes(self, case: usize) -> bool {
        case % self.of == self.index
    }

    /// How many of `cases` it has.
    pub fn count(self, cases: usize) -> usize {
        (cases + self.of - 1 - self.index) / self.of
    }

    /// Its part of the machine's cores, where all shares are examined at the same time.
    pub(super) fn threads(self) -> usize {
        thread::available_parallelism().map_or(1, NonZeroUsize::get).div_ceil(self.of)
    }
}

impl fmt::Display for Share {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.index + 1, self.of)
    }
}

/// A text that names no share.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{text}` is not a share; give one such as 2/3, the second of three")]
pub struct ShareError {
    /// The text.
    pub text: String,
}

/// The first of three is `1/3`.
impl FromStr for Share {
    type Err = ShareError;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let parts =
            text.split_once('/').and_then(|(number, of)| Some((number.parse().ok()?, of.parse().ok()?)));
        match parts {
            Some((number, of)) if (1..=of).contains(&number) => Ok(Self { index: number - 1, of }),
            _ => Err(ShareError { text: text.to_owned() }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_case_is_in_one_share() {
        for of in 1..6 {
            for case in 0..20 {
                assert_eq!(Share::each(of).filter(|share| share.takes(case)).count(), 1);
            }
            for cases in 0..20 {
                assert_eq!(Share::each(of).map(|share| share.count(cases)).sum::<usize>(), cases);
                assert!(Share::each(of).all(|share| {
                    share.count(cases) == (0..cases).filter(|case| share.takes(*case)).count()
                }));
            }
        }
    }

    #[test]
    fn words_are_read_back_and_nonsense_is_not() {
        for share in Share::each(3) {
            assert_eq!(share.to_string().parse(), Ok(share));
        }
        for wrong in ["", "1", "0/3", "4/3", "a/b", "1/0", "1/2/3"] {
            let error = wrong.parse::<Share>().unwrap_err().to_string();
            assert!(error.contains("2/3"), "{error}");
        }
    }
}

//! A number of stages for each pass of attention.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::error::ConfigError;

/// The largest number of remote stages that can be asked for.
pub const MAX_STAGES: usize = 64;

/// How many stages the remote work of a pass is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StageCount {
    /// The number that minimises the predicted makespan.
    Auto,
    /// So many remote stages after stage 0 (the local work), on every rank. 0 is all work at once: one stage that begins with
    /// what needs no received row and takes those as they arrive; its keys begin with the rank's own. Where some rank's own rows are no multiple of
    /// [`KEY_BLOCK`](counterpoint_plan::KEY_BLOCK), or rows cross nodes, that is not to be had, and 0 is as 1.
    Fixed(usize),
}

/// The stages of the forward and of the backward. Written as one number or `auto` for both, or as `forward=N,backward=N`; of a pass
/// that is not named the number is chosen.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(from = "WrittenStages", into = "WrittenStages")]
pub struct PassStages {
    /// Of the forward.
    pub forward: StageCount,
    /// Of the backward.
    pub backward: StageCount,
}

/// As files have it: one for both where they agree.
#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(untagged)]
enum WrittenStages {
    Both(StageCount),
    Each { forward: StageCount, backward: StageCount },
}

impl From<WrittenStages> for PassStages {
    fn from(written: WrittenStages) -> Self {
        match written {
            WrittenStages::Both(count) => count.into(),
            WrittenStages::Each { forward, backward } => Self { forward, backward },
        }
    }
}

impl From<PassStages> for WrittenStages {
    fn from(stages: PassStages) -> Self {
        let PassStages { forward, backward } = stages;
        if forward == backward { Self::Both(forward) } else { Self::Each { forward, backward } }
    }
}

impl PassStages {
    /// Each pass has the number that minimises its predicted makespan.
    pub const AUTO: Self = Self { forward: StageCount::Auto, backward: StageCount::Auto };

    /// The number of the forward and that of the backward.
    pub fn each(self) -> [StageCount; 2] {
        [self.forward, self.backward]
    }

    /// Whether plans can be made with it.
    pub(crate) fn validate(self) -> Result<(), ConfigError> {
        for count in self.each() {
            if let StageCount::Fixed(stages) = count
                && stages > MAX_STAGES
            {
                return Err(ConfigError::Stages { stages, max: MAX_STAGES });
            }
        }
        Ok(())
    }
}

impl From<StageCount> for PassStages {
    /// One number for both passes.
    fn from(count: StageCount) -> Self {
        Self { forward: count, backward: count }
    }
}

impl fmt::Display for StageCount {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Auto => f.write_str("auto"),
            Self::Fixed(stages) => stages.fmt(f),
        }
    }
}

impl fmt::Display for PassStages {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { forward, backward } = self;
        match forward == backward {
            true => forward.fmt(f),
            false => write!(f, "forward={forward},backward={backward}"),
        }
    }
}

impl FromStr for StageCount {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        match (text, text.parse::<usize>()) {
            ("auto", _) => Ok(Self::Auto),
            (_, Ok(count @ 0..=MAX_STAGES)) => Ok(Self::Fixed(count)),
            _ => Err(ConfigError::StagesText { text: text.to_owned(), max: MAX_STAGES }),
        }
    }
}

impl FromStr for PassStages {
    type Err = ConfigError;

    fn from_str(text: &str) -> Result<Self, ConfigError> {
        if !text.contains('=') {
            return text.parse::<StageCount>().map(Self::from);
        }
        let refused = || ConfigError::StagesText { text: text.to_owned(), max: MAX_STAGES };
        let (mut forward, mut backward) = (None, None);
        for part in text.split(',') {
            let (pass, count) = match part.split_once('=') {
                Some(("forward", count)) => (&mut forward, count),
                Some(("backward", count)) => (&mut backward, count),
                _ => return Err(refused()),
            };
            if pass.replace(count.parse()?).is_some() {
                return Err(refused());
            }
        }
        let [forward, backward] = [forward, backward].map(|count| count.unwrap_or(StageCount::Auto));
        Ok(Self { forward, backward })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_and_back() {
        for text in ["auto", "0", "3", "forward=2,backward=0", "forward=auto,backward=4"] {
            assert_eq!(text.parse::<PassStages>().unwrap().to_string(), text);
        }
        for stages in [PassStages::AUTO, PassStages { forward: StageCount::Fixed(2), ..PassStages::AUTO }] {
            let written = serde_json::to_string(&stages).unwrap();
            assert_eq!(serde_json::from_str::<PassStages>(&written).unwrap(), stages, "{written}");
        }
        assert_eq!(serde_json::to_string(&PassStages::AUTO).unwrap(), "\"auto\"");
        let of_one_pass: PassStages = "backward=4".parse().unwrap();
        assert_eq!(of_one_pass.to_string(), "forward=auto,backward=4");
        assert_eq!("backward=1,forward=1".parse::<PassStages>().unwrap(), StageCount::Fixed(1).into());
    }

    #[test]
    fn what_is_no_number_is_refused_as_it_was_written() {
        for text in ["", "some", "65", "-1", "forward=1,forward=2", "forward=1,2", "sideways=1", "forward="] {
            let refused = text.parse::<PassStages>().unwrap_err().to_string();
            assert!(refused.contains("auto or a number from 0 to 64"), "{text}: {refused}");
        }
    }
}

//! What a plan is, in words that ranks can compare: how a plan that differs between ranks is found and named.

use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// A plan's name among ranks: what it was made from, one value each, the most significant first and a fingerprint of the whole last.
/// Collectives carry it, so that ranks compare their plans in the first call, whenever and wherever each of them was prepared.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlanIdentity(Arc<[(String, String)]>);

/// What no property of a plan is called.
const END_OF_GROUP: &str = "the end of the group";

/// Something that two ranks have otherwise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PlanDifference {
    /// What it is, such as `heads`.
    pub what: String,
    /// This rank's value.
    pub own: String,
    /// The other's.
    pub other: String,
}

impl PlanIdentity {
    /// Of these properties: what each is called, and its value.
    pub fn new(properties: impl IntoIterator<Item = (&'static str, String)>) -> Self {
        Self(properties.into_iter().map(|(what, value)| (what.to_owned(), value)).collect())
    }

    /// Of the collective end of a group, which no plan has.
    pub(crate) fn end_of_group() -> Self {
        Self::new([(END_OF_GROUP, String::new())])
    }

    /// Whether whoever carries it is about to leave.
    pub(crate) fn is_end_of_group(&self) -> bool {
        self.0.first().is_some_and(|(what, _)| what == END_OF_GROUP)
    }

    /// The first property that differs; `None` where the plans are the same.
    pub fn difference(&self, other: &Self) -> Option<PlanDifference> {
        if Arc::ptr_eq(&self.0, &other.0) || self == other {
            return None;
        }
        let missing = || "missing".to_owned();
        let value = |of: &Self, what: &str| {
            of.0.iter().find(|(name, _)| name == what).map_or_else(missing, |(_, value)| value.clone())
        };
        let names = self.0.iter().chain(other.0.iter()).map(|(what, _)| what);
        names
            .map(|what| PlanDifference {
                what: what.clone(),
                own: value(self, what),
                other: value(other, what),
            })
            .find(|difference| difference.own != difference.other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_difference_is_named() {
        let plan = |heads: usize, tokens: usize| {
            PlanIdentity::new([("heads", heads.to_string()), ("tokens", tokens.to_string())])
        };
        assert_eq!(plan(4, 128).difference(&plan(4, 128)), None);
        let difference = plan(4, 128).difference(&plan(4, 256)).unwrap();
        assert_eq!(
            difference,
            PlanDifference { what: "tokens".into(), own: "128".into(), other: "256".into() }
        );
        let shorter = PlanIdentity::new([("heads", "4".to_owned())]);
        assert_eq!(shorter.difference(&plan(4, 1)).unwrap().own, "missing");
    }
}

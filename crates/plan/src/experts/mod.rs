//! Layers of a mixture of experts: which rows of which tokens each rank's experts multiply, and how these travel there and back.

mod known;
mod routing;
mod routing_error;
mod rows;
mod tables;
mod token_experts;

use std::fmt;
use std::sync::Arc;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

pub use self::routing::{ExpertCapacity, RandomRouting, Routing};
pub use self::routing_error::RoutingError;
pub use self::tables::{ArrivingGroup, ArrivingRows, ExpertRows, LeavingGroup, LeavingRows, TokenRun};
use crate::DType;

/// Which way tokens go in the forward of a layer of experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ExpertKind {
    /// To the experts, which multiply them: a group-cast, then products. The first product of an expert.
    Dispatch,
    /// Back from the experts, which multiplied them: products, then a group-reduce that sums what a token's experts gave. The last product.
    Combine,
}

impl fmt::Display for ExpertKind {
    /// The name on the command line.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            Self::Dispatch => "dispatch",
            Self::Combine => "combine",
        })
    }
}

/// One product of every expert, `y = x W^T` with the expert's own `W`, with what brings tokens to it or back. Weights are
/// `[experts x out_features, in_features]`, expert after expert.
///
/// Of a dispatch `x` is `[tokens, in_features]` of a rank's own tokens and `y` `[rows, out_features]`, the rows of its experts: expert after
/// expert, of each the tokens of rank 0, then those of rank 1, and so on, in their order. Of a combine `x` is the rows and `y` the tokens,
/// which are the sums of what their experts gave; weights of a router are the caller's to multiply the rows with.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertSpec {
    /// Which way tokens go.
    pub kind: ExpertKind,
    /// Columns of `x`.
    pub in_features: usize,
    /// Columns of `y`.
    pub out_features: usize,
    /// Type of activations and weights.
    pub dtype: DType,
}

impl ExpertSpec {
    /// Columns of the rows that travel.
    pub fn travelling_columns(&self) -> usize {
        match self.kind {
            ExpertKind::Dispatch => self.in_features,
            ExpertKind::Combine => self.out_features,
        }
    }
}

/// Groups of tokens of a pass: how many, and how each compares with the one before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertGroups {
    /// How many, at least 1.
    pub count: usize,
    /// Tokens of a group in percent of those of the one before: 100 is even, more leaves less to wait for before the first product, less
    /// leaves less to send behind the last.
    pub growth: u32,
}

impl ExpertGroups {
    /// So many, as even as can be.
    pub const fn even(count: usize) -> Self {
        Self { count, growth: 100 }
    }

    /// Tokens of the largest group at most, of so many tokens or fewer.
    pub fn most_tokens(self, tokens: usize) -> usize {
        let weights = self.weights();
        let (sum, most) = (weights.iter().sum::<u64>(), weights.iter().copied().max().unwrap_or(1));
        (u128::from(most) * tokens as u128).div_ceil(u128::from(sum.max(1))) as usize
    }

    /// How groups compare.
    fn weights(self) -> Vec<u64> {
        let count = self.count.max(1);
        let mut weights = Vec::with_capacity(count);
        // Integers: ranks on different machines must cut alike.
        let mut weight: u64 = 1 << 20;
        for _ in 0..count {
            weights.push(weight);
            weight = (weight * u64::from(self.growth.clamp(10, 1000)) / 100).clamp(1, 1 << 40);
        }
        weights
    }

    /// Where each group ends, of so many tokens.
    fn ends(self, tokens: usize) -> Vec<usize> {
        let weights = self.weights();
        let sum: u64 = weights.iter().sum();
        let mut before = 0;
        let end = |weight: &u64| {
            before += *weight;
            (u128::from(before) * tokens as u128 / u128::from(sum)) as usize
        };
        weights.iter().map(end).collect()
    }
}

impl Default for ExpertGroups {
    /// One.
    fn default() -> Self {
        Self::even(1)
    }
}

impl fmt::Display for ExpertGroups {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let text = match self.growth {
            100 => self.count.to_string(),
            growth => format!("{} ({growth} %)", self.count),
        };
        f.pad(&text)
    }
}

/// A layer of experts under a routing, in groups of tokens: one group travels while another is multiplied.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertPlan {
    /// The layer.
    pub spec: ExpertSpec,
    routing: Arc<Routing>,
    groups: ExpertGroups,
    /// Where each group ends in the tokens of each rank.
    ends: Vec<Vec<usize>>,
}

impl ExpertPlan {
    /// In these groups of tokens, each with its part of every rank's.
    pub fn new(spec: ExpertSpec, routing: Arc<Routing>, groups: ExpertGroups) -> Self {
        let ends = (0..routing.ranks()).map(|rank| groups.ends(routing.tokens(rank))).collect();
        Self { spec, routing, groups, ends }
    }

    /// The experts of every token.
    pub fn routing(&self) -> &Arc<Routing> {
        &self.routing
    }

    /// How many groups of tokens there are.
    pub fn groups(&self) -> usize {
        self.groups.count.max(1)
    }

    /// How tokens are cut into groups.
    pub fn cut(&self) -> ExpertGroups {
        self.groups
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.routing.ranks()
    }

    /// Tokens that a rank has.
    pub fn tokens_of(&self, rank: usize) -> usize {
        self.routing.tokens(rank)
    }

    /// A rank's tokens that are in a group.
    pub fn group_tokens(&self, rank: usize, group: usize) -> Range {
        let ends = &self.ends[rank];
        Range::new(group.checked_sub(1).map_or(0, |before| ends[before]), ends[group])
    }

    /// Type of what a rank gives of a token: where several of its experts add to it, one in which sums lose nothing.
    pub fn partial_dtype(&self) -> DType {
        match self.routing.sums_on_ranks() {
            true => self.spec.dtype.accumulator(),
            false => self.spec.dtype,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_group_has_more_tokens_than_the_most() {
        for (count, growth) in [(1, 100), (3, 100), (4, 30), (5, 170), (2, 1000)] {
            let groups = ExpertGroups { count, growth };
            for most in [0, 1, 7, 100, 4096] {
                let largest = |tokens| {
                    let ends = groups.ends(tokens);
                    let begins = [0].into_iter().chain(ends.iter().copied());
                    begins.zip(&ends).map(|(begin, end)| end - begin).max().unwrap()
                };
                let limit = groups.most_tokens(most);
                assert!((0..=most).all(|tokens| largest(tokens) <= limit), "{groups:?}, {most}");
                assert!(limit <= largest(most) + 1, "{groups:?}, {most}");
            }
        }
    }
}

//! Tensor-parallel linear layers: which part of weight and tokens a rank has, and in which groups of tokens a layer is
//! computed so that one group travels while another is multiplied.

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::{CostModel, DType, GroupPart, OwnedSplit, PlanError, RemoteSplit};

/// Which axis of the weight `[out_features, in_features]` is split over the ranks (Megatron-LM, section 3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LinearKind {
    /// Output features: every rank has all tokens of the input and some columns of the output.
    Column,
    /// Input features: every rank has some columns of the input, and a share of every output, which are summed.
    Row,
}

/// What a rank has of the activations that are not split by features: the input of a column-parallel layer, the output of a
/// row-parallel one.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Activations {
    /// All tokens, the same on every rank: sums are all-reduced.
    Replicated,
    /// Its own tokens (sequence parallelism, Korthikanti et al. 2022): inputs are all-gathered, sums reduce-scattered.
    SequenceParallel,
}

/// A linear layer `y = x W^T + bias` over the ranks of a tensor-parallel group. `x` is `[tokens, in_features]`, `y` is
/// `[tokens, out_features]`, `W` is `[out_features, in_features]`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearSpec {
    /// The axis that is split.
    pub kind: LinearKind,
    /// How activations lie.
    pub activations: Activations,
    /// Rows of `x`, of all ranks.
    pub tokens: usize,
    /// Columns of `x`, of all ranks.
    pub in_features: usize,
    /// Columns of `y`, of all ranks.
    pub out_features: usize,
    /// Whether there is a bias. A row-parallel layer adds it once, on rank 0's share.
    pub has_bias: bool,
    /// Type of activations, weight and bias.
    pub dtype: DType,
}

/// How many groups of tokens one pass of a layer is cut into.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaveGroups {
    /// The number that the cost model predicts to be fastest.
    Auto,
    /// So many, at least 1.
    Fixed(usize),
}

/// Numbers of groups that a pass is cut into by itself: each group costs the start of a collective, and powers of two leave products
/// of sizes that models have whole rounds of tiles.
const AUTO_GROUPS: [usize; 5] = [1, 2, 4, 8, 16];

/// Groups are cut at multiples of so many of an owner's rows, where it has enough: kernels compute tiles of as many.
const TILE_ROWS: usize = 128;

/// A layer on its ranks: shards and groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearPlan {
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks of the tensor-parallel group.
    pub tp_size: usize,
    /// Groups of tokens of one pass.
    pub groups: usize,
}

impl LinearPlan {
    /// Splits a layer over `tp_size` ranks.
    ///
    /// # Errors
    /// [`PlanError::Linear`] when there are no ranks, an axis is empty, or the split features are no multiple of the ranks.
    pub fn new(
        spec: LinearSpec,
        tp_size: usize,
        groups: WaveGroups,
        cost: &CostModel,
    ) -> Result<Self, PlanError> {
        let error = |field, value: usize, wanted: String| Err(PlanError::Linear { field, value, wanted });
        if tp_size == 0 {
            return error("tp_size", 0, "at least 1".to_owned());
        }
        for (field, value) in
            [("tokens", spec.tokens), ("in_features", spec.in_features), ("out_features", spec.out_features)]
        {
            if value == 0 {
                return error(field, 0, "at least 1".to_owned());
            }
        }
        let (field, split) = match spec.kind {
            LinearKind::Column => ("out_features", spec.out_features),
            LinearKind::Row => ("in_features", spec.in_features),
        };
        if !split.is_multiple_of(tp_size) {
            return error(field, split, format!("a multiple of the {tp_size} ranks that share them"));
        }
        if groups == WaveGroups::Fixed(0) {
            return error("groups", 0, "at least 1".to_owned());
        }
        let mut plan = Self { spec, tp_size, groups: 1 };
        plan.groups = match groups {
            WaveGroups::Fixed(groups) => groups.min(plan.most_groups()),
            WaveGroups::Auto => plan.fastest_groups(cost),
        };
        Ok(plan)
    }

    /// Groups that have a token of some rank.
    fn most_groups(&self) -> usize {
        self.tokens_of(0).len().max(1)
    }

    /// The number of groups with the smallest predicted time: with `G` groups a pass takes at least
    /// `max(t_gemm + t_comm(last), t_gemm(first) + T_comm + G alpha)`, and each more product costs a launch.
    fn fastest_groups(&self, cost: &CostModel) -> usize {
        let LinearSpec { tokens, in_features, out_features, dtype, kind, activations, .. } = self.spec;
        if self.tp_size == 1 {
            return 1;
        }
        let flops = 2.0 * tokens as f64 * in_features as f64 * out_features as f64;
        let multiply = flops / self.tp_size as f64 / cost.matmul_flops_per_second;
        let features = if kind == LinearKind::Column { in_features } else { out_features };
        let ways = if activations == Activations::Replicated { 2.0 } else { 1.0 };
        let remote = (self.tp_size - 1) as f64 / self.tp_size as f64;
        let bytes = ways * remote * (tokens * features * dtype.size()) as f64;
        let travel = bytes / cost.link.bytes_per_second;
        let seconds = |groups: usize| {
            let share = 1.0 / groups as f64;
            let starts = ways * cost.link.alpha_seconds;
            let multiply = multiply + groups as f64 * cost.launch_seconds;
            f64::max(multiply + travel * share + starts, multiply * share + travel + groups as f64 * starts)
        };
        let fits = |groups: &usize| *groups <= self.most_groups();
        AUTO_GROUPS.into_iter().filter(fits).min_by(|a, b| seconds(*a).total_cmp(&seconds(*b))).unwrap_or(1)
    }

    /// The tokens that a rank owns where activations are split by tokens, and sums where they are not: stretches of equal
    /// length, the first ones longer by one where they cannot be.
    pub fn tokens_of(&self, rank: usize) -> Range {
        even(self.spec.tokens, self.tp_size, rank)
    }

    /// Those of a rank's tokens that are in a group, counted from its first. Groups follow each other in every rank's tokens,
    /// so every group has work for, and rows of, all ranks. Where each can have a tile of rows, they begin with one.
    pub fn group_rows(&self, rank: usize, group: usize) -> Range {
        let rows = self.tokens_of(rank).len();
        let tiles = rows / TILE_ROWS;
        if tiles < self.groups {
            return even(rows, self.groups, group);
        }
        let tiles = even(tiles, self.groups, group);
        let end = if group + 1 == self.groups { rows } else { tiles.end * TILE_ROWS };
        Range::new(tiles.start * TILE_ROWS, end)
    }

    /// The tokens of a group, by owner.
    pub fn group_tokens(&self, group: usize) -> Vec<Range> {
        (0..self.tp_size)
            .map(|owner| {
                let (first, rows) = (self.tokens_of(owner).start, self.group_rows(owner, group));
                Range::new(first + rows.start, first + rows.end)
            })
            .collect()
    }

    /// Input features of a rank's weight.
    pub fn local_in_features(&self) -> usize {
        match self.spec.kind {
            LinearKind::Column => self.spec.in_features,
            LinearKind::Row => self.spec.in_features / self.tp_size,
        }
    }

    /// Output features of a rank's weight.
    pub fn local_out_features(&self) -> usize {
        match self.spec.kind {
            LinearKind::Column => self.spec.out_features / self.tp_size,
            LinearKind::Row => self.spec.out_features,
        }
    }

    /// `rank`'s part in the exchange of a group: it owns its rows of the group, which lie in its own tokens, and the other
    /// side is a tensor with the group's rows of all owners one after the other, its own included. As a group-cast an
    /// all-gather, as a group-reduce a reduce-scatter.
    pub fn group_part(&self, rank: usize, group: usize) -> GroupPart {
        self.part(rank, group, |plan, rank| plan.group_rows(rank, group))
    }

    /// As [`LinearPlan::group_part`], where the rank's rows of the group are a tensor of their own.
    pub fn packed_group_part(&self, rank: usize, group: usize) -> GroupPart {
        self.part(rank, group, |plan, rank| Range::new(0, plan.group_rows(rank, group).len()))
    }

    /// `rank`'s part in an all-gather of all tokens, each rank's own rows included.
    pub fn all_tokens_part(&self, rank: usize) -> GroupPart {
        let lengths: Vec<usize> = (0..self.tp_size).map(|owner| self.tokens_of(owner).len()).collect();
        GroupPart::all_gather_v(rank, &lengths)
    }

    fn part(&self, rank: usize, group: usize, owned: impl Fn(&Self, usize) -> Range) -> GroupPart {
        let everyone: Vec<u32> = (0..self.tp_size as u32).collect();
        let mut end = 0;
        let remote = (0..self.tp_size).map(|owner| {
            let rows = self.group_rows(owner, group).len();
            end += rows;
            RemoteSplit { rows: Range::new(end - rows, end), rank: owner as u32 }
        });
        GroupPart {
            remote: remote.filter(|split| !split.rows.is_empty()).collect(),
            owned: Some(OwnedSplit { rows: owned(self, rank), ranks: everyone })
                .filter(|split| !split.rows.is_empty())
                .into_iter()
                .collect(),
        }
    }
}

/// Part `index` of `length` things in `parts` stretches.
fn even(length: usize, parts: usize, index: usize) -> Range {
    let (short, longer) = (length / parts, length % parts);
    let start = index * short + index.min(longer);
    Range::new(start, start + short + usize::from(index < longer))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spec(tokens: usize) -> LinearSpec {
        LinearSpec {
            kind: LinearKind::Column,
            activations: Activations::SequenceParallel,
            tokens,
            in_features: 8,
            out_features: 12,
            has_bias: false,
            dtype: DType::Bf16,
        }
    }

    #[test]
    fn groups_have_every_token_once_and_parts_fit() {
        for tokens in [1, 2, 7, 64, 65, 1500] {
            for tp_size in [1, 2, 3, 4] {
                for groups in [1, 2, 5, 100] {
                    let groups = WaveGroups::Fixed(groups);
                    let plan = LinearPlan::new(spec(tokens), tp_size, groups, &CostModel::H200).unwrap();
                    let mut seen = vec![0; tokens];
                    for group in 0..plan.groups {
                        let ranges = plan.group_tokens(group);
                        let rows: usize = ranges.iter().map(Range::len).sum();
                        ranges.iter().for_each(|r| seen[r.start..r.end].iter_mut().for_each(|n| *n += 1));
                        for rank in 0..tp_size {
                            let own = plan.tokens_of(rank).len();
                            plan.group_part(rank, group).check(rank, tp_size, own, rows).unwrap();
                            let packed = plan.group_rows(rank, group).len();
                            plan.packed_group_part(rank, group).check(rank, tp_size, packed, rows).unwrap();
                        }
                    }
                    assert!(seen.iter().all(|n| *n == 1), "{tokens} {tp_size} {groups:?}");
                }
            }
        }
    }

    #[test]
    fn groups_are_whole_tiles_where_there_are_enough() {
        let plan = LinearPlan { spec: spec(4096 + 7), tp_size: 4, groups: 3 };
        let rows = |rank| (0..3).map(|group| plan.group_rows(rank, group).len()).collect::<Vec<_>>();
        assert_eq!(rows(0), [384, 384, 258]);
        assert_eq!(rows(3), [384, 384, 257]);
    }

    #[test]
    fn what_does_not_divide_is_named() {
        let error = LinearPlan::new(spec(5), 5, WaveGroups::Auto, &CostModel::H200).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("out_features") && text.contains("12") && text.contains('5'), "{text}");
        let row = LinearSpec { kind: LinearKind::Row, ..spec(5) };
        assert!(LinearPlan::new(row, 3, WaveGroups::Auto, &CostModel::H200).is_err());
        assert!(LinearPlan::new(row, 4, WaveGroups::Fixed(0), &CostModel::H200).is_err());
        assert!(
            LinearPlan::new(LinearSpec { tokens: 0, ..row }, 4, WaveGroups::Auto, &CostModel::H200).is_err()
        );
    }

    /// More groups where there is more to hide, one where a collective's start costs more than all of it.
    #[test]
    fn automatic_groups_follow_the_cost() {
        let groups = |tokens: usize| {
            let spec = LinearSpec { tokens, in_features: 8192, out_features: 8192, ..spec(1) };
            LinearPlan::new(spec, 4, WaveGroups::Auto, &CostModel::H200).unwrap().groups
        };
        assert_eq!(groups(16), 1);
        assert!(groups(32_768) > 2, "{}", groups(32_768));
    }
}

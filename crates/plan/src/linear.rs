//! A tensor-parallel linear layer on its ranks: which part of weight and tokens a rank has, and in which groups of tokens the layer is
//! computed so that one group travels while another is multiplied.

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::{
    CostModel, GroupFlow, GroupPart, LinearDirection, LinearKind, LinearSpec, LinkUse, OwnedSplit, PassCosts,
    PassCurves, PlanError, ProductStart, RemoteSplit, WaveGroups,
};

/// The most groups that a pass is cut into by itself: each costs the start of a collective.
pub(crate) const MOST_GROUPS: usize = 16;
/// Groups are cut at multiples of so many of an owner's rows, where it has enough: kernels compute tiles of as many.
pub(crate) const TILE_ROWS: usize = 128;

/// The steps in which sizes of groups are looked at.
const STEPS: usize = 32;

/// A layer on its ranks: shards and groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearPlan {
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks of the tensor-parallel group.
    pub tp_size: usize,
    /// Rows of every group in the tokens of the first rank.
    groups: Vec<usize>,
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
        let mut plan = Self { spec, tp_size, groups: Vec::new() };
        let rows = plan.tokens_of(0).len();
        plan.groups = match groups {
            WaveGroups::Fixed(0) => return error("groups", 0, "at least 1".to_owned()),
            WaveGroups::Fixed(groups) => even_tiles(rows, groups.min(rows)),
            WaveGroups::Sizes(sizes) => {
                let sum = sizes.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
                if sum != rows || sizes.contains(&0) {
                    let wanted = format!("sizes of at least 1 that add up to the {rows} tokens of a rank");
                    return error("the sum of groups", sum, wanted);
                }
                sizes
            }
            WaveGroups::Auto => plan.fastest_groups(cost),
        };
        Ok(plan)
    }

    /// Number of groups of tokens of one pass.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Rows of every group in the tokens of the first rank, which add up to these.
    pub fn group_sizes(&self) -> &[usize] {
        &self.groups
    }

    /// The groups with the smallest predicted time of the pass in which they matter most.
    fn fastest_groups(&self, cost: &CostModel) -> Vec<usize> {
        let (spec, tp_size, direction) = (&self.spec, self.tp_size, self.spec.communicating_pass());
        let product = |rows: usize| {
            cost.launch_seconds + cost.matmul_seconds(spec.product_of(direction, rows, tp_size))
        };
        let row_bytes = (tp_size - 1) * spec.travelling_columns() * spec.dtype.size();
        let travel = |rows: usize| cost.link.seconds((rows * row_bytes) as u64);
        let speed_beside = cost.sharing.map_or(1.0, |sharing| sharing.speed_without(sharing.communication));
        let join = 2.0 * (self.tokens_of(0).len() * spec.travelling_columns() * spec.dtype.size()) as f64;
        let curves = PassCurves {
            product: &product,
            travel: &travel,
            back: &travel,
            after: match direction {
                LinearDirection::Backward { weight_gradient: true } => product(spec.tokens),
                _ => 0.0,
            },
            join: cost.launch_seconds + join / cost.memory_bytes_per_second,
            starts: ProductStart::Free,
            link: LinkUse::Shared,
            speed_beside,
        };
        let step = self.wave_step();
        match self.pass_costs(direction, step, &curves) {
            Some(costs) => self.rows_of_waves(step, &costs.fastest(MOST_GROUPS)),
            None => vec![self.tokens_of(0).len()],
        }
    }

    /// Rows of the waves that groups are made of by themselves: whole tiles, where an owner has enough rows.
    pub(crate) fn wave_step(&self) -> usize {
        let step = self.tokens_of(0).len().div_ceil(STEPS);
        if step < TILE_ROWS { step } else { step.next_multiple_of(TILE_ROWS) }
    }

    /// Rows of groups of so many waves, each of `wave` rows of the first rank's tokens; the last one may have fewer.
    pub fn rows_of_waves(&self, wave: usize, groups: &[usize]) -> Vec<usize> {
        let mut left = self.tokens_of(0).len();
        let sizes = groups.iter().map(|waves| {
            let size = (waves * wave).min(left);
            left -= size;
            size
        });
        sizes.filter(|size| *size > 0).collect()
    }

    /// What a pass costs in waves of `wave` rows of each rank's tokens; `None` where it does not communicate.
    pub fn pass_costs(
        &self,
        direction: LinearDirection,
        wave: usize,
        curves: &PassCurves<'_>,
    ) -> Option<PassCosts> {
        if self.tp_size == 1 {
            return None;
        }
        let flow = self.spec.flow(direction)?;
        let rows = self.tokens_of(0).len();
        let waves = rows.div_ceil(wave.max(1));
        let table = |seconds: &dyn Fn(usize) -> f64| {
            (0..=waves).map(|n| if n == 0 { 0.0 } else { seconds((n * wave).min(rows)) }).collect()
        };
        let before = if flow == GroupFlow::Gather { (curves.product)(rows) } else { 0.0 };
        // Of a gather the own rows are multiplied before.
        let owners = if flow == GroupFlow::Gather { self.tp_size - 1 } else { self.tp_size };
        Some(PassCosts {
            flow,
            product: table(&|rows| (curves.product)(rows * owners)),
            travel: table(curves.travel),
            back: table(curves.back),
            before,
            after: curves.after,
            join: if flow == GroupFlow::Reduce { curves.join } else { 0.0 },
            starts: curves.starts,
            link: curves.link,
            speed_beside: curves.speed_beside,
        })
    }

    /// The tokens that a rank owns where activations are split by tokens, and sums where they are not: stretches of equal
    /// length, the first ones longer by one where they cannot be.
    pub fn tokens_of(&self, rank: usize) -> Range {
        even(self.spec.tokens, self.tp_size, rank)
    }

    /// Those of a rank's tokens that are in a group, counted from its first. Groups follow each other in every rank's tokens,
    /// so every group has work for, and rows of, all ranks; one of a single row may miss the ranks that own a token fewer.
    pub fn group_rows(&self, rank: usize, group: usize) -> Range {
        let rows = self.tokens_of(rank).len();
        let start = self.groups[..group].iter().sum::<usize>().min(rows);
        Range::new(start, (start + self.groups[group]).min(rows))
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

    /// `rank`'s part in the exchange of a group with the others: it owns its rows of the group, which lie in its own tokens, and the
    /// other side is a tensor with room for the group's rows of all owners one after the other, of which its own are left alone.
    pub fn group_part(&self, rank: usize, group: usize) -> GroupPart {
        to_others(rank, &self.part(rank, group, |plan, rank| plan.group_rows(rank, group)))
    }

    /// `rank`'s part in the exchange of a group, its own rows included: those it owns are a tensor of their own, and the other side is
    /// one with the group's rows of all owners one after the other. As a group-cast an all-gather, as a group-reduce a reduce-scatter.
    pub fn packed_group_part(&self, rank: usize, group: usize) -> GroupPart {
        self.part(rank, group, |plan, rank| Range::new(0, plan.group_rows(rank, group).len()))
    }

    /// `rank`'s part in an all-gather of all tokens, each rank's own rows included.
    pub fn all_tokens_part(&self, rank: usize) -> GroupPart {
        let lengths: Vec<usize> = (0..self.tp_size).map(|owner| self.tokens_of(owner).len()).collect();
        GroupPart::all_gather_v(rank, &lengths)
    }

    /// The same, in which each rank's rows go to the others only.
    pub fn other_tokens_part(&self, rank: usize) -> GroupPart {
        to_others(rank, &self.all_tokens_part(rank))
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

/// A rank's part without the rows that stay.
fn to_others(rank: usize, part: &GroupPart) -> GroupPart {
    part.shared_with(|other| other != rank)
}

/// Sizes of so many groups of rows that are as even as whole tiles allow, where there is a tile for each.
fn even_tiles(rows: usize, groups: usize) -> Vec<usize> {
    let tiles = rows / TILE_ROWS;
    if tiles < groups {
        return (0..groups).map(|group| even(rows, groups, group).len()).collect();
    }
    let mut sizes: Vec<usize> =
        (0..groups).map(|group| even(tiles, groups, group).len() * TILE_ROWS).collect();
    if let Some(last) = sizes.last_mut() {
        *last += rows % TILE_ROWS;
    }
    sizes
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
    use crate::{Activations, DType};

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
        for tokens in [1usize, 2, 7, 64, 65, 1500] {
            for tp_size in [1, 2, 3, 4] {
                let rows = tokens.div_ceil(tp_size);
                let fixed = [1, 2, 5, 100].map(WaveGroups::Fixed);
                let uneven = (rows > 2).then(|| WaveGroups::Sizes(vec![1, rows - 2, 1]));
                for groups in fixed.into_iter().chain(uneven).chain([WaveGroups::Auto]) {
                    let plan =
                        LinearPlan::new(spec(tokens), tp_size, groups.clone(), &CostModel::H200).unwrap();
                    let mut seen = vec![0; tokens];
                    for group in 0..plan.groups() {
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
        let plan = LinearPlan::new(spec(4096 + 7), 4, WaveGroups::Fixed(3), &CostModel::H200).unwrap();
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

    /// More groups where there is more to hide, one where a collective's start costs more than all of it. Small first ones where
    /// communication takes longer, so that it begins early; small last ones where computation does.
    #[test]
    fn automatic_groups_follow_the_cost() {
        let groups = |tokens: usize, kind: LinearKind, in_features: usize| {
            let spec = LinearSpec { kind, tokens, in_features, out_features: 8192, ..spec(1) };
            let plan = LinearPlan::new(spec, 4, WaveGroups::Auto, &CostModel::H200).unwrap();
            assert_eq!(plan.group_sizes().iter().sum::<usize>(), tokens.div_ceil(4));
            plan.group_sizes().to_vec()
        };
        assert_eq!(groups(16, LinearKind::Row, 8192), [4]);
        assert!(groups(32_768, LinearKind::Column, 8192).len() > 1);
        let ends = |sizes: &[usize]| (sizes[0], sizes[sizes.len() - 1]);
        let (first, last) = ends(&groups(32_768, LinearKind::Row, 4096));
        assert!(first < last, "{first} {last}");
        let (first, last) = ends(&groups(32_768, LinearKind::Row, 32_768));
        assert!(first > last, "{first} {last}");
    }

    #[test]
    fn sizes_that_do_not_add_up_are_named() {
        for (sizes, words) in
            [(vec![3, 2], ["5", "6 tokens"]), (vec![6, 0], ["6", "at least 1"]), (vec![], ["0", "6 tokens"])]
        {
            let error = LinearPlan::new(spec(12), 2, WaveGroups::Sizes(sizes), &CostModel::H200).unwrap_err();
            let text = error.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}

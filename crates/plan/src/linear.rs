//! A tensor-parallel linear layer on its ranks: which part of weight and tokens a rank has, and in which groups of tokens, or of columns,
//! the layer is computed so that one group travels while another is multiplied.

use std::fmt;

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use crate::{
    GemmCollective, GroupPart, LinearBound, LinearDirection, LinearField, LinearKind, LinearSpec, OwnedSplit,
    PlanError, RemoteSplit,
};

/// Groups are cut at multiples of so many of an owner's rows, where it has enough: kernels compute tiles of as many.
pub const GROUP_TILE_ROWS: usize = 128;

/// Groups of columns are cut at multiples of so many, where there are enough: kernels compute tiles of as many, or of a part of them.
pub const GROUP_TILE_COLUMNS: usize = 256;

/// How many groups one pass of a layer is cut into, and how large each is. Groups are of tokens, or, for passes of few rows whose sums over
/// ranks travel, of columns of these.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum WaveGroups {
    /// So many of the same size, at least 1.
    Fixed(usize),
    /// So many rows of a rank's tokens in each, at least 1; together those that the first rank owns. A rank that owns one
    /// token fewer has it missing in its last group.
    Sizes(Vec<usize>),
    /// All tokens at once, and the columns of sums over ranks in so many groups of about the same size, at least 1. What travels before it
    /// is multiplied travels at once.
    Columns(usize),
    /// The same in groups of so many columns, at least 1; together those that travel.
    ColumnSizes(Vec<usize>),
}

impl fmt::Display for WaveGroups {
    /// Sizes joined by `+`, those of columns behind `columns=`; of groups of about the same size their number.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let sizes = |sizes: &[usize]| sizes.iter().map(ToString::to_string).collect::<Vec<_>>().join("+");
        match self {
            Self::Fixed(groups) => write!(f, "{groups}"),
            Self::Sizes(rows) => f.pad(&sizes(rows)),
            Self::Columns(groups) => write!(f, "columns={groups}"),
            Self::ColumnSizes(columns) => f.pad(&format!("columns={}", sizes(columns))),
        }
    }
}

/// A layer on its ranks: shards and groups.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LinearPlan {
    /// The layer.
    pub spec: LinearSpec,
    /// Ranks of the tensor-parallel group.
    pub tp_size: usize,
    /// Rows of every group in the tokens of the first rank.
    groups: Vec<usize>,
    /// Columns of every group of columns; none where all columns travel at once.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    columns: Vec<usize>,
}

impl LinearPlan {
    /// Splits a layer over `tp_size` ranks.
    ///
    /// # Errors
    /// [`PlanError::Linear`] when there are no ranks, an axis is empty, or the split features are no multiple of the ranks;
    /// [`PlanError::Bytes`] when the layer is too large.
    pub fn new(spec: LinearSpec, tp_size: usize, groups: WaveGroups) -> Result<Self, PlanError> {
        let error = |field, value, wanted| Err(PlanError::Linear { field, value, wanted });
        if tp_size == 0 {
            return error(LinearField::TpSize, 0, LinearBound::AtLeastOne);
        }
        for (field, value) in [
            (LinearField::Tokens, spec.tokens),
            (LinearField::InFeatures, spec.in_features),
            (LinearField::OutFeatures, spec.out_features),
        ] {
            if value == 0 {
                return error(field, 0, LinearBound::AtLeastOne);
            }
        }
        let (field, split) = match spec.kind {
            LinearKind::Column => (LinearField::OutFeatures, spec.out_features),
            LinearKind::Row => (LinearField::InFeatures, spec.in_features),
        };
        if !split.is_multiple_of(tp_size) {
            return error(field, split, LinearBound::MultipleOfRanks { ranks: tp_size });
        }
        spec.check_bytes(tp_size)?;
        let mut plan = Self { spec, tp_size, groups: Vec::new(), columns: Vec::new() };
        let rows = plan.tokens_of(0).len();
        let columns = spec.travelling_columns();
        plan.columns = match &groups {
            WaveGroups::Columns(groups) => even_columns(columns, (*groups).min(columns)),
            WaveGroups::ColumnSizes(sizes) => {
                let sum = sizes.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
                if sum != columns || sizes.contains(&0) {
                    return error(LinearField::SumOfColumnGroups, sum, LinearBound::AllColumns { columns });
                }
                sizes.clone()
            }
            WaveGroups::Fixed(_) | WaveGroups::Sizes(_) => Vec::new(),
        };
        if plan.columns.len() == 1 {
            plan.columns.clear();
        }
        plan.groups = match groups {
            WaveGroups::Fixed(0) | WaveGroups::Columns(0) => {
                return error(LinearField::Groups, 0, LinearBound::AtLeastOne);
            }
            WaveGroups::Columns(_) | WaveGroups::ColumnSizes(_) => vec![rows],
            WaveGroups::Fixed(groups) => even_tiles(rows, groups.min(rows), GROUP_TILE_ROWS),
            WaveGroups::Sizes(sizes) => {
                let sum = sizes.iter().fold(0usize, |sum, size| sum.saturating_add(*size));
                if sum != rows || sizes.contains(&0) {
                    return error(LinearField::SumOfGroups, sum, LinearBound::AllTokens { tokens: rows });
                }
                sizes
            }
        };
        Ok(plan)
    }

    /// The same layer of fewer tokens: groups in the same proportions, none of them longer, cut at whole tiles where the rows of a group have
    /// some.
    ///
    /// # Errors
    /// [`PlanError::Linear`] for no tokens, and for more than it has.
    pub fn of_fewer_tokens(&self, tokens: usize) -> Result<Self, PlanError> {
        if tokens == 0 || tokens > self.spec.tokens {
            let wanted = LinearBound::UpTo { most: self.spec.tokens };
            return Err(PlanError::Linear { field: LinearField::Tokens, value: tokens, wanted });
        }
        let mut fewer = Self { spec: LinearSpec { tokens, ..self.spec }, ..self.clone() };
        let (rows, all) = (fewer.tokens_of(0).len(), self.tokens_of(0).len());
        let step = if rows / self.groups.len() >= GROUP_TILE_ROWS { GROUP_TILE_ROWS } else { 1 };
        let (mut end, mut end_of_all) = (0, 0);
        let sizes = self.groups.iter().map(|&most| {
            end_of_all += most;
            let cut = ((end_of_all as u128 * rows as u128 / all as u128) as usize).next_multiple_of(step);
            // What is left must fit in the groups behind it.
            let (begin, least) = (end, rows.saturating_sub(all - end_of_all));
            end = cut.clamp(begin.max(least), (begin + most).min(rows));
            end - begin
        });
        fewer.groups = sizes.filter(|size| *size > 0).collect();
        Ok(fewer)
    }

    /// Number of groups of tokens of one pass.
    pub fn groups(&self) -> usize {
        self.groups.len()
    }

    /// Rows of every group in the tokens of the first rank, which add up to these.
    pub fn group_sizes(&self) -> &[usize] {
        &self.groups
    }

    /// Whether a group but the last ends inside a tile of its rows.
    pub fn cuts_tiles(&self) -> bool {
        let before = self.groups.split_last().map_or(&[][..], |(_, before)| before);
        !before.iter().all(|rows| rows.is_multiple_of(GROUP_TILE_ROWS))
    }

    /// Columns of every group of columns, which add up to those that travel; none where all columns travel at once.
    pub fn column_sizes(&self) -> &[usize] {
        &self.columns
    }

    /// The groups of columns, one after the other; none where all columns travel at once.
    pub fn column_groups(&self) -> impl Iterator<Item = Range> {
        let mut end = 0;
        self.columns.iter().map(move |&columns| {
            end += columns;
            Range::new(end - columns, end)
        })
    }

    /// Number of groups in which the sums of one pass travel.
    pub fn sum_groups(&self) -> usize {
        self.groups.len().max(self.columns.len())
    }

    /// Whether what travels in a pass does so in groups of columns: sums do, rows before their product do not.
    pub fn travels_in_columns(&self, direction: LinearDirection) -> bool {
        let collective = GemmCollective::of_pass(&self.spec, direction);
        !self.columns.is_empty() && !matches!(collective, None | Some(GemmCollective::AllGather))
    }

    /// The groups as they are asked for.
    pub fn wave_groups(&self) -> WaveGroups {
        match self.columns[..] {
            [] => WaveGroups::Sizes(self.groups.clone()),
            _ => WaveGroups::ColumnSizes(self.columns.clone()),
        }
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

    /// The tokens that a rank owns where activations are split by tokens, and sums where they are not: ranges of equal
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

/// Sizes of so many groups of rows or columns that are as even as whole tiles allow, where there is a tile for each.
fn even_tiles(length: usize, groups: usize, tile: usize) -> Vec<usize> {
    let tiles = length / tile;
    if tiles < groups {
        return (0..groups).map(|group| even(length, groups, group).len()).collect();
    }
    let mut sizes: Vec<usize> = (0..groups).map(|group| even(tiles, groups, group).len() * tile).collect();
    if let Some(last) = sizes.last_mut() {
        *last += length % tile;
    }
    sizes
}

/// The same of columns, where there are fewer tiles at multiples of 8, at which kernels begin to read.
fn even_columns(columns: usize, groups: usize) -> Vec<usize> {
    const ELEMENTS: usize = 8;
    let has_tiles = columns / GROUP_TILE_COLUMNS >= groups;
    even_tiles(columns, groups, if has_tiles { GROUP_TILE_COLUMNS } else { ELEMENTS })
}

/// Part `index` of `length` things in `parts` ranges.
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
                for groups in fixed.into_iter().chain(uneven) {
                    let plan = LinearPlan::new(spec(tokens), tp_size, groups.clone()).unwrap();
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
        let plan = LinearPlan::new(spec(4096 + 7), 4, WaveGroups::Fixed(3)).unwrap();
        let rows = |rank| (0..3).map(|group| plan.group_rows(rank, group).len()).collect::<Vec<_>>();
        assert_eq!(rows(0), [384, 384, 258]);
        assert_eq!(rows(3), [384, 384, 257]);
        assert!(!plan.cuts_tiles());
        let sizes =
            |sizes: &[usize]| LinearPlan::new(spec(4096), 4, WaveGroups::Sizes(sizes.to_vec())).unwrap();
        assert!(sizes(&[128, 64, 832]).cuts_tiles() && !sizes(&[896, 128]).cuts_tiles());
        assert!(!sizes(&[1024]).cuts_tiles() && sizes(&[1000, 24]).cuts_tiles());
    }

    #[test]
    fn fewer_tokens_are_in_groups_of_the_same_proportions_that_are_no_longer() {
        let fewer = |sizes: &[usize], tokens| {
            let all = 4 * sizes.iter().sum::<usize>();
            let plan = LinearPlan::new(spec(all), 4, WaveGroups::Sizes(sizes.to_vec())).unwrap();
            plan.of_fewer_tokens(tokens).unwrap().groups
        };
        let sizes = [2048, 1024, 512, 512];
        assert_eq!(fewer(&sizes, 4 * 4096), sizes);
        assert_eq!(fewer(&sizes, 4 * 3072), [1536, 768, 384, 384]);
        assert_eq!(fewer(&sizes, 4 * 3000 + 1), [1536, 768, 384, 313]);
        assert_eq!(fewer(&sizes, 4 * 4095 + 3), [2048, 1024, 512, 512]);
        assert_eq!(fewer(&sizes, 4 * 4095 + 1), [2048, 1024, 512, 512]);
        assert_eq!(fewer(&[128, 1, 5], 4 * 3), [2, 1]);
        assert_eq!(fewer(&[6, 1, 5], 4 * 11), [5, 1, 5]);
        for tokens in 1..=4 * 4096 {
            let groups = fewer(&sizes, tokens);
            assert_eq!(groups.iter().sum::<usize>(), tokens.div_ceil(4), "{tokens}");
            assert!(groups.iter().zip(sizes).all(|(size, most)| (1..=most).contains(size)), "{groups:?}");
        }
        let plan = LinearPlan::new(spec(64), 4, WaveGroups::Fixed(2)).unwrap();
        for tokens in [0, 65] {
            let text = plan.of_fewer_tokens(tokens).unwrap_err().to_string();
            assert!(text.contains("1 to 64"), "{text}");
        }
    }

    #[test]
    fn what_does_not_divide_is_named() {
        let error = LinearPlan::new(spec(5), 5, WaveGroups::Fixed(2)).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("out_features") && text.contains("12") && text.contains('5'), "{text}");
        let row = LinearSpec { kind: LinearKind::Row, ..spec(5) };
        assert!(LinearPlan::new(row, 3, WaveGroups::Fixed(2)).is_err());
        assert!(LinearPlan::new(row, 4, WaveGroups::Fixed(0)).is_err());
        assert!(LinearPlan::new(LinearSpec { tokens: 0, ..row }, 4, WaveGroups::Fixed(2)).is_err());
    }

    #[test]
    fn groups_of_columns_are_whole_tiles_where_there_are_enough() {
        let of = |out_features, groups| {
            let row = LinearSpec { kind: LinearKind::Row, out_features, ..spec(64) };
            LinearPlan::new(row, 4, groups).unwrap()
        };
        let plan = of(1024 + 8, WaveGroups::Columns(3));
        assert_eq!(plan.column_sizes(), [512, 256, 264]);
        assert_eq!(plan.column_groups().collect::<Vec<_>>(), [(0, 512), (512, 768), (768, 1032)].map(range));
        assert_eq!((plan.groups(), plan.group_sizes()), (1, &[16][..]));
        assert_eq!(plan.wave_groups(), WaveGroups::ColumnSizes(vec![512, 256, 264]));
        assert_eq!(of(1032, plan.wave_groups()), plan);
        assert_eq!(
            (plan.sum_groups(), plan.wave_groups().to_string()),
            (3, "columns=512+256+264".to_owned())
        );
        assert_eq!(of(50, WaveGroups::Columns(4)).column_sizes(), [16, 16, 8, 10]);
        assert_eq!(of(10, WaveGroups::Columns(4)).column_sizes(), [3, 3, 2, 2]);
        let gathers = LinearDirection::Backward { weight_gradient: true };
        assert!(plan.travels_in_columns(LinearDirection::Forward) && !plan.travels_in_columns(gathers));
        // One group is none.
        for one in [WaveGroups::Columns(1), WaveGroups::ColumnSizes(vec![10]), WaveGroups::Fixed(1)] {
            assert_eq!(of(10, one).column_sizes(), [0; 0]);
        }
        let fewer = plan.of_fewer_tokens(9).unwrap();
        assert_eq!((fewer.column_sizes(), fewer.group_sizes()), (plan.column_sizes(), &[3][..]));
        let row = LinearSpec { kind: LinearKind::Row, out_features: 10, ..spec(64) };
        for (groups, words) in [
            (WaveGroups::Columns(0), ["groups", "at least 1"]),
            (WaveGroups::ColumnSizes(vec![4, 4]), ["8", "the 10 columns"]),
            (WaveGroups::ColumnSizes(vec![10, 0]), ["10", "at least 1"]),
        ] {
            let text = LinearPlan::new(row, 4, groups).unwrap_err().to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }

    fn range((start, end): (usize, usize)) -> Range {
        Range::new(start, end)
    }

    #[test]
    fn sizes_that_do_not_add_up_are_named() {
        for (sizes, words) in
            [(vec![3, 2], ["5", "6 tokens"]), (vec![6, 0], ["6", "at least 1"]), (vec![], ["0", "6 tokens"])]
        {
            let error = LinearPlan::new(spec(12), 2, WaveGroups::Sizes(sizes)).unwrap_err();
            let text = error.to_string();
            assert!(words.iter().all(|word| text.contains(word)), "{text}");
        }
    }
}

//! Where tokens lie on their way to a rank's experts and back, and which rows of experts they become.

use counterpoint_mask::Range;

use super::ExpertPlan;
use crate::{GroupPart, OwnedSplit, RemoteSplit};

/// A token's row of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ExpertRow {
    /// Its row among the tokens that it came with.
    pub token: usize,
    /// Its row among those of the rank's experts.
    pub row: usize,
    /// Whether no expert of this rank before has it.
    pub is_first: bool,
}

/// Tokens of a group on a rank that has experts of them.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct GroupRows {
    /// Rows of the other ranks' tokens: those that have an expert here, rank after rank.
    pub arriving: usize,
    /// Of each of the rank's experts, the rows of those: ascending.
    pub arrived: Vec<Vec<ExpertRow>>,
    /// The rank's part in bringing them: it owns its tokens, all groups', and the other side is a tensor of `arriving` rows.
    pub cast: GroupPart,
    /// Rows of all ranks' tokens, its own included.
    pub leaving: usize,
    /// Of each of the rank's experts, the rows of those: ascending.
    pub left: Vec<Vec<ExpertRow>>,
    /// The rank's part in taking them home: it owns its tokens, all groups', and the other side is a tensor of `leaving` rows.
    pub reduce: GroupPart,
}

/// The rows of a rank's experts.
#[derive(Clone, Debug, PartialEq)]
pub struct ExpertRows {
    /// Rows of each expert; they follow each other.
    pub experts: Vec<Range>,
    /// Of each expert, the rows of the rank's own tokens, which need no way: ascending. A token's row is its number.
    pub own: Vec<Vec<ExpertRow>>,
    /// What travels, group by group.
    pub groups: Vec<GroupRows>,
}

/// Tokens that follow each other and go to the same ranks.
struct Stretch {
    tokens: Range,
    ranks: Vec<u32>,
}

impl ExpertPlan {
    /// The rows of a rank's experts.
    pub fn rows_of(&self, rank: usize) -> ExpertRows {
        let routing = self.routing();
        let here = routing.experts_of(rank);
        let experts = here.len();
        let mut next = self.first_rows(rank);
        let mut rows = ExpertRows {
            experts: Vec::with_capacity(experts),
            own: vec![Vec::new(); experts],
            groups: vec![
                GroupRows {
                    arrived: vec![Vec::new(); experts],
                    left: vec![Vec::new(); experts],
                    ..GroupRows::default()
                };
                self.groups()
            ],
        };
        for expert in 0..experts {
            rows.experts.push(Range::new(next[0][expert], next[self.ranks()][expert]));
        }
        for source in 0..self.ranks() {
            for (group, rows_of_group) in rows.groups.iter_mut().enumerate() {
                for token in self.group_tokens(source, group).start..self.group_tokens(source, group).end {
                    let of_token = routing.experts_of_token(source, token);
                    let of_token = of_token.iter().filter(|expert| here.contains(**expert as usize));
                    let mut is_first = true;
                    for &expert in of_token {
                        let expert = expert as usize - here.start;
                        let row = next[source][expert];
                        next[source][expert] += 1;
                        let at = |token| ExpertRow { token, row, is_first };
                        rows_of_group.left[expert].push(at(rows_of_group.leaving));
                        match source == rank {
                            true => rows.own[expert].push(at(token)),
                            false => rows_of_group.arrived[expert].push(at(rows_of_group.arriving)),
                        }
                        is_first = false;
                    }
                    if !is_first {
                        rows_of_group.leaving += 1;
                        rows_of_group.arriving += usize::from(source != rank);
                    }
                }
            }
        }
        for (group, of_group) in rows.groups.iter_mut().enumerate() {
            (of_group.cast, of_group.reduce) = self.parts(rank, group);
        }
        rows
    }

    /// The first row of every rank's tokens in each expert of `rank`, and behind the last rank's the end.
    fn first_rows(&self, rank: usize) -> Vec<Vec<usize>> {
        let (routing, ranks) = (self.routing(), self.ranks());
        let here = routing.experts_of(rank);
        let mut counts = vec![vec![0; here.len()]; ranks];
        for (source, counts) in counts.iter_mut().enumerate() {
            for token in 0..routing.tokens(source) {
                for &expert in routing.experts_of_token(source, token) {
                    if here.contains(expert as usize) {
                        counts[expert as usize - here.start] += 1;
                    }
                }
            }
        }
        let mut first = vec![vec![0; here.len()]; ranks + 1];
        let mut row = 0;
        for expert in 0..here.len() {
            for source in 0..ranks {
                first[source][expert] = row;
                row += counts[source][expert];
            }
            first[ranks][expert] = row;
        }
        first
    }

    /// A rank's parts in the way of a group's tokens to the experts of others, and in the way home of all.
    fn parts(&self, rank: usize, group: usize) -> (GroupPart, GroupPart) {
        let (mut cast, mut reduce) = (GroupPart::default(), GroupPart::default());
        for Stretch { tokens, ranks } in self.stretches(rank, group) {
            let others: Vec<u32> = ranks.iter().copied().filter(|other| *other as usize != rank).collect();
            if !others.is_empty() {
                cast.owned.push(OwnedSplit { rows: tokens, ranks: others });
            }
            reduce.owned.push(OwnedSplit { rows: tokens, ranks });
        }
        let (mut arriving, mut leaving) = (0, 0);
        for source in 0..self.ranks() {
            for Stretch { tokens, ranks } in self.stretches(source, group) {
                if !ranks.contains(&(rank as u32)) {
                    continue;
                }
                let split = |end: &mut usize| {
                    *end += tokens.len();
                    RemoteSplit { rows: Range::new(*end - tokens.len(), *end), rank: source as u32 }
                };
                if source != rank {
                    cast.remote.push(split(&mut arriving));
                }
                reduce.remote.push(split(&mut leaving));
            }
        }
        (cast, reduce)
    }

    /// A rank's tokens of a group that have experts.
    fn stretches(&self, rank: usize, group: usize) -> Vec<Stretch> {
        let mut all: Vec<Stretch> = Vec::new();
        let tokens = self.group_tokens(rank, group);
        for token in tokens.start..tokens.end {
            let of_token = self.routing().experts_of_token(rank, token).iter();
            let mut ranks: Vec<u32> = of_token.map(|expert| self.routing().rank_of(*expert) as u32).collect();
            ranks.dedup();
            if ranks.is_empty() {
                continue;
            }
            match all.last_mut().filter(|last| last.tokens.end == token && last.ranks == ranks) {
                Some(last) => last.tokens.end += 1,
                None => all.push(Stretch { tokens: Range::new(token, token + 1), ranks }),
            }
        }
        all
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{DType, ExpertGroups, ExpertKind, ExpertSpec, Routing};

    fn plan(experts: usize, choices: usize, ids: &[Vec<u32>], groups: ExpertGroups) -> ExpertPlan {
        let spec =
            ExpertSpec { kind: ExpertKind::Dispatch, in_features: 3, out_features: 2, dtype: DType::F32 };
        ExpertPlan::new(spec, Arc::new(Routing::top_k(experts, choices, ids).unwrap()), groups)
    }

    /// A generator of its own, for tests that print their seed.
    fn random(seed: &mut u64) -> usize {
        *seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (*seed >> 33) as usize
    }

    fn random_ids(seed: &mut u64, ranks: usize, experts: usize, choices: usize) -> Vec<Vec<u32>> {
        let of_token = |seed: &mut u64| -> Vec<u32> {
            // Some prefer the first experts, so that others stay empty.
            let among = if random(seed).is_multiple_of(3) { experts.min(choices) } else { experts };
            let mut all: Vec<u32> = (0..among as u32).collect();
            let mut ids = Vec::new();
            for _ in 0..choices {
                let is_none = all.is_empty() || random(seed).is_multiple_of(5);
                ids.push(match is_none {
                    true => Routing::NO_EXPERT,
                    false => all.swap_remove(random(seed) % all.len()),
                });
            }
            ids
        };
        (0..ranks)
            .map(|_| {
                let tokens = random(seed) % 9;
                (0..tokens).flat_map(|_| of_token(seed)).collect()
            })
            .collect()
    }

    /// Row by row against the definition: what arrives where, which expert it is for, and that both sides of every exchange fit.
    #[test]
    fn rows_of_random_routings_are_what_they_must_be() {
        for first in 0..300u64 {
            let mut seed = first;
            let ranks = 1 + random(&mut seed) % 4;
            let experts = ranks * (1 + random(&mut seed) % 3);
            let choices = 1 + random(&mut seed) % experts.min(3);
            let ids = random_ids(&mut seed, ranks, experts, choices);
            let growth = [100, 30, 170][random(&mut seed) % 3];
            let groups = ExpertGroups { count: 1 + random(&mut seed) % 4, growth };
            let plan = plan(experts, choices, &ids, groups);
            let all: Vec<ExpertRows> = (0..ranks).map(|rank| plan.rows_of(rank)).collect();
            for (rank, rows) in all.iter().enumerate() {
                check_rank(&plan, rank, rows, first);
                for (group, of_group) in rows.groups.iter().enumerate() {
                    let tokens = plan.tokens_of(rank);
                    of_group.cast.check(rank, ranks, tokens, of_group.arriving).unwrap();
                    of_group.reduce.check(rank, ranks, tokens, of_group.leaving).unwrap();
                    for (other, theirs) in all.iter().enumerate() {
                        let theirs = &theirs.groups[group];
                        for (mine, theirs) in
                            [(&of_group.cast, &theirs.cast), (&of_group.reduce, &theirs.reduce)]
                        {
                            let sent = mine.owned.iter().filter(|s| s.ranks.contains(&(other as u32)));
                            let expected = theirs.remote.iter().filter(|s| s.rank as usize == rank);
                            let sent: Vec<usize> = sent.map(|s| s.rows.len()).collect();
                            let expected: Vec<usize> = expected.map(|s| s.rows.len()).collect();
                            assert_eq!(sent, expected, "seed {first}: {rank} to {other}");
                        }
                    }
                }
            }
        }
    }

    fn check_rank(plan: &ExpertPlan, rank: usize, rows: &ExpertRows, seed: u64) {
        let routing = plan.routing();
        // Of each row of the rank's experts, by the definition: which rank's which token it is.
        let mut expected = Vec::new();
        for expert in routing.experts_of(rank).start..routing.experts_of(rank).end {
            for source in 0..plan.ranks() {
                let tokens = 0..routing.tokens(source);
                let here = tokens.filter(|&t| routing.experts_of_token(source, t).contains(&(expert as u32)));
                expected.extend(here.map(|token| (expert, source, token)));
            }
        }
        assert_eq!(rows.experts.iter().map(Range::len).sum::<usize>(), expected.len(), "seed {seed}");
        let mut found = vec![None; expected.len()];
        let mut of_leaving = found.clone();
        let first_expert = routing.experts_of(rank).start;
        let place = |found: &mut Vec<Option<(usize, usize, usize)>>, row: usize, what| {
            assert_eq!(found[row].replace(what), None, "seed {seed}");
        };
        for (expert, own) in rows.own.iter().enumerate() {
            own.iter().for_each(|row| place(&mut found, row.row, (expert + first_expert, rank, row.token)));
        }
        for (group, of_group) in rows.groups.iter().enumerate() {
            // Tokens as they come: those of each rank that have an expert here.
            let coming = |with_own: bool| {
                let mut coming = Vec::new();
                for source in (0..plan.ranks()).filter(|source| with_own || *source != rank) {
                    let tokens = plan.group_tokens(source, group);
                    let has_one = |token: &usize| {
                        let mut experts = routing.experts_of_token(source, *token).iter();
                        experts.any(|expert| routing.rank_of(*expert) == rank)
                    };
                    coming.extend((tokens.start..tokens.end).filter(has_one).map(|token| (source, token)));
                }
                coming
            };
            let (others, all) = (coming(false), coming(true));
            assert_eq!((of_group.arriving, of_group.leaving), (others.len(), all.len()), "seed {seed}");
            let mut seen = vec![false; all.len()];
            for expert in 0..rows.experts.len() {
                for row in &of_group.arrived[expert] {
                    let (source, token) = others[row.token];
                    place(&mut found, row.row, (expert + first_expert, source, token));
                }
                for row in &of_group.left[expert] {
                    let (source, token) = all[row.token];
                    place(&mut of_leaving, row.row, (expert + first_expert, source, token));
                    assert_eq!(row.is_first, !std::mem::replace(&mut seen[row.token], true), "seed {seed}");
                }
            }
        }
        let expected: Vec<_> = expected.into_iter().map(Some).collect();
        assert_eq!(found, expected, "seed {seed}");
        assert_eq!(of_leaving, expected, "seed {seed}");
    }
}

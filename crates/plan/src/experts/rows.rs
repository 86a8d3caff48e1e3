//! Where tokens lie on their way to a rank's experts and back, and which rows of experts they become.

use std::sync::Arc;

use counterpoint_mask::Range;

use super::ExpertPlan;
use super::known::{has_rank, ranks_of};
use super::tables::{ExpertRow, ExpertRows, GroupRows};
use crate::{GroupPart, OwnedSplit, RemoteSplit, Routing};

impl Routing {
    /// Of each row of a rank's experts, in their order, the token that it is, counted through those of all ranks.
    pub fn tokens_of_rows(&self, rank: usize) -> Vec<u32> {
        let here = self.experts_of(rank);
        let mut end = 0;
        let begin = |rows: &usize| {
            end += rows;
            end - rows
        };
        let mut next: Vec<usize> = self.rows()[here.start..here.end].iter().map(begin).collect();
        let mut tokens = vec![0; end];
        let (mut found, mut first) = (Vec::new(), 0);
        for source in 0..self.ranks() {
            let count = tokens_here(&mut found, self.of_rank(source), here);
            for &(token, expert) in &found[..count] {
                let row = &mut next[expert as usize];
                tokens[*row] = first + token;
                *row += 1;
            }
            first += self.tokens(source) as u32;
        }
        tokens
    }
}

impl ExpertPlan {
    /// The rows of a rank's experts. The routing keeps them: all passes in the same groups have the same.
    pub fn rows_of(&self, rank: usize) -> Arc<ExpertRows> {
        let groups = self.cut();
        let key = (rank, groups.count, groups.growth);
        self.routing().known().tables(key, || self.find_rows(rank))
    }

    /// A counting sort of all tokens by the rank's experts.
    fn find_rows(&self, rank: usize) -> ExpertRows {
        let routing = self.routing();
        let here = routing.experts_of(rank);
        let mut end = 0;
        let place = |rows: &usize| {
            end += rows;
            Range::new(end - rows, end)
        };
        let experts: Vec<Range> = routing.travel().rows[here.start..here.end].iter().map(place).collect();
        let mut rows = vec![ExpertRow::default(); end];
        let mut groups = vec![GroupRows::default(); self.groups()];
        // Tokens of lower ranks come first, so each expert is filled from its first row on.
        let mut next: Vec<usize> = experts.iter().map(|rows| rows.start).collect();
        let mut found = Vec::new();
        for source in 0..self.ranks() {
            let count = tokens_here(&mut found, routing.of_rank(source), here);
            let (mut coming, is_own) = (&found[..count], source == rank);
            for (group, of_group) in groups.iter_mut().enumerate() {
                let end = self.group_tokens(source, group).end as u32;
                let (now, later) = coming.split_at(coming.partition_point(|(token, _)| *token < end));
                coming = later;
                let mut last = None;
                for &(token, expert) in now {
                    let is_first = last != Some(token);
                    last = Some(token);
                    of_group.leaving += usize::from(is_first);
                    of_group.arriving += usize::from(is_first && !is_own);
                    let row = &mut next[expert as usize];
                    rows[*row] = ExpertRow {
                        token: if is_own { token } else { of_group.arriving as u32 - 1 },
                        leaving: of_group.leaving as u32 - 1,
                        group: group as u32,
                        is_own,
                        is_first,
                    };
                    *row += 1;
                }
            }
        }
        for (group, of_group) in groups.iter_mut().enumerate() {
            let (cast, reduce) = self.parts(rank, group, of_group);
            (of_group.cast, of_group.reduce) = (Arc::new(cast), Arc::new(reduce));
        }
        ExpertRows { experts, rows, groups }
    }

    /// A rank's parts in the way of a group's tokens to the experts of others, and in the way back of all.
    fn parts(&self, rank: usize, group: usize, of_group: &GroupRows) -> (GroupPart, GroupPart) {
        let travel = self.routing().travel();
        let (mut cast, mut reduce) = (GroupPart::default(), GroupPart::default());
        let tokens = self.group_tokens(rank, group);
        travel.ranges(rank, tokens.start..tokens.end, |tokens, set| {
            let (rows, ranks) = (Range::new(tokens.start, tokens.end), ranks_of(set));
            if ranks.len() > usize::from(has_rank(set, rank)) {
                let others = ranks.iter().copied().filter(|other| *other as usize != rank);
                cast.owned.push(OwnedSplit { rows, ranks: others.collect() });
            }
            if !ranks.is_empty() {
                reduce.owned.push(OwnedSplit { rows, ranks });
            }
        });
        cast.remote.reserve(of_group.arriving);
        reduce.remote.reserve(of_group.leaving);
        let (mut arriving, mut leaving) = (0, 0);
        for source in 0..self.ranks() {
            let tokens = self.group_tokens(source, group);
            travel.ranges(source, tokens.start..tokens.end, |tokens, set| {
                if !has_rank(set, rank) {
                    return;
                }
                let split = |end: &mut usize| {
                    *end += tokens.len();
                    RemoteSplit { rows: Range::new(*end - tokens.len(), *end), rank: source as u32 }
                };
                if source != rank {
                    cast.remote.push(split(&mut arriving));
                }
                reduce.remote.push(split(&mut leaving));
            });
        }
        (cast, reduce)
    }
}

/// Lists the tokens of a rank that have experts among `here`, once for each of them, with its number among these. How many there are.
fn tokens_here(found: &mut Vec<(u32, u32)>, (starts, experts): (&[usize], &[u32]), here: Range) -> usize {
    let (first, each) = (here.start as u32, here.len() as u32);
    // Each is written, and the place is kept where it belongs there: what a branch predicts badly.
    found.resize(experts.len() + 1, (0, 0));
    let mut count = 0;
    for (token, ends) in (0..).zip(starts.windows(2)) {
        for expert in &experts[ends[0]..ends[1]] {
            let expert = expert.wrapping_sub(first);
            found[count] = (token, expert);
            count += usize::from(expert < each);
        }
    }
    count
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{DType, ExpertGroups, ExpertKind, ExpertSpec};

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
            let all: Vec<Arc<ExpertRows>> = (0..ranks).map(|rank| plan.rows_of(rank)).collect();
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

    /// All layers that are given a routing have its tables, but for those of groups that came long ago.
    #[test]
    fn a_routing_keeps_the_tables_of_its_rows() {
        let ids = [vec![0, 1, 2, 3], vec![1, 3]];
        let whole = plan(4, 2, &ids, ExpertGroups::default());
        let spec = ExpertSpec { kind: ExpertKind::Combine, ..whole.spec };
        let in_groups = |count| ExpertPlan::new(spec, whole.routing().clone(), ExpertGroups::even(count));
        let first = whole.rows_of(1);
        assert!(Arc::ptr_eq(&first, &in_groups(1).rows_of(1)));
        assert!(!Arc::ptr_eq(&first, &whole.rows_of(0)));
        (2..5).for_each(|count| drop(in_groups(count).rows_of(1)));
        assert!(Arc::ptr_eq(&first, &whole.rows_of(1)));
        drop(in_groups(5).rows_of(1));
        let again = whole.rows_of(1);
        assert!(!Arc::ptr_eq(&first, &again) && first == again);
        let copy = Routing::clone(whole.routing());
        assert_eq!((&copy, copy.fingerprint()), (&**whole.routing(), whole.routing().fingerprint()));
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
        let before = |source: usize| (0..source).map(|rank| routing.tokens(rank)).sum::<usize>();
        let numbers: Vec<u32> =
            expected.iter().map(|&(_, source, token)| (before(source) + token) as u32).collect();
        assert_eq!(routing.tokens_of_rows(rank), numbers, "seed {seed}");
        let mut found = vec![None; expected.len()];
        let mut of_leaving = found.clone();
        let first_expert = routing.experts_of(rank).start;
        let place = |found: &mut Vec<Option<(usize, usize, usize)>>, row: usize, what| {
            assert_eq!(found[row].replace(what), None, "seed {seed}");
        };
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
            for (expert, range) in rows.experts.iter().enumerate() {
                for (at, row) in (range.start..).zip(rows.of_expert(expert)) {
                    if row.group as usize != group {
                        continue;
                    }
                    let (source, token) = match row.is_own {
                        true => (rank, row.token as usize),
                        false => others[row.token as usize],
                    };
                    place(&mut found, at, (expert + first_expert, source, token));
                    let (source, token) = all[row.leaving as usize];
                    place(&mut of_leaving, at, (expert + first_expert, source, token));
                    let before = std::mem::replace(&mut seen[row.leaving as usize], true);
                    assert_eq!(row.is_first, !before, "seed {seed}");
                }
            }
        }
        let expected: Vec<_> = expected.into_iter().map(Some).collect();
        assert_eq!(found, expected, "seed {seed}");
        assert_eq!(of_leaving, expected, "seed {seed}");
    }
}

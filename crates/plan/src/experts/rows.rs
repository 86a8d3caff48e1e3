//! Where tokens lie on their way to a rank's experts and back, and which rows of experts they become.

use std::sync::Arc;

use counterpoint_mask::Range;

use super::ExpertPlan;
use super::known::{has_rank, ranks_of};
use super::tables::{ArrivingGroup, ArrivingRows, ExpertRows, LeavingGroup, LeavingRows, TokenRun};
use crate::{GroupPart, OwnedSplit, RemoteSplit, Routing};

impl Routing {
    /// Of each row of a rank's experts, in their order, the token that it is, counted through those of all ranks.
    pub fn tokens_of_rows(&self, rank: usize) -> Vec<u32> {
        let experts = self.rows_of_experts(rank);
        let mut next: Vec<usize> = experts.iter().map(|rows| rows.start).collect();
        let mut tokens = vec![0; experts.last().map_or(0, |last| last.end)];
        let choices = ChoicesHere::of(self, rank, tokens.len());
        let mut first = 0;
        for source in 0..self.ranks() {
            for &(token, expert) in choices.of_source(source) {
                let row = &mut next[expert as usize];
                tokens[*row] = first + token;
                *row += 1;
            }
            first += self.tokens(source) as u32;
        }
        tokens
    }

    /// Rows of each expert of a rank, which follow each other.
    fn rows_of_experts(&self, rank: usize) -> Vec<Range> {
        let here = self.experts_of(rank);
        let mut end = 0;
        let place = |rows: &usize| {
            end += rows;
            Range::new(end - rows, end)
        };
        self.rows()[here.start..here.end].iter().map(place).collect()
    }
}

impl ExpertPlan {
    /// The rows of a rank's experts. The routing keeps them: all passes in the same groups have the same.
    pub fn rows_of(&self, rank: usize) -> Arc<ExpertRows> {
        let groups = self.cut();
        let key = (rank, groups.count, groups.growth);
        let find = || ExpertRows::new(rank, self.routing().rows_of_experts(rank));
        self.routing().known().tables(key, find)
    }

    /// The tokens that these rows of a rank are.
    pub fn arriving<'a>(&self, rows: &'a ExpertRows) -> &'a ArrivingRows {
        rows.arriving.get_or_init(|| self.find_arriving(rows))
    }

    /// The tokens that these rows of a rank give to.
    pub fn leaving<'a>(&self, rows: &'a ExpertRows) -> &'a LeavingRows {
        rows.leaving.get_or_init(|| self.find_leaving(rows))
    }

    fn choices<'a>(&self, of: &'a ExpertRows) -> &'a ChoicesHere {
        of.choices.get_or_init(|| ChoicesHere::of(self.routing(), of.rank, of.count()))
    }

    /// A counting sort of all tokens by the rank's experts.
    fn find_arriving(&self, of: &ExpertRows) -> ArrivingRows {
        let mut tokens = vec![0; of.count()];
        let mut arriving = vec![0u32; self.groups()];
        let mut runs: Vec<Vec<TokenRun>> = vec![Vec::new(); of.experts.len()];
        // Tokens of lower ranks come first, so each expert is filled from its first row on.
        let mut next: Vec<usize> = of.experts.iter().map(|rows| rows.start).collect();
        let mut place = |next: &mut [usize], expert: u32, token: u32| {
            let row = &mut next[expert as usize];
            tokens[*row] = token;
            *row += 1;
        };
        for (source, group, choices) in self.by_groups(self.choices(of)) {
            let is_own = source == of.rank;
            if is_own {
                choices.iter().for_each(|&(token, expert)| place(&mut next, expert, token));
            } else {
                let (arrived, mut last) = (&mut arriving[group], NO_TOKEN);
                for &(token, expert) in choices {
                    *arrived += u32::from(token != last);
                    last = token;
                    place(&mut next, expert, *arrived - 1);
                }
            }
            let group = (!is_own).then_some(group);
            for ((runs, rows), &end) in runs.iter_mut().zip(&of.experts).zip(&next) {
                add_run(runs, (rows.start, end), group);
            }
        }
        let mut run_starts = vec![0];
        run_starts.extend(runs.iter().scan(0, |end, of_expert| {
            *end += of_expert.len();
            Some(*end)
        }));
        let group = |(group, rows): (usize, u32)| {
            let rows = rows as usize;
            ArrivingGroup { rows, cast: Arc::new(self.cast(of.rank, group, rows)) }
        };
        let groups = arriving.into_iter().enumerate().map(group).collect();
        ArrivingRows { tokens: Arc::new(tokens), runs: runs.concat(), run_starts, groups }
    }

    /// A counting sort of all rows by their groups and experts, and by whether they are the first of their token.
    fn find_leaving(&self, of: &ExpertRows) -> LeavingRows {
        let (choices, of_group) = (self.choices(of), 2 * of.experts.len());
        let kind = |expert: u32, is_first: bool| 2 * expert as usize + usize::from(!is_first);
        let mut starts = vec![0u32; of_group * self.groups() + 1];
        for (_, group, choices) in self.by_groups(choices) {
            let (counts, mut last) = (&mut starts[group * of_group..][..of_group], NO_TOKEN);
            for &(token, expert) in choices {
                counts[kind(expert, token != last)] += 1;
                last = token;
            }
        }
        let mut end = 0;
        for of_kind in &mut starts {
            (*of_kind, end) = (end, end + *of_kind);
        }
        let mut next: Vec<u32> = of.experts.iter().map(|rows| rows.start as u32).collect();
        let mut next_given = starts.clone();
        let (mut rows, mut to) = (vec![0; of.count()], vec![0; of.count()]);
        let mut leaving = vec![0u32; self.groups()];
        for (_, group, choices) in self.by_groups(choices) {
            let (next_given, mut last) = (&mut next_given[group * of_group..][..of_group], NO_TOKEN);
            let mut left = leaving[group];
            for &(token, expert) in choices {
                let is_first = token != last;
                last = token;
                left += u32::from(is_first);
                let (given, row) = (&mut next_given[kind(expert, is_first)], &mut next[expert as usize]);
                let place = *given as usize;
                (rows[place], to[place]) = (*row, left - 1);
                (*given, *row) = (*given + 1, *row + 1);
            }
            leaving[group] = left;
        }
        let group = |(group, rows): (usize, u32)| {
            let rows = rows as usize;
            LeavingGroup { rows, reduce: Arc::new(self.reduce(of.rank, group, rows)) }
        };
        let groups = leaving.into_iter().enumerate().map(group).collect();
        LeavingRows { rows: Arc::new(rows), to: Arc::new(to), starts, groups }
    }

    /// The choices of each rank's tokens of each group, in their order.
    fn by_groups<'a>(&self, choices: &'a ChoicesHere) -> impl Iterator<Item = (usize, usize, &'a [Choice])> {
        (0..self.ranks()).flat_map(move |source| {
            let mut left = choices.of_source(source);
            (0..self.groups()).map(move |group| {
                let end = self.group_tokens(source, group).end as u32;
                let (now, later) = left.split_at(left.partition_point(|(token, _)| *token < end));
                left = later;
                (source, group, now)
            })
        })
    }

    /// A rank's part in the way of a group's tokens to the experts of others, of which so many come here.
    fn cast(&self, rank: usize, group: usize, arriving: usize) -> GroupPart {
        let mut cast = GroupPart::default();
        let tokens = self.group_tokens(rank, group);
        self.routing().travel().ranges(rank, tokens.start..tokens.end, |tokens, set| {
            let others = ranks_of(set, Some(rank));
            if !others.is_empty() {
                cast.owned.push(OwnedSplit { rows: Range::new(tokens.start, tokens.end), ranks: others });
            }
        });
        let others = (0..self.ranks()).filter(|source| *source != rank);
        cast.remote = self.coming_here(others, (rank, group), arriving);
        cast
    }

    /// A rank's part in the way of a group's tokens back from all experts, of which so many leave here.
    fn reduce(&self, rank: usize, group: usize, leaving: usize) -> GroupPart {
        let mut reduce = GroupPart::default();
        let tokens = self.group_tokens(rank, group);
        self.routing().travel().ranges(rank, tokens.start..tokens.end, |tokens, set| {
            let ranks = ranks_of(set, None);
            if !ranks.is_empty() {
                reduce.owned.push(OwnedSplit { rows: Range::new(tokens.start, tokens.end), ranks });
            }
        });
        reduce.remote = self.coming_here(0..self.ranks(), (rank, group), leaving);
        reduce
    }

    /// The tokens of a group that ranks have and that have experts on a rank, so many, one after the other.
    fn coming_here(
        &self,
        sources: impl Iterator<Item = usize>,
        (rank, group): (usize, usize),
        count: usize,
    ) -> Vec<RemoteSplit> {
        let (mut remote, mut end) = (Vec::with_capacity(count), 0);
        for source in sources {
            let tokens = self.group_tokens(source, group);
            self.routing().travel().ranges(source, tokens.start..tokens.end, |tokens, set| {
                if has_rank(set, rank) {
                    end += tokens.len();
                    remote
                        .push(RemoteSplit { rows: Range::new(end - tokens.len(), end), rank: source as u32 });
                }
            });
        }
        remote
    }
}

/// No token has this number.
const NO_TOKEN: u32 = u32::MAX;

/// A token of a rank, and which of the experts here it goes to.
pub(super) type Choice = (u32, u32);

/// Which tokens of all ranks go to the experts of one.
#[derive(Debug, PartialEq)]
pub(super) struct ChoicesHere {
    /// Rank after rank and token after token.
    all: Vec<Choice>,
    /// Where those of each rank end.
    ends: Vec<usize>,
}

impl ChoicesHere {
    /// Those of a rank, so many.
    fn of(routing: &Routing, rank: usize, count: usize) -> Self {
        let here = routing.experts_of(rank);
        let (first, each) = (here.start as u32, here.len() as u32);
        // Each is written, and the place is kept where it belongs there: what a branch predicts badly.
        let (mut all, mut end) = (vec![(0, 0); count + 1], 0);
        let mut of_source = |source| {
            let (starts, experts) = routing.of_rank(source);
            for (token, ends) in (0..).zip(starts.windows(2)) {
                for expert in &experts[ends[0]..ends[1]] {
                    let expert = expert.wrapping_sub(first);
                    all[end] = (token, expert);
                    end += usize::from(expert < each);
                }
            }
            end
        };
        let ends = (0..routing.ranks()).map(&mut of_source).collect();
        Self { all, ends }
    }

    /// Those of a rank's tokens.
    fn of_source(&self, source: usize) -> &[Choice] {
        &self.all[source.checked_sub(1).map_or(0, |before| self.ends[before])..self.ends[source]]
    }
}

/// Adds what follows the last run of an expert, whose rows begin and now end there, where anything does.
fn add_run(runs: &mut Vec<TokenRun>, (begin, end): (usize, usize), group: Option<usize>) {
    let first = runs.last().map_or(begin, |last| last.rows.end);
    match runs.last_mut() {
        _ if first == end => {}
        Some(last) if last.group == group => last.rows.end = end,
        _ => runs.push(TokenRun { rows: Range::new(first, end), group }),
    }
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
            let parts = |rows: &ExpertRows, group: usize| {
                let (arriving, leaving) =
                    (&plan.arriving(rows).groups[group], &plan.leaving(rows).groups[group]);
                [(arriving.cast.clone(), arriving.rows), (leaving.reduce.clone(), leaving.rows)]
            };
            for (rank, rows) in all.iter().enumerate() {
                check_rank(&plan, rank, rows, first);
                for group in 0..plan.groups() {
                    let tokens = plan.tokens_of(rank);
                    let here = parts(rows, group);
                    here.iter().for_each(|(part, rows)| part.check(rank, ranks, tokens, *rows).unwrap());
                    for (other, theirs) in all.iter().enumerate() {
                        for ((mine, _), (theirs, _)) in here.iter().zip(parts(theirs, group)) {
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
        assert!(!Arc::ptr_eq(&first, &again));
        assert_eq!(
            (whole.arriving(&first), whole.leaving(&first)),
            (whole.arriving(&again), whole.leaving(&again))
        );
        assert_eq!(first, again);
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
        let (arriving, leaving) = (plan.arriving(rows), plan.leaving(rows));
        for group in 0..plan.groups() {
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
            let counts = (arriving.groups[group].rows, leaving.groups[group].rows);
            assert_eq!(counts, (others.len(), all.len()), "seed {seed}");
            let mut seen = vec![false; all.len()];
            for expert in 0..rows.experts.len() {
                let runs = arriving.runs_of(expert).iter();
                for run in runs.filter(|run| run.group.unwrap_or(group) == group) {
                    for at in run.rows.start..run.rows.end {
                        let token = arriving.tokens[at] as usize;
                        let (source, token) = match run.group {
                            None => (rank, token),
                            Some(_) => others[token],
                        };
                        if plan.group_tokens(source, group).contains(token) {
                            place(&mut found, at, (expert + first_expert, source, token));
                        }
                    }
                }
                for (given, is_first) in
                    leaving.given(group, (expert, rows.experts.len())).into_iter().zip([true, false])
                {
                    let listed = &leaving.rows[given.start..given.end];
                    assert!(listed.is_sorted(), "seed {seed}");
                    for (&at, &to) in listed.iter().zip(&leaving.to[given.start..given.end]) {
                        let (source, token) = all[to as usize];
                        place(&mut of_leaving, at as usize, (expert + first_expert, source, token));
                        let before = std::mem::replace(&mut seen[to as usize], true);
                        assert_eq!(is_first, !before, "seed {seed}");
                    }
                }
            }
        }
        let expected: Vec<_> = expected.into_iter().map(Some).collect();
        assert_eq!(found, expected, "seed {seed}");
        assert_eq!(of_leaving, expected, "seed {seed}");
    }
}

//! Routing of a mixture of experts: which experts each token of every rank goes to, and what of it fits.

use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use super::known::{Known, Travel};
use super::routing_error::RoutingError;
use super::token_experts::TokenExperts;

/// The most experts of a layer. Who names more has slipped: tables have an entry for each.
const MAX_EXPERTS: usize = 1 << 20;
/// The most rows that a rank's tokens give, likewise.
const MAX_ROWS: usize = 1 << 28;

/// The most that a layer of experts is called with, whatever the routing of a step; `None` has no limit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct ExpertCapacity {
    /// Tokens that a rank has.
    pub tokens: Option<usize>,
    /// Rows that one expert takes.
    pub rows_of_expert: Option<usize>,
    /// Rows that the experts of one rank take together.
    pub rows_of_rank: Option<usize>,
}

/// What [`Routing::random`] draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RandomRouting {
    /// Experts of all ranks.
    pub experts: usize,
    /// Different experts of each token, at most all.
    pub choices: usize,
    /// Ranks.
    pub ranks: usize,
    /// Tokens of each rank.
    pub tokens: usize,
    /// An expert's popularity falls as one over its place to the power of this: 0 has all alike.
    pub skew: f64,
    /// Of the random numbers.
    pub seed: u64,
}

/// The experts of every token of every rank, known at run time. A token may have any number of them, none too (it was dropped, or is
/// padding). Experts lie on the ranks in equal ranges: the first ones on rank 0.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Routing {
    experts: usize,
    ranks: Vec<TokenExperts>,
    #[serde(skip)]
    known: Known,
}

impl Routing {
    /// Stands for no expert in [`Routing::top_k`].
    pub const NO_EXPERT: u32 = u32::MAX;

    /// From `choices` experts a token, of every rank token after token, as a router gives them; [`Routing::NO_EXPERT`] where a token has
    /// fewer.
    ///
    /// # Errors
    /// Experts that do not exist, that a token has twice, or that do not divide over the ranks.
    pub fn top_k(experts: usize, choices: usize, ids: &[Vec<u32>]) -> Result<Self, RoutingError> {
        Self::check_experts(experts, ids.len())?;
        let of_rank = |(rank, ids): (usize, &Vec<u32>)| {
            if choices == 0 || !ids.len().is_multiple_of(choices) {
                return Err(RoutingError::Uneven { rank, given: ids.len(), choices });
            }
            let mut starts = Vec::with_capacity(ids.len() / choices + 1);
            starts.push(0);
            let mut of_rank = TokenExperts { starts, experts: Vec::with_capacity(ids.len()) };
            for (token, ids) in ids.chunks(choices).enumerate() {
                of_rank.push(rank, token, ids, experts)?;
            }
            Ok(of_rank)
        };
        let ranks = ids.iter().enumerate().map(of_rank).collect::<Result<_, _>>()?;
        Ok(Self { experts, ranks, known: Known::default() })
    }

    /// From rows that lie expert after expert, each of one expert, as a permutation of tokens leaves them: `counts[rank][expert]` rows, of
    /// the `rows[rank]` that the rank has.
    ///
    /// # Errors
    /// Counts that do not add up, or of other experts.
    pub fn from_counts(experts: usize, counts: &[Vec<usize>], rows: &[usize]) -> Result<Self, RoutingError> {
        Self::check_experts(experts, counts.len().min(rows.len()))?;
        let of_rank = |(rank, (counts, &rows)): (usize, (&Vec<usize>, &usize))| {
            if counts.len() != experts {
                return Err(RoutingError::CountsOfOthers { rank, given: counts.len(), experts });
            }
            let sum = counts.iter().fold(0usize, |sum, count| sum.saturating_add(*count));
            if sum > MAX_ROWS {
                return Err(RoutingError::TooManyRows { rank, rows: sum, most: MAX_ROWS });
            }
            if sum != rows {
                return Err(RoutingError::CountsDoNotAddUp { rank, sum, rows });
            }
            let of_expert = |(&count, expert): (&usize, u32)| std::iter::repeat_n(expert, count);
            let experts = counts.iter().zip(0..).flat_map(of_expert).collect();
            Ok(TokenExperts { starts: (0..=rows).collect(), experts })
        };
        if counts.len() != rows.len() {
            return Err(RoutingError::Experts { experts, ranks: counts.len().min(rows.len()) });
        }
        let ranks = counts.iter().zip(rows).enumerate().map(of_rank).collect::<Result<_, _>>()?;
        Ok(Self { experts, ranks, known: Known::default() })
    }

    /// A routing as a router's choices may be, the same for equal arguments.
    ///
    /// # Errors
    /// Experts that do not divide over the ranks.
    pub fn random(drawn: RandomRouting) -> Result<Self, RoutingError> {
        let RandomRouting { experts, choices, ranks, tokens, skew, seed } = drawn;
        let choices = choices.min(experts);
        let mut draw = Draw(seed);
        // Who is popular is drawn too, so that a rank's experts are not alike.
        let mut places: Vec<usize> = (1..=experts).collect();
        for at in (1..experts).rev() {
            places.swap(at, draw.below(at + 1));
        }
        let weights: Vec<f64> = places.iter().map(|place| (*place as f64).powf(-skew)).collect();
        let mut one_rank = || {
            let mut ids = Vec::with_capacity(tokens * choices);
            for _ in 0..tokens {
                let mut left = weights.clone();
                let mut sum: f64 = left.iter().sum();
                for _ in 0..choices {
                    let mut point = draw.unit() * sum;
                    let found = left.iter().position(|weight| {
                        point -= weight;
                        *weight > 0.0 && point < 0.0
                    });
                    // Rounding may leave a rest behind the last.
                    let expert = found.or_else(|| left.iter().rposition(|weight| *weight > 0.0)).unwrap_or(0);
                    sum -= left[expert];
                    left[expert] = 0.0;
                    ids.push(expert as u32);
                }
            }
            ids
        };
        let ids: Vec<Vec<u32>> = (0..ranks).map(|_| one_rank()).collect();
        Self::top_k(experts, choices.max(1), &ids)
    }

    fn check_experts(experts: usize, ranks: usize) -> Result<(), RoutingError> {
        if experts > MAX_EXPERTS {
            return Err(RoutingError::TooMany { experts, most: MAX_EXPERTS });
        }
        if ranks == 0 || experts == 0 || !experts.is_multiple_of(ranks) {
            return Err(RoutingError::Experts { experts, ranks });
        }
        Ok(())
    }

    /// Experts of all ranks.
    pub fn experts(&self) -> usize {
        self.experts
    }

    /// Ranks.
    pub fn ranks(&self) -> usize {
        self.ranks.len()
    }

    /// Tokens that a rank has.
    pub fn tokens(&self, rank: usize) -> usize {
        self.ranks[rank].starts.len() - 1
    }

    /// The experts of a rank's token, ascending.
    pub fn experts_of_token(&self, rank: usize, token: usize) -> &[u32] {
        let TokenExperts { starts, experts } = &self.ranks[rank];
        &experts[starts[token]..starts[token + 1]]
    }

    /// The experts on a rank.
    pub fn experts_of(&self, rank: usize) -> Range {
        let each = self.experts / self.ranks.len();
        Range::new(rank * each, (rank + 1) * each)
    }

    /// The rank of an expert.
    pub fn rank_of(&self, expert: u32) -> usize {
        expert as usize / (self.experts / self.ranks.len())
    }

    /// A rank's tokens: where the experts of each begin, with the last one's end, and the experts.
    pub(crate) fn of_rank(&self, rank: usize) -> (&[usize], &[u32]) {
        let TokenExperts { starts, experts } = &self.ranks[rank];
        (starts, experts)
    }

    /// What was found of it.
    pub(super) fn known(&self) -> &Known {
        &self.known
    }

    /// Where its tokens go.
    pub(super) fn travel(&self) -> &Travel {
        let tokens = (0..self.ranks()).map(|rank| self.of_rank(rank));
        self.known.travel(|| Travel::of([self.experts, self.ranks()], tokens))
    }

    /// The bytes of its fingerprint, which `find` makes.
    pub(crate) fn fingerprint_bytes(&self, find: impl FnOnce() -> [u8; 32]) -> [u8; 32] {
        self.known.fingerprint(find)
    }

    /// Rows of every expert: the tokens of all ranks that go to it.
    pub fn rows(&self) -> &[usize] {
        &self.travel().rows
    }

    /// Whether a token has several experts on one rank, which then sums what they give.
    pub fn sums_on_ranks(&self) -> bool {
        self.travel().sums_on_ranks
    }

    /// Whether a layer that was prepared for so much can be called with it.
    ///
    /// # Errors
    /// What is exceeded first, and by how much.
    pub fn check(&self, capacity: &ExpertCapacity) -> Result<(), RoutingError> {
        for rank in 0..self.ranks() {
            let tokens = self.tokens(rank);
            if let Some(capacity) = capacity.tokens.filter(|most| tokens > *most) {
                return Err(RoutingError::Tokens { rank, tokens, capacity });
            }
        }
        let of_experts = self.rows();
        for (expert, &rows) in of_experts.iter().enumerate() {
            if let Some(capacity) = capacity.rows_of_expert.filter(|most| rows > *most) {
                return Err(RoutingError::Overfull { expert, rows, capacity });
            }
        }
        for rank in 0..self.ranks() {
            let experts = self.experts_of(rank);
            let rows = of_experts[experts.start..experts.end].iter().sum();
            if let Some(capacity) = capacity.rows_of_rank.filter(|most| rows > *most) {
                return Err(RoutingError::RankOverfull { rank, rows, capacity });
            }
        }
        Ok(())
    }

    /// The routing in which no expert has more than so many rows, and how many were dropped: those of the last tokens of the last ranks,
    /// as in GShard and the Switch Transformer.
    #[must_use]
    pub fn within(&self, rows_of_expert: usize) -> (Self, usize) {
        let mut rows = vec![0; self.experts];
        let mut dropped = 0;
        let ranks = (0..self.ranks()).map(|rank| {
            let mut kept = TokenExperts { starts: vec![0], experts: Vec::new() };
            for token in 0..self.tokens(rank) {
                for &expert in self.experts_of_token(rank, token) {
                    let rows = &mut rows[expert as usize];
                    if *rows == rows_of_expert {
                        dropped += 1;
                        continue;
                    }
                    *rows += 1;
                    kept.experts.push(expert);
                }
                kept.starts.push(kept.experts.len());
            }
            kept
        });
        let ranks = ranks.collect();
        (Self { experts: self.experts, ranks, known: Known::default() }, dropped)
    }
}

/// Numbers that follow from a seed (splitmix64).
struct Draw(u64);

impl Draw {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut word = self.0;
        word = (word ^ (word >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        word = (word ^ (word >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        word ^ (word >> 31)
    }

    fn below(&mut self, count: usize) -> usize {
        (self.next() % count as u64) as usize
    }

    fn unit(&mut self) -> f64 {
        (self.next() >> 11) as f64 / (1u64 << 53) as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NONE: u32 = Routing::NO_EXPERT;

    #[test]
    fn what_makes_no_sense_is_refused_with_where() {
        let top = |experts, choices, ids: &[&[u32]]| {
            let ids: Vec<Vec<u32>> = ids.iter().map(|ids| ids.to_vec()).collect();
            Routing::top_k(experts, choices, &ids).unwrap_err().to_string()
        };
        assert_eq!(
            top(4, 2, &[&[0, 1], &[3, 4]]),
            "token 0 of rank 1 goes to expert 4; there are experts 0 to 3"
        );
        assert_eq!(
            top(4, 2, &[&[0, 1, 2, 2], &[]]),
            "token 1 of rank 0 goes to expert 2 twice; name each expert of a token once"
        );
        assert_eq!(
            top(4, 2, &[&[0, 1, 2], &[]]),
            "rank 0 names 3 experts, which are no rows of 2 experts a token"
        );
        assert!(top(4, 0, &[&[], &[]]).contains("0 experts a token"));
        for (experts, ranks) in [(3, 2), (0, 1), (4, 0)] {
            let refused = top(experts, 1, &vec![&[][..]; ranks]);
            assert!(refused.starts_with(&format!("{experts} experts on {ranks} ranks")), "{refused}");
        }
        let counts = |counts: &[Vec<usize>], rows: &[usize]| {
            Routing::from_counts(2, counts, rows).unwrap_err().to_string()
        };
        assert_eq!(
            counts(&[vec![3, 4], vec![1, 1]], &[7, 3]),
            "the counts of rank 1 add up to 2 rows, and it has 3"
        );
        assert_eq!(counts(&[vec![3, 4], vec![1]], &[7, 1]), "rank 1 has counts of 1 experts; there are 2");
        assert_eq!(
            counts(&[vec![1 << 40, 4], vec![0, 0]], &[1 << 40, 0]),
            "rank 0 has 1099511627780 rows; give 268435456 at most"
        );
        assert!(counts(&[vec![usize::MAX, 4], vec![0, 0]], &[3, 0]).starts_with("rank 0 has"));
        assert_eq!(top(1 << 40, 1, &[&[0]]), "there are 1099511627776 experts; give 1048576 at most");
        assert_eq!(
            top(0, 1, &[&[0]]),
            "0 experts on 1 ranks; each rank needs the same number of experts, and at least one"
        );
    }

    #[test]
    fn counts_are_rows_of_one_expert_each() {
        let counted = Routing::from_counts(4, &[vec![2, 0, 1, 0], vec![0, 0, 0, 2]], &[3, 2]).unwrap();
        let named = Routing::top_k(4, 1, &[vec![0, 0, 2], vec![3, 3]]).unwrap();
        assert_eq!(counted, named);
        assert_eq!(counted.rows(), [2, 0, 1, 2]);
        assert!(!counted.sums_on_ranks());
        assert!(Routing::top_k(4, 2, &[vec![1, 0], vec![]]).unwrap().sums_on_ranks());
        assert!(!Routing::top_k(4, 2, &[vec![1, 2], vec![]]).unwrap().sums_on_ranks());
    }

    #[test]
    fn random_choices_are_as_popular_as_asked() {
        let of = |experts, choices, skew| {
            let (ranks, tokens) = if experts == 8 { (4, 500) } else { (2, 10) };
            Routing::random(RandomRouting { experts, choices, ranks, tokens, skew, seed: 7 })
        };
        let drawn = |skew| of(8, 2, skew).unwrap();
        assert_eq!(drawn(1.0), drawn(1.0));
        let even = drawn(0.0).rows().to_vec();
        assert_eq!(even.iter().sum::<usize>(), 4 * 500 * 2);
        assert!(even.iter().all(|rows| (400..600).contains(rows)), "{even:?}");
        let mut skewed = drawn(2.0).rows().to_vec();
        skewed.sort_unstable();
        assert!(skewed[7] > 4 * skewed[3] && skewed[7] <= 2000, "{skewed:?}");
        // All experts of a token, where it chooses as many as there are.
        assert_eq!(of(4, 9, 1.0).unwrap().rows(), [20; 4]);
        assert!(of(3, 1, 0.0).is_err());
    }

    #[test]
    fn capacities_are_held_to_and_rows_beyond_them_dropped() {
        let ids = [vec![0, 1, 0, 2, 0, NONE], vec![3, 0, 0, 1]];
        let routing = Routing::top_k(4, 2, &ids).unwrap();
        assert_eq!(routing.rows(), [5, 2, 1, 1]);
        let check = |capacity: ExpertCapacity| routing.check(&capacity).map_err(|error| error.to_string());
        assert_eq!(check(ExpertCapacity::default()), Ok(()));
        let tight = ExpertCapacity { tokens: Some(3), rows_of_expert: Some(5), rows_of_rank: Some(7) };
        assert_eq!(check(tight), Ok(()));
        let refused = |capacity| check(capacity).unwrap_err();
        let less = ExpertCapacity { tokens: Some(2), ..tight };
        assert_eq!(refused(less), "rank 0 has 3 tokens, and its capacity is 2");
        let less = ExpertCapacity { rows_of_expert: Some(4), ..tight };
        assert!(refused(less).starts_with("expert 0 is given 5 rows, and its capacity is 4"));
        let less = ExpertCapacity { rows_of_rank: Some(6), ..tight };
        assert!(refused(less).starts_with("the experts of rank 0 are given 7 rows, and its capacity is 6"));
        let (within, dropped) = routing.within(3);
        assert_eq!((within.rows(), dropped), (&[3, 2, 1, 1][..], 2));
        assert_eq!(within.experts_of_token(1, 0), [3]);
        assert_eq!(within.experts_of_token(1, 1), [1]);
        within.check(&ExpertCapacity { rows_of_expert: Some(3), ..tight }).unwrap();
    }
}

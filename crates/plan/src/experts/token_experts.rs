//! The experts of the tokens of one rank, as a routing keeps them.

use serde::{Deserialize, Serialize};

use super::{Routing, RoutingError};

/// The experts of one rank's tokens.
#[expect(clippy::derived_hash_with_manual_eq, reason = "equal values are equal in all fields")]
#[derive(Clone, Debug, Default, Eq, Hash, Serialize, Deserialize)]
pub(super) struct TokenExperts {
    /// Where each token's experts begin, and where the last one's end.
    pub(super) starts: Vec<usize>,
    /// Of each token ascending.
    pub(super) experts: Vec<u32>,
}

impl PartialEq for TokenExperts {
    /// Of two steps the experts differ at once, and mostly nothing else does.
    fn eq(&self, other: &Self) -> bool {
        self.experts == other.experts && self.starts == other.starts
    }
}

impl TokenExperts {
    /// Adds a token with these experts, in any order.
    pub(super) fn push(
        &mut self,
        rank: usize,
        token: usize,
        ids: &[u32],
        experts: usize,
    ) -> Result<(), RoutingError> {
        if !self.push_set(ids, experts) {
            self.push_sorted(rank, token, ids, experts)?;
        }
        self.starts.push(self.experts.len());
        Ok(())
    }

    /// Adds the experts of a token as the bits of a set, which takes a third of the time that sorting takes. False, and nothing is added, where
    /// there are too many for that or something is wrong with them.
    fn push_set(&mut self, ids: &[u32], experts: usize) -> bool {
        let mut sets = [0u64; 4];
        let most = experts.min(64 * sets.len()) as u32;
        let mut fits = true;
        for &id in ids {
            let (is_one, is_known) = (id != Routing::NO_EXPERT, id < most);
            fits &= is_known | !is_one;
            let set = &mut sets[id as usize / 64 % 4];
            let bit = u64::from(is_known) << (id % 64);
            fits &= *set & bit == 0;
            *set |= bit;
        }
        if fits {
            for (set, first) in sets[..most.div_ceil(64) as usize].iter().zip((0..).step_by(64)) {
                let mut left = *set;
                while left != 0 {
                    self.experts.push(first + left.trailing_zeros());
                    left &= left - 1;
                }
            }
        }
        fits
    }

    /// The same by sorting them.
    fn push_sorted(
        &mut self,
        rank: usize,
        token: usize,
        ids: &[u32],
        experts: usize,
    ) -> Result<(), RoutingError> {
        let first = self.experts.len();
        self.experts.extend(ids.iter().copied().filter(|id| *id != Routing::NO_EXPERT));
        let of_token = &mut self.experts[first..];
        of_token.sort_unstable();
        if let Some(&expert) = of_token.last().filter(|last| **last as usize >= experts) {
            return Err(RoutingError::UnknownExpert { rank, token, expert, experts });
        }
        if let Some(pair) = of_token.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(RoutingError::Twice { rank, token, expert: pair[0] });
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Few experts are bits of a set, more are sorted: the same.
    #[test]
    fn experts_of_a_token_ascend_however_many_there_are() {
        let mut seed = 7u64;
        let mut draw = |below: usize| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (seed >> 33) as usize % below
        };
        for experts in [1, 3, 63, 64, 65, 255, 256, 257, 300] {
            for _ in 0..200 {
                let choices = 1 + draw(experts.min(9));
                let mut left: Vec<u32> = (0..experts as u32).collect();
                let mut chosen = || left.swap_remove(draw(left.len()));
                let mut ids: Vec<u32> = (0..choices).map(|_| chosen()).collect();
                ids.push(Routing::NO_EXPERT);
                ids.swap(0, choices);
                let routing = Routing::top_k(experts, choices + 1, std::slice::from_ref(&ids)).unwrap();
                let mut sorted = ids[..].to_vec();
                sorted.sort_unstable();
                assert_eq!(routing.experts_of_token(0, 0), &sorted[..choices], "{experts} experts, {ids:?}");
                for wrong in [ids[1], experts as u32, experts as u32 + 64, Routing::NO_EXPERT - 1] {
                    let ids = vec![[&ids[..], &[wrong]].concat()];
                    let error = Routing::top_k(experts, choices + 2, &ids).unwrap_err();
                    let (rank, token) = (0, 0);
                    assert_eq!(
                        error,
                        match wrong < experts as u32 {
                            true => RoutingError::Twice { rank, token, expert: wrong },
                            false => RoutingError::UnknownExpert { rank, token, expert: wrong, experts },
                        }
                    );
                }
            }
        }
    }
}

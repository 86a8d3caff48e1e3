//! What follows from a routing and is found once, for all passes of all layers that are given it.

use std::hash::{Hash, Hasher};
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use super::tables::ExpertRows;

/// Tables of one rank that a routing keeps: forward and backward of dispatch and combine may each be in groups of their own.
const KEPT_TABLES: usize = 4;

/// A rank, and the groups of its tokens: how many, and how they grow.
pub(super) type TableKey = (usize, usize, u32);

/// What was found of a routing. It adds nothing to what the routing is.
#[derive(Debug, Default)]
pub(super) struct Known {
    travel: OnceLock<Travel>,
    fingerprint: OnceLock<[u8; 32]>,
    tables: Mutex<Vec<(TableKey, Arc<ExpertRows>)>>,
}

impl Known {
    /// Where tokens go.
    pub(super) fn travel(&self, find: impl FnOnce() -> Travel) -> &Travel {
        self.travel.get_or_init(find)
    }

    /// The bytes of the fingerprint.
    pub(super) fn fingerprint(&self, find: impl FnOnce() -> [u8; 32]) -> [u8; 32] {
        *self.fingerprint.get_or_init(find)
    }

    /// The tables of a rank.
    pub(super) fn tables(&self, key: TableKey, find: impl FnOnce() -> ExpertRows) -> Arc<ExpertRows> {
        let known = || self.tables.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, found)) = known().iter().find(|(of, _)| *of == key) {
            return found.clone();
        }
        let found = Arc::new(find());
        let mut all = known();
        let of_rank = || all.iter().filter(|((rank, ..), _)| *rank == key.0).count();
        if of_rank() >= KEPT_TABLES
            && let Some(oldest) = all.iter().position(|((rank, ..), _)| *rank == key.0)
        {
            all.remove(oldest);
        }
        all.push((key, found.clone()));
        found
    }
}

impl Clone for Known {
    fn clone(&self) -> Self {
        Self::default()
    }
}

impl PartialEq for Known {
    fn eq(&self, _: &Self) -> bool {
        true
    }
}

impl Eq for Known {}

impl Hash for Known {
    fn hash<H: Hasher>(&self, _: &mut H) {}
}

/// Which ranks each token goes to, and how many rows each expert has.
#[derive(Debug)]
pub(super) struct Travel {
    /// Rows of every expert.
    pub(super) rows: Vec<usize>,
    /// Whether some token has several experts on one rank.
    pub(super) sums_on_ranks: bool,
    /// Words of a token's set of ranks.
    words: usize,
    of_ranks: Vec<TokenRanks>,
}

/// The ranks that the tokens of one rank go to.
#[derive(Debug)]
struct TokenRanks {
    /// A bit for each rank, token after token.
    sets: Vec<u64>,
    /// Whether a token goes to other ranks than the one before it.
    differs: Vec<bool>,
}

impl Travel {
    /// Of so many experts on so many ranks; `tokens` gives each rank's tokens: where the experts of each begin, with the last one's end,
    /// and the experts.
    pub(super) fn of<'a>(
        [experts, ranks]: [usize; 2],
        tokens: impl Iterator<Item = (&'a [usize], &'a [u32])>,
    ) -> Self {
        let (each, words) = (experts / ranks, ranks.div_ceil(64));
        let rank_of: Vec<u32> = (0..experts).map(|expert| (expert / each) as u32).collect();
        let mut rows = vec![0; experts];
        let mut sums_on_ranks = false;
        let of_rank = |(starts, of_tokens): (&[usize], &[u32])| {
            of_tokens.iter().for_each(|&expert| rows[expert as usize] += 1);
            let count = starts.len() - 1;
            let (mut sets, mut differs) = (Vec::with_capacity(count * words), Vec::with_capacity(count));
            for ends in starts.windows(2) {
                let of_token = &of_tokens[ends[0]..ends[1]];
                let mut size = 0;
                for word in 0..words as u32 {
                    let mut set = 0u64;
                    for &expert in of_token {
                        let rank = rank_of[expert as usize];
                        set |= u64::from(rank / 64 == word) << (rank % 64);
                    }
                    size += set.count_ones() as usize;
                    sets.push(set);
                }
                sums_on_ranks |= size < of_token.len();
                let same = |(word, before): (usize, &u64)| *before == sets[sets.len() - words + word];
                let before = sets.len().checked_sub(2 * words).map(|first| sets[first..].iter().take(words));
                differs.push(!before.is_some_and(|before| before.enumerate().all(same)));
            }
            TokenRanks { sets, differs }
        };
        let of_ranks = tokens.map(of_rank).collect();
        Self { rows, sums_on_ranks, words, of_ranks }
    }

    /// Gives `each` the tokens of a rank that follow each other and go to the same ranks, which are given as bits.
    pub(super) fn ranges(
        &self,
        rank: usize,
        tokens: Range<usize>,
        mut each: impl FnMut(Range<usize>, &[u64]),
    ) {
        let TokenRanks { sets, differs } = &self.of_ranks[rank];
        let mut first = tokens.start;
        while first < tokens.end {
            let mut next = first + 1;
            while next < tokens.end && !differs[next] {
                next += 1;
            }
            each(first..next, &sets[first * self.words..(first + 1) * self.words]);
            first = next;
        }
    }
}

/// Whether a rank is in a set.
pub(super) fn has_rank(set: &[u64], rank: usize) -> bool {
    set[rank / 64] >> (rank % 64) & 1 == 1
}

/// The ranks of a set but for one, ascending.
pub(super) fn ranks_of(set: &[u64], but: Option<usize>) -> Vec<u32> {
    let count: u32 = set.iter().map(|word| word.count_ones()).sum();
    let mut ranks = Vec::with_capacity(count as usize);
    for (word, first) in set.iter().zip((0..).step_by(64)) {
        let mut left = *word;
        while left != 0 {
            ranks.push(first + left.trailing_zeros());
            left &= left - 1;
        }
    }
    ranks.retain(|rank| Some(*rank as usize) != but);
    ranks
}

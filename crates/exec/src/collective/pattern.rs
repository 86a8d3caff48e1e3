//! A group collective by peers: which rows go to whom and come from whom, read from a plan's `GroupPart`.

use counterpoint_mask::Range;
use counterpoint_plan::GroupPart;

/// Rows shared with one rank, in the order in which both sides list them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PeerRows {
    /// The rank.
    pub rank: usize,
    /// The rows, no range empty.
    pub rows: Vec<Range>,
}

impl PeerRows {
    /// Number of rows.
    pub fn total(&self) -> usize {
        self.rows.iter().map(Range::len).sum()
    }

    /// The rows as one range, where they follow each other.
    pub fn as_one(&self) -> Option<Range> {
        let (first, last) = (self.rows.first()?, self.rows.last()?);
        let together = self.rows.windows(2).all(|pair| pair[0].end == pair[1].start);
        together.then(|| Range::new(first.start, last.end))
    }

    /// What ranks that they do not come to learn of them: the one range that they are, or else how many there are, in two ranges that do not
    /// follow each other.
    fn in_short(&self) -> Vec<Range> {
        match self.as_one() {
            Some(range) => vec![range],
            None if self.total() == 0 => Vec::new(),
            None => vec![Range::new(0, 1), Range::new(0, self.total() - 1)],
        }
    }

    /// The rank alone.
    pub fn without_rows(&self) -> Self {
        Self { rank: self.rank, rows: Vec::new() }
    }
}

/// A [`GroupPart`] read in one direction: by peer, ascending, splits without rows left out.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Pattern {
    /// Rows of the inputs that go to each peer.
    pub outgoing: Vec<PeerRows>,
    /// Rows of the outputs that come from each peer.
    pub incoming: Vec<PeerRows>,
}

impl Pattern {
    pub(super) fn of_cast(part: &GroupPart) -> Self {
        Self { outgoing: by_owned(part), incoming: by_remote(part) }
    }

    pub(super) fn of_reduce(part: &GroupPart) -> Self {
        Self { outgoing: by_remote(part), incoming: by_owned(part) }
    }

    /// What goes to `rank`; no rows when nothing does.
    pub fn to(&self, rank: usize) -> &[Range] {
        rows_of(&self.outgoing, rank)
    }

    /// The ranks on either side, ascending.
    pub fn peers(&self) -> Vec<usize> {
        let mut peers: Vec<usize> =
            self.incoming.iter().chain(&self.outgoing).map(|peer| peer.rank).collect();
        peers.sort_unstable();
        peers.dedup();
        peers
    }

    /// What comes from `rank`.
    pub fn from(&self, rank: usize) -> &[Range] {
        rows_of(&self.incoming, rank)
    }

    /// What `rank`, which is another process, learns of it: the rows that travel between the two; of others' the one range that they are, or no
    /// more than how many there are. Rows of a mixture's experts are thousands of ranges, of which most take two bytes here.
    pub fn bytes_for(&self, rank: usize) -> Vec<u8> {
        let ranges: usize = [self.to(rank), self.from(rank)].iter().map(|rows| rows.len()).sum();
        let mut bytes = Vec::with_capacity(3 * ranges + 64);
        for side in [&self.outgoing, &self.incoming] {
            put(&mut bytes, side.len() as u64);
            for peer in side {
                let in_short = if peer.rank == rank { Vec::new() } else { peer.in_short() };
                let rows = if peer.rank == rank { &peer.rows } else { &in_short };
                put(&mut bytes, peer.rank as u64);
                put(&mut bytes, rows.len() as u64);
                let mut end = 0;
                for rows in rows {
                    // Mostly behind the last ones, but not always: small either way.
                    let step = rows.start.wrapping_sub(end) as i64;
                    put(&mut bytes, ((step << 1) ^ (step >> 63)) as u64);
                    put(&mut bytes, rows.len() as u64);
                    end = rows.end;
                }
            }
        }
        bytes
    }

    /// What such bytes say; `None` where they say nothing that makes sense.
    pub fn of_bytes(mut bytes: &[u8]) -> Option<Self> {
        let mut side = || -> Option<Vec<PeerRows>> {
            let mut peers: Vec<PeerRows> = Vec::new();
            for _ in 0..take(&mut bytes)? {
                let (rank, count) = (take(&mut bytes)? as usize, take(&mut bytes)? as usize);
                // No range takes less than two bytes.
                if count > bytes.len() / 2 || peers.last().is_some_and(|last| last.rank >= rank) {
                    return None;
                }
                let mut rows = Vec::with_capacity(count);
                let mut end = 0usize;
                for _ in 0..count {
                    let step = take(&mut bytes)?;
                    let step = (step >> 1) as i64 ^ -((step & 1) as i64);
                    let start = end.checked_add_signed(isize::try_from(step).ok()?)?;
                    end = start.checked_add(usize::try_from(take(&mut bytes)?).ok()?)?;
                    if end == start {
                        return None;
                    }
                    rows.push(Range { start, end });
                }
                peers.push(PeerRows { rank, rows });
            }
            Some(peers)
        };
        let pattern = Self { outgoing: side()?, incoming: side()? };
        bytes.is_empty().then_some(pattern)
    }
}

/// Adds a number, seven bits a byte, the lowest first; a byte with the highest bit set is not the last.
fn put(bytes: &mut Vec<u8>, mut number: u64) {
    while number >= 0x80 {
        bytes.push(number as u8 | 0x80);
        number >>= 7;
    }
    bytes.push(number as u8);
}

/// Takes the number that the bytes begin with; `None` where there is none, or one of more than 64 bits.
fn take(bytes: &mut &[u8]) -> Option<u64> {
    let mut number = 0;
    for shift in (0..64).step_by(7) {
        let (byte, rest) = bytes.split_first()?;
        *bytes = rest;
        let part = u64::from(byte & 0x7f);
        if part << shift >> shift != part {
            return None;
        }
        number |= part << shift;
        if byte & 0x80 == 0 {
            return Some(number);
        }
    }
    None
}

fn rows_of(peers: &[PeerRows], rank: usize) -> &[Range] {
    peers.binary_search_by_key(&rank, |peer| peer.rank).map_or(&[], |index| &peers[index].rows)
}

fn by_owned(part: &GroupPart) -> Vec<PeerRows> {
    group(part.owned.iter().flat_map(|split| split.ranks.iter().map(|&rank| (rank, split.rows))))
}

fn by_remote(part: &GroupPart) -> Vec<PeerRows> {
    group(part.remote.iter().map(|split| (split.rank, split.rows)))
}

/// By rank; of each in the order of the splits, which is what the two sides agree on.
fn group(splits: impl Iterator<Item = (u32, Range)> + Clone) -> Vec<PeerRows> {
    let splits = splits.filter(|(_, rows)| !rows.is_empty());
    let mut counts: Vec<usize> = Vec::new();
    for (rank, _) in splits.clone() {
        let rank = rank as usize;
        if rank >= counts.len() {
            counts.resize(rank + 1, 0);
        }
        counts[rank] += 1;
    }
    let with_room = |(rank, count): (usize, &usize)| PeerRows { rank, rows: Vec::with_capacity(*count) };
    let mut peers: Vec<PeerRows> = counts.iter().enumerate().map(with_room).collect();
    splits.for_each(|(rank, rows)| peers[rank as usize].rows.push(rows));
    peers.retain(|peer| !peer.rows.is_empty());
    peers
}

#[cfg(test)]
mod tests {
    use super::*;

    fn peer(rank: usize, rows: &[(usize, usize)]) -> PeerRows {
        PeerRows { rank, rows: rows.iter().map(|&(start, end)| Range::new(start, end)).collect() }
    }

    /// Rows that do not ascend, long gaps and large numbers among them.
    #[test]
    fn a_peer_learns_its_rows_and_how_many_others_have() {
        let own = [(5, 6), (7, 9), (300, 500), (2, 3), (1 << 40, (1 << 40) + 200)];
        let pattern = Pattern {
            outgoing: vec![peer(0, &[(0, 3), (9, 12)]), peer(2, &own)],
            incoming: vec![peer(1, &[(4, 8)]), peer(2, &[(0, 1)]), peer(3, &[(1, 5), (5, 300)])],
        };
        let learnt = Pattern {
            outgoing: vec![peer(0, &[(0, 1), (0, 5)]), peer(2, &own)],
            incoming: vec![peer(1, &[(4, 8)]), peer(2, &[(0, 1)]), peer(3, &[(1, 300)])],
        };
        for (whole, learnt) in [(&pattern.outgoing, &learnt.outgoing), (&pattern.incoming, &learnt.incoming)]
        {
            for (whole, learnt) in whole.iter().zip(learnt) {
                assert_eq!((whole.as_one(), whole.total()), (learnt.as_one(), learnt.total()));
            }
        }
        // Ranges without rows are none.
        let without_rows = peer(0, &[(3, 3), (7, 7)]);
        assert_eq!((without_rows.in_short(), peer(0, &[]).in_short()), (Vec::new(), Vec::new()));
        let bytes = pattern.bytes_for(2);
        assert_eq!(Pattern::of_bytes(&bytes), Some(learnt));
        assert_eq!(Pattern::of_bytes(&Pattern::default().bytes_for(0)), Some(Pattern::default()));
        // Two bytes a row, as those of experts come.
        let rows: Vec<_> = (0..1000).map(|row| (3 * row, 3 * row + 1)).collect();
        let scattered = Pattern { outgoing: vec![peer(1, &rows)], incoming: Vec::new() };
        assert_eq!(scattered.bytes_for(1).len(), 2005);
        assert_eq!(Pattern::of_bytes(&scattered.bytes_for(1)), Some(scattered));
        for end in 0..bytes.len() {
            assert_eq!(Pattern::of_bytes(&bytes[..end]), None, "{end} bytes");
        }
    }

    #[test]
    fn what_makes_no_sense_is_no_pattern() {
        let mut seed = 1u64;
        for _ in 0..100_000 {
            let mut next = || {
                seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                (seed >> 40) as u8
            };
            let bytes: Vec<u8> =
                (0..next() % 24).map(|_| next() & [0x83, 0xff][usize::from(next() & 1)]).collect();
            // It may be one, but then all of it is.
            if let Some(pattern) = Pattern::of_bytes(&bytes) {
                for side in [&pattern.outgoing, &pattern.incoming] {
                    assert!(side.windows(2).all(|pair| pair[0].rank < pair[1].rank), "{bytes:?}");
                    assert!(
                        side.iter().flat_map(|peer| &peer.rows).all(|rows| rows.start < rows.end),
                        "{bytes:?}"
                    );
                }
            }
        }
        for bytes in [&[][..], &[0], &[0, 0, 0], &[1, 0, 1, 1, 1, 0], &[1, 0, 1, 0, 0, 0], &[0xff; 12]] {
            assert_eq!(Pattern::of_bytes(bytes), None, "{bytes:?}");
        }
    }
}

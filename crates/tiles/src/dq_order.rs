//! The order in which key tiles add to dq in a deterministic backward, so that every sum is rounded the same way.

use bytemuck::{Pod, Zeroable};
use counterpoint_mask::Range;
use serde::{Deserialize, Serialize};

use super::chains::Chains;
use super::{TileDirection, TilePlacement, TileSchedule, pod_bytes};

/// Key tiles of one chain with consecutive numbers that all add to one block of dq.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Pod, Zeroable)]
#[repr(C)]
pub struct DqOrderSpan {
    /// [`Tile::number`](super::Tile::number) of the first.
    pub first: u32,
    /// One past the number of the last.
    pub end: u32,
    /// Place of the first in the order: how many key tiles of the chain add before it. That of number `n` is `order + n - first`.
    pub order: u32,
    /// Which counter says how many of the chain have added to the block.
    pub counter: u32,
}

/// In which order key tiles add to dq when the order matters: for every block of query rows its key tiles, ascending.
///
/// A key tile that has computed its part of the block `[i * block, (i + 1) * block)` waits until as many tiles of its chain have
/// added to it as come before it in the order. (Tiles that read a row in common are a chain. Of others, which read other rows of the block,
/// what they add to this one's rows is zero, so it does not matter when.) Tiles must be handed out in
/// [`TileOrder::Chains`](super::TileOrder::Chains): then everyone waits only for tiles that have started. Nearly every mask
/// has one span a block, or one for each document in it; the spans of a schedule are as many as its runs change from tile to
/// tile, not as many as its blocks.
#[derive(Clone, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DqOrder {
    #[serde(with = "pod_bytes")]
    spans: Vec<DqOrderSpan>,
    /// Of each block its first span, and the number of all spans.
    #[serde(with = "pod_bytes")]
    begins: Vec<u32>,
    counters: u32,
}

impl DqOrder {
    /// The spans of all blocks, block after block, ascending in each.
    pub fn spans(&self) -> &[DqOrderSpan] {
        &self.spans
    }

    /// Block `i` of query rows has the spans `begins()[i]..begins()[i + 1]`.
    pub fn begins(&self) -> &[u32] {
        &self.begins
    }

    /// Number of counters: one for each block and each further chain in it.
    pub fn counters(&self) -> u32 {
        self.counters
    }

    /// The counter and the place in the order of the key tile `number` at `block`; `None` when it adds nothing there.
    ///
    /// # Panics
    /// When there is no such block.
    pub fn place(&self, block: usize, number: u32) -> Option<(u32, u32)> {
        let spans = &self.spans[self.begins[block] as usize..self.begins[block + 1] as usize];
        let span = spans.iter().find(|span| (span.first..span.end).contains(&number))?;
        Some((span.counter, span.order + (number - span.first)))
    }
}

impl TileSchedule {
    /// The order of additions to dq. `None` unless the schedule is one of a backward whose blocks are aligned: other blocks
    /// do not meet each other in rows.
    pub fn dq_order(&self) -> Option<DqOrder> {
        if self.config.direction != TileDirection::Backward || self.config.blocks != TilePlacement::Aligned {
            return None;
        }
        let block = self.config.block;
        let chains = Chains::of(self);
        let mut order: Vec<usize> = (0..self.tiles.len()).collect();
        order.sort_unstable_by_key(|&index| self.tiles[index].number);
        let mut closed: Vec<(usize, DqOrderSpan)> = Vec::new();
        // The first tile of the span that is open at each block.
        let mut opened = vec![0; self.q_rows.div_ceil(block)];
        let (mut last, mut touched): (Vec<Range>, Vec<Range>) = (Vec::new(), Vec::new());
        let mut number = 0;
        for parts in order.chunk_by(|&a, &b| self.tiles[a].number == self.tiles[b].number) {
            let before = number;
            number = self.tiles[parts[0]].number;
            touched.clear();
            for run in parts.iter().flat_map(|&part| self.runs_of(&self.tiles[part])) {
                touched.push(Range::new(run.start as usize / block, (run.end as usize).div_ceil(block)));
            }
            touched = Range::merged(std::mem::take(&mut touched));
            let same_chain = chains.chain(before) == chains.chain(number);
            let (kept, keeping): (&[_], &[_]) = if same_chain { (&touched, &last) } else { (&[], &[]) };
            difference(&last, kept, |index| closed.push((index, span(opened[index], number))));
            difference(&touched, keeping, |index| opened[index] = number);
            std::mem::swap(&mut last, &mut touched);
        }
        difference(&last, &[], |index| closed.push((index, span(opened[index], number + 1))));
        // Spans were closed in the order of tiles, and a stable sort keeps it in every block.
        closed.sort_by_key(|&(index, _)| index);
        let mut begins = vec![0; opened.len() + 1];
        let mut spans: Vec<DqOrderSpan> = Vec::with_capacity(closed.len());
        let mut counters = opened.len() as u32;
        for (index, mut span) in closed {
            let of_block = &spans[spans.len() - begins[index + 1] as usize..];
            let chain = chains.chain(span.first);
            (span.order, span.counter) =
                match of_block.iter().rev().find(|before| chains.chain(before.first) == chain) {
                    Some(before) => (before.order + (before.end - before.first), before.counter),
                    None if of_block.is_empty() => (0, index as u32),
                    None => (0, counters),
                };
            counters = counters.max(span.counter + 1);
            begins[index + 1] += 1;
            spans.push(span);
        }
        for index in 0..opened.len() {
            begins[index + 1] += begins[index];
        }
        Some(DqOrder { spans, begins, counters })
    }
}

fn span(first: u32, end: u32) -> DqOrderSpan {
    DqOrderSpan { first, end, order: 0, counter: 0 }
}

/// Calls `each` for every index in `ranges` and not in `without`, both merged and ascending.
fn difference(ranges: &[Range], without: &[Range], mut each: impl FnMut(usize)) {
    let mut next = 0;
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            while without.get(next).is_some_and(|other| other.end <= start) {
                next += 1;
            }
            match without.get(next) {
                Some(other) if other.start <= start => start = other.end,
                other => {
                    let end = other.map_or(range.end, |other| other.start.min(range.end));
                    (start..end).for_each(&mut each);
                    start = end;
                }
            }
        }
    }
}

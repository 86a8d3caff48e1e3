//! The start of the affinity dispatch: a rank's area comes out right because runs of heavy chunks are paired with light ones.

use std::cmp::Reverse;
use std::ops::Range;

use counterpoint_plan::ChunkWork;

use crate::owners::capacity::capacity;

/// How far from its target a rank's area may stay before another split is looked for: 1 / 250 of the target.
const TOLERANCE: u64 = 250;
/// How many numbers of heavy chunks are tried together with a fitting chunk. Past the first few even the lightest
/// fitting chunk is too heavy.
const FITS: usize = 4;

/// Gives every rank a run of heavy chunks and a run of light ones, so that both its count and its area come out right.
///
/// The stretches are laid in a line from heavy to light (by mean area), each from its last chunk to its first. Rank by
/// rank takes chunks from both ends: the number from the heavy end follows from the area that is wanted. Chunks of a
/// causal document then go tail first and in runs, so few ranks share the document and each of them as high up as
/// possible, and what such a run leaves free is filled with light chunks that live together anyway. Where whole runs
/// cannot hit the area, the last heavy chunk is replaced by one further down its stretch: the rank reads its keys
/// already.
pub(super) fn pair_heavy_with_light(
    work: &ChunkWork,
    stretches: &[Range<u32>],
    ranks: usize,
) -> Vec<Vec<u32>> {
    let chunks = work.num_chunks();
    let mut line = Line::new(work, stretches);
    let mut area: u64 = work.areas().iter().sum();
    (0..ranks)
        .map(|rank| {
            let taken = line.take(capacity(chunks, ranks, rank), area / (ranks - rank) as u64);
            area -= taken.iter().map(|&chunk| work.area(chunk as usize)).sum::<u64>();
            taken
        })
        .collect()
}

/// The chunks that nobody has yet, from heavy to light.
struct Line<'a> {
    work: &'a ChunkWork,
    chunks: Vec<u32>,
    /// Chunks before this place are gone.
    front: usize,
    /// The stretch of every chunk of the sequence.
    stretch_of: Vec<u32>,
    /// Of every stretch, what is left in the line.
    left: Vec<Left>,
}

/// What is left of a stretch. It stays together in the line.
#[derive(Clone, Copy)]
struct Left {
    chunks: usize,
    mean_area: u64,
}

/// Which chunks to take.
#[derive(Clone, Copy)]
struct Choice {
    area: u64,
    heavy: usize,
    /// Place in the line of one chunk more.
    fit: Option<usize>,
}

impl<'a> Line<'a> {
    fn new(work: &'a ChunkWork, stretches: &[Range<u32>]) -> Self {
        let mut stretch_of = vec![0; work.num_chunks()];
        let mut left = Vec::with_capacity(stretches.len());
        for (index, stretch) in stretches.iter().enumerate() {
            let range = stretch.start as usize..stretch.end as usize;
            stretch_of[range.clone()].fill(index as u32);
            let area: u64 = work.areas()[range].iter().sum();
            left.push(Left { chunks: stretch.len(), mean_area: area / stretch.len() as u64 });
        }
        let mut order: Vec<usize> = (0..stretches.len()).collect();
        order.sort_by_key(|&index| (Reverse(left[index].mean_area), index));
        let chunks = order.into_iter().flat_map(|index| stretches[index].clone().rev()).collect();
        Self { work, chunks, front: 0, stretch_of, left }
    }

    fn area(&self, place: usize) -> u64 {
        self.work.area(self.chunks[place] as usize)
    }

    fn stretch(&self, place: usize) -> usize {
        self.stretch_of[self.chunks[place] as usize] as usize
    }

    /// Takes `count` chunks with an area close to `target`.
    fn take(&mut self, count: usize, target: u64) -> Vec<u32> {
        let choice = self.choose(count, target);
        let light = count - choice.heavy - usize::from(choice.fit.is_some());
        let mut taken = self.chunks.split_off(self.chunks.len() - light);
        if let Some(place) = choice.fit {
            self.chunks[self.front..=place].rotate_right(1);
            self.front += 1;
            taken.push(self.chunks[self.front - 1]);
        }
        taken.extend(&self.chunks[self.front..self.front + choice.heavy]);
        self.front += choice.heavy;
        for &chunk in &taken {
            self.left[self.stretch_of[chunk as usize] as usize].chunks -= 1;
        }
        self.place_rest();
        taken
    }

    fn choose(&self, count: usize, target: u64) -> Choice {
        let (front, end) = (self.front, self.chunks.len());
        let area = (end - count..end).map(|place| self.area(place)).sum();
        let mut whole = Choice { area, heavy: 0, fit: None };
        let mut fitted = whole;
        let mut area = area;
        let mut fits = 0;
        for heavy in 1..=count {
            // The lightest chunk of the heavy run comes in, the heaviest of the light run goes.
            let (last, first_light) = (front + heavy - 1, end - count + heavy);
            area = area + self.area(last) - self.area(first_light - 1);
            if area.abs_diff(target) < whole.area.abs_diff(target) {
                whole = Choice { area, heavy, fit: None };
            }
            if heavy > 1 && area > target && fits < FITS && self.stretch(last) == self.stretch(last - 1) {
                fits += 1;
                let rest = area - self.area(last);
                for place in last..first_light.min(last + self.left[self.stretch(last)].chunks) {
                    if self.stretch(place) != self.stretch(last) {
                        break;
                    }
                    let area = rest + self.area(place);
                    if area.abs_diff(target) < fitted.area.abs_diff(target) {
                        fitted = Choice { area, heavy: heavy - 1, fit: Some(place) };
                    }
                }
            }
        }
        let off = whole.area.abs_diff(target);
        if off > target / TOLERANCE && fitted.area.abs_diff(target) < off { fitted } else { whole }
    }

    /// Moves what is left of the two stretches at the ends of the line to where its mean area belongs. A causal document
    /// that lost its tail is lighter than before, one that lost its head is heavier.
    fn place_rest(&mut self) {
        if self.front == self.chunks.len() {
            return;
        }
        let (stretch, length) = self.weigh(self.front);
        let mut to = self.front + length;
        while to < self.chunks.len() && self.left[self.stretch(to)].mean_area > self.left[stretch].mean_area {
            to += self.left[self.stretch(to)].chunks;
        }
        self.chunks[self.front..to].rotate_left(length);

        let end = self.chunks.len();
        let (stretch, length) = self.weigh(end - self.left[self.stretch(end - 1)].chunks);
        let mut to = end - length;
        while to > self.front && self.left[self.stretch(to - 1)].mean_area < self.left[stretch].mean_area {
            to -= self.left[self.stretch(to - 1)].chunks;
        }
        self.chunks[to..].rotate_right(length);
    }

    /// Brings the mean area of the stretch that starts at `place` up to date. Returns the stretch and its length.
    fn weigh(&mut self, place: usize) -> (usize, usize) {
        let stretch = self.stretch(place);
        let length = self.left[stretch].chunks;
        let area: u64 = (place..place + length).map(|place| self.area(place)).sum();
        self.left[stretch].mean_area = area / length as u64;
        (stretch, length)
    }
}

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
/// The clusters are laid in a line from heavy to light (by mean area), each from its last chunk to its first. Rank by
/// rank takes chunks from both ends: the number from the heavy end follows from the area that is wanted. Chunks of a
/// causal document then go tail first and in runs, so few ranks share the document and each of them as high up as
/// possible, and what such a run leaves free is filled with light chunks that live together anyway. Where whole runs
/// cannot hit the area, the last heavy chunk is replaced by one further down its cluster: the rank reads its keys
/// already.
pub(super) fn pair_heavy_with_light(
    work: &ChunkWork,
    clusters: &[Range<u32>],
    ranks: usize,
) -> Vec<Vec<u32>> {
    let chunks = work.num_chunks();
    let mut line = Line::new(work, clusters);
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
    /// The cluster of every chunk of the sequence.
    cluster_of: Vec<u32>,
    /// Of every cluster, what is left in the line.
    left: Vec<Left>,
}

/// What is left of a cluster. It stays together in the line.
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
    fn new(work: &'a ChunkWork, clusters: &[Range<u32>]) -> Self {
        let mut cluster_of = vec![0; work.num_chunks()];
        let mut left = Vec::with_capacity(clusters.len());
        for (index, cluster) in clusters.iter().enumerate() {
            let range = cluster.start as usize..cluster.end as usize;
            cluster_of[range.clone()].fill(index as u32);
            let area: u64 = work.areas()[range].iter().sum();
            left.push(Left { chunks: cluster.len(), mean_area: area / cluster.len() as u64 });
        }
        let mut order: Vec<usize> = (0..clusters.len()).collect();
        order.sort_by_key(|&index| (Reverse(left[index].mean_area), index));
        let chunks = order.into_iter().flat_map(|index| clusters[index].clone().rev()).collect();
        Self { work, chunks, front: 0, cluster_of, left }
    }

    fn area(&self, place: usize) -> u64 {
        self.work.area(self.chunks[place] as usize)
    }

    fn cluster(&self, place: usize) -> usize {
        self.cluster_of[self.chunks[place] as usize] as usize
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
            self.left[self.cluster_of[chunk as usize] as usize].chunks -= 1;
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
            if heavy > 1 && area > target && fits < FITS && self.cluster(last) == self.cluster(last - 1) {
                fits += 1;
                let rest = area - self.area(last);
                for place in last..first_light.min(last + self.left[self.cluster(last)].chunks) {
                    if self.cluster(place) != self.cluster(last) {
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

    /// Moves what is left of the two clusters at the ends of the line to where its mean area belongs. A causal document
    /// that lost its tail is lighter than before, one that lost its head is heavier.
    fn place_rest(&mut self) {
        if self.front == self.chunks.len() {
            return;
        }
        let (cluster, length) = self.weigh(self.front);
        let mut to = self.front + length;
        while to < self.chunks.len() && self.left[self.cluster(to)].mean_area > self.left[cluster].mean_area {
            to += self.left[self.cluster(to)].chunks;
        }
        self.chunks[self.front..to].rotate_left(length);

        let end = self.chunks.len();
        let (cluster, length) = self.weigh(end - self.left[self.cluster(end - 1)].chunks);
        let mut to = end - length;
        while to > self.front && self.left[self.cluster(to - 1)].mean_area < self.left[cluster].mean_area {
            to -= self.left[self.cluster(to - 1)].chunks;
        }
        self.chunks[to..].rotate_right(length);
    }

    /// Brings the mean area of the cluster that starts at `place` up to date. Returns the cluster and its length.
    fn weigh(&mut self, place: usize) -> (usize, usize) {
        let cluster = self.cluster(place);
        let length = self.left[cluster].chunks;
        let area: u64 = (place..place + length).map(|place| self.area(place)).sum();
        self.left[cluster].mean_area = area / length as u64;
        (cluster, length)
    }
}

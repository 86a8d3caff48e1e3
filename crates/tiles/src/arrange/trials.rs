//! When a queue ends whose items take a little more or less time than they are said to.

use super::super::list_time::list_time;

/// By which part an item takes longer or less long at most: who shares power and memory with whom is not known.
pub(super) const UNEVEN: u64 = 16;

/// The most CTAs of a tree.
const LEAVES: usize = 256;
const BITS: u32 = LEAVES.ilog2();

/// Time in which some CTAs are through with a queue, in `N` trials. Each takes the next item as soon as it is free.
pub(super) struct Trials<const N: usize> {
    ctas: usize,
    trees: [Tree; N],
}

/// CTAs by the time at which they are free, with their number in the low bits. Leaves are CTAs, any other node has the earlier one
/// of its children, those of node `i` being `2 * i` and `2 * i + 1`. A search spends nearly all of its time here, so all sizes are known and
/// nothing is decided by a branch; trials do not wait for each other.
struct Tree {
    leaves: [u64; LEAVES],
    nodes: [u64; LEAVES],
}

impl Tree {
    fn new(ends: impl Iterator<Item = u64>) -> Self {
        let (mut leaves, mut nodes) = ([u64::MAX; LEAVES], [u64::MAX; LEAVES]);
        for (cta, (leaf, end)) in leaves.iter_mut().zip(ends).enumerate() {
            *leaf = end << BITS | cta as u64;
        }
        for node in LEAVES / 2..LEAVES {
            let first = 2 * (node - LEAVES / 2);
            nodes[node] = leaves[first].min(leaves[first + 1]);
        }
        for node in (1..LEAVES / 2).rev() {
            nodes[node] = nodes[2 * node].min(nodes[2 * node + 1]);
        }
        Self { leaves, nodes }
    }

    /// Whoever is free first is free so much later.
    #[inline(always)]
    fn take(&mut self, time: u64) {
        let free = self.nodes[1];
        let cta = free as usize % LEAVES;
        let mut end = free + (time << BITS);
        self.leaves[cta] = end;
        end = end.min(self.leaves[cta ^ 1]);
        let mut node = LEAVES / 2 + cta / 2;
        self.nodes[node] = end;
        for _ in 1..BITS {
            end = end.min(self.nodes[node ^ 1]);
            node /= 2;
            self.nodes[node] = end;
        }
    }

    fn last(&self) -> u64 {
        let taken = self.leaves.iter().filter(|leaf| **leaf < u64::MAX);
        taken.max().map_or(0, |end| end >> BITS)
    }
}

impl<const N: usize> Trials<N> {
    /// # Panics
    /// When there is no CTA.
    pub(super) fn new(ctas: usize) -> Self {
        assert!(ctas > 0, "no CTA never finishes");
        Self { ctas, trees: std::array::from_fn(|_| Tree::new(std::iter::empty())) }
    }

    /// The mean of the trials. Whoever takes one of the first items, one each, begins as much later as `delays` says.
    pub(super) fn mean(&mut self, items: &[u64], delays: &[u64]) -> u64 {
        let (first, others) = items.split_at(self.ctas.min(items.len()));
        let mut draws: [u32; N] = std::array::from_fn(|trial| trial as u32 + 1);
        if self.ctas > LEAVES {
            let mut trial = |draw: &mut u32| {
                let first = first.iter().zip(delays).map(|(&item, delay)| (item, delay));
                let all = first.chain(others.iter().map(|&item| (item, &0)));
                list_time(all.map(|(item, delay)| (uneven(item, draw) + delay, 1)), self.ctas)
            };
            return draws.iter_mut().map(&mut trial).sum::<u64>() / N as u64;
        }
        for (tree, draw) in self.trees.iter_mut().zip(&mut draws) {
            let ends = first.iter().zip(delays).map(|(&item, delay)| uneven(item, draw) + delay);
            *tree = Tree::new(ends.chain(std::iter::repeat(0)).take(self.ctas));
        }
        for &item in others {
            for (tree, draw) in self.trees.iter_mut().zip(&mut draws) {
                tree.take(uneven(item, draw));
            }
        }
        self.trees.iter().map(Tree::last).sum::<u64>() / N as u64
    }
}

/// What `item` takes this time.
fn uneven(item: u64, draw: &mut u32) -> u64 {
    *draw = draw.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
    item - item / UNEVEN + item * u64::from(*draw >> 16) / (UNEVEN << 15)
}

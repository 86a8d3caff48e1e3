//! Who takes tiles from a queue, and where classes of tiles end for them.

use super::Tile;

/// Who takes the tiles of a schedule from its queue, and for what.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TileCtas {
    /// CTAs that run at a time.
    pub workers: usize,
    /// Heads for each of which every tile is handed out.
    pub heads: usize,
    /// How often a CTA computes the blocks of a tile: query heads of a key head, one after the other.
    pub head_passes: usize,
    /// Whether two may take a tile of a head, each for half of its query heads.
    pub half_heads: bool,
}

impl TileCtas {
    /// The same classes, but those which the CTAs begin with are without tiles that wait, which come after them.
    pub(super) fn delay<T: Copy>(
        self,
        tiles: &[T],
        ends: &[usize],
        waits: impl Fn(&T) -> bool,
    ) -> (Vec<T>, Vec<usize>) {
        let (mut ordered, mut new_ends) =
            (Vec::with_capacity(tiles.len()), Vec::with_capacity(ends.len() + 1));
        let mut delayed: Vec<T> = Vec::new();
        let mut begin = 0;
        let mut close = |ordered: &Vec<T>| {
            if new_ends.last().copied().unwrap_or(0) < ordered.len() {
                new_ends.push(ordered.len());
            }
        };
        for &end in ends {
            let class = &tiles[begin..end];
            begin = end;
            if ordered.len() * self.heads < self.workers {
                let (waiting, ready): (Vec<T>, Vec<T>) = class.iter().copied().partition(&waits);
                delayed.extend(waiting);
                ordered.extend(ready);
            } else {
                ordered.append(&mut delayed);
                close(&ordered);
                ordered.extend_from_slice(class);
            }
            close(&ordered);
        }
        ordered.append(&mut delayed);
        close(&ordered);
        (ordered, new_ends)
    }
}

/// Where groups of one place end, at most `most`, the last one of which takes the rest of those that have one.
pub(super) fn ends_of<T, P: PartialEq>(
    tiles: &[T],
    place: impl Fn(&T) -> Option<P>,
    most: usize,
) -> Vec<usize> {
    let grouped = tiles.partition_point(|tile| place(tile).is_some());
    let mut ends: Vec<_> =
        (1..grouped).filter(|&index| place(&tiles[index]) != place(&tiles[index - 1])).collect();
    ends.truncate(most - 1);
    if grouped > 0 {
        ends.push(grouped);
    }
    ends
}

/// Where classes of tiles by work end that have at least so many tenths of their heaviest's blocks, so that short ones come last; the
/// last of `most` takes the rest.
pub(super) fn ends_of_alike(tiles: &[Tile], tenths: u32, most: usize) -> impl Iterator<Item = usize> {
    let mut next = 0;
    (1..=most).map_while(move |class| {
        let heaviest = tiles.get(next)?.blocks.max(1);
        let alike = tiles[next..].partition_point(|tile| {
            u64::from(tile.blocks.max(1)) * 10 >= u64::from(heaviest) * u64::from(tenths)
        });
        next = if class == most { tiles.len() } else { next + alike };
        Some(next)
    })
}

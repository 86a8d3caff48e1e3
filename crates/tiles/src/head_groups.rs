//! Handing tiles out to a few heads at a time, so that their keys stay in the L2 cache.

use super::list_time::{MOST_ITEMS, list_time};
use super::{TILE_COST, Tile, TileSchedule};

/// For which heads the tiles of a launch are handed out, and when: the first `tiles` tiles for one group of heads after another,
/// each tile for all heads of the group before the next; then the other tiles, each for all heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadGroups {
    /// Tiles that are handed out by groups.
    pub tiles: usize,
    /// Heads of a group.
    pub heads: usize,
}

impl TileSchedule {
    /// Groups of heads whose keys stay in a cache of `cached_columns` inner rows while the tiles of all heads together would have
    /// to read them from memory again and again; of even size, and larger where the launch would end later by groups. For some of
    /// the `tiles`, ordered by work, `inner_heads` heads on the inner axis that each serve `heads_per_inner`, and `workers` CTAs.
    ///
    /// Short tiles and parts of split ones come last for all heads, which keeps the end of a launch balanced.
    pub fn head_groups(
        &self,
        tiles: &[Tile],
        inner_heads: usize,
        heads_per_inner: usize,
        cached_columns: usize,
        workers: usize,
    ) -> HeadGroups {
        let heads = inner_heads * heads_per_inner;
        let together = HeadGroups { tiles: 0, heads };
        let columns = |tile: &Tile| tile.blocks as usize * self.config.block;
        let longest = tiles.first().map_or(0, columns);
        if longest * inner_heads <= cached_columns {
            return together;
        }
        let is_long = |tile: &&Tile| columns(tile) * inner_heads > cached_columns && tile.partial < 0;
        let grouped = tiles.iter().take_while(is_long).count();
        if grouped == 0 {
            return together;
        }
        let groups = |width: usize| {
            let even = inner_heads.div_ceil(inner_heads.div_ceil(width));
            HeadGroups { tiles: grouped, heads: even * heads_per_inner }
        };
        let mut width = (cached_columns / longest).max(1);
        if tiles.len() * heads > MOST_ITEMS {
            let all = tiles.iter().map(|tile| columns(tile) as u64).sum::<u64>() * heads as u64;
            let is_short = longest as u64 * 128 <= all / workers.max(1) as u64;
            return if is_short { groups(width) } else { together };
        }
        let limit = self.time_by_groups(tiles, &together, heads, workers);
        while width < inner_heads {
            let groups = groups(width);
            if self.time_by_groups(tiles, &groups, heads, workers) <= limit + limit / 200 {
                return groups;
            }
            width *= 2;
        }
        together
    }

    /// As [`TileSchedule::makespan`], with tiles handed out by groups of heads.
    fn time_by_groups(&self, tiles: &[Tile], groups: &HeadGroups, heads: usize, workers: usize) -> u64 {
        let cost = |tile: &Tile| u64::from(tile.blocks) * self.config.block as u64 + TILE_COST;
        let (grouped, others) = tiles.split_at(groups.tiles);
        let of_groups = (0..heads).step_by(groups.heads).flat_map(|first| {
            let width = groups.heads.min(heads - first);
            grouped.iter().map(move |tile| (cost(tile), width))
        });
        list_time(of_groups.chain(others.iter().map(|tile| (cost(tile), heads))), workers)
    }
}

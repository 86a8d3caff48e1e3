//! Tilings up to rows that are not visited yet: which of them go on, and from where.

/// Tiles up to a row.
#[derive(Clone, Copy, Debug)]
pub(super) struct Path {
    pub(super) cost: u64,
    /// The visited row from which the last step came. Rows and steps are fewer than 2^31:
    /// [`MAX_TILE_SCHEDULE_ROWS`](super::MAX_TILE_SCHEDULE_ROWS).
    pub(super) before: u32,
}

/// The cheapest paths to rows that are not visited yet.
#[derive(Debug, Default)]
pub(super) struct Paths {
    /// To each cut, as far as there is one: [`Paths::NONE`] costs most.
    to_cuts: Vec<Path>,
    /// Behind the last cut to which there was one.
    cuts_end: usize,
    /// To other rows, by row. Those before `first` were taken.
    others: Vec<(usize, Path)>,
    first: usize,
}

impl Paths {
    const NONE: Path = Path { cost: u64::MAX, before: 0 };

    pub(super) fn bytes(&self) -> usize {
        self.to_cuts.capacity() * size_of::<Path>() + self.others.capacity() * size_of::<(usize, Path)>()
    }

    /// None to any of so many cuts.
    pub(super) fn start(&mut self, cuts: usize) {
        self.to_cuts.clear();
        self.to_cuts.resize(cuts, Self::NONE);
        self.cuts_end = 0;
        self.others.clear();
        self.first = 0;
    }

    /// Whether there is none, `cut` being the first cut that is not visited.
    #[inline]
    pub(super) fn are_none(&self, cut: usize) -> bool {
        // The last cut to which there is a path is not visited before that.
        self.first == self.others.len() && self.cuts_end <= cut
    }

    /// Adds a path to this cut, where it is the cheapest.
    #[inline]
    pub(super) fn add_to_cut(&mut self, cut: usize, path: Path) {
        let to_cut = &mut self.to_cuts[cut];
        *to_cut = if path.cost < to_cut.cost { path } else { *to_cut };
        self.cuts_end = self.cuts_end.max(cut + 1);
    }

    /// Adds a path to a row that is no cut, where it is the cheapest.
    #[inline]
    pub(super) fn add(&mut self, row: usize, path: Path) {
        if self.first == self.others.len() {
            self.others.clear();
            self.first = 0;
        }
        let mut at = self.others.len();
        self.others.push((row, path));
        // Most paths end beyond all others.
        while at > self.first && self.others[at - 1].0 >= row {
            if self.others[at - 1].0 == row {
                let (other, path) = (self.others[at - 1].1, self.others.remove(at).1);
                self.others[at - 1].1 = if path.cost < other.cost { path } else { other };
                return;
            }
            self.others.swap(at - 1, at);
            at -= 1;
        }
    }

    /// Takes the path to the nearest row, `cut` being the first cut that is not visited. Of those to rows that are no cuts the ones are
    /// dropped that have been overtaken: by a path at no more cost.
    #[inline]
    pub(super) fn next(&mut self, cuts: &[usize], cut: usize) -> Option<(usize, Path)> {
        let mut nearest = cut;
        while nearest < self.cuts_end && self.to_cuts[nearest].cost == u64::MAX {
            nearest += 1;
        }
        let is_cut = nearest < self.cuts_end;
        let nearest_row = if is_cut { cuts[nearest] } else { usize::MAX };
        while let Some(&(row, path)) = self.others.get(self.first)
            && row < nearest_row
        {
            self.first += 1;
            let mut least = u64::MAX;
            if is_cut {
                self.to_cuts[nearest..self.cuts_end].iter().for_each(|path| least = least.min(path.cost));
            }
            self.others[self.first..].iter().for_each(|(_, path)| least = least.min(path.cost));
            if least > path.cost {
                return Some((row, path));
            }
        }
        is_cut.then(|| (nearest_row, self.to_cuts[nearest]))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// A path to `row`, which drops at once all paths that it overtakes. The list of paths is by descending row.
    fn add_at_once(
        paths: &mut Vec<(usize, Path)>,
        (row, path): (usize, Path),
        is_cut: impl Fn(usize) -> bool,
    ) {
        let at_least = |other: &(usize, Path)| other.1.cost <= path.cost;
        let is_overtaken = !is_cut(row) && paths.iter().any(|other| other.0 > row && at_least(other));
        if is_overtaken || paths.iter().any(|other| other.0 == row && at_least(other)) {
            return;
        }
        let stays = |other: &(usize, Path)| {
            other.0 > row || other.1.cost < path.cost || (is_cut(other.0) && other.0 != row)
        };
        paths.retain(stays);
        paths.push((row, path));
        paths.sort_by_key(|(row, _)| std::cmp::Reverse(*row));
    }

    proptest! {
        /// Whether paths that have been overtaken are dropped at once or when they are taken, the same ones go on from the same rows.
        #[test]
        fn paths_go_on_as_if_those_overtaken_were_dropped_at_once(
            cuts in prop::collection::btree_set(1..90_usize, 0..20),
            steps in prop::collection::vec(prop::collection::vec((1..12_usize, 0..9_u64), 1..4), 1..60),
        ) {
            const ROWS: usize = 100;
            let cuts: Vec<usize> = cuts.into_iter().chain([ROWS]).collect();
            let mut paths = Paths::default();
            paths.start(cuts.len());
            let mut at_once = Vec::new();
            let (mut row, mut path) = (0, Path { cost: 0, before: 0 });
            for (step, ahead) in steps.iter().enumerate() {
                let cut = cuts.partition_point(|&cut| cut <= row);
                prop_assert_eq!(paths.are_none(cut), at_once.is_empty());
                for &(rows, cost) in ahead {
                    let end = (row + rows).min(ROWS);
                    let next = Path { cost: path.cost + cost, before: step as u32 };
                    match cuts.binary_search(&end) {
                        Ok(cut) => paths.add_to_cut(cut, next),
                        Err(_) => paths.add(end, next),
                    }
                    add_at_once(&mut at_once, (end, next), |row| cuts.binary_search(&row).is_ok());
                }
                let found = paths.next(&cuts, cut).map(|(row, path)| (row, path.cost, path.before));
                let wanted = at_once.pop();
                prop_assert_eq!(found, wanted.map(|(row, path)| (row, path.cost, path.before)));
                match wanted {
                    Some(next) if next.0 < ROWS => (row, path) = next,
                    _ => break,
                }
            }
        }
    }
}

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

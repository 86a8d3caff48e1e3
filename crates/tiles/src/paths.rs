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
    /// To other rows, by descending row.
    others: Vec<(usize, Path)>,
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
    }

    /// Whether there is none, `cut` being the first cut that is not visited.
    #[inline]
    pub(super) fn are_none(&self, cut: usize) -> bool {
        // The last cut to which there is a path is not visited before that.
        self.others.is_empty() && self.cuts_end <= cut
    }

    /// Adds a path to `row`, or to this cut, where it is the cheapest.
    #[inline]
    pub(super) fn add(&mut self, row: usize, cut: Option<usize>, path: Path) {
        if let Some(cut) = cut {
            let to_cut = &mut self.to_cuts[cut];
            *to_cut = if path.cost < to_cut.cost { path } else { *to_cut };
            self.cuts_end = self.cuts_end.max(cut + 1);
            return;
        }
        // From the nearest row on: there are few, and most paths end beyond all others.
        let mut at = self.others.len();
        while at > 0 && self.others[at - 1].0 < row {
            at -= 1;
        }
        match at.checked_sub(1).map(|before| &mut self.others[before]) {
            Some(other) if other.0 == row => {
                if path.cost < other.1.cost {
                    other.1 = path;
                }
            }
            _ => self.others.insert(at, (row, path)),
        }
    }

    /// Takes the path to the nearest row, `cut` being the first cut that is not visited. Of those to rows that are no cuts the ones are
    /// dropped that have been overtaken: by a path at no more cost.
    #[inline]
    pub(super) fn next(&mut self, cuts: &[usize], cut: usize) -> Option<(usize, Path)> {
        let open = &self.to_cuts[cut.min(self.cuts_end)..self.cuts_end];
        let nearest = open.iter().position(|path| path.cost < u64::MAX).unwrap_or(open.len());
        let nearest_row = if nearest < open.len() { cuts[cut + nearest] } else { usize::MAX };
        while let Some(&(row, path)) = self.others.last()
            && row < nearest_row
        {
            self.others.pop();
            let open = open.iter().chain(self.others.iter().map(|(_, path)| path));
            if open.fold(u64::MAX, |least, path| least.min(path.cost)) > path.cost {
                return Some((row, path));
            }
        }
        (nearest < open.len()).then(|| (nearest_row, open[nearest]))
    }
}


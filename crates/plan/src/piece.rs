//! Bands in the one form that a set of pairs can have, so that equal sets are equal values and neighbours can be joined.

use counterpoint_mask::{Band, Range};

/// The canonical form of a band's set of pairs: no row and no column at the rims is empty, and a diagonal bound that cuts
/// nothing is [`Band::NO_MIN`] or [`Band::NO_MAX`]. `None` for the empty set.
///
/// Every column of the result's `k_range` is seen by some row: the columns of consecutive rows overlap or touch, because
/// both ends move by at most one column a row.
pub(crate) fn canonical(band: &Band) -> Option<Band> {
    let (q, k) = (band.q_range, band.k_range);
    if q.is_empty() || k.is_empty() || band.diag_min > band.diag_max {
        return None;
    }
    // A row sees something when its window [row + diag_min, row + diag_max] meets k_range.
    let row_start = (q.start as i64).max(k.start as i64 - band.diag_max);
    let row_end = (q.end as i64).min(k.end as i64 - band.diag_min);
    if row_start >= row_end {
        return None;
    }
    let col_start = (k.start as i64).max(row_start + band.diag_min);
    let col_end = (k.end as i64).min(row_end + band.diag_max);
    // A bound is free when the row that it touches first still sees up to the rim.
    let free_min = row_end - 1 + band.diag_min <= col_start;
    let free_max = row_start + band.diag_max >= col_end - 1;
    Some(Band {
        q_range: Range::new(row_start as usize, row_end as usize),
        k_range: Range::new(col_start as usize, col_end as usize),
        diag_min: if free_min { Band::NO_MIN } else { band.diag_min },
        diag_max: if free_max { Band::NO_MAX } else { band.diag_max },
    })
}

/// Whether a canonical band is a whole rectangle.
pub(crate) fn is_rectangle(band: &Band) -> bool {
    band.diag_min == Band::NO_MIN && band.diag_max == Band::NO_MAX
}

/// The band of `a` and `b` together, when that is a band again. Both must be canonical and share no pair.
pub(crate) fn join(a: &Band, b: &Band) -> Option<Band> {
    if a.q_range == b.q_range {
        // Side by side. Bands that touch nowhere cannot be one band.
        let (left, right) = if a.k_range.start <= b.k_range.start { (a, b) } else { (b, a) };
        if left.k_range.end == right.k_range.start && is_rectangle(left) && is_rectangle(right) {
            return Some(Band { k_range: Range::new(left.k_range.start, right.k_range.end), ..*left });
        }
    }
    let hull = |x: Range, y: Range| Range::new(x.start.min(y.start), x.end.max(y.end));
    let (q_hull, k_hull) = (hull(a.q_range, b.q_range), hull(a.k_range, b.k_range));
    // A row or a column between the two that neither sees would have to be empty in the union, which no band allows.
    if q_hull.len() > a.q_range.len() + b.q_range.len() || k_hull.len() > a.k_range.len() + b.k_range.len() {
        return None;
    }
    let area = a.area() + b.area();
    let bound = |x: i64, y: i64, free: i64| if x == free { y } else { x };
    // A bound of the union that cuts shows in at least one of the two, so two candidates an end are enough.
    for diag_min in [bound(a.diag_min, b.diag_min, Band::NO_MIN), Band::NO_MIN] {
        for diag_max in [bound(a.diag_max, b.diag_max, Band::NO_MAX), Band::NO_MAX] {
            let union = Band { q_range: q_hull, k_range: k_hull, diag_min, diag_max };
            let holds = |part: &Band| canonical(&union.clip(&part.q_range, &part.k_range)) == Some(*part);
            if union.area() == area && holds(a) && holds(b) {
                return canonical(&union);
            }
        }
    }
    None
}

/// Appends `band`, joined with the last one where the two are one band. Cutting makes neighbours follow each other, so
/// looking at the last one finds them.
pub(crate) fn push_joined(bands: &mut Vec<Band>, band: Band) {
    if let Some(last) = bands.last_mut()
        && let Some(joined) = join(last, &band)
    {
        *last = joined;
        return;
    }
    bands.push(band);
}

//! Builders of sliding-window masks, with sink tokens at the front of documents, and of windowed cross attention.

use super::Drawing;
use crate::{Band, Documents, Mask, MaskError, MaskType};

/// How far a token sees in [`Mask::sliding_window`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Window {
    /// Tokens before itself; `None` is no limit.
    pub left: Option<usize>,
    /// Tokens after itself; `None` is no limit, 0 makes the window causal.
    pub right: Option<usize>,
    /// Tokens at the front of the document that stay in sight when the left limit has passed them (sink or global
    /// tokens). The right limit holds for them too, so a causal window stays causal.
    pub global: usize,
}

impl Mask {
    /// Token `i` of a document sees its token `j` when `i - left <= j <= i + right`, or when
    /// `j < global` and `j <= i + right`. At most three slices a document, and two more with global tokens; a causal
    /// window has two, and one more with global tokens.
    ///
    /// # Errors
    /// See [`Mask::full`].
    pub fn sliding_window(documents: impl Into<Documents>, window: Window) -> Result<Self, MaskError> {
        let documents = documents.into();
        let mut drawing = Drawing::new(documents.seqlen(), documents.seqlen())?;
        for document in documents.ranges() {
            let far = document.len();
            let left = window.left.unwrap_or(far).min(far);
            let right = window.right.unwrap_or(far).min(far);
            let global = window.global.min(far);
            let window =
                Band { diag_min: -(left as i64), diag_max: right as i64, ..Band::full(document, document) };
            // Until its left end has passed the global tokens, the window and they are one interval.
            let (near, rest) = document.cut(document.start + left + global + 1);
            let (sinks, others) = document.cut(document.start + global);
            let parts: &[Band] = match global {
                // Cut as one band it gives fewer slices.
                0 => &[window],
                _ => &[
                    Band { q_range: near, diag_min: Band::NO_MIN, ..window },
                    Band { q_range: rest, k_range: others, ..window },
                ],
            };
            for slice in parts.iter().flat_map(Band::to_slices) {
                drawing.add(slice.q_range, slice.k_range, slice.mask_type)?;
            }
            drawing.add(rest, sinks, MaskType::Full)?;
        }
        drawing.finish()
    }

    /// Cross attention in a window: where a document has `n` queries and `m` keys, query `i` sees key `j` when
    /// `i - left <= j - (m - n) <= i + right`, so the last query is aligned to the last key. `window.global` must be 0:
    /// which keys are global is not said by an alignment to the end.
    ///
    /// # Errors
    /// As [`Mask::cross_full`]; [`MaskError::GlobalTokens`].
    pub fn cross_sliding_window(
        queries: impl Into<Documents>,
        keys: impl Into<Documents>,
        window: Window,
    ) -> Result<Self, MaskError> {
        let (queries, keys) = (queries.into(), keys.into());
        if queries == keys {
            return Self::sliding_window(queries, window);
        }
        if window.global > 0 {
            return Err(MaskError::GlobalTokens { global: window.global });
        }
        if queries.count() != keys.count() {
            return Err(MaskError::DocumentCount { queries: queries.count(), keys: keys.count() });
        }
        let mut drawing = Drawing::new(queries.seqlen(), keys.seqlen())?;
        for (q, k) in queries.ranges().zip(keys.ranges()) {
            let aligned = k.end as i64 - q.end as i64;
            let far = q.len().saturating_add(k.len());
            let limit = |side: Option<usize>| side.unwrap_or(far).min(far) as i64;
            let band = Band {
                diag_min: aligned - limit(window.left),
                diag_max: aligned + limit(window.right),
                ..Band::full(q, k)
            };
            for slice in band.to_slices() {
                drawing.add(slice.q_range, slice.k_range, slice.mask_type)?;
            }
        }
        drawing.finish()
    }
}

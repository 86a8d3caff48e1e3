use super::Drawing;
use crate::{Band, Documents, Mask, MaskError, MaskType, Range};

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
            // Until its left end has passed the global tokens, the window and they are one interval.
            let (near, rest) = document.cut(document.start.saturating_add(left).saturating_add(global + 1));
            let (sinks, others) = document.cut(document.start + global);
            let upper = Band { diag_max: right as i64, ..Band::full(near, document) };
            let window =
                Band { diag_min: -(left as i64), diag_max: right as i64, ..Band::full(rest, others) };
            let joined = if global == 0 {
                // Without global tokens it is one band, and cutting it as one gives fewer slices.
                let whole = Range { start: near.start, end: rest.end };
                [Some(Band { q_range: whole, k_range: document, ..window }), None]
            } else {
                [Some(upper), Some(window)]
            };
            for slice in joined.iter().flatten().flat_map(Band::to_slices) {
                drawing.add(slice.q_range, slice.k_range, slice.mask_type)?;
            }
            drawing.add(rest, sinks, MaskType::Full)?;
        }
        drawing.finish()
    }
}

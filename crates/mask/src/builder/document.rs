//! Builders of masks by documents: full, causal and prefix-LM over packed sequences, and cross attention between two of them.

use super::Drawing;
use crate::{Documents, Mask, MaskError, MaskType, Range};

impl Mask {
    /// Every token sees every token of its own document. One slice a document.
    ///
    /// # Errors
    /// No token at all, or too many ([`MAX_SEQLEN`](crate::MAX_SEQLEN)); so for every builder.
    pub fn full(documents: impl Into<Documents>) -> Result<Self, MaskError> {
        let documents = documents.into();
        Self::cross_full(documents.clone(), documents)
    }

    /// Every token sees the tokens of its own document up to itself. One slice a document.
    ///
    /// # Errors
    /// See [`Mask::full`].
    pub fn causal(documents: impl Into<Documents>) -> Result<Self, MaskError> {
        let documents = documents.into();
        Self::cross_causal(documents.clone(), documents)
    }

    /// Cross attention: every query of document `d` sees every key of document `d`. One slice a document.
    ///
    /// # Errors
    /// See [`Mask::full`]; also unequal numbers of documents.
    pub fn cross_full(queries: impl Into<Documents>, keys: impl Into<Documents>) -> Result<Self, MaskError> {
        cross(queries.into(), keys.into(), MaskType::Full)
    }

    /// Cross attention, causal and aligned bottom-right: in every document the last query sees all keys, and each
    /// query before it one key less. Queries that are too early see none. One slice a document.
    ///
    /// # Errors
    /// See [`Mask::cross_full`].
    pub fn cross_causal(
        queries: impl Into<Documents>,
        keys: impl Into<Documents>,
    ) -> Result<Self, MaskError> {
        cross(queries.into(), keys.into(), MaskType::Causal)
    }

    /// Prefix LM: in each document the first `prefix` tokens are seen by all its tokens, and the others by themselves
    /// and later ones. A document shorter than its prefix is full. At most two slices a document.
    ///
    /// # Errors
    /// See [`Mask::full`].
    pub fn prefix_lm(documents: impl Into<Documents>, prefix: usize) -> Result<Self, MaskError> {
        let documents = documents.into();
        let prefixes: Vec<usize> = documents.ranges().map(|document| prefix.min(document.len())).collect();
        Self::prefix_lm_each(documents, &prefixes)
    }

    /// As [`Mask::prefix_lm`], with a prefix for each document.
    ///
    /// # Errors
    /// See [`Mask::full`]; another number of prefixes than of documents; a prefix longer than its document.
    pub fn prefix_lm_each(documents: impl Into<Documents>, prefixes: &[usize]) -> Result<Self, MaskError> {
        let documents = documents.into();
        if documents.count() != prefixes.len() {
            return Err(MaskError::PrefixCount { documents: documents.count(), prefixes: prefixes.len() });
        }
        let mut drawing = Drawing::new(documents.seqlen(), documents.seqlen())?;
        for (index, (document, &prefix)) in documents.ranges().zip(prefixes).enumerate() {
            let length = document.len();
            if prefix > length {
                return Err(MaskError::PrefixTooLong { document: index, prefix, length });
            }
            let (head, tail) = document.cut(document.start + prefix);
            drawing.add(head, head, MaskType::Full)?;
            drawing.add(tail, document, MaskType::Causal)?;
        }
        drawing.finish()
    }
}

fn cross(queries: Documents, keys: Documents, mask_type: MaskType) -> Result<Mask, MaskError> {
    if queries.count() != keys.count() {
        return Err(MaskError::DocumentCount { queries: queries.count(), keys: keys.count() });
    }
    let mut drawing = Drawing::new(queries.seqlen(), keys.seqlen())?;
    for (q_range, k_range) in queries.ranges().zip(keys.ranges()) {
        // Rows above the diagonal see nothing; without them the slice is its own bounding box.
        let blind = match mask_type {
            MaskType::Causal => q_range.len().saturating_sub(k_range.len()),
            _ => 0,
        };
        drawing.add(Range { start: q_range.start + blind, end: q_range.end }, k_range, mask_type)?;
    }
    drawing.finish()
}

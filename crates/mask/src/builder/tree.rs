//! Masks of packed pieces that share prefixes: trees of rollouts, and documents marked token by token.

use std::collections::BTreeMap;

use super::Drawing;
use crate::{Documents, Mask, MaskError, MaskType, Range};

impl Mask {
    /// A tree of pieces, packed one after another: a token sees its own piece up to itself, and every piece on the way
    /// to the root whole. `parents[i]` is the piece that piece `i` continues, an earlier one, or `None` for a root.
    /// Neighbours in the sequence that follow each other in the tree share a slice.
    ///
    /// # Errors
    /// As [`Mask::full`]; [`MaskError::Parent`] where a piece continues itself or a later one, or there are more or
    /// fewer parents than pieces.
    pub fn prefix_tree(parents: &[Option<usize>], pieces: &Documents) -> Result<Self, MaskError> {
        if parents.len() != pieces.count() {
            return Err(MaskError::DocumentCount { queries: pieces.count(), keys: parents.len() });
        }
        let ranges: Vec<Range> = pieces.ranges().collect();
        let mut drawing = Drawing::new(pieces.seqlen(), pieces.seqlen())?;
        for (piece, own) in ranges.iter().enumerate() {
            let mut causal = *own;
            let mut whole: Vec<Range> = Vec::new();
            let mut at = piece;
            while let Some(parent) = parents[at] {
                if parent >= at {
                    return Err(MaskError::Parent { piece: at, parent });
                }
                let range = ranges[parent];
                match whole.last_mut() {
                    None if range.end == causal.start => causal.start = range.start,
                    Some(last) if range.end == last.start => last.start = range.start,
                    _ => whole.push(range),
                }
                at = parent;
            }
            for range in whole.iter().rev() {
                drawing.add(*own, *range, MaskType::Full)?;
            }
            drawing.add(*own, causal, MaskType::Causal)?;
        }
        drawing.finish()
    }

    /// Every token sees the tokens with its own number, with `causal` those up to itself. Documents may lie in
    /// several places of the sequence. A token with a negative number is padding: it sees nothing and nothing sees it.
    ///
    /// # Errors
    /// As [`Mask::full`].
    pub fn from_document_ids(ids: &[i64], causal: bool) -> Result<Self, MaskError> {
        let mut runs: Vec<(i64, Range)> = Vec::new();
        for (token, &id) in ids.iter().enumerate() {
            match runs.last_mut() {
                Some((last, range)) if *last == id => range.end = token + 1,
                _ => runs.push((id, Range::new(token, token + 1))),
            }
        }
        let mut places: BTreeMap<i64, Vec<Range>> = BTreeMap::new();
        for &(id, range) in runs.iter().filter(|(id, _)| *id >= 0) {
            places.entry(id).or_default().push(range);
        }
        let mut drawing = Drawing::new(ids.len(), ids.len())?;
        for (id, own) in runs.into_iter().filter(|(id, _)| *id >= 0) {
            for keys in &places[&id] {
                match (causal, keys.start.cmp(&own.start)) {
                    (true, std::cmp::Ordering::Equal) => drawing.add(own, *keys, MaskType::Causal)?,
                    (true, std::cmp::Ordering::Greater) => {}
                    _ => drawing.add(own, *keys, MaskType::Full)?,
                }
            }
        }
        drawing.finish()
    }
}

//! The mask of reinforcement learning: one prompt with many answers that do not see each other.

use super::Drawing;
use crate::{Documents, Mask, MaskError, MaskType, Range};

impl Mask {
    /// One question of `question` tokens, then answers to it: the question is causal, and every token of an answer sees
    /// the whole question and its own answer up to itself, but no other answer. Two slices and one an answer.
    ///
    /// # Errors
    /// See [`Mask::full`].
    pub fn shared_question(question: usize, answers: impl Into<Documents>) -> Result<Self, MaskError> {
        let answers = answers.into();
        let seqlen = question.saturating_add(answers.seqlen());
        let mut drawing = Drawing::new(seqlen, seqlen)?;
        let (asked, answered) = Range { start: 0, end: seqlen }.cut(question);
        drawing.add(asked, asked, MaskType::Causal)?;
        drawing.add(answered, asked, MaskType::Full)?;
        for answer in answers.ranges() {
            let own = Range { start: question + answer.start, end: question + answer.end };
            drawing.add(own, own, MaskType::Causal)?;
        }
        drawing.finish()
    }
}

//! Masks by a name and a length: those that attention is compared on, here and with others.

use crate::{Documents, Mask, MaskError, Window};

/// Lengths of packed documents, one a line, by the length of the sequence. `benches/peers/one_gpu/masks.py` reads the same.
pub const PACKED_DOCUMENTS: [(usize, &str); 3] = [
    (8 << 10, include_str!("../../../benches/data/documents_8k.txt")),
    (16 << 10, include_str!("../../../benches/data/documents_16k.txt")),
    (32 << 10, include_str!("../../../benches/data/documents_32k.txt")),
];

/// Rows that a row of the window sees, itself included.
const WINDOW: usize = 1024;
/// Rows of a block.
const BLOCK: usize = 2048;
/// Answers to a shared question.
const ANSWERS: usize = 4;
/// Tokens that every row of a window sees.
const GLOBAL: usize = 64;
/// Rows and columns of a block of the sparse grid, at least.
const SPARSE: usize = 256;
/// Block rows of the sparse grid, at most.
const SPARSE_ROWS: usize = 256;

/// A mask of the comparison with others, by the name that it has there.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MaskPreset {
    /// Every token sees every token.
    Full,
    /// A token sees itself and what is before it.
    Causal,
    /// Full inside packed documents.
    VarlenFull,
    /// Causal inside packed documents.
    VarlenCausal,
    /// A causal window of 1,024 rows.
    SwCausal,
    /// A token sees its own block of 2,048 and earlier ones.
    BlockCausal,
    /// The same inside packed documents.
    VarlenBlockCausal,
    /// Block-causal, and a last block that sees everything.
    BlockCausalLastGlobal,
    /// A question of half the tokens, and four answers that do not see each other.
    SharedQuestion,
    /// A causal window, and 64 tokens at the front that everyone sees.
    SwGlobal,
    /// A grid of blocks: the diagonal, the first column, and every fourth of the others below it.
    BlockSparse,
}

impl MaskPreset {
    /// All of them, in the order of tables.
    pub const ALL: [Self; 11] = [
        Self::Full,
        Self::Causal,
        Self::VarlenFull,
        Self::VarlenCausal,
        Self::SwCausal,
        Self::BlockCausal,
        Self::VarlenBlockCausal,
        Self::BlockCausalLastGlobal,
        Self::SharedQuestion,
        Self::SwGlobal,
        Self::BlockSparse,
    ];

    /// Its name on the command line and in tables.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Full => "full",
            Self::Causal => "causal",
            Self::VarlenFull => "varlen_full",
            Self::VarlenCausal => "varlen_causal",
            Self::SwCausal => "sw_causal",
            Self::BlockCausal => "block_causal",
            Self::VarlenBlockCausal => "varlen_block_causal",
            Self::BlockCausalLastGlobal => "block_causal_last_global",
            Self::SharedQuestion => "shared_question",
            Self::SwGlobal => "sw_global",
            Self::BlockSparse => "block_sparse",
        }
    }

    /// The one of that name.
    pub fn named(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|preset| preset.name() == name)
    }

    /// The mask on so many tokens.
    ///
    /// # Errors
    /// Where there are too few tokens for it, or more than masks have.
    pub fn build(self, seqlen: usize) -> Result<Mask, MaskError> {
        match self {
            Self::Full => Mask::full(seqlen),
            Self::Causal => Mask::causal(seqlen),
            Self::VarlenFull => Mask::full(documents(seqlen)?),
            Self::VarlenCausal => Mask::causal(documents(seqlen)?),
            Self::SwCausal => Mask::sliding_window(seqlen, window(0)),
            Self::BlockCausal => Mask::block_causal(seqlen, BLOCK),
            Self::VarlenBlockCausal => Mask::block_causal(documents(seqlen)?, BLOCK),
            Self::BlockCausalLastGlobal => {
                // Four blocks at least, or the last one that sees everything would be all there is.
                let block = BLOCK.min(seqlen / 4).max(1).min(seqlen);
                Mask::last_global(seqlen.saturating_sub(block), block, block)
            }
            Self::SharedQuestion => {
                let question = seqlen / 2;
                let answer = (seqlen - question) / ANSWERS;
                let mut answers = vec![answer; ANSWERS];
                answers[ANSWERS - 1] = seqlen - question - (ANSWERS - 1) * answer;
                Mask::shared_question(question, Documents::from_lengths(answers)?)
            }
            Self::SwGlobal => Mask::sliding_window(seqlen, window(GLOBAL)),
            Self::BlockSparse => block_sparse(seqlen, SPARSE.max(seqlen.div_ceil(SPARSE_ROWS))),
        }
    }
}

/// A causal window that sees so many tokens at the front besides.
fn window(global: usize) -> Window {
    Window { left: Some(WINDOW - 1), right: Some(0), global }
}

/// Of a grid of blocks the diagonal, the first column, and every fourth block below it.
fn block_sparse(seqlen: usize, block: usize) -> Result<Mask, MaskError> {
    let rows = seqlen.div_ceil(block);
    let seen = |row: usize, column: usize| row == column || column == 0 || (row + column).is_multiple_of(4);
    let of_row =
        |row: usize| (0..=row).filter(move |&column| seen(row, column)).map(move |column| (row, column));
    let blocks: Vec<(usize, usize)> = (0..rows).flat_map(of_row).collect();
    Mask::block_sparse(seqlen, seqlen, block, block, &blocks)
}

/// The numbers of a list, one a line.
fn lengths(text: &str) -> Vec<usize> {
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// The list of that length; multiples of the longest repeat it; for others the shortest list scaled, what is left over going
/// to the longest document.
fn documents(seqlen: usize) -> Result<Documents, MaskError> {
    if let Some((_, text)) = PACKED_DOCUMENTS.iter().find(|(listed, _)| *listed == seqlen) {
        return Documents::from_lengths(lengths(text));
    }
    let (longest, text) = PACKED_DOCUMENTS[PACKED_DOCUMENTS.len() - 1];
    if seqlen > longest && seqlen.is_multiple_of(longest) {
        return Documents::from_lengths(lengths(text).repeat(seqlen / longest));
    }
    let (listed, text) = PACKED_DOCUMENTS[0];
    let mut scaled: Vec<usize> =
        lengths(text).iter().map(|length| (length.saturating_mul(seqlen) / listed).max(1)).collect();
    let longest = (0..scaled.len()).max_by_key(|&at| (scaled[at], usize::MAX - at)).unwrap_or(0);
    let others: usize = scaled.iter().sum::<usize>() - scaled[longest];
    scaled[longest] = seqlen.saturating_sub(others);
    // Hardly more tokens than documents: the last ones have none.
    let mut left = seqlen;
    for length in &mut scaled {
        *length = left.min(*length);
        left -= *length;
    }
    Documents::from_lengths(scaled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mask_is_as_long_as_it_says() {
        for seqlen in [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131_072, 1 << 20] {
            for preset in MaskPreset::ALL {
                let built = preset.build(seqlen).unwrap();
                assert_eq!((built.seqlen_q(), built.seqlen_k()), (seqlen, seqlen), "{preset:?}");
                assert_eq!(MaskPreset::named(preset.name()), Some(preset));
            }
        }
    }

    /// As the script that times the peers has counted them.
    #[test]
    fn areas_are_those_of_the_comparison() {
        let area = |preset: MaskPreset, seqlen| preset.build(seqlen).unwrap().area();
        assert_eq!(area(MaskPreset::Full, 8192), 67_108_864);
        assert_eq!(area(MaskPreset::Causal, 8192), 33_558_528);
        assert_eq!(area(MaskPreset::VarlenCausal, 8192), 5_308_482);
        assert_eq!(area(MaskPreset::SwCausal, 8192), 8192 * 1024 - 1024 * 1023 / 2);
        assert_eq!(area(MaskPreset::BlockCausal, 8192), 2048 * 2048 * 10);
        // Four blocks, the last of which sees them all as it does without being global.
        assert_eq!(area(MaskPreset::BlockCausalLastGlobal, 8192), 2048 * 2048 * 10);
        // Of short ones too.
        assert_eq!(area(MaskPreset::BlockCausalLastGlobal, 1024), 256 * 256 * 10);
        assert_eq!(
            area(MaskPreset::SharedQuestion, 8192),
            4096 * 4097 / 2 + 4 * (1024 * 4096 + 1024 * 1025 / 2)
        );
        // The first 64 tokens, where the window has left them.
        assert_eq!(
            area(MaskPreset::SwGlobal, 8192),
            area(MaskPreset::SwCausal, 8192)
                + (64..8192_u64).map(|row| 64.min(row.saturating_sub(1023))).sum::<u64>()
        );
        // Of 4 block rows: 1, 2, 2 and 3 blocks.
        assert_eq!(area(MaskPreset::BlockSparse, 1024), 8 * 256 * 256);
        // One document there is longer than a block.
        assert!(area(MaskPreset::VarlenBlockCausal, 32768) < area(MaskPreset::VarlenFull, 32768));
    }

    #[test]
    fn too_few_tokens_are_an_error_or_a_mask() {
        for seqlen in 0..40 {
            for preset in MaskPreset::ALL {
                if let Ok(mask) = preset.build(seqlen) {
                    assert_eq!(mask.seqlen_q(), seqlen, "{preset:?}");
                }
            }
        }
    }
}

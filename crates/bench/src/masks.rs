//! The masks that attention is compared on.

use clap::ValueEnum;
use counterpoint_console::CliError;
use counterpoint_mask::{Documents, Mask, MaskError, Window};

use crate::arguments::BenchMask;

/// Lengths of packed documents, one a line, by the length of the sequence. `benches/peers/one_gpu/masks.py` reads the same.
pub(crate) const DOCUMENTS: [(usize, &str); 3] = [
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
/// Rows and columns of a block of the sparse grid.
const SPARSE: usize = 256;

/// The name on the command line and in tables.
pub(crate) fn name(mask: BenchMask) -> String {
    value_name(&mask)
}

/// The name that a value has on the command line.
pub(crate) fn value_name<T: ValueEnum>(value: &T) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// A mask of the comparison.
fn build(mask: BenchMask, seqlen: usize) -> Result<Mask, MaskError> {
    match mask {
        BenchMask::Full => Mask::full(seqlen),
        BenchMask::Causal => Mask::causal(seqlen),
        BenchMask::VarlenFull => Mask::full(documents(seqlen)?),
        BenchMask::VarlenCausal => Mask::causal(documents(seqlen)?),
        BenchMask::SwCausal => {
            Mask::sliding_window(seqlen, Window { left: Some(WINDOW - 1), right: Some(0), global: 0 })
        }
        BenchMask::BlockCausal => Mask::block_causal(seqlen, BLOCK),
        BenchMask::VarlenBlockCausal => Mask::block_causal(documents(seqlen)?, BLOCK),
        BenchMask::BlockCausalLastGlobal => {
            let global = BLOCK.min(seqlen / 2);
            Mask::last_global(seqlen - global, BLOCK, global)
        }
        BenchMask::SharedQuestion => {
            let question = seqlen / 2;
            let answer = (seqlen - question) / ANSWERS;
            let mut answers = vec![answer; ANSWERS];
            answers[ANSWERS - 1] = seqlen - question - (ANSWERS - 1) * answer;
            Mask::shared_question(question, Documents::from_lengths(answers)?)
        }
        BenchMask::SwGlobal => {
            Mask::sliding_window(seqlen, Window { left: Some(WINDOW - 1), right: Some(0), global: GLOBAL })
        }
        BenchMask::BlockSparse => block_sparse(seqlen, SPARSE),
    }
}

/// Of a grid of blocks the diagonal, the first column, and every fourth block below it.
pub(crate) fn block_sparse(seqlen: usize, block: usize) -> Result<Mask, MaskError> {
    let rows = seqlen.div_ceil(block);
    let seen = |row: usize, column: usize| row == column || column == 0 || (row + column).is_multiple_of(4);
    let of_row =
        |row: usize| (0..=row).filter(move |&column| seen(row, column)).map(move |column| (row, column));
    let blocks: Vec<(usize, usize)> = (0..rows).flat_map(of_row).collect();
    Mask::block_sparse(seqlen, seqlen, block, block, &blocks)
}

/// As [`build`], with the command line's error.
pub(crate) fn load(mask: BenchMask, seqlen: usize) -> Result<Mask, CliError> {
    build(mask, seqlen).map_err(|source| CliError::MaskExpression {
        expression: format!("{} of {seqlen}", name(mask)),
        source,
    })
}

/// The numbers of a list, one a line.
fn lengths(text: &str) -> Vec<usize> {
    text.lines().filter_map(|line| line.trim().parse().ok()).collect()
}

/// The list of that length; multiples of the longest repeat it; for others the shortest list scaled, what is left over going
/// to the longest document.
fn documents(seqlen: usize) -> Result<Documents, MaskError> {
    if let Some((_, text)) = DOCUMENTS.iter().find(|(listed, _)| *listed == seqlen) {
        return Documents::from_lengths(lengths(text));
    }
    let (longest, text) = DOCUMENTS[DOCUMENTS.len() - 1];
    if seqlen > longest && seqlen.is_multiple_of(longest) {
        return Documents::from_lengths(lengths(text).repeat(seqlen / longest));
    }
    let (listed, text) = DOCUMENTS[0];
    let mut scaled: Vec<usize> =
        lengths(text).iter().map(|length| (length * seqlen / listed).max(1)).collect();
    let longest = (0..scaled.len()).max_by_key(|&at| (scaled[at], usize::MAX - at)).unwrap_or(0);
    let others: usize = scaled.iter().sum::<usize>() - scaled[longest];
    scaled[longest] = seqlen.saturating_sub(others);
    Documents::from_lengths(scaled)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_mask_is_as_long_as_it_says() {
        for seqlen in [1024, 2048, 4096, 8192, 16384, 32768, 65536, 131_072] {
            for mask in BenchMask::value_variants() {
                let built = build(*mask, seqlen).unwrap();
                assert_eq!((built.seqlen_q(), built.seqlen_k()), (seqlen, seqlen), "{mask:?}");
            }
        }
    }

    /// As the script that times the peers has counted them.
    #[test]
    fn areas_are_those_of_the_comparison() {
        let area = |mask, seqlen| build(mask, seqlen).unwrap().area();
        assert_eq!(area(BenchMask::Full, 8192), 67_108_864);
        assert_eq!(area(BenchMask::Causal, 8192), 33_558_528);
        assert_eq!(area(BenchMask::VarlenCausal, 8192), 5_308_482);
        assert_eq!(area(BenchMask::SwCausal, 8192), 8192 * 1024 - 1024 * 1023 / 2);
        assert_eq!(area(BenchMask::BlockCausal, 8192), 2048 * 2048 * 10);
        // Four blocks, the last of which sees them all as it does without being global.
        assert_eq!(area(BenchMask::BlockCausalLastGlobal, 8192), 2048 * 2048 * 10);
        assert_eq!(
            area(BenchMask::SharedQuestion, 8192),
            4096 * 4097 / 2 + 4 * (1024 * 4096 + 1024 * 1025 / 2)
        );
        // The first 64 tokens, where the window has left them.
        assert_eq!(
            area(BenchMask::SwGlobal, 8192),
            area(BenchMask::SwCausal, 8192)
                + (64..8192_u64).map(|row| 64.min(row.saturating_sub(1023))).sum::<u64>()
        );
        // Of 4 block rows: 1, 2, 2 and 3 blocks.
        assert_eq!(area(BenchMask::BlockSparse, 1024), 8 * 256 * 256);
        // One document there is longer than a block.
        assert!(area(BenchMask::VarlenBlockCausal, 32768) < area(BenchMask::VarlenFull, 32768));
    }
}

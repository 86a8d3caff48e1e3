//! What is refused of masks: of slices, builders, expressions, JSON and files, with the place and the values.

use thiserror::Error;

/// Why a mask is not valid. Every message names the place and the values, and says what would be right.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum MaskError {
    /// A sequence without tokens: there is nothing to attend.
    #[error("seqlen_{axis} is 0; a mask needs at least one query row and one key column")]
    EmptySequence {
        /// `q` or `k`.
        axis: &'static str,
    },
    /// A sequence longer than [`MAX_SEQLEN`](crate::MAX_SEQLEN).
    #[error("seqlen_{axis} is {seqlen}; at most {limit} tokens are supported")]
    SequenceTooLong {
        /// `q` or `k`.
        axis: &'static str,
        /// The length asked for.
        seqlen: usize,
        /// The largest length supported.
        limit: usize,
    },
    /// A slice reaches past the sequence.
    #[error(
        "slices[{index}].{axis}: the range [{start}, {end}) is outside the sequence of {seqlen} tokens; end it at \
         {seqlen} or before, or make seqlen_{axis} larger"
    )]
    OutOfBounds {
        /// Index of the slice.
        index: usize,
        /// `q` or `k`.
        axis: &'static str,
        /// Start of the range.
        start: usize,
        /// End of the range.
        end: usize,
        /// Length of that axis.
        seqlen: usize,
    },
    /// A slice has a range without tokens.
    #[error("slices[{index}].{axis}: the range [{at}, {at}) is empty; leave the slice out")]
    EmptyRange {
        /// Index of the slice.
        index: usize,
        /// `q` or `k`.
        axis: &'static str,
        /// Where the range starts and ends.
        at: usize,
    },
    /// A slice has a range that ends before it starts.
    #[error("slices[{index}].{axis}: the range [{start}, {end}) is reversed; write the smaller number first")]
    ReversedRange {
        /// Index of the slice.
        index: usize,
        /// `q` or `k`.
        axis: &'static str,
        /// Start of the range.
        start: usize,
        /// End of the range.
        end: usize,
    },
    /// Two slices hold the same pair, which would count twice.
    #[error(
        "slices[{first}] and slices[{second}] overlap: both hold row {row}, column {col}; slices must be disjoint"
    )]
    Overlap {
        /// Index of one slice.
        first: usize,
        /// Index of the other slice, larger than `first`.
        second: usize,
        /// A query row that both hold.
        row: usize,
        /// A key column that both hold in that row.
        col: usize,
    },
    /// Cumulative starts that do not begin with 0 (or are missing).
    #[error("cumulative starts begin with 0, not with {}", first.map_or("nothing".to_owned(), |v| v.to_string()))]
    StartsNotAtZero {
        /// The first value, when there is one.
        first: Option<usize>,
    },
    /// Cumulative starts that decrease.
    #[error(
        "cumulative starts must not decrease, but number {index} is {value} after {previous}: \
         give where documents start, and not their lengths"
    )]
    StartsDecrease {
        /// Position of the smaller value, counted from 0.
        index: usize,
        /// The value before it.
        previous: usize,
        /// The value.
        value: usize,
    },
    /// Document lengths whose sum overflows.
    #[error("the lengths up to number {index} add up to more than {limit} tokens")]
    LengthsTooLong {
        /// Position of the length that went too far, counted from 0.
        index: usize,
        /// The largest sum supported.
        limit: usize,
    },
    /// Cross attention between unequal numbers of documents.
    #[error(
        "{queries} documents of queries cannot be paired with {keys} documents of keys; give as many of each"
    )]
    DocumentCount {
        /// Documents on the query side.
        queries: usize,
        /// Documents on the key side.
        keys: usize,
    },
    /// An order of rows that leaves one out, or has one twice.
    #[error(
        "{axis}_order must hold each of the mask's {seqlen} rows once; row {row} is in no range, in two, or past the end"
    )]
    Order {
        /// `q` or `k`.
        axis: &'static str,
        /// The first row that is not in one range.
        row: usize,
        /// Rows of the mask.
        seqlen: usize,
    },
    /// A piece of a tree that continues no earlier piece.
    #[error(
        "parents[{piece}] is {parent}; a piece continues an earlier one, so its parent must be below {piece}"
    )]
    Parent {
        /// Index of the piece.
        piece: usize,
        /// The parent that was given.
        parent: usize,
    },
    /// Global tokens in a window of cross attention.
    #[error(
        "{global} global tokens in a window of cross attention: they are defined for self-attention alone"
    )]
    GlobalTokens {
        /// How many were asked for.
        global: usize,
    },
    /// Another number of prefixes than of documents.
    #[error(
        "{prefixes} prefixes cannot be those of {documents} documents; give one for all, or one for each"
    )]
    PrefixCount {
        /// Documents.
        documents: usize,
        /// Prefixes.
        prefixes: usize,
    },
    /// A prefix longer than its document.
    #[error(
        "the prefix of document {document} has {prefix} tokens and the document only {length}; give a prefix of at most {length}"
    )]
    PrefixTooLong {
        /// Position of the document, counted from 0.
        document: usize,
        /// Tokens of its prefix.
        prefix: usize,
        /// Tokens of the document.
        length: usize,
    },
    /// A block of no tokens.
    #[error("{field} is 0; a block needs at least one token")]
    EmptyBlock {
        /// Which size it is.
        field: &'static str,
    },
    /// A builder that would need more slices than memory should be spent on.
    #[error("this mask would need more than {limit} slices; choose a larger block or a shorter sequence")]
    TooManySlices {
        /// The largest number of slices that a builder makes.
        limit: usize,
    },
    /// A block index outside the grid of a block-sparse mask.
    #[error("block ({row}, {col}) is outside the grid of {rows} x {cols} blocks")]
    BlockOutOfBounds {
        /// Block row.
        row: usize,
        /// Block column.
        col: usize,
        /// Block rows of the grid.
        rows: usize,
        /// Block columns of the grid.
        cols: usize,
    },
    /// A builder expression that names no builder.
    #[error("unknown mask builder {name:?}; known builders: {known}")]
    UnknownBuilder {
        /// The name as written.
        name: String,
        /// The names that exist.
        known: String,
    },
    /// A part of a builder expression that is missing, unknown or not what is expected there.
    #[error("{builder}: {field}: {problem}")]
    Expression {
        /// The builder's name.
        builder: &'static str,
        /// The option, or the place of the value.
        field: String,
        /// What is wrong, and what is expected.
        problem: Box<ExpressionFault>,
    },
    /// Arguments of a builder expression that are well-formed and make no valid mask.
    #[error("{builder}: {reason}")]
    Builder {
        /// The builder's name.
        builder: &'static str,
        /// Why.
        reason: Box<MaskError>,
    },
    /// A file that a mask names and that cannot be read.
    #[error("cannot read {path:?}: {problem}")]
    Unreadable {
        /// The file as written.
        path: String,
        /// What the reader said.
        problem: String,
    },
    /// A mask file whose content is no valid mask.
    #[error("{path}: {reason}")]
    File {
        /// The file as written.
        path: String,
        /// Why.
        reason: Box<MaskError>,
    },
    /// Text that is not JSON, or JSON that is not a mask.
    #[error("{path}{}{problem} (line {line}, column {column})", if path.is_empty() { "" } else { ": " })]
    Json {
        /// Where in the document, for example `slices[3].q[1]`; empty for the document itself.
        path: String,
        /// What is wrong, and what is expected.
        problem: String,
        /// Line, from 1.
        line: usize,
        /// Column, from 1.
        column: usize,
    },
}

/// What is wrong with a part of a mask expression.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum ExpressionFault {
    /// An option that the builder does not take.
    #[error("unknown option; {}", known_options(known))]
    UnknownOption {
        /// Those that it takes.
        known: Vec<&'static str>,
    },
    /// An option that was given before.
    #[error("given twice")]
    Twice,
    /// Something that must be given.
    #[error("missing; {remedy}")]
    Missing {
        /// What to give, and how.
        remedy: &'static str,
    },
    /// A size that must be given.
    #[error("missing; write {field}=N")]
    MissingSize {
        /// Its option.
        field: &'static str,
    },
    /// What stands behind the builder's name.
    #[error("missing; write {builder}:{arguments}")]
    MissingArguments {
        /// The builder.
        builder: &'static str,
        /// What it takes.
        arguments: &'static str,
    },
    /// Several values where a length stands.
    #[error("expected one length, got {values} values; options are written name=value")]
    OneLength {
        /// How many there are.
        values: usize,
    },
    /// Several values where a number stands.
    #[error("expected one number, got {values} values")]
    OneNumber {
        /// How many there are.
        values: usize,
    },
    /// A mask of the comparison without its name or its length.
    #[error("write its name, a comma and its length; names: {}", known.join(", "))]
    PresetForm {
        /// The names that exist.
        known: Vec<&'static str>,
    },
    /// No mask of the comparison.
    #[error("no mask is named {name:?}; use {}", known.join(", "))]
    NoPreset {
        /// The name as written.
        name: String,
        /// The names that exist.
        known: Vec<&'static str>,
    },
    /// Documents that are given twice.
    #[error("give either {starts} or {lengths}, not both")]
    StartsAndLengths {
        /// Where their starts are given.
        starts: String,
        /// Where their lengths are given.
        lengths: String,
    },
    /// Documents that make no sense.
    #[error("{0}")]
    Documents(Box<MaskError>),
    /// Something other than a digit that says whether a block is there.
    #[error("expected only 0 and 1, got {word:?}")]
    BlockDigits {
        /// The word.
        word: String,
    },
    /// Another number of digits than of block columns.
    #[error("expected {cols} digits, one for each block column, got {digits}")]
    BlockColumns {
        /// Block columns.
        cols: usize,
        /// Digits of the word.
        digits: usize,
    },
    /// Another number of words than of block rows.
    #[error("expected {rows} words, one for each block row, got {words}")]
    BlockRows {
        /// Block rows.
        rows: usize,
        /// Words given.
        words: usize,
    },
    /// Values behind a file that holds all of them.
    #[error("nothing may follow the file {path:?}")]
    BehindFile {
        /// The file.
        path: String,
    },
    /// A file that cannot be read.
    #[error("cannot read {path:?}: {problem}")]
    Unreadable {
        /// The file.
        path: String,
        /// What the reader said.
        problem: String,
    },
    /// A file's line that leaves a value out.
    #[error("nothing stands between two commas; give a value or leave one out")]
    NoValue,
    /// A list with one bracket.
    #[error("a list begins with [ and ends with ], or has neither")]
    Bracket,
    /// No number.
    #[error("expected a whole number such as 4096, 4k or 1M, got {text:?}")]
    NoNumber {
        /// What was written.
        text: String,
    },
    /// A number of more tokens than masks have.
    #[error("{text} is too large; at most {most} tokens are supported")]
    TooLarge {
        /// What was written.
        text: String,
        /// The most tokens.
        most: usize,
    },
}

fn known_options(known: &[&str]) -> String {
    match known {
        [] => "there are none here".to_owned(),
        _ => format!("known: {}", known.join(", ")),
    }
}

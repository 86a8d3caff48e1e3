//! Masks written as one word on a command line: `causal:4k`, `sliding-window:1M,left=1023,right=0`.
//!
//! ```text
//! mask       = path | builder ":" arguments
//! arguments  = [ value { "," value } ] { "," option "=" value { "," value } }
//! value      = size | size ";" size | bits | "all" | "@" file
//! size       = digits [ "k" | "M" ]            1024 and 1024 * 1024 tokens
//! ```
//!
//! The values before the first option are the sequence: one size (`S` in [`BUILDERS`]), or for the varlen builders
//! the cumulative starts of the documents, from 0 to the length of the sequence (`STARTS`). Instead of starts,
//! `lengths=` takes the documents' lengths. A list can stand in a file: `lengths=@FILE`, values apart by commas, blanks or
//! line ends. Brackets around a list, as Python prints it, change nothing: `varlen-causal:[0, 12, 30]`, also in a file. A
//! document may have length 0. Options come in any order.
//!
//! Cross attention: `full`, `causal` and their varlen forms take `keys=`, the keys' size or starts (or `key-lengths=`).
//! `shared-question:128;300,200` separates the question from the answers' lengths by a semicolon. `block-sparse` takes
//! one word of `0` and `1` for each block row, one digit for each block column. `preset:sw_global,64k` is one of the masks
//! that attention is compared on ([`MaskPreset`](crate::MaskPreset)).
//!
//! Anything that does not begin with lower-case letters and a colon is the path of a JSON file ([`Mask::from_json`]);
//! `./` in front makes a path of any name.

mod arguments;

use arguments::Arguments;

use crate::{ExpressionFault, Mask, MaskError, Window};

/// Reads a file's text for [`Mask::parse`], which itself touches no file: the caller decides what a name means. The
/// error is one sentence for the user.
pub type ReadFile<'a> = &'a dyn Fn(&str) -> Result<String, String>;

/// How one builder is written, for help texts.
#[derive(Clone, Copy, Debug)]
pub struct Builder {
    /// What stands before the colon.
    pub name: &'static str,
    /// What follows the colon.
    pub arguments: &'static str,
    /// What it means, in a few words.
    pub meaning: &'static str,
    options: &'static [&'static str],
    build: fn(&Arguments) -> Result<Mask, MaskError>,
}

/// Every builder, in the order in which help lists them.
pub const BUILDERS: &[Builder] = &[
    Builder {
        name: "full",
        arguments: "S[,keys=S]",
        meaning: "every token sees every token",
        options: &["keys"],
        build: |a| {
            let queries = a.sequence()?;
            Mask::cross_full(queries, a.optional_size("keys")?.unwrap_or(queries))
        },
    },
    Builder {
        name: "causal",
        arguments: "S[,keys=S]",
        meaning: "a token sees itself and what is before it; with keys, aligned to the last token",
        options: &["keys"],
        build: |a| {
            let queries = a.sequence()?;
            Mask::cross_causal(queries, a.optional_size("keys")?.unwrap_or(queries))
        },
    },
    Builder {
        name: "varlen-full",
        arguments: "STARTS[,keys=STARTS]",
        meaning: "full inside each document",
        options: &["lengths", "keys", "key-lengths"],
        build: |a| {
            let queries = a.documents()?;
            let keys = a.key_documents()?.unwrap_or_else(|| queries.clone());
            Mask::cross_full(queries, keys)
        },
    },
    Builder {
        name: "varlen-causal",
        arguments: "STARTS[,keys=STARTS]",
        meaning: "causal inside each document",
        options: &["lengths", "keys", "key-lengths"],
        build: |a| {
            let queries = a.documents()?;
            let keys = a.key_documents()?.unwrap_or_else(|| queries.clone());
            Mask::cross_causal(queries, keys)
        },
    },
    Builder {
        name: "sliding-window",
        arguments: "S,left=N,right=N[,global=N]",
        meaning: "left tokens before, right tokens after (0: causal, all: no limit), and the first global tokens always",
        options: &["left", "right", "global"],
        build: |a| Mask::sliding_window(a.sequence()?, window(a)?),
    },
    Builder {
        name: "varlen-sliding-window",
        arguments: "STARTS,left=N,right=N[,global=N]",
        meaning: "a sliding window inside each document",
        options: &["lengths", "left", "right", "global"],
        build: |a| Mask::sliding_window(a.documents()?, window(a)?),
    },
    Builder {
        name: "block-causal",
        arguments: "S,block=N",
        meaning: "a token sees its own block and earlier ones",
        options: &["block"],
        build: |a| Mask::block_causal(a.sequence()?, a.size("block")?),
    },
    Builder {
        name: "varlen-block-causal",
        arguments: "STARTS,block=N",
        meaning: "block-causal inside each document",
        options: &["lengths", "block"],
        build: |a| Mask::block_causal(a.documents()?, a.size("block")?),
    },
    Builder {
        name: "prefix-lm",
        arguments: "S,prefix=N",
        meaning: "causal, and the first tokens are seen by all",
        options: &["prefix"],
        build: |a| Mask::prefix_lm_each(a.sequence()?, &[a.size("prefix")?]),
    },
    Builder {
        name: "varlen-prefix-lm",
        arguments: "STARTS,prefix=N[,N,...]",
        meaning: "prefix-lm inside each document, with one prefix for all or one for each",
        options: &["lengths", "prefix"],
        build: |a| {
            let documents = a.documents()?;
            let prefixes = a.prefixes(&documents)?;
            Mask::prefix_lm_each(documents, &prefixes)
        },
    },
    Builder {
        name: "shared-question",
        arguments: "Q;LENGTHS",
        meaning: "one question, then answers that see it and themselves, causally",
        options: &[],
        build: |a| {
            let (question, answers) = a.question_and_answers()?;
            Mask::shared_question(question, answers)
        },
    },
    Builder {
        name: "last-global",
        arguments: "STARTS,global=N[,block=N]",
        meaning: "causal documents (block-causal with block), then global more tokens that see everything",
        options: &["lengths", "global", "block"],
        build: |a| {
            let block = a.optional_size("block")?.unwrap_or(1);
            Mask::last_global(a.documents()?, block, a.size("global")?)
        },
    },
    Builder {
        name: "block-sparse",
        arguments: "S,block=N,rows=BITS,BITS,...[,keys=S]",
        meaning: "chosen blocks of a grid, one word of 0 and 1 for each block row",
        options: &["block", "rows", "keys"],
        build: |a| {
            let (queries, block) = (a.sequence()?, a.size("block")?);
            let keys = a.optional_size("keys")?.unwrap_or(queries);
            if block == 0 {
                return Err(MaskError::EmptyBlock { field: "block" });
            }
            let blocks = a.blocks("rows", queries.div_ceil(block), keys.div_ceil(block))?;
            Mask::block_sparse(queries, keys, block, block, &blocks)
        },
    },
    Builder {
        name: "preset",
        arguments: "NAME,S",
        meaning: "a mask of the benchmarks on S tokens, by the name that bench cp --masks has for it",
        options: &[],
        build: |a| {
            let (preset, seqlen) = a.preset()?;
            preset.build(seqlen)
        },
    },
];

fn window(arguments: &Arguments) -> Result<Window, MaskError> {
    Ok(Window {
        left: arguments.limit("left", "give left=N, or left=all for no limit")?,
        // Programs disagree about what a window without it means, so it is not guessed.
        right: arguments
            .limit("right", "give right=0 for a causal window, right=N, or right=all for no limit")?,
        global: arguments.optional_size("global")?.unwrap_or(0),
    })
}

impl Mask {
    /// A mask from a command line: a builder expression, or the path of a JSON file. See [`expression`](self) for the
    /// grammar. `read` is asked for the text of files that are named.
    ///
    /// # Errors
    /// One sentence that names the builder and the option, or the file and the place in it, and says what is expected.
    pub fn parse(text: &str, read: ReadFile) -> Result<Self, MaskError> {
        let text = text.trim();
        let (name, arguments) = match text.split_once(':') {
            Some((name, arguments)) if is_builder_name(name) => (name, Some(arguments)),
            _ => (text, None),
        };
        let builder = BUILDERS.iter().find(|builder| builder.name == name);
        match (builder, arguments) {
            (Some(builder), Some(arguments)) => {
                let arguments = Arguments::split(builder.name, builder.options, arguments, read)?;
                (builder.build)(&arguments).map_err(|error| match error {
                    MaskError::Expression { .. } => error,
                    reason => MaskError::Builder { builder: builder.name, reason: Box::new(reason) },
                })
            }
            (Some(builder), None) => Err(MaskError::Expression {
                builder: builder.name,
                field: "arguments".to_owned(),
                problem: Box::new(ExpressionFault::MissingArguments {
                    builder: builder.name,
                    arguments: builder.arguments,
                }),
            }),
            (None, Some(_)) => Err(MaskError::UnknownBuilder {
                name: name.to_owned(),
                known: BUILDERS.iter().map(|builder| builder.name).collect::<Vec<_>>().join(", "),
            }),
            (None, None) => {
                let json =
                    read(text).map_err(|problem| MaskError::Unreadable { path: text.to_owned(), problem })?;
                Mask::from_json(&json)
                    .map_err(|reason| MaskError::File { path: text.to_owned(), reason: Box::new(reason) })
            }
        }
    }
}

/// A builder expression. Text that names a file is refused: nothing here can read one, [`Mask::parse`] can.
impl std::str::FromStr for Mask {
    type Err = MaskError;

    fn from_str(text: &str) -> Result<Self, MaskError> {
        Mask::parse(text, &|_| Err("files are not read here".to_owned()))
    }
}

fn is_builder_name(name: &str) -> bool {
    name.starts_with(|c: char| c.is_ascii_lowercase())
        && name.chars().all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '-' || c == '_')
}

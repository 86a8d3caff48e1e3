//! What `counterpoint mask` accepts, and the help on builder expressions.

use std::path::PathBuf;

use clap::Args;
use counterpoint_mask::expression::BUILDERS;

/// Print a mask's slices as JSON and a small picture of it
#[derive(Debug, Args)]
#[command(after_help = help())]
pub(crate) struct MaskArguments {
    /// A JSON file or a builder expression
    pub(crate) mask: String,

    /// Draw the mask into this file
    #[arg(long, value_name = "FILE")]
    pub(crate) svg: Option<PathBuf>,

    /// Print one JSON document and nothing else
    #[arg(long)]
    pub(crate) json: bool,
}

fn help() -> String {
    let mut text = "\
MASK is a path to a JSON file, or one of the expressions below. Sizes (S, N)
take k and M, 1024 and 1024 x 1024. STARTS are cumulative, as in 0,100,400;
lengths=100,300 means the same, and lengths=@FILE reads them from a file, apart
by commas, blanks or line ends. A list may stand in brackets: '[0, 100, 400]'.

"
    .to_owned();
    for builder in BUILDERS {
        text += &format!("  {}:{}\n      {}\n", builder.name, builder.arguments, builder.meaning);
    }
    text + "
JSON: {\"seqlen_q\": 1024, \"seqlen_k\": 1024,
       \"slices\": [{\"q\": [0, 512], \"k\": [0, 1024], \"type\": \"causal\"}, ...]}
Types: full, causal (aligned to the bottom right), inv_causal (to the top left)
and bi_causal (both). Slices must be disjoint.

stdout gets the slices as JSON, then the picture; with --json the JSON alone.

Examples:
  counterpoint mask causal:16
  counterpoint mask varlen-causal:lengths=300,4000,96 --json > mask.json
  counterpoint mask mask.json --svg mask.svg"
}

use std::path::PathBuf;

use clap::Args;

/// Print a mask's slices as JSON and a small picture of it
#[derive(Debug, Args)]
#[command(after_help = MASK_HELP)]
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

const MASK_HELP: &str = "\
MASK is a path to a JSON file, or one of the expressions below. Sizes take k and M (1024 and 1024 x 1024). A varlen
builder takes cumulative starts, lengths=100,300 or lengths=@FILE with one length a line.
  full:S   causal:S   varlen-full:0,100,400   varlen-causal:0,100,400
  sliding-window:S,left=1023,right=0   block-causal:S,block=512   varlen-block-causal:0,4096,8192,block=512
  prefix-lm:S,prefix=100   shared-question:128;128,256,512

JSON: {\"seqlen_q\": 1024, \"seqlen_k\": 1024, \"slices\": [{\"q\": [0, 512], \"k\": [0, 1024], \"type\": \"causal\"}]}
with the types full, causal (aligned to the bottom right), inv_causal (to the top left) and bi_causal (both).

With --json the JSON document is all that stdout gets; without it the picture follows.

Examples:
  counterpoint mask causal:16
  counterpoint mask varlen-causal:lengths=300,4000,96 --json > mask.json
  counterpoint mask mask.json --svg mask.svg";

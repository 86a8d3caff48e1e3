//! The masks that attention is compared on, with the command line's errors.

use clap::ValueEnum;
use counterpoint_console::CliError;
use counterpoint_mask::{Mask, MaskPreset};

/// The name that a value has on the command line.
pub(crate) fn value_name<T: ValueEnum>(value: &T) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

/// Whether the scripts of the peers know it: each row sees one interval of columns.
pub(crate) fn has_peers(preset: MaskPreset) -> bool {
    use MaskPreset::{BlockCausalLastGlobal, BlockSparse, SharedQuestion, SwGlobal};
    !matches!(preset, BlockCausalLastGlobal | SharedQuestion | SwGlobal | BlockSparse)
}

/// As [`MaskPreset::build`], with the command line's error.
pub(crate) fn load(preset: MaskPreset, seqlen: usize) -> Result<Mask, CliError> {
    preset.build(seqlen).map_err(|source| CliError::MaskExpression {
        expression: format!("preset:{},{seqlen}", preset.name()),
        source,
    })
}

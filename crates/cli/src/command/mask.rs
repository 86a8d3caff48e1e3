use counterpoint_report::format_count;

use crate::arguments::MaskArguments;
use crate::error::CliError;
use crate::output::Outputs;
use crate::{console, mask_argument};

/// `counterpoint mask`.
pub(crate) fn run(arguments: &MaskArguments) -> Result<(), CliError> {
    let mask = mask_argument::load(&arguments.mask)?;
    Ok(())
}

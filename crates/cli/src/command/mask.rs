//! `counterpoint mask`: a mask as JSON, as a picture for the terminal and as SVG.

use counterpoint_console::{
    self as console, CliError, Schema, mask_argument,
    output::{Outputs, shown},
};
use counterpoint_mask::PictureStyle;
use counterpoint_report::{MaskDrawing, format_count};

use crate::arguments::MaskArguments;

/// Characters of the picture: as many rows of tokens as a terminal shows, twice as many columns, as characters are
/// about twice as high as wide.
const PICTURE: (usize, usize) = (48, 24);

/// `counterpoint mask`.
pub(crate) fn run(arguments: &MaskArguments) -> Result<(), CliError> {
    let mask = mask_argument::load(&arguments.mask)?;
    let outputs = Outputs::check(&[("--svg", arguments.svg.as_deref())])?;
    outputs.write(|_| {
        Ok(MaskDrawing { title: &arguments.mask, mask: &mask, plan: None }.render().into_bytes())
    })?;
    let mut text = mask.to_json();
    if arguments.json {
        // One slice a line, as in a file, and one may be made of it: files of masks may have a schema.
        text.insert_str(1, &format!("\n  \"schema\": \"{}\",", Schema::Mask));
    } else {
        text.push('\n');
        text.push_str(&mask.picture(PICTURE.0, PICTURE.1, PictureStyle::Blocks));
        text.push_str(&summary(&mask));
        for (_, path) in outputs.files() {
            text.push_str(&format!("drawn into {}\n", shown(path)));
        }
    }
    console::print(&text)
}

fn summary(mask: &counterpoint_mask::Mask) -> String {
    let (rows, columns, area) = (mask.seqlen_q() as u64, mask.seqlen_k() as u64, mask.area());
    format!(
        "{} queries x {} keys, {}, area {} ({:.1} % of all pairs)\n",
        format_count(rows),
        format_count(columns),
        console::count(mask.slices().len(), "slice"),
        format_count(area),
        100.0 * area as f64 / (rows as f64 * columns as f64)
    )
}

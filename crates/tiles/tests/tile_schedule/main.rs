//! Tile schedules against the dense pictures of their masks.

mod examples;
mod oracle;
mod random;
#[path = "../../../mask/tests/random/mod.rs"]
mod random_masks;

use counterpoint_mask::{Band, Mask};
use counterpoint_tiles::{TileSchedule, TileScheduleConfig};

fn schedule(mask: &Mask, config: &TileScheduleConfig) -> TileSchedule {
    let bands: Vec<Band> = mask.bands().collect();
    TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), config).unwrap()
}

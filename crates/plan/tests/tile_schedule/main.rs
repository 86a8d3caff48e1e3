//! Tile schedules against the dense pictures of their masks.

#[allow(dead_code, reason = "the other tests of this crate use the rest")]
#[path = "../cases/mod.rs"]
mod cases;
mod examples;
mod oracle;
mod random;

use counterpoint_mask::{Band, Mask};
use counterpoint_plan::{TileSchedule, TileScheduleConfig};

fn schedule(mask: &Mask, config: &TileScheduleConfig) -> TileSchedule {
    let bands: Vec<Band> = mask.bands().collect();
    TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), config).unwrap()
}

//! What a collective of a layer took by itself, by the timeline of its Program.

use counterpoint_plan::GemmCollective;

use super::LayerPart;
use crate::Timeline;

/// Seconds of a collective that ran alone: of the gather or the reduction, and of an all-reduce's way back. A mean over the
/// ranks of the timeline.
pub fn travel_seconds(collective: GemmCollective, timeline: &Timeline) -> [f64; 2] {
    let of = |gathers: bool| -> f64 {
        let spans = timeline.spans.iter().filter(|span| LayerPart::Gather.names(&span.label) == gathers);
        spans.map(|span| span.end - span.start).sum::<f64>() / timeline.world_size.max(1) as f64
    };
    match collective {
        GemmCollective::AllGather => [of(true), 0.0],
        GemmCollective::ReduceScatter | GemmCollective::AllReduce => [of(false), of(true)],
    }
}

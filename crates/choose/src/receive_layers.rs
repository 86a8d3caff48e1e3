//! In how many layers ranks receive: one where rows come much sooner than they can be used.

use counterpoint_cost::CostModel;
use counterpoint_mask::Band;
use counterpoint_plan::{AttentionSpec, MOST_LAYERS};

use crate::config::PlanConfig;

/// Nobody waits for rows that take less than one part in so many of what a rank computes: its own ones keep it busy meanwhile.
const HIDDEN: f64 = 4.0;

/// Layers at most for ranks that do such `work` and receive so many rows for it. By the figures of one GPU and not of the machine's
/// profile, whose measurements must not decide about bits; but its links must be of the same kind.
pub(crate) fn most_layers(
    work: &[Vec<Band>],
    received: &[usize],
    spec: &AttentionSpec,
    config: &PlanConfig,
) -> usize {
    const COST: CostModel = CostModel::H200;
    let is_hidden = |(bands, &rows): (&Vec<Band>, &usize)| {
        let area = bands.iter().map(Band::area).sum();
        let computing = spec.flops_forward(area) / COST.forward_flops_per_second;
        let coming = (rows * spec.kv_row_bytes()) as f64 / COST.link.bytes_per_second;
        HIDDEN * coming <= computing
    };
    let is_alike = config.cost.tiles.is_some()
        && config.topology.nodes() == 1
        && 2.0 * config.cost.link.bytes_per_second >= COST.link.bytes_per_second;
    if is_alike && work.iter().zip(received).all(is_hidden) { 1 } else { MOST_LAYERS }
}

#[cfg(test)]
mod tests {
    use counterpoint_cost::Link;
    use counterpoint_mask::Range;
    use counterpoint_plan::{DType, Topology};

    use super::*;

    /// A full mask on four ranks.
    #[test]
    fn there_is_one_layer_where_rows_come_much_sooner_than_they_are_used() {
        let spec = AttentionSpec::new(64, 8, 128, DType::Bf16);
        let layers = |rows: usize, config: &PlanConfig| {
            let work = vec![vec![Band::full(Range::new(0, rows / 4), Range::new(0, rows))]; 4];
            most_layers(&work, &[rows * 3 / 4; 4], &spec, config)
        };
        let gpus = PlanConfig::new(4);
        assert_eq!(layers(32_768, &gpus), 1);
        // Too few rows read what comes.
        assert_eq!(layers(2048, &gpus), MOST_LAYERS);
        let cost = gpus.cost;
        let others = [
            PlanConfig { topology: Topology { world_size: 4, ranks_per_node: 2 }, ..gpus },
            PlanConfig { cost: CostModel { tiles: None, ..cost }, ..gpus },
            PlanConfig {
                cost: CostModel { link: Link { bytes_per_second: 50e9, ..cost.link }, ..cost },
                ..gpus
            },
        ];
        for config in others {
            assert_eq!(layers(32_768, &config), MOST_LAYERS, "{config:?}");
        }
    }
}

//! Ranks on several nodes, as flags say it.

use counterpoint_exec::{SlowLink, SlowNetwork};
use counterpoint_plan::Topology;

use crate::FlagFault;
use crate::error::CliError;

/// `cp_size` ranks on `nodes` nodes.
pub fn topology(cp_size: usize, nodes: usize) -> Result<Topology, CliError> {
    if !cp_size.is_multiple_of(nodes) {
        return Err(CliError::flag("--nodes", nodes.to_string(), FlagFault::Nodes { cp_size }));
    }
    Ok(Topology { world_size: cp_size, ranks_per_node: cp_size / nodes })
}

/// What is to be imitated: a link, a network, or both. Without a link of its own a node's ranks are as near as they are.
pub fn slow_link(
    link: Option<SlowLink>,
    network: Option<SlowLink>,
    topology: Topology,
) -> Result<Option<SlowLink>, CliError> {
    let Some(SlowLink { alpha, bytes_per_second, .. }) = network else { return Ok(link) };
    if topology.nodes() == 1 {
        let value = format!("{},{}", alpha.as_secs_f64() * 1e6, bytes_per_second / 1e9);
        return Err(CliError::flag("--slow-network", value, FlagFault::OneNode));
    }
    let network = Some(SlowNetwork { alpha, bytes_per_second, topology });
    let near = SlowLink { alpha: Default::default(), bytes_per_second: f64::INFINITY, network };
    Ok(Some(link.map_or(near, |link| SlowLink { network, ..link })))
}

//! What holds of every lowering, over random masks and plans.

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, QueryExchange, plan_mask};
use counterpoint_mask::Mask;
use counterpoint_plan::*;
use counterpoint_schedule::*;
use proptest::prelude::*;

use crate::{check, config, cost, last_global, mask, plan, programs, spec};

/// So many ranks on a node.
fn nodes(world_size: usize, ranks_per_node: usize) -> Topology {
    Topology { world_size, ranks_per_node: ranks_per_node.min(world_size) }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn valid_race_free_and_predictable(
        lengths in prop::collection::vec(1usize..300, 1..8),
        cp_size in 1usize..6, chunk_size in 16usize..100, stages in 1usize..5, sink in 0usize..2,
        rounds in any::<bool>(),
    ) {
        let plan = plan(&mask(&lengths), cp_size, chunk_size, stages);
        let gradient_shares = if rounds { GradientShares::Elements } else { GradientShares::Accumulators };
        check(&plan, &AttentionSpec { gradient_shares, ..spec(DType::Bf16, sink) })?;
    }

    /// Likewise where a last block sees everything and is computed where the keys are.
    #[test]
    fn hosted_work_is_valid_too(
        lengths in prop::collection::vec(100usize..300, 4..8),
        cp_size in 2usize..6, chunk_size in 16usize..100, stages in 0usize..5, sink in 0usize..2,
        ranks_per_node in 1usize..6,
    ) {
        let mask = last_global(&mask(&lengths), 4);
        // Neighbours stay together, so that the block's owner fetches most of what it sees for the block alone.
        let (dispatch, query_exchange) = (DispatchAlgorithm::Sequential, QueryExchange::FewestBytes);
        let config = PlanConfig { dispatch, query_exchange, ..config(cp_size, chunk_size, stages) };
        let plan = plan_mask(&mask, &spec(DType::Bf16, sink), &config).unwrap();
        // With two ranks it may be predicted to take no longer without; proptest gives up where too few cases are left.
        prop_assume!(plan.ranks.iter().all(|rank| rank.hosted.is_some()));
        check(&plan, &spec(DType::Bf16, sink))?;
        check(&plan.over_nodes(&nodes(cp_size, ranks_per_node)), &spec(DType::Bf16, sink))?;
    }

    /// Likewise where hosts do all there is to do.
    #[test]
    fn hosts_alone_are_valid_too(
        keys in 500usize..900, cp_size in 2usize..6, chunk_size in 16usize..100, sink in 0usize..2,
        ranks_per_node in 1usize..6,
    ) {
        let query_exchange = QueryExchange::FewestBytes;
        let mask = Mask::cross_full(cp_size, keys).unwrap();
        let config = PlanConfig { query_exchange, ..config(cp_size, chunk_size, 1) };
        let config = PlanConfig { chunk_size: None, ..config };
        let spec = spec(DType::Bf16, sink);
        let plan = plan_mask(&mask, &spec, &config).unwrap();
        for plan in [plan.clone(), plan.over_nodes(&nodes(cp_size, ranks_per_node))] {
            let [forward, backward, _] = programs(&plan, &spec, "concurrent");
            for program in forward.iter().chain(&backward) {
                prop_assert_eq!(program.validate(), Ok(()), "{}", program.name);
                let local =
                    |op: &&ProgramOp| op.stage.is_some() && !matches!(op.op, Op::Record(_) | Op::Wait(_));
                prop_assert_eq!(program.ops.iter().filter(local).count(), 0, "{}", program.name);
            }
        }
    }

    /// Sequential order leaves everything exposed; the other policies never predict a longer run.
    #[test]
    fn overlap_never_predicts_a_loss(
        lengths in prop::collection::vec(1usize..300, 1..8), cp_size in 2usize..6, stages in 1usize..5,
    ) {
        let plan = plan(&mask(&lengths), cp_size, 32, stages);
        let spec = spec(DType::Bf16, 0);
        let predict = |policy| {
            let [forward, backward, _] = programs(&plan, &spec, policy);
            [forward, backward].map(|ranks| simulate(&ranks, &Topology::flat(cp_size), &cost()).unwrap())
        };
        let (sequential, concurrent) = (predict("sequential"), predict("concurrent"));
        for (a, b) in sequential.iter().zip(&concurrent) {
            prop_assert!(b.makespan() <= a.makespan() * (1.0 + 1e-9));
            let alone = a.overlap();
            prop_assert!((alone.exposed_seconds - alone.communication_seconds).abs() <= 1e-12);
        }
    }
}

/// A Program is plain data: it can be written down and read back.
#[test]
fn programs_serialise() {
    let plan = plan(&mask(&[100, 200]), 2, 32, 2);
    for program in programs(&plan, &spec(DType::F16, 1), "concurrent").iter().flatten() {
        let text = serde_json::to_string(program).unwrap();
        assert_eq!(&serde_json::from_str::<Program>(&text).unwrap(), program);
    }
}

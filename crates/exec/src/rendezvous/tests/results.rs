//! Results that ranks bring to rank 0.

use std::thread;
use std::time::Duration;

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType};

use super::{LIMIT, ranks};
use crate::{AttentionOutputs, HostTensor, RanksRun};

/// Else a rank that is ahead of rank 0 replaces results that rank 0 has not taken, which then waits for the last ones in vain.
#[test]
fn results_that_are_gathered_again_and_again_are_each_their_own() {
    let (heads, dim) = (2, 16);
    let spec = AttentionSpec::new(heads, 1, dim, DType::F32);
    let plan = plan_mask(&Mask::full(64).unwrap(), &spec, &PlanConfig::new(2)).unwrap();
    let found = ranks(2, LIMIT, |rank| {
        let own = rank.rank();
        let rows = plan.ranks[own].q_rows;
        let gathered = |round: u8| {
            if own == 0 {
                thread::sleep(Duration::from_millis(100));
            }
            let filled = |shape: Vec<usize>| {
                let elements = vec![f32::from(round); shape.iter().product()];
                HostTensor::from_vec(shape, elements)
            };
            let (out, lse) = (filled(vec![rows, heads, dim]), filled(vec![rows, heads]));
            let outputs =
                AttentionOutputs { out, lse, max_logits: None, dq: None, dk: None, dv: None, dsink: None };
            let run = RanksRun::of_outputs(vec![(own, outputs)]).gather(&rank, &plan).unwrap();
            run.map(|run| run.outputs.out.to_f64())
        };
        (0..3).map(gathered).collect::<Vec<_>>()
    });
    for (round, out) in found[0].iter().enumerate() {
        let out = out.as_ref().unwrap();
        assert!(
            out.len() == 64 * heads * dim && out.iter().all(|element| *element == round as f64),
            "{round}"
        );
    }
    assert!(found[1].iter().all(Option::is_none));
}

//! The lower bound of what plans move, compared with plans that reach it.

use counterpoint_choose::{DispatchAlgorithm, PlanConfig, plan_mask};
use counterpoint_mask::Mask;
use counterpoint_plan::TrafficBounds;

use crate::cases::spec;

#[test]
fn the_bound_bites_on_one_causal_document() {
    let mask = Mask::causal(4096).unwrap();
    let config = PlanConfig { chunk_size: Some(64), ..PlanConfig::new(8) };
    let bounds = TrafficBounds::new(&plan_mask(&mask, &spec(), &config).unwrap(), &mask, &spec());
    assert!(bounds.lower_bound_tokens * 2 > bounds.ring_tokens, "{bounds:?}");
    // Level ranks each read beyond the middle, the further the more of them there are: nothing as level as a zigzag of two pieces a
    // rank receives less than that, three quarters of a ring.
    let zigzag = PlanConfig { chunk_size: Some(256), dispatch: DispatchAlgorithm::Zigzag, ..config };
    let zigzag = TrafficBounds::new(&plan_mask(&mask, &spec(), &zigzag).unwrap(), &mask, &spec());
    assert_eq!(
        (zigzag.recv_tokens, zigzag.recv_tokens * 4),
        (zigzag.lower_bound_tokens, zigzag.ring_tokens * 3)
    );
    assert!(bounds.lower_bound_tokens <= bounds.recv_tokens && bounds.recv_tokens <= bounds.ring_tokens);
    assert_eq!(bounds.ring_tokens, 7 * 4096);
    let shares: Vec<_> = bounds.of_ring().unwrap().collect();
    assert_eq!(
        shares.iter().map(|(name, _)| *name).collect::<Vec<_>>(),
        ["this plan", "lower bound", "ring", "all-gather", "Ulysses"]
    );
    assert_eq!((shares[2].1, shares[3].1), (1.0, 1.0));
    assert!(shares[1].1 <= shares[0].1 && shares[0].1 < 1.0, "{shares:?}");
    // q and out: 8 heads of 2 rows each; k and v: 8 copies where there are 2 heads; 7/8 of it moves.
    assert_eq!(bounds.ulysses_tokens, Some(4096 * (8 + 8) / 2 * 7 / 8));
}

//! Lesson 2: from a mask to who computes what, who sends what, and when.
//!
//! A packed batch of documents of very different lengths, each causal, on 8 ranks. The plan says which chunks of tokens
//! live where, which key rows every rank must fetch, and how its work is cut into stages so that fetching hides under
//! computing. Planning is a pure function: every rank makes the same plan on its own.
//!
//! Run it with `cargo run --release --example 02-plan`.

use counterpoint::choose::{DispatchAlgorithm, PlanConfig, Prediction, plan_mask, plan_mask_on, plan_rank};
use counterpoint::mask::{Documents, Mask};
use counterpoint::plan::{AttentionSpec, DType, Planning, Topology, TrafficBounds};

// Long: an example, read from top to bottom.
fn main() -> Result<(), Box<dyn std::error::Error>> {
    let ranks = 8;
    let lengths = [517, 6_000, 90, 14_336, 2_048, 311, 9_000, 1_200, 23_170, 64, 4_096, 700, 3_004, 1_000];
    let mask = Mask::causal(Documents::from_lengths(lengths)?)?;
    let spec = AttentionSpec::new(32, 8, 128, DType::Bf16);
    println!(
        "{} documents, {} tokens, {} unmasked pairs, {ranks} ranks",
        lengths.len(),
        mask.seqlen_q(),
        mask.area()
    );

    // Who owns what decides both how even the work is and how much travels.
    println!("\n{:<12} {:>8} {:>16} {:>12}", "dispatch", "balance", "rows received", "of ring");
    let mut received = Vec::new();
    for dispatch in [
        DispatchAlgorithm::Sequential,
        DispatchAlgorithm::Zigzag,
        DispatchAlgorithm::MinHeap,
        DispatchAlgorithm::Affinity,
    ] {
        let config = PlanConfig { chunk_size: Some(256), dispatch, ..PlanConfig::new(ranks) };
        let plan = plan_mask(&mask, &spec, &config)?;
        let bounds = TrafficBounds::new(&plan, &mask, &spec);
        let of_ring = 100.0 * bounds.recv_tokens as f64 / bounds.ring_tokens as f64;
        println!(
            "{:<12} {:>8.3} {:>16} {of_ring:>10.1} %",
            format!("{dispatch:?}"),
            plan.balance(),
            bounds.recv_tokens
        );
        assert!(bounds.lower_bound_tokens <= bounds.recv_tokens && bounds.recv_tokens <= bounds.ring_tokens);
        assert_eq!(plan.area(), mask.area(), "every pair is computed by one rank");
        received.push((bounds.recv_tokens, plan.balance()));
    }
    // In order the rows travel least, and one rank does several times the work of another; the default keeps the balance
    // of the greedy, but for what makes the seconds of tiles even and not the area, and fetches no more than it.
    assert!(received[0].1 > 1.5);
    assert!(received[3].1 < 1.05 && received[3].0 <= received[2].0);

    // The default, looked at more closely.
    let config = PlanConfig { chunk_size: Some(256), ..PlanConfig::new(ranks) };
    let plan = plan_mask(&mask, &spec, &config)?;
    let prediction = Prediction::new(&plan, &spec, &config);
    let stages = plan.rank(0).forward.len();
    println!(
        "\n{stages} forward stages (0 is local), predicted {:.0} us",
        prediction.forward_seconds() * 1e6
    );
    for (rank, predicted) in plan.ranks.iter().zip(&prediction.forward) {
        let rows: Vec<String> = rank.forward[1..].iter().map(|stage| stage.key_rows.to_string()).collect();
        println!(
            "rank {}: {:>5} rows in {:>2} runs, {:>10} pairs, receives {:>6} = {:<20} {:>5.0} us",
            rank.rank,
            rank.q_rows,
            rank.q_ranges.len(),
            rank.area,
            rank.recv_rows(),
            rows.join(" + "),
            predicted.seconds * 1e6,
        );
        // Nothing is sent twice or for nothing: stages are cuts of one list of needed rows.
        let needed: usize = rank.recv_ranges().iter().map(|range| range.len()).sum();
        assert_eq!(needed as u64, rank.recv_rows());
    }
    let sent: u64 = plan.ranks.iter().map(|rank| rank.send_rows()).sum();
    assert_eq!(sent, plan.ranks.iter().map(|rank| rank.recv_rows()).sum::<u64>());

    // A rank can make its own part alone.
    assert_eq!(&plan_rank(&mask, &spec, &config, 5)?, plan.rank(5));

    // The layer above may use another mask on the same rows: nothing is dispatched again.
    let full = Mask::full(Documents::from_lengths(lengths)?)?;
    let other = plan_mask_on(&plan, &full, &spec, &config, &Planning::ALONE)?;
    assert_eq!(other.q_dispatch, plan.q_dispatch);

    // On two nodes of four, a row that several ranks of the other node need crosses the network once.
    let topology = Topology { world_size: ranks, ranks_per_node: 4 };
    let once = other.two_levels(&topology).inter_node_rows();
    let flat = other.flat_inter_node_rows(&topology);
    println!("\nfull documents on the same dispatch, two nodes: {once} rows cross instead of {flat}");
    assert!(once <= flat);
    Ok(())
}

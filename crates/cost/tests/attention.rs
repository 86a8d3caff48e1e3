//! Predicted seconds of attention kernels against those of a kept run.

use std::path::Path;

use counterpoint_cost::{AttentionWork, CostModel, Interruption};
use counterpoint_mask::{Band, Documents, Mask, Window};

type Measured = (usize, usize, usize, [f64; 7], [f64; 7]);

/// Of one H200: rows, query and key heads, then microseconds of the forward and of the backward with its delta, of the masks full,
/// causal, block_causal, sw_causal, varlen_full, varlen_causal, varlen_block_causal; 0 where it was not measured. Forwards are of
/// `benches/runs/2026-11-22-h200-x2-whole`. Backwards, whose kernels are later, are of `bench attention` that day and, 16k and 32k rows of
/// 64:8 heads, of `bench cp` on one rank (`docs/experiments/070-stages-and-arrivals.md`).
const MEASURED: [Measured; 6] = [
    (
        8192,
        16,
        16,
        [769.6, 396.2, 489.7, 127.2, 149.0, 100.0, 149.3],
        [2130.8, 1134.1, 1365.6, 391.0, 441.6, 302.8, 441.6],
    ),
    (
        8192,
        64,
        8,
        [2973.5, 1498.8, 1854.3, 396.5, 523.2, 305.3, 524.7],
        [9101.9, 4612.6, 5368.7, 1400.6, 1615.4, 1095.4, 1615.4],
    ),
    (
        16384,
        16,
        16,
        [3068.1, 1512.5, 1692.9, 240.6, 413.2, 264.7, 366.7],
        [8852.8, 4196.9, 4714.0, 763.5, 1215.8, 796.5, 1072.1],
    ),
    (
        32768,
        16,
        16,
        [13881.6, 6114.1, 6497.8, 470.8, 1687.0, 971.8, 1214.3],
        [37398.4, 18860.1, 19901.7, 1527.0, 4727.8, 2747.6, 3436.8],
    ),
    (
        16384,
        64,
        8,
        [11900.0, 5880.0, 0.0, 0.0, 1530.0, 851.0, 1350.0],
        [37900.0, 19700.0, 0.0, 0.0, 4720.0, 2830.0, 4120.0],
    ),
    (
        32768,
        64,
        8,
        [54300.0, 26900.0, 0.0, 0.0, 6950.0, 3450.0, 4620.0],
        [154000.0, 77800.0, 0.0, 0.0, 21500.0, 11400.0, 15200.0],
    ),
];

fn documents(rows: usize) -> Documents {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join(format!("../../benches/data/documents_{}k.txt", rows >> 10));
    let text = std::fs::read_to_string(path).unwrap();
    Documents::from_lengths(text.lines().filter_map(|line| line.trim().parse().ok())).unwrap()
}

fn masks(rows: usize) -> [Mask; 7] {
    let window = Window { left: Some(1023), right: Some(0), global: 0 };
    [
        Mask::full(rows),
        Mask::causal(rows),
        Mask::block_causal(rows, 2048),
        Mask::sliding_window(rows, window),
        Mask::full(documents(rows)),
        Mask::causal(documents(rows)),
        Mask::block_causal(documents(rows), 2048),
    ]
    .map(Result::unwrap)
}

#[test]
fn an_h200_takes_what_is_predicted() {
    let cost = CostModel::H200;
    let mut wrong = Vec::new();
    for (rows, heads_q, heads_kv, forward, backward) in MEASURED {
        for ((mask, forward), backward) in masks(rows).iter().zip(forward).zip(backward) {
            let bands: Vec<Band> = mask.bands().collect();
            let elements = (rows * heads_q * 128) as u64;
            let work = |passed_bytes| AttentionWork {
                bands: &bands,
                q_rows: rows,
                k_rows: rows,
                heads_q,
                heads_kv,
                head_dim: 128,
                head_dim_v: 128,
                staged: false,
                passed_bytes,
                computed_seconds: 0.0,
                interruption: Interruption::default(),
            };
            // The backward also reads out and dout for delta, clears its sums of dq and rounds them.
            let predicted = [cost.forward_seconds(&work(0)), cost.backward_seconds(&work(12 * elements))];
            for (measured, predicted) in [forward, backward].into_iter().zip(predicted) {
                let error = 1e6 * predicted / measured - 1.0;
                if measured > 0.0 && error.abs() > 0.1 {
                    wrong.push(format!(
                        "{rows} {heads_q}:{heads_kv} {measured} us, {:.1} % off",
                        100.0 * error
                    ));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

#[test]
fn without_tiles_time_is_in_proportion_to_pairs() {
    let cost = CostModel { tiles: None, ..CostModel::H200 };
    let seconds = |mask: &str| {
        let mask: Mask = mask.parse().unwrap();
        let bands: Vec<Band> = mask.bands().collect();
        let work = AttentionWork {
            bands: &bands,
            q_rows: mask.seqlen_q(),
            k_rows: mask.seqlen_k(),
            heads_q: 2,
            heads_kv: 1,
            head_dim: 64,
            head_dim_v: 32,
            staged: false,
            passed_bytes: 0,
            computed_seconds: 0.0,
            interruption: Interruption::default(),
        };
        let flops = 2.0 * 96.0 * 2.0 * mask.area() as f64;
        let expected = [
            cost.launch_seconds + flops / cost.forward_flops_per_second,
            cost.launch_seconds + 2.5 * flops / cost.backward_flops_per_second,
        ];
        ([cost.forward_seconds(&work), cost.backward_seconds(&work)], expected)
    };
    for mask in ["full:1000", "varlen-causal:lengths=1,700,30"] {
        let (found, expected) = seconds(mask);
        for (found, expected) in found.into_iter().zip(expected) {
            assert!((found / expected - 1.0).abs() < 1e-9, "{mask}: {found} {expected}");
        }
    }
}

//! Which tiles problems get.

use counterpoint_mask::{Documents, Mask, Window};

use super::*;
use crate::kernel::ElementType;

fn problem(mask: &str, heads_q: usize, heads_kv: usize) -> AttentionProblem {
    problem_of(mask.parse().unwrap(), heads_q, heads_kv)
}

fn problem_of(mask: Mask, heads_q: usize, heads_kv: usize) -> AttentionProblem {
    AttentionProblem {
        bands: mask.bands().collect::<Vec<_>>().into(),
        rows_q: mask.seqlen_q(),
        rows_k: mask.seqlen_k(),
        rows_arriving: 0,
        heads_q,
        heads_kv,
        head_dim: 128,
        head_dim_v: 128,
        element: ElementType::Bf16,
        scale: 0.088,
        softcap: None,
        sm_margin: 0,
        deterministic: false,
    }
}

#[test]
fn shapes_fit_a_multiprocessor() {
    for dims in HEAD_DIMS {
        for shape in PACKS
            .into_iter()
            .flat_map(|pack| ForwardShape::large(dims, pack))
            .chain([ForwardShape::small(dims, 1)])
        {
            assert!(shape.shared_bytes() <= 232_448, "{shape:?}");
            // Blocks of whole instructions, tiles of whole warpgroups.
            assert!(shape.block % 16 == 0 && shape.rows % 64 == 0);
        }
        assert_eq!(128 % ForwardShape::small(dims, 1).block, 0);
    }
}

#[test]
fn long_rows_take_large_blocks_and_short_documents_packed_heads() {
    let shape = |mask, heads_q, heads_kv| {
        let problem = problem(mask, heads_q, heads_kv);
        choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap().0
    };
    assert_eq!(shape("full:8k", 16, 16).block, 176);
    assert_eq!(shape("sliding-window:8k,left=1023,right=0", 16, 16).block, 128);
    let packed = shape("sliding-window:8k,left=1023,right=0", 64, 8);
    assert_eq!((packed.block, packed.pack), (176, 8));
    let documents = shape("varlen-full:lengths=100,60,30,200,10,300,70,50,20,120", 64, 8);
    assert_eq!(documents.pack, 8);
}

#[test]
fn interior_steps_have_a_loop_where_rows_are_long() {
    let chosen = |seqlen: usize, mask: &str, heads: (usize, usize), dim: u32| {
        let documents = || {
            let lengths = DOCUMENTS.iter().find(|lengths| lengths.iter().sum::<usize>() == seqlen);
            Documents::from_lengths(lengths.unwrap().iter().copied()).unwrap()
        };
        let mask = match mask {
            "full" => Mask::full(seqlen),
            "causal" => Mask::causal(seqlen),
            "sw_causal" => {
                Mask::sliding_window(seqlen, Window { left: Some(1023), right: Some(0), global: 0 })
            }
            "varlen_full" => Mask::full(documents()),
            _ => Mask::causal(documents()),
        };
        let mut problem = problem_of(mask.unwrap(), heads.0, heads.1);
        (problem.head_dim, problem.head_dim_v) = (dim as usize, dim as usize);
        let shape = choose(&problem, (dim, dim), Freedom::Any, 132, TileEnds::Results).unwrap().0;
        (shape.rows, shape.block, shape.pack, shape.steps)
    };
    let (uniform, interior) = (Loop::Uniform, Loop::Interior);
    for mask in ["full", "causal", "sw_causal"] {
        assert_eq!(chosen(2048, mask, (16, 16), 64), (128, 128, 1, uniform), "{mask}");
    }
    for seqlen in [8192, 16384, 32768] {
        for mask in ["full", "causal", "varlen_full", "varlen_causal"] {
            assert_eq!(chosen(seqlen, mask, (16, 16), 64), (192, 128, 1, interior), "{seqlen} {mask}");
        }
        assert_eq!(chosen(seqlen, "sw_causal", (16, 16), 64), (128, 128, 1, uniform), "{seqlen}");
        for mask in ["full", "causal", "sw_causal", "varlen_full", "varlen_causal"] {
            assert_eq!(chosen(seqlen, mask, (64, 8), 64), (192, 128, 8, interior), "{seqlen} {mask}");
        }
    }
    assert_eq!(chosen(16384, "full", (1, 1), 64), (128, 208, 1, interior), "one round of either");
    for seqlen in [8192, 16384] {
        for mask in ["full", "causal"] {
            assert_eq!(chosen(seqlen, mask, (16, 16), 128), (128, 176, 1, interior), "{seqlen} {mask}");
        }
        for (mask, pack, steps) in [
            ("full", 1, interior),
            ("causal", 8, interior),
            ("sw_causal", 8, uniform),
            ("varlen_causal", 8, uniform),
        ] {
            assert_eq!(chosen(seqlen, mask, (64, 8), 128), (128, 176, pack, steps), "{seqlen} {mask}");
        }
    }
}

/// Keys and values of a head that stay in the L2 cache are not worth it, nor are those of documents.
#[test]
fn rows_of_very_many_keys_have_clusters() {
    let ctas = |mask: &str, heads: (usize, usize), change: fn(&mut AttentionProblem)| {
        let mut problem = problem(mask, heads.0, heads.1);
        change(&mut problem);
        choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap().0.ctas
    };
    // The self-test's.
    for mask in ["full:46380", "causal:25900"] {
        assert_eq!(ctas(mask, (8, 1), |_| ()), 2, "{mask}");
    }
    for heads in [(16, 16), (64, 8), (5, 5)] {
        assert_eq!(ctas("full:32k", heads, |_| ()), 2);
        assert_eq!(ctas("causal:32k", heads, |_| ()), 2);
        assert_eq!(ctas("full:16k", heads, |_| ()), 1);
        assert_eq!(ctas("sliding-window:32k,left=1023,right=0", heads, |_| ()), 1);
        assert_eq!(ctas("causal:32k", heads, |problem| problem.deterministic = true), 1);
        assert_eq!(ctas("causal:32k", heads, |problem| problem.rows_arriving = 1024), 1);
    }
    assert_eq!(ctas("varlen-full:lengths=8000,8000,8000,8000", (16, 16), |_| ()), 1);
    assert_eq!(ctas("full:200,keys=64k", (8, 8), |_| ()), 1, "few tiles, which are split");
}

/// Clusters own twice the rows, and half as many take tiles.
#[test]
fn a_last_round_of_clusters_is_cut_for_clusters() {
    let problem = problem("full:46380", 8, 1);
    let (shape, schedule) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
    assert_eq!((shape.ctas, shape.tokens()), (2, 256));
    assert!(schedule.partials() > 0);
    assert!(schedule.tiles().iter().all(|tile| tile.end - tile.start <= 256));
    assert!(schedule.tiles().iter().any(|tile| (tile.end - tile.start) as usize == 46_380 % 256));
}

#[test]
fn long_rows_in_many_rounds_have_three_warpgroups_at_head_64() {
    let mut problem = problem("causal:10000", 3, 1);
    let q_range = counterpoint_mask::Range::new(0, 384);
    problem.bands = vec![counterpoint_mask::Band { q_range, diag_max: 9600, ..problem.bands[0] }].into();
    (problem.rows_q, problem.head_dim, problem.head_dim_v) = (384, 64, 64);
    let rows = |workers| choose(&problem, (64, 64), Freedom::Any, workers, TileEnds::Results).unwrap().0.rows;
    // Six tiles of 192 rows or nine of 128, on as many multiprocessors.
    assert_eq!((rows(1), rows(9)), (192, 128));
    problem.deterministic = true;
    assert_eq!(choose(&problem, (64, 64), Freedom::Any, 1, TileEnds::Results).unwrap().0.rows, 128);
    (problem.heads_q, problem.deterministic) = (8, false);
    let packed = choose(&problem, (64, 64), Freedom::Any, 1, TileEnds::Results).unwrap().0;
    assert_eq!((packed.rows, packed.pack), (192, 8));
}

#[test]
fn a_loop_of_interior_steps_pays_from_some_blocks_on() {
    for (dim, seqlens) in [(64, [2048, 4096]), (128, [1024, 2048])] {
        let chosen = seqlens.map(|seqlen| {
            let mut problem = problem(&format!("full:{seqlen}"), 16, 16);
            (problem.head_dim, problem.head_dim_v) = (dim as usize, dim as usize);
            choose(&problem, (dim, dim), Freedom::Any, 132, TileEnds::Results).unwrap().0.steps
        });
        assert_eq!(chosen, [Loop::Uniform, Loop::Interior], "{dim}");
    }
}

#[test]
fn few_tiles_are_split_unless_bits_must_not_change() {
    let mut problem = problem("full:16k", 1, 1);
    problem.bands =
        vec![counterpoint_mask::Band { q_range: counterpoint_mask::Range::new(0, 128), ..problem.bands[0] }]
            .into();
    problem.rows_q = 128;
    assert!(choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap().1.partials() > 1);
    assert_eq!(choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::States).unwrap().1.partials(), 0);
    problem.deterministic = true;
    let (shape, schedule) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
    assert_eq!((schedule.partials(), shape.block), (0, 128));
}

#[test]
fn an_incomplete_last_round_is_cut() {
    let gain = |mask: &str, heads_q: usize, heads_kv: usize| {
        let problem = problem(mask, heads_q, heads_kv);
        let (shape, cut) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
        let (_, whole) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::States).unwrap();
        let heads = heads_q / shape.pack as usize;
        let workers = 132 / shape.ctas as usize;
        let gain = whole.makespan(workers, heads) as f64 / cut.makespan(workers, heads) as f64 - 1.0;
        (cut.merges().len(), cut.partials(), (1000.0 * gain).round())
    };
    assert_eq!(gain("full:32k", 16, 16), (1, 2, 20.0));
    // Here the lightest tiles fill the last round, or the gain is not worth the memory: at 16k it is 2.4 % for 15 partial results,
    // 6 % of q, k, v and out.
    assert_eq!(gain("full:8k", 64, 8), (0, 0, 0.0));
    for mask in ["full:8k", "full:16k", "causal:8k", "sliding-window:8k,left=1023,right=0", "causal:32k"] {
        assert_eq!(gain(mask, 16, 16), (0, 0, 0.0), "{mask}");
    }
}

/// The documents of the benchmark, 8k, 16k and 32k tokens.
const DOCUMENTS: [&[usize]; 3] = [
    &[102, 1003, 419, 356, 130, 895, 108, 1718, 1139, 2048, 81, 87, 27, 43, 24, 5, 1, 3, 2, 1],
    &[
        102, 3051, 419, 2404, 130, 895, 108, 1718, 1139, 2074, 2701, 696, 220, 344, 194, 88, 5, 68, 12, 9, 5,
        2,
    ],
    &[2150, 6102, 419, 2404, 2178, 895, 108, 3766, 1139, 8192, 2701, 1393, 440, 344, 389, 88, 51, 7, 1, 1],
];

#[test]
fn partial_results_take_less_than_a_hundredth_of_the_tensors() {
    for lengths in DOCUMENTS {
        let documents = || Documents::from_lengths(lengths.iter().copied()).unwrap();
        let seqlen: usize = lengths.iter().sum();
        let window = Window { left: Some(1023), right: Some(0), global: 0 };
        let masks = [
            Mask::full(seqlen),
            Mask::causal(seqlen),
            Mask::block_causal(seqlen, 2048),
            Mask::sliding_window(seqlen, window),
            Mask::full(documents()),
            Mask::causal(documents()),
            Mask::block_causal(documents(), 2048),
        ];
        for (mask, heads) in masks.into_iter().flat_map(|mask| [(mask.clone(), (16, 16)), (mask, (64, 8))]) {
            let problem = problem_of(mask.unwrap(), heads.0, heads.1);
            let (shape, schedule) =
                choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
            let workspace = schedule.partials() * shape.partial_bytes(&problem);
            assert!(100 * workspace < problem_bytes(&problem), "{:?} {heads:?}: {workspace}", problem.bands);
        }
    }
}

#[test]
fn heads_whose_keys_fit_the_cache_go_together() {
    let groups = |mask: &str, heads_q: usize, heads_kv: usize| {
        let problem = problem(mask, heads_q, heads_kv);
        let (shape, schedule) = choose(&problem, (128, 128), Freedom::Any, 132, TileEnds::Results).unwrap();
        let HeadGroups { tiles, heads } = head_groups(&problem, shape, &schedule, schedule.tiles(), 132);
        (tiles, schedule.tiles().len(), heads)
    };
    // All of them, or one or two whose keys alone fill the cache; light tiles come last for all.
    assert_eq!(groups("full:512", 16, 16), (0, 4, 16));
    assert_eq!(groups("full:8k", 16, 16), (64, 64, 1));
    assert_eq!(groups("causal:32k", 16, 16), (126, 128, 1));
    assert_eq!(groups("full:32k", 64, 8), (128, 128, 8));
}

//! How much of what attention kernels compute is unmasked, by tile and block size: the tables of docs/tile-schedules.md.
//!
//! `cargo run --release -p counterpoint-tiles --example tile_schedules`

use std::error::Error;
use std::time::Instant;

use counterpoint_mask::{Band, Documents, Mask, Window};
use counterpoint_tiles::{TileDirection, TilePlacement, TileSchedule, TileScheduleConfig, TileStatistics};

const DOCUMENTS: [&[usize]; 3] = [
    &[102, 1003, 419, 356, 130, 895, 108, 1718, 1139, 2048, 81, 87, 27, 43, 24, 5, 1, 3, 2, 1],
    &[
        102, 3051, 419, 2404, 130, 895, 108, 1718, 1139, 2074, 2701, 696, 220, 344, 194, 88, 5, 68, 12, 9, 5,
        2,
    ],
    &[2150, 6102, 419, 2404, 2178, 895, 108, 3766, 1139, 8192, 2701, 1393, 440, 344, 389, 88, 51, 7, 1, 1],
];

/// CTAs of an H200, one on each multiprocessor.
const WORKERS: usize = 132;

/// The masks that kernels are measured with.
fn masks(seqlen: usize, lengths: &[usize]) -> Result<Vec<(&'static str, Mask)>, Box<dyn Error>> {
    let documents = || Documents::from_lengths(lengths.iter().copied());
    let window = Window { left: Some(1023), right: Some(0), global: 0 };
    Ok(vec![
        ("full", Mask::full(seqlen)?),
        ("causal", Mask::causal(seqlen)?),
        ("block_causal", Mask::block_causal(seqlen, 2048)?),
        ("sw_causal", Mask::sliding_window(seqlen, window)?),
        ("varlen_full", Mask::full(documents()?)?),
        ("varlen_causal", Mask::causal(documents()?)?),
        ("varlen_block_causal", Mask::block_causal(documents()?, 2048)?),
    ])
}

fn schedule(mask: &Mask, config: &TileScheduleConfig) -> Result<TileSchedule, Box<dyn Error>> {
    let bands: Vec<Band> = mask.bands().collect();
    Ok(TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), config)?)
}

fn statistics(mask: &Mask, config: &TileScheduleConfig) -> Result<TileStatistics, Box<dyn Error>> {
    Ok(schedule(mask, config)?.statistics())
}

/// Of each shape: efficiency, share of bounded blocks, and the share of an H200's time that goes into unmasked pairs when
/// `heads` follow the schedule. All in percent.
fn table(direction: TileDirection, heads: usize, shapes: &[(usize, usize)]) -> Result<(), Box<dyn Error>> {
    print!("| seqlen | mask |");
    shapes.iter().for_each(|(tile_rows, block)| print!(" {tile_rows} x {block} |"));
    print!("\n|---|---|{}\n", "---|".repeat(shapes.len()));
    let mut logarithms = vec![0.0; shapes.len()];
    let mut rows = 0;
    for (index, lengths) in DOCUMENTS.into_iter().enumerate() {
        let seqlen = 8192 << index;
        for (name, mask) in masks(seqlen, lengths)? {
            print!("| {}k | {name} |", seqlen >> 10);
            for (&(tile_rows, block), logarithm) in shapes.iter().zip(&mut logarithms) {
                let schedule = schedule(&mask, &TileScheduleConfig::new(direction, tile_rows, block))?;
                let found = schedule.statistics();
                let bounded = found.bounded_blocks as f64 / found.blocks as f64;
                let pairs = schedule.makespan(WORKERS, heads) as f64 * (WORKERS * tile_rows) as f64;
                let useful = (found.area * heads as u64) as f64 / pairs;
                *logarithm += useful.ln();
                print!(
                    " {:.0} ({:.0}) **{:.0}** |",
                    100.0 * found.efficiency,
                    100.0 * bounded,
                    100.0 * useful
                );
            }
            println!();
            rows += 1;
        }
    }
    print!("| | geometric mean |");
    logarithms.iter().for_each(|sum| print!(" **{:.1}** |", 100.0 * (sum / f64::from(rows)).exp()));
    println!();
    Ok(())
}

fn gain(direction: TileDirection, shapes: &[(usize, usize)]) -> Result<(), Box<dyn Error>> {
    println!(
        "| seqlen | mask | tile x block | aligned: tiles, blocks, % | tight: tiles, blocks, % | blocks saved |"
    );
    println!("|---|---|---|---|---|---|");
    for (index, lengths) in DOCUMENTS.into_iter().enumerate() {
        let seqlen = 8192 << index;
        for (name, mask) in masks(seqlen, lengths)?.into_iter().skip(3) {
            for &(tile_rows, block) in shapes {
                let tight = TileScheduleConfig::new(direction, tile_rows, block);
                let aligned = TileScheduleConfig { tiles: TilePlacement::Aligned, ..tight };
                let (tight, aligned) = (statistics(&mask, &tight)?, statistics(&mask, &aligned)?);
                let figures =
                    |s: &TileStatistics| format!("{}, {}, {:.1}", s.tiles, s.blocks, 100.0 * s.efficiency);
                println!(
                    "| {}k | {name} | {tile_rows} x {block} | {} | {} | {:.1} % |",
                    seqlen >> 10,
                    figures(&aligned),
                    figures(&tight),
                    100.0 * (1.0 - tight.blocks as f64 / aligned.blocks as f64),
                );
            }
        }
    }
    Ok(())
}

/// The least of many runs, in milliseconds.
fn milliseconds(mask: &Mask, config: &TileScheduleConfig) -> Result<f64, Box<dyn Error>> {
    let bands: Vec<Band> = mask.bands().collect();
    let mut least = f64::INFINITY;
    for _ in 0..40 {
        let started = Instant::now();
        let schedule = TileSchedule::new(&bands, mask.seqlen_q(), mask.seqlen_k(), config)?;
        least = least.min(started.elapsed().as_secs_f64() * 1e3);
        std::hint::black_box(schedule);
    }
    Ok(least)
}

fn times() -> Result<(), Box<dyn Error>> {
    let packed = |name: &str| -> Result<Documents, Box<dyn Error>> {
        let path =
            format!("{}/../../benches/data/packed_documents_{name}_1m.txt", env!("CARGO_MANIFEST_DIR"));
        let lengths: Result<Vec<usize>, _> = std::fs::read_to_string(path)?.lines().map(str::parse).collect();
        Ok(Documents::from_lengths(lengths?)?)
    };
    let window = Window { left: Some(1023), right: Some(0), global: 0 };
    let masks = [
        ("lognormal documents, full", Mask::full(packed("lognormal")?)?),
        ("lognormal documents, causal", Mask::causal(packed("lognormal")?)?),
        ("pareto documents, full", Mask::full(packed("pareto")?)?),
        ("pareto documents, causal", Mask::causal(packed("pareto")?)?),
        ("lognormal documents, window 1024", Mask::sliding_window(packed("lognormal")?, window)?),
        ("documents of 100 tokens, causal", Mask::causal(Documents::from_lengths(vec![100; 10486])?)?),
        (
            "documents of 1 to 16 tokens, causal",
            Mask::causal(Documents::from_lengths((0..123361).map(|i| 1 + i * 7919 % 16))?)?,
        ),
        ("dense causal 1M", Mask::causal(1 << 20)?),
        ("dense causal 4M", Mask::causal(4 << 20)?),
    ];
    println!("| mask | direction | tile x block | tiles | blocks | ms | kB |");
    println!("|---|---|---|---|---|---|---|");
    for (name, mask) in &masks {
        for (direction, tile_rows, block) in [
            (TileDirection::Forward, 128, 128),
            (TileDirection::Forward, 128, 176),
            (TileDirection::Forward, 16, 128),
            (TileDirection::Backward, 128, 64),
        ] {
            let config = TileScheduleConfig::new(direction, tile_rows, block);
            let (ms, found) = (milliseconds(mask, &config)?, statistics(mask, &config)?);
            println!(
                "| {name} | {direction:?} | {tile_rows} x {block} | {} | {} | {ms:.2} | {} |",
                found.tiles,
                found.blocks,
                found.bytes >> 10,
            );
        }
    }
    Ok(())
}

fn main() -> Result<(), Box<dyn Error>> {
    println!("\n### Forward, 16 heads, not packed\n");
    let shapes = [
        (64, 128),
        (64, 176),
        (128, 64),
        (128, 80),
        (128, 112),
        (128, 128),
        (128, 176),
        (192, 80),
        (192, 112),
        (192, 128),
    ];
    table(TileDirection::Forward, 16, &shapes)?;
    println!("\n### Forward, 64 heads, not packed\n");
    table(
        TileDirection::Forward,
        64,
        &[(128, 80), (128, 112), (128, 128), (128, 176), (192, 112), (192, 128)],
    )?;
    println!("\n### Forward, 64 query heads of 8 key heads, packed\n");
    let shapes =
        [(8, 128), (16, 64), (16, 80), (16, 112), (16, 128), (16, 176), (24, 80), (24, 112), (24, 128)];
    table(TileDirection::Forward, 8, &shapes)?;
    println!("\n### Backward, 16 key heads\n");
    let shapes = [(64, 64), (64, 128), (80, 64), (96, 64), (128, 64), (128, 80), (128, 128)];
    table(TileDirection::Backward, 16, &shapes)?;
    println!("\n### Backward, 8 key heads\n");
    table(TileDirection::Backward, 8, &shapes)?;
    println!("\n### What ending tiles early saves: forward\n");
    gain(TileDirection::Forward, &[(128, 128), (128, 176), (16, 128), (16, 176)])?;
    println!("\n### What ending tiles early saves: backward\n");
    gain(TileDirection::Backward, &[(128, 64), (128, 128)])?;
    println!("\n### Time and size\n");
    times()
}

//! Masks drawn with the chunks of a plan, and tables of real plans.

mod fixture;

use counterpoint_mask::{AttnSlice, Mask, MaskType, Range};
use counterpoint_report::{MaskDrawing, Style, plan_table};
use fixture::{Run, documents, lengths};

/// Area of the paths of each rank, in square tenths of a unit.
fn painted(svg: &str) -> Vec<(usize, f64)> {
    let cells =
        svg.split("class=\"mask-cells\"").nth(1).unwrap().split("class=\"mask-owners\"").next().unwrap();
    let of_rank = |group: &str| {
        // Without what follows the last group.
        let group = group.split("</g>").next().unwrap();
        let rank = group.split("<title>rank ").nth(1).unwrap().split('<').next().unwrap().parse().unwrap();
        let area =
            group.split(" d=\"").skip(1).flat_map(|path| path.split('"').next().unwrap().split('M').skip(1));
        let size = |rectangle: &str| {
            let numbers: Vec<f64> = rectangle
                .split(|c: char| !c.is_ascii_digit())
                .filter(|n| !n.is_empty())
                .map(|n| n.parse().unwrap())
                .collect();
            numbers[2] * numbers[3]
        };
        (rank, area.map(size).sum())
    };
    cells.split("<g fill=").skip(1).map(of_rank).collect()
}

#[test]
fn every_rank_is_painted_as_much_as_it_computes() {
    // All pairs unmasked, so that what is painted is the area. Once with a row of cells a chunk, once with many chunks
    // in a row of cells.
    for (seqlen, cp_size, chunk_size) in
        [(4096, 4, 128), (3000, 7, 64), (1 << 20, 8, 512), (1 << 20, 64, 256)]
    {
        let all = Range::new(0, seqlen);
        let mask = Mask::new(seqlen, seqlen, vec![AttnSlice::new(all, all, MaskType::Full)]).unwrap();
        let run = Run::new(mask, cp_size, chunk_size);
        let svg = MaskDrawing { title: "full", mask: &run.mask, plan: Some(&run.plan) }.render();
        let painted = painted(&svg);
        assert_eq!(painted.len(), cp_size);
        for (rank, area) in painted {
            let want = run.plan.ranks[rank].area as f64 / (seqlen as f64).powi(2);
            let got = area / 6000f64.powi(2);
            // Ends of chunks are rounded to 1/6000 of the plot. A row of cells (1/512) that lies in several chunks is all
            // painted for one of them, a sample of its rows: within three standard deviations of the mean.
            let aligned = (chunk_size * 512).is_multiple_of(seqlen);
            let tolerance = if aligned { 0.002 } else { 3.0 * (512.0 * want).sqrt() / 512.0 };
            assert!((got - want).abs() < tolerance, "rank {rank} of {cp_size}: {got}, want {want}");
        }
    }
}

#[test]
fn a_million_tokens_are_a_small_picture() {
    for file in ["packed_documents_lognormal_1m.txt", "packed_documents_pareto_1m.txt"] {
        let run = Run::new(documents(lengths(file)), 64, 512);
        let svg = MaskDrawing { title: file, mask: &run.mask, plan: Some(&run.plan) }.render();
        assert!(svg.len() < 300_000, "{file}: {} bytes", svg.len());
        assert!(svg.contains(">1M</text>") && svg.contains("colours repeat every 24"));
    }
}

#[test]
fn a_plan_in_a_table() {
    let run = Run::new(documents([1500, 1096, 900, 600]), 4, 128);
    let seconds = [1e-3, 2e-3, 3e-3, 4e-3];
    let text = plan_table(&run.plan, Some(&seconds), &Style::PLAIN);
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 2 + 4 + 2, "{text}");
    for (rank, part) in run.plan.ranks.iter().enumerate() {
        let digits = lines[2 + rank].replace(',', "");
        let words: Vec<&str> = digits.split_whitespace().collect();
        assert_eq!(words[0], rank.to_string());
        for figure in [part.q_rows as u64, part.area, part.recv_rows(), part.send_rows()] {
            assert!(words.contains(&figure.to_string().as_str()), "{figure} in {digits}");
        }
    }
    assert!(lines[6].contains("mean") && lines[6].contains("2.50 ms"), "{text}");
    assert!(lines[7].contains("max") && lines[7].contains("4.00 ms"), "{text}");

    let many = Run::new(documents([5000, 5000]), 40, 64);
    let text = plan_table(&many.plan, None, &Style { color: false, width: Some(80) });
    assert!(text.contains("the 16 ranks with the largest area of 40"), "{text}");
    assert!(text.lines().all(|line| line.chars().count() <= 80), "{text}");
    println!("{text}");
}

//! Masks as SVG drawings, with the ranks that own their rows where there is a plan.

use std::{collections::BTreeMap, fmt::Write};

use counterpoint_mask::{Mask, Raster};
use counterpoint_plan::Plan;

use crate::{
    escape::escape,
    ownership::part_owners,
    palette::{color_of, color_properties},
    quantity::format_count,
};

mod frame;
mod timeline;

pub use timeline::TimelineDrawing;

use frame::{Axis, Frame, LEFT};

/// Cells along an axis, the finest first: the first grid whose drawing is small enough is taken. 512 cells are about
/// one a pixel of the plot.
const GRIDS: [usize; 4] = [512, 256, 128, 64];
/// Largest size of the cells' paths in bytes. The rest of a drawing takes a few kB more.
const CELL_BYTES: usize = 700_000;
/// Steps in which the density of a cell is shown.
const LEVELS: usize = 8;
/// A mask as a picture: a grid of cells, darker where more pairs are unmasked, with token axes and a legend; where there
/// is a plan, query rows in the colour of the rank that owns them, and strips that name the owners of queries and keys.
///
/// Readable from a handful of tokens, where a cell is one pair, to millions, and at most about 0.8 MB.
#[derive(Clone, Copy, Debug)]
pub struct MaskDrawing<'a> {
    /// Title, for readers and for screen readers.
    pub title: &'a str,
    /// What to draw.
    pub mask: &'a Mask,
    /// Whose rows are whose.
    pub plan: Option<&'a Plan>,
}

impl MaskDrawing<'_> {
    /// A complete SVG file. It follows the reader's light or dark theme.
    pub fn render(&self) -> String {
        self.with_style(&GRIDS)
    }

    /// The same with at most 128 cells along an axis, for notebooks, which keep every drawing: at most about 0.1 MB.
    pub fn render_small(&self) -> String {
        self.with_style(&GRIDS[2..])
    }

    fn with_style(&self, grids: &[usize]) -> String {
        let style = format!("{}{}", color_properties("svg.mask"), include_str!("svg/mask.css"));
        self.draw(&format!("<style>{style}</style>"), grids)
    }

    /// The drawing for a page that has `mask.css` and the colours already.
    pub(crate) fn render_inline(&self) -> String {
        self.draw("", &GRIDS)
    }

    fn draw(&self, style: &str, grids: &[usize]) -> String {
        let frame = Frame::of(self.mask, self.plan.is_some());
        let (cells, raster) = grids
            .iter()
            .map(|&grid| self.cells(&frame, grid))
            .find(|(cells, _)| cells.len() <= CELL_BYTES)
            .unwrap_or_else(|| self.cells(&frame, grids[grids.len() - 1]));

        let title = escape(self.title);
        let (sq, sk) = (self.mask.seqlen_q(), self.mask.seqlen_k());
        let pairs = sq as f64 * sk as f64;
        let description = format!(
            "{} query rows by {} key columns, {} of all pairs unmasked.",
            format_count(sq as u64),
            format_count(sk as u64),
            percent(self.mask.area() as f64 / pairs)
        );
        let mut out = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" class=\"mask\" style=\"max-width:{limit}px\" viewBox=\"0 0 {w} {h}\" role=\"img\" \
             aria-label=\"{title}. {description}\" data-x=\"{x}\" data-y=\"{y}\" data-width=\"{pw}\" data-height=\"{ph}\" \
             data-q=\"{sq}\" data-k=\"{sk}\"><title>{title}</title><desc>{description}</desc>{style}\
             <rect class=\"mask-paper\" width=\"{w}\" height=\"{h}\"/>\
             <rect class=\"mask-plot\" x=\"{x}\" y=\"{y}\" width=\"{pw}\" height=\"{ph}\"/>",
            w = frame.width,
            // Stretched to a page's width, a narrow picture would be very tall.
            limit = frame.width * 1.2,
            h = frame.height,
            x = LEFT,
            y = frame.top,
            pw = frame.plot_width,
            ph = frame.plot_height,
        );
        out.push_str("<g class=\"mask-whole\">");
        let _ = write!(
            out,
            "<g class=\"mask-cells\" shape-rendering=\"crispEdges\" transform=\"translate({LEFT} {}) scale(.1)\">{cells}</g>",
            frame.top
        );
        if let Some(plan) = self.plan {
            frame.chunk_lines(&mut out, &plan.q_dispatch);
            frame.strip(&mut out, Axis::Queries, &plan.q_dispatch);
            frame.strip(&mut out, Axis::Keys, &plan.k_dispatch);
        }
        frame.axes(&mut out, sq, sk);
        out.push_str("</g>");
        frame.names(&mut out);
        frame.legend(&mut out, self.plan, &raster);
        out.push_str("</svg>");
        out
    }

    /// The cells of a grid, a path for each rank and density, neighbours of one path merged along and across.
    fn cells(&self, frame: &Frame, grid: usize) -> (String, Raster) {
        let (sq, sk) = (self.mask.seqlen_q(), self.mask.seqlen_k());
        let raster = self.mask.raster(grid, grid);
        let rows = (0..raster.height()).map(|row| raster.rows(row));
        let owner = self.plan.map(|plan| part_owners(&plan.q_dispatch, rows));
        let position = |token: usize, seqlen: usize, length: f64| {
            (token as f64 / seqlen as f64 * length * 10.0).round() as i64
        };
        let x: Vec<i64> = (0..raster.width())
            .map(|column| position(raster.cols(column).start, sk, frame.plot_width))
            .chain([position(sk, sk, frame.plot_width)])
            .collect();
        let y: Vec<i64> = (0..raster.height())
            .map(|row| position(raster.rows(row).start, sq, frame.plot_height))
            .chain([position(sq, sq, frame.plot_height)])
            .collect();

        let mut paths: BTreeMap<(usize, usize), String> = BTreeMap::new();
        // Runs of the row above that may still grow downwards, with the row where they began.
        let mut open: BTreeMap<(usize, usize, usize, usize), usize> = BTreeMap::new();
        for row in 0..=raster.height() {
            let mut next = BTreeMap::new();
            if row < raster.height() {
                let rank = owner.as_ref().map_or(0, |owner| owner[row]);
                let levels: Vec<usize> =
                    (0..raster.width()).map(|column| level(raster.density(column, row))).collect();
                let mut start = 0;
                for run in levels.chunk_by(|a, b| a == b) {
                    let end = start + run.len();
                    if run[0] > 0 {
                        let key = (rank, run[0], start, end);
                        next.insert(key, open.remove(&key).unwrap_or(row));
                    }
                    start = end;
                }
            }
            for ((rank, level, start, end), first) in std::mem::replace(&mut open, next) {
                let (w, h) = (x[end] - x[start], y[row] - y[first]);
                let path = paths.entry((rank, level)).or_default();
                let _ = write!(path, "M{} {}h{w}v{h}h-{w}z", x[start], y[first]);
            }
        }

        let mut out = String::new();
        let mut last = None;
        for ((rank, level), path) in paths {
            if self.plan.is_some() && last != Some(rank) {
                let close = if last.is_some() { "</g>" } else { "" };
                let _ = write!(
                    out,
                    "{close}<g fill=\"var(--rank-{})\"><title>rank {rank}</title>",
                    color_of(rank)
                );
                last = Some(rank);
            }
            let _ = write!(out, "<path class=\"d{level}\" d=\"{path}\"/>");
        }
        if last.is_some() {
            out.push_str("</g>");
        }
        (out, raster)
    }
}

/// 0 for a cell that is masked throughout, else 1 to [`LEVELS`].
fn level(density: f64) -> usize {
    (density * LEVELS as f64).ceil().min(LEVELS as f64) as usize
}

/// A part of one as a percentage with sensible digits, never 0 for what is not 0.
pub(crate) fn percent(part: f64) -> String {
    match part * 100.0 {
        p if p == 0.0 || p >= 99.95 => format!("{p:.0} %"),
        p if p >= 10.0 => format!("{p:.1} %"),
        p if p >= 0.1 => format!("{p:.2} %"),
        p => format!("{p:.1e} %"),
    }
}

#[cfg(test)]
mod tests {
    use super::{
        frame::{PLOT, ticks},
        *,
    };
    use counterpoint_mask::{AttnSlice, MaskType, Range};

    fn causal(seqlen: usize) -> Mask {
        let all = Range::new(0, seqlen);
        Mask::new(seqlen, seqlen, vec![AttnSlice::new(all, all, MaskType::Causal)]).unwrap()
    }

    fn drawing(mask: &Mask) -> String {
        MaskDrawing { title: "a <mask> & \"more\"", mask, plan: None }.render()
    }

    #[test]
    fn ticks_are_few_and_round() {
        for seqlen in [1, 2, 7, 100, 1000, 1023, 1024, 5000, 131_072, 1 << 20, 4 << 20, (4 << 20) + 17] {
            let ticks = ticks(seqlen, 8);
            assert!(ticks.len() <= 9 && ticks[0] == 0, "{seqlen}: {ticks:?}");
            assert!(ticks.iter().all(|&tick| tick <= seqlen));
            assert!(seqlen < 4 || ticks.len() >= 4, "{seqlen}: {ticks:?}");
        }
        assert_eq!(ticks(1 << 20, 8).len(), 9);
    }

    #[test]
    fn titles_are_escaped() {
        let svg = drawing(&causal(64));
        assert!(svg.contains("<title>a &lt;mask&gt; &amp; &quot;more&quot;</title>"));
        assert!(!svg.contains("<mask>"));
    }

    /// Sum of the painted area times the density that its class says, against the mask's own density.
    #[test]
    fn painted_area_is_the_masks_area() {
        for seqlen in [16, 500, 4096, 1 << 20, 4 << 20] {
            let mask = causal(seqlen);
            let svg = drawing(&mask);
            let mut painted = 0.0;
            for path in svg.split("<path class=\"d").skip(1) {
                let density = path[..1].parse::<f64>().unwrap() / LEVELS as f64;
                let d = path.split("d=\"").nth(1).unwrap().split('"').next().unwrap();
                for rectangle in d.split('M').skip(1) {
                    let mut numbers =
                        rectangle.split(|c: char| !c.is_ascii_digit()).filter(|n| !n.is_empty());
                    let mut number = || numbers.next().unwrap().parse::<f64>().unwrap();
                    let (_, _, w, h) = (number(), number(), number(), number());
                    painted += density * w * h;
                }
            }
            let want = mask.area() as f64 / (seqlen as f64).powi(2);
            let got = painted / (PLOT * 10.0).powi(2);
            assert!((got - want).abs() < 0.002, "{seqlen}: painted {got}, want {want}");
            assert!(svg.len() < 200_000, "{seqlen}: {} bytes", svg.len());
        }
    }

    #[test]
    fn the_worst_mask_stays_under_a_megabyte() {
        // Scattered blocks of every size of hole: nothing merges along a row or down a column.
        let mut slices = Vec::new();
        let (mut state, cell) = (1u64, 4096);
        for row in 0..256 {
            for column in 0..256 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                if state >> 62 != 0 {
                    let (q, k) = (row * cell, column * cell);
                    let side = 512 * (1 + (state >> 40) as usize % 8);
                    slices.push(AttnSlice::new(
                        Range::new(q, q + side),
                        Range::new(k, k + side),
                        MaskType::Causal,
                    ));
                }
            }
        }
        assert!(slices.len() > 40_000);
        let mask = Mask::new(256 * cell, 256 * cell, slices).unwrap();
        let svg = drawing(&mask);
        assert!(svg.len() < 1_000_000, "{} bytes", svg.len());
        assert!(svg.len() > 50_000, "{} bytes", svg.len());
    }

    #[test]
    fn degenerate_masks_draw() {
        for (seqlen_q, seqlen_k) in [(1, 1), (1, 1 << 20), (1 << 20, 1), (3, 2)] {
            let svg = drawing(&Mask::new(seqlen_q, seqlen_k, vec![]).unwrap());
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}

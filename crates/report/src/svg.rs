use std::{collections::BTreeMap, fmt::Write};

use counterpoint_mask::Mask;
use counterpoint_plan::{Dispatch, Plan};

use crate::{
    html::escape,
    palette::{RANK_COLORS, color_of, color_properties},
    quantity::{format_count, format_tokens},
    raster::{Raster, chunk_edges, even_edges, owners},
};

/// Cells along an axis, the finest first: the first grid whose drawing is small enough is taken. 512 cells are about
/// one a pixel of the plot.
const GRIDS: [usize; 4] = [512, 256, 128, 64];
/// Largest size of the cells' paths in bytes. The rest of a drawing takes a few kB more.
const CELL_BYTES: usize = 700_000;
/// Steps in which the density of a cell is shown.
const LEVELS: usize = 8;
/// Longer side of the plot, in user units. Coordinates are whole tenths of a unit, to keep paths short.
const PLOT: f64 = 600.0;
const LEFT: f64 = 62.0;
const STRIP: f64 = 10.0;
const GAP: f64 = 4.0;
/// Smallest part of a strip, in units, that holds the number of its rank.
const LABEL_ROOM: f64 = 10.0;
/// Ranks named one by one in the legend.
const LEGEND_RANKS: usize = 8;

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
        let style = format!("{}{}", color_properties("svg.mask"), include_str!("svg/mask.css"));
        self.draw(&format!("<style>{style}</style>"))
    }

    /// The drawing for a page that has `mask.css` and the colours already.
    pub(crate) fn render_inline(&self) -> String {
        self.draw("")
    }

    fn draw(&self, style: &str) -> String {
        let frame = Frame::of(self.mask, self.plan.is_some());
        let (cells, raster) = GRIDS
            .iter()
            .map(|&grid| self.cells(&frame, grid))
            .find(|(cells, _)| cells.len() <= CELL_BYTES)
            .unwrap_or_else(|| self.cells(&frame, GRIDS[GRIDS.len() - 1]));

        let title = escape(self.title);
        let (sq, sk) = (self.mask.seqlen_q(), self.mask.seqlen_k());
        let pairs = (sq as f64 * sk as f64).max(1.0);
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
            frame.strips(&mut out, plan, &raster);
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
        let q_edges = match self.plan {
            Some(plan) => chunk_edges(&plan.q_dispatch, grid),
            None => even_edges(sq, grid),
        };
        let raster = Raster::new(self.mask, q_edges, even_edges(sk, grid));
        let owner = self.plan.map(|plan| owners(&plan.q_dispatch, &raster.q_edges));
        let position = |edge: usize, seqlen: usize, length: f64| {
            (edge as f64 / seqlen.max(1) as f64 * length * 10.0).round() as i64
        };
        let x: Vec<i64> = raster.k_edges.iter().map(|&edge| position(edge, sk, frame.plot_width)).collect();
        let y: Vec<i64> = raster.q_edges.iter().map(|&edge| position(edge, sq, frame.plot_height)).collect();

        let mut paths: BTreeMap<(usize, usize), String> = BTreeMap::new();
        // Runs of the row above that may still grow downwards, with the row where they began.
        let mut open: BTreeMap<(usize, usize, usize, usize), usize> = BTreeMap::new();
        for row in 0..=raster.rows() {
            let mut next = BTreeMap::new();
            if row < raster.rows() {
                let rank = owner.as_ref().map_or(0, |owner| owner[row]);
                let levels: Vec<usize> =
                    (0..raster.columns()).map(|column| level(raster.density(row, column))).collect();
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

/// Where things lie in the drawing.
struct Frame {
    width: f64,
    height: f64,
    top: f64,
    plot_width: f64,
    plot_height: f64,
}

impl Frame {
    fn of(mask: &Mask, with_owners: bool) -> Self {
        // Tokens are as long on both axes, until a side would be too thin to read.
        let ratio = mask.seqlen_k().max(1) as f64 / mask.seqlen_q().max(1) as f64;
        let plot_width = (PLOT * ratio.clamp(0.25, 1.0)).round();
        let plot_height = (PLOT / ratio.clamp(1.0, 4.0)).round();
        let strip = if with_owners { STRIP + GAP } else { 0.0 };
        let (top, right) = (36.0 + strip, strip + if with_owners { 8.0 } else { 18.0 });
        // A narrow plot must still have room for the legend.
        let width = (LEFT + plot_width + right).max(440.0);
        Self { width, height: top + plot_height + 62.0, top, plot_width, plot_height }
    }

    fn right(&self) -> f64 {
        LEFT + self.plot_width
    }

    fn bottom(&self) -> f64 {
        self.top + self.plot_height
    }

    /// Lines between chunks, where they are far enough apart.
    fn chunk_lines(&self, out: &mut String, dispatch: &Dispatch) {
        let unit = self.plot_height / dispatch.seqlen().max(1) as f64;
        if dispatch.chunk_size() as f64 * unit < 5.0 {
            return;
        }
        out.push_str("<path class=\"mask-chunks\" d=\"");
        for chunk in 1..dispatch.num_chunks() {
            let y = self.top + dispatch.chunk_range(chunk).start as f64 * unit;
            let _ = write!(out, "M{LEFT} {y:.1}h{}", self.plot_width);
        }
        out.push_str("\"/>");
    }

    /// Who owns the queries, at the right, and the keys, at the top; named where there is room.
    fn strips(&self, out: &mut String, plan: &Plan, raster: &Raster) {
        out.push_str("<g class=\"mask-owners\">");
        for (dispatch, length) in [(&plan.q_dispatch, self.plot_height), (&plan.k_dispatch, self.plot_width)]
        {
            let vertical = std::ptr::eq(dispatch, &plan.q_dispatch);
            let edges =
                if vertical { raster.q_edges.clone() } else { chunk_edges(dispatch, raster.columns()) };
            let owner = owners(dispatch, &edges);
            let unit = length / dispatch.seqlen().max(1) as f64;
            let mut start = 0;
            for run in owner.chunk_by(|a, b| a == b) {
                let end = start + run.len();
                let (from, to) = (edges[start] as f64 * unit, edges[end] as f64 * unit);
                let (rank, size) = (run[0], to - from);
                let (x, y, w, h) = if vertical {
                    (self.right() + GAP, self.top + from, STRIP, size)
                } else {
                    (LEFT + from, self.top - GAP - STRIP, size, STRIP)
                };
                let _ = write!(
                    out,
                    "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"var(--rank-{})\">\
                     <title>rank {rank}: {} {} to {}</title></rect>",
                    color_of(rank),
                    if vertical { "queries" } else { "keys" },
                    format_count(edges[start] as u64),
                    format_count(edges[end] as u64 - 1),
                );
                let room = if vertical { size } else { size - 6.0 * (rank.to_string().len() as f64 - 1.0) };
                if room >= LABEL_ROOM && (rank < 100 || !vertical) {
                    let _ = write!(
                        out,
                        "<text class=\"mask-owner\" x=\"{:.1}\" y=\"{:.1}\">{rank}</text>",
                        x + w / 2.0,
                        y + h / 2.0
                    );
                }
                start = end;
            }
        }
        out.push_str("</g>");
    }

    fn axes(&self, out: &mut String, seqlen_q: usize, seqlen_k: usize) {
        let strip = self.top - 36.0;
        out.push_str("<g class=\"mask-axes\"><path d=\"");
        let (mut labels, baseline) = (String::new(), self.top - strip - 6.0);
        for tick in ticks(seqlen_k, (self.plot_width / 75.0) as usize) {
            let x = LEFT + tick as f64 / seqlen_k.max(1) as f64 * self.plot_width;
            let _ = write!(out, "M{x:.1} {:.1}v3", baseline + 3.0);
            let _ = write!(
                labels,
                "<text x=\"{x:.1}\" y=\"{baseline:.1}\">{}</text>",
                format_tokens(tick as u64)
            );
        }
        for tick in ticks(seqlen_q, (self.plot_height / 50.0) as usize) {
            let y = self.top + tick as f64 / seqlen_q.max(1) as f64 * self.plot_height;
            let _ = write!(out, "M{:.1} {y:.1}h3", LEFT - 4.0);
            let _ = write!(
                labels,
                "<text class=\"mask-q\" x=\"{:.1}\" y=\"{:.1}\">{}</text>",
                LEFT - 7.0,
                y + 3.5,
                format_tokens(tick as u64)
            );
        }
        let _ = write!(out, "\"/>{labels}</g>");
    }

    fn names(&self, out: &mut String) {
        let _ = write!(
            out,
            "<g class=\"mask-axes\"><text class=\"mask-name\" x=\"{x:.1}\" y=\"12\">keys →</text>\
             <text class=\"mask-name\" x=\"12\" y=\"{y:.1}\" transform=\"rotate(-90 12 {y:.1})\">← queries</text></g>",
            x = LEFT + self.plot_width / 2.0,
            y = self.top + self.plot_height / 2.0,
        );
    }

    fn legend(&self, out: &mut String, plan: Option<&Plan>, raster: &Raster) {
        let y = self.bottom() + 16.0;
        out.push_str("<g class=\"mask-legend\">");
        let mut x = LEFT;
        for level in 1..=LEVELS {
            let _ =
                write!(out, "<rect class=\"d{level}\" x=\"{x}\" y=\"{y:.1}\" width=\"12\" height=\"11\"/>");
            x += 12.0;
        }
        let cell = |edges: &[usize]| edges.windows(2).map(|edge| edge[1] - edge[0]).max().unwrap_or(1) as u64;
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\">unmasked part, 0 to 100 %, of a cell of {} × {} tokens</text>",
            x + 6.0,
            y + 9.0,
            format_tokens(cell(&raster.q_edges)),
            format_tokens(cell(&raster.k_edges)),
        );
        if let Some(plan) = plan {
            let ranks = plan.ranks.len();
            let (mut x, y) = (LEFT, y + 20.0);
            for rank in 0..ranks.min(LEGEND_RANKS) {
                let _ = write!(
                    out,
                    "<rect x=\"{x}\" y=\"{y:.1}\" width=\"11\" height=\"11\" fill=\"var(--rank-{rank})\"/>\
                     <text x=\"{:.1}\" y=\"{:.1}\">{}{rank}</text>",
                    x + 15.0,
                    y + 9.5,
                    if rank == 0 { "rank " } else { "" },
                );
                x += if rank == 0 { 56.0 } else { 32.0 };
            }
            if ranks > LEGEND_RANKS {
                let more = if ranks > RANK_COLORS {
                    format!("… {}; colours repeat every {RANK_COLORS}", format_count(ranks as u64 - 1))
                } else {
                    format!("… {}", ranks - 1)
                };
                let _ = write!(out, "<text x=\"{x:.1}\" y=\"{:.1}\">{more}</text>", y + 9.5);
            }
        }
        out.push_str("</g>");
    }
}

/// At most `limit` + 1 round positions from 0, a power of two apart (so that `k` and `M` come out whole), or 1, 2, 5
/// times a power of ten where that is what the length is made of.
fn ticks(seqlen: usize, limit: usize) -> Vec<usize> {
    let binary = (0..).map(|exponent| 1usize << exponent);
    let decimal = (0..).flat_map(|exponent| [1, 2, 5].map(|digit| digit * 10usize.pow(exponent)));
    let fits = |step: &usize| seqlen / step <= limit.max(1);
    let step = if seqlen < 1024 || seqlen.is_multiple_of(1000) {
        decimal.take(60).find(fits)
    } else {
        binary.take(63).find(fits)
    };
    (0..=seqlen).step_by(step.unwrap_or(seqlen.max(1))).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
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
        for seqlen in [0, 1, 2, 7, 100, 1000, 1023, 1024, 5000, 131_072, 1 << 20, 4 << 20, (4 << 20) + 17] {
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
        for (seqlen_q, seqlen_k) in [(0, 0), (1, 1), (1, 1 << 20), (1 << 20, 1), (3, 2)] {
            let svg = drawing(&Mask::new(seqlen_q, seqlen_k, vec![]).unwrap());
            assert!(svg.starts_with("<svg") && svg.ends_with("</svg>"));
            assert!(!svg.contains("NaN") && !svg.contains("inf"), "{svg}");
        }
    }
}

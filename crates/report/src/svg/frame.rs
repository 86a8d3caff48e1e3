//! What surrounds the drawing of a mask: axes with token ticks, strips of owners, the legend.

use std::fmt::Write;

use counterpoint_mask::{Mask, Range, Raster};
use counterpoint_plan::{Dispatch, Plan};

use super::LEVELS;
use crate::{
    ownership::part_owners,
    palette::{RANK_COLORS, color_of},
    quantity::{format_count, format_tokens},
};

/// Longer side of the plot, in user units. Coordinates of cells are whole tenths of a unit, to keep paths short.
pub(super) const PLOT: f64 = 600.0;
/// Left end of the plot.
pub(super) const LEFT: f64 = 62.0;
const STRIP: f64 = 13.0;
const GAP: f64 = 4.0;
/// Parts of a strip, where there are more chunks.
const STRIP_PARTS: usize = 512;
/// Smallest part of a strip, in units, that holds the number of its rank.
const LABEL_ROOM: f64 = 11.0;
/// Ranks named one by one in the legend.
const LEGEND_RANKS: usize = 8;

/// A side of the mask.
#[derive(Clone, Copy)]
pub(super) enum Axis {
    Queries,
    Keys,
}

/// Where things lie in the drawing.
pub(super) struct Frame {
    pub(super) width: f64,
    pub(super) height: f64,
    pub(super) top: f64,
    pub(super) plot_width: f64,
    pub(super) plot_height: f64,
}

impl Frame {
    pub(super) fn of(mask: &Mask, with_owners: bool) -> Self {
        // Tokens are as long on both axes, until a side would be too thin to read.
        let ratio = mask.seqlen_k() as f64 / mask.seqlen_q() as f64;
        let plot_width = (PLOT * ratio.clamp(0.25, 1.0)).round();
        let plot_height = (PLOT / ratio.clamp(1.0, 4.0)).round();
        let strip = if with_owners { STRIP + GAP } else { 0.0 };
        let (top, right) = (36.0 + strip, strip + if with_owners { 8.0 } else { 18.0 });
        // A narrow plot must still have room for the legend.
        let width = (LEFT + plot_width + right).max(440.0);
        let legend = if with_owners { 62.0 } else { 42.0 };
        Self { width, height: top + plot_height + legend, top, plot_width, plot_height }
    }

    fn right(&self) -> f64 {
        LEFT + self.plot_width
    }

    fn bottom(&self) -> f64 {
        self.top + self.plot_height
    }

    /// Lines between chunks, where they are far enough apart.
    pub(super) fn chunk_lines(&self, out: &mut String, dispatch: &Dispatch) {
        let unit = self.plot_height / dispatch.seqlen() as f64;
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

    /// Who owns the tokens of an axis: queries at the right, keys at the top; named where there is room.
    pub(super) fn strip(&self, out: &mut String, axis: Axis, dispatch: &Dispatch) {
        let (seqlen, length) = match axis {
            Axis::Queries => (dispatch.seqlen(), self.plot_height),
            Axis::Keys => (dispatch.seqlen(), self.plot_width),
        };
        let parts: Vec<Range> = if dispatch.num_chunks() <= STRIP_PARTS {
            (0..dispatch.num_chunks()).map(|chunk| dispatch.chunk_range(chunk)).collect()
        } else {
            let cut = |index: usize| (index as u128 * seqlen as u128 / STRIP_PARTS as u128) as usize;
            (0..STRIP_PARTS).map(|index| Range::new(cut(index), cut(index + 1))).collect()
        };
        let owner = part_owners(dispatch, parts.iter().copied());
        let unit = length / seqlen as f64;
        out.push_str("<g class=\"mask-owners\">");
        let mut first = 0;
        for run in owner.chunk_by(|a, b| a == b) {
            let (start, end) = (parts[first].start, parts[first + run.len() - 1].end);
            first += run.len();
            let (rank, from, size) = (run[0], start as f64 * unit, (end - start) as f64 * unit);
            let (x, y, w, h, name) = match axis {
                Axis::Queries => (self.right() + GAP, self.top + from, STRIP, size, "queries"),
                Axis::Keys => (LEFT + from, self.top - GAP - STRIP, size, STRIP, "keys"),
            };
            let _ = write!(
                out,
                "<rect x=\"{x:.1}\" y=\"{y:.1}\" width=\"{w:.1}\" height=\"{h:.1}\" fill=\"var(--rank-{})\">\
                 <title>rank {rank}: {name} {} to {}</title></rect>",
                color_of(rank),
                format_count(start as u64),
                format_count(end as u64 - 1),
            );
            let digits = rank.to_string().len();
            let room = match axis {
                Axis::Queries => digits <= 2 && size >= LABEL_ROOM,
                Axis::Keys => size >= LABEL_ROOM + 6.0 * (digits as f64 - 1.0),
            };
            if room {
                let (x, y) = (x + w / 2.0, y + h / 2.0);
                let _ = write!(out, "<text class=\"mask-owner\" x=\"{x:.1}\" y=\"{y:.1}\">{rank}</text>");
            }
        }
        out.push_str("</g>");
    }

    pub(super) fn axes(&self, out: &mut String, seqlen_q: usize, seqlen_k: usize) {
        let strip = self.top - 36.0;
        out.push_str("<g class=\"mask-axes\"><path d=\"");
        let (mut labels, baseline) = (String::new(), self.top - strip - 6.0);
        for tick in ticks(seqlen_k, (self.plot_width / 75.0) as usize) {
            let x = LEFT + tick as f64 / seqlen_k as f64 * self.plot_width;
            let _ = write!(out, "M{x:.1} {:.1}v3", baseline + 3.0);
            let _ = write!(
                labels,
                "<text x=\"{x:.1}\" y=\"{baseline:.1}\">{}</text>",
                format_tokens(tick as u64)
            );
        }
        for tick in ticks(seqlen_q, (self.plot_height / 50.0) as usize) {
            let y = self.top + tick as f64 / seqlen_q as f64 * self.plot_height;
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

    pub(super) fn names(&self, out: &mut String) {
        let _ = write!(
            out,
            "<g class=\"mask-axes\"><text class=\"mask-name\" x=\"{x:.1}\" y=\"12\">keys →</text>\
             <text class=\"mask-name\" x=\"12\" y=\"{y:.1}\" transform=\"rotate(-90 12 {y:.1})\">← queries</text></g>",
            x = LEFT + self.plot_width / 2.0,
            y = self.top + self.plot_height / 2.0,
        );
    }

    pub(super) fn legend(&self, out: &mut String, plan: Option<&Plan>, raster: &Raster) {
        let y = self.bottom() + 16.0;
        out.push_str("<g class=\"mask-legend\">");
        let mut x = LEFT;
        for level in 1..=LEVELS {
            let _ =
                write!(out, "<rect class=\"d{level}\" x=\"{x}\" y=\"{y:.1}\" width=\"12\" height=\"11\"/>");
            x += 12.0;
        }
        let _ = write!(
            out,
            "<text x=\"{:.1}\" y=\"{:.1}\">unmasked part, 0 to 100 %, of a cell of {} × {} tokens</text>",
            x + 6.0,
            y + 9.0,
            format_tokens(raster.rows(0).len() as u64),
            format_tokens(raster.cols(0).len() as u64),
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
                x += if rank == 0 { 68.0 } else { 36.0 };
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
pub(super) fn ticks(seqlen: usize, limit: usize) -> Vec<usize> {
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

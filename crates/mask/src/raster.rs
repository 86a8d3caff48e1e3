//! Masks as pictures: dense for tests, and as grids of exact areas for terminals and drawings.

use crate::{Mask, Range};

/// A mask seen from far away: a grid of cells, each with the number of its unmasked pairs.
///
/// Cell `(x, y)` holds columns `x` of `width` equal parts of the keys and rows `y` of `height` equal parts of the
/// queries; where the lengths do not divide, parts differ by one token.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Raster {
    seqlen_q: usize,
    seqlen_k: usize,
    width: usize,
    height: usize,
    areas: Vec<u64>,
}

impl Raster {
    /// Cells in a row.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Rows of cells.
    pub fn height(&self) -> usize {
        self.height
    }

    /// The query rows of cell row `y`.
    pub fn rows(&self, y: usize) -> Range {
        part(self.seqlen_q, self.height, y)
    }

    /// The key columns of cell column `x`.
    pub fn cols(&self, x: usize) -> Range {
        part(self.seqlen_k, self.width, x)
    }

    /// Unmasked pairs of cell `(x, y)`.
    pub fn area(&self, x: usize, y: usize) -> u64 {
        self.areas[y * self.width + x]
    }

    /// The unmasked part of cell `(x, y)`: 0 exactly when nothing is unmasked, 1 exactly when everything is.
    pub fn density(&self, x: usize, y: usize) -> f64 {
        self.area(x, y) as f64 / (self.rows(y).len() as u64 * self.cols(x).len() as u64) as f64
    }

    /// The cells as lines of text, one character a cell, the first query row on top. A cell is drawn as empty or as
    /// full only when it is exactly that.
    pub fn picture(&self, style: PictureStyle) -> String {
        let shades = style.shades();
        let mut text = String::with_capacity(self.height * (self.width * 3 + 1));
        for y in 0..self.height {
            for x in 0..self.width {
                let density = self.density(x, y);
                let shade = match density {
                    0.0 => 0,
                    1.0 => shades.len() - 1,
                    _ => 1 + ((density * (shades.len() - 2) as f64) as usize).min(shades.len() - 3),
                };
                text.push(shades[shade]);
            }
            text.push('\n');
        }
        text
    }
}

/// The characters of a [`Raster::picture`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PictureStyle {
    /// Shading blocks: `·░▒▓█`.
    Blocks,
    /// `.-+*#`, for terminals and files without Unicode.
    Ascii,
}

impl PictureStyle {
    /// From empty to full.
    fn shades(self) -> [char; 5] {
        match self {
            Self::Blocks => ['·', '░', '▒', '▓', '█'],
            Self::Ascii => ['.', '-', '+', '*', '#'],
        }
    }
}

/// Part `index` of `parts` nearly equal parts of `[0, len)`.
fn part(len: usize, parts: usize, index: usize) -> Range {
    let cut = |i: usize| (i as u128 * len as u128 / parts as u128) as usize;
    Range { start: cut(index), end: cut(index + 1) }
}

/// The part that holds `token`: the inverse of [`part`].
fn part_of(len: usize, parts: usize, token: usize) -> usize {
    (((token as u128 + 1) * parts as u128 - 1) / len as u128) as usize
}

impl Mask {
    /// The dense picture, row by row: `seqlen_q * seqlen_k` booleans. For tests and small masks.
    pub fn rasterise(&self) -> Vec<bool> {
        let mut dense = vec![false; self.seqlen_q() * self.seqlen_k()];
        for band in self.bands() {
            let rows = band.rows();
            for row in rows.start..rows.end {
                let columns = band.columns(row);
                let offset = row * self.seqlen_k();
                dense[offset + columns.start..offset + columns.end].fill(true);
            }
        }
        dense
    }

    /// The mask as a grid of at most `width` x `height` cells (never more cells than tokens, never fewer than one).
    /// Exact areas in closed form; every slice visits only the cells that it reaches.
    pub fn raster(&self, width: usize, height: usize) -> Raster {
        let (seqlen_q, seqlen_k) = (self.seqlen_q(), self.seqlen_k());
        let (width, height) = (width.clamp(1, seqlen_k), height.clamp(1, seqlen_q));
        let mut raster = Raster { seqlen_q, seqlen_k, width, height, areas: vec![0; width * height] };
        for band in self.bands().filter_map(|band| band.trim()) {
            let first_y = part_of(seqlen_q, height, band.q_range.start);
            let last_y = part_of(seqlen_q, height, band.q_range.end - 1);
            for y in first_y..=last_y {
                let Some(strip) = band.clip(&raster.rows(y), &band.k_range).trim() else { continue };
                let first_x = part_of(seqlen_k, width, strip.k_range.start);
                let last_x = part_of(seqlen_k, width, strip.k_range.end - 1);
                for x in first_x..=last_x {
                    raster.areas[y * width + x] += strip.clip(&strip.q_range, &raster.cols(x)).area();
                }
            }
        }
        raster
    }

    /// A small picture for a terminal, at most `width` x `height` characters. See [`Raster::picture`].
    pub fn picture(&self, width: usize, height: usize, style: PictureStyle) -> String {
        self.raster(width, height).picture(style)
    }
}

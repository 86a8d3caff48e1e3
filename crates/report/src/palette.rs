use std::fmt::Write;

/// Number of different rank colours; ranks beyond take them again from the start, so every drawing also says the rank
/// in words.
pub(crate) const RANK_COLORS: usize = 24;

/// Eight hues that stay apart under the common kinds of colour blindness (after Okabe and Ito, "Color universal
/// design", 2008, with yellow darkened and black replaced, so that all eight show on light and dark paper), in three
/// tones: plain, deep, pale.
const LIGHT: [&str; RANK_COLORS] = [
    "#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#a39a00", "#6f7680", "#004c78",
    "#a86f00", "#00694c", "#8f4a72", "#2a7fb0", "#8f3e00", "#6b6500", "#454b54", "#66aad1", "#f3c766",
    "#66c5ab", "#e3b3cd", "#a3d6f3", "#e89e66", "#cec866", "#a9aeb5",
];
const DARK: [&str; RANK_COLORS] = [
    "#3d9bd1", "#f0b429", "#2dbb91", "#db93bb", "#7cc7f2", "#ec7b2b", "#8f8a1c", "#98a1ad", "#1f6e9e",
    "#b98212", "#168064", "#a8658c", "#4495c4", "#b4560f", "#6b6712", "#69717c", "#93c9ea", "#f8d98a",
    "#8adcc3", "#efc6db", "#bde3fa", "#f6b283", "#e0da83", "#c5cbd3",
];

/// Index of the colour of `rank`.
pub(crate) fn color_of(rank: usize) -> usize {
    rank % RANK_COLORS
}

/// Custom properties of the drawing colours for `selector`: `--rank-0` and so on, `--ink`, `--soft` (secondary text and
/// lines), `--line`, `--paper`, `--plain` (a mask without ranks); dark ones where the reader prefers dark.
pub(crate) fn color_properties(selector: &str) -> String {
    let properties = |ranks: &[&str; RANK_COLORS], base: &str| {
        let mut out = base.to_owned();
        for (index, color) in ranks.iter().enumerate() {
            let _ = write!(out, "--rank-{index}:{color};");
        }
        out
    };
    let light = properties(
        &LIGHT,
        "--ink:#1c2126;--soft:#5b6570;--line:#d8dde2;--paper:#ffffff;--ground:#f5f6f4;--plain:#0a5c8c;\
         --compute:#0072b2;--communication:#d98200;--wait:#8a929b;--good:#0b7a4b;--bad:#b3261e;",
    );
    let dark = properties(
        &DARK,
        "--ink:#e6e9ec;--soft:#9aa5b1;--line:#333b44;--paper:#1a1f25;--ground:#12161a;--plain:#57b1e4;\
         --compute:#3d9bd1;--communication:#f0b429;--wait:#7b8590;--good:#4cc38a;--bad:#ff8a80;",
    );
    format!("{selector}{{{light}}}@media (prefers-color-scheme:dark){{{selector}{{{dark}}}}}")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn channels(color: &str) -> [f64; 3] {
        [1, 3, 5].map(|at| f64::from(u8::from_str_radix(&color[at..at + 2], 16).unwrap()) / 255.0)
    }

    fn luminance(color: &str) -> f64 {
        let linear =
            channels(color).map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) });
        0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    }

    /// sRGB as somebody without green receptors sees it (Machado, Oliveira and Fernandes 2009, table 1, severity 1.0),
    /// on linear light.
    fn deuteranope(color: &str) -> [f64; 3] {
        let c =
            channels(color).map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) });
        [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]]
            .map(|row| row.iter().zip(c).map(|(m, c)| m * c).sum::<f64>().clamp(0.0, 1.0).powf(1.0 / 2.2))
    }

    #[test]
    fn neighbouring_ranks_differ_even_without_green_receptors() {
        for palette in [&LIGHT, &DARK] {
            for a in 0..8 {
                for b in 0..a {
                    let (x, y) = (deuteranope(palette[a]), deuteranope(palette[b]));
                    let distance = x.iter().zip(y).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
                    assert!(distance > 0.08, "{} and {}: {distance}", palette[a], palette[b]);
                }
            }
        }
    }

    #[test]
    fn every_color_shows_on_its_paper() {
        for (palette, paper) in [(&LIGHT, "#ffffff"), (&DARK, "#1a1f25")] {
            for color in palette {
                let (a, b) = (luminance(color), luminance(paper));
                let contrast = (a.max(b) + 0.05) / (a.min(b) + 0.05);
                assert!(contrast > 1.5, "{color} on {paper}: {contrast}");
            }
        }
    }
}

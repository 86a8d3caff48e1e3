//! Colours of ranks and activities, and of the page.

use std::fmt::Write;

/// Number of different rank colours; ranks beyond take them again from the start, so every drawing also says the rank
/// in words.
pub(crate) const RANK_COLORS: usize = 24;

/// Colours of ranks: from orange over green to blue, found by a search for the largest distances in OKLab among those that have a
/// contrast of 3 with the paper; the first eight stay apart under the common kinds of colour blindness too. Violet, crimson and grey
/// are left to activities ([`ACTIVITIES`]), so that no rank looks like one.
const LIGHT: [&str; RANK_COLORS] = [
    "#116bb5", "#e25c26", "#0e915f", "#621f02", "#079fa8", "#003672", "#358bf6", "#045b61", "#a08b3e",
    "#0c7501", "#b66d54", "#54a31b", "#6c4436", "#094d9a", "#8d5d1c", "#479f7e", "#4e4a02", "#0f8dc8",
    "#c04201", "#044044", "#74840a", "#067253", "#055f89", "#064502",
];
const DARK: [&str; RANK_COLORS] = [
    "#53a3f2", "#fd811b", "#0fbb7c", "#dbe237", "#08729a", "#fecab8", "#16f5f7", "#a25c43", "#117f06",
    "#e0b43e", "#1e78e1", "#8fc4d5", "#9f8d05", "#64e37e", "#029983", "#d3a595", "#517355", "#c6835a",
    "#b6e4ca", "#91b906", "#0cc3f6", "#0f8dc8", "#d85218", "#a5c883",
];

/// Colours of what a timeline shows (computation, communication, waiting), on light and on dark paper.
const ACTIVITIES: [[&str; 3]; 2] = [["#6d28b8", "#e0277a", "#878f98"], ["#b48cf5", "#ff5c9e", "#848e99"]];

/// Index of the colour of `rank`.
pub(crate) fn color_of(rank: usize) -> usize {
    rank % RANK_COLORS
}

/// Custom properties of the drawing colours for `selector`: `--rank-0` and so on, `--ink`, `--soft` (secondary text and
/// lines), `--line`, `--paper`, `--plain` (a mask without ranks); dark ones where the reader prefers dark.
pub(crate) fn color_properties(selector: &str) -> String {
    let properties = |ranks: &[&str; RANK_COLORS], [compute, communication, wait]: [&str; 3], base: &str| {
        let mut out = base.to_owned();
        let _ = write!(out, "--compute:{compute};--communication:{communication};--wait:{wait};");
        for (index, color) in ranks.iter().enumerate() {
            let _ = write!(out, "--rank-{index}:{color};");
        }
        out
    };
    let light = properties(
        &LIGHT,
        ACTIVITIES[0],
        "--ink:#1c2126;--soft:#5b6570;--line:#d8dde2;--paper:#ffffff;--ground:#f5f6f4;--plain:#0a5c8c;\
         --good:#0b7a4b;--bad:#b3261e;",
    );
    let dark = properties(
        &DARK,
        ACTIVITIES[1],
        "--ink:#e6e9ec;--soft:#9aa5b1;--line:#333b44;--paper:#1a1f25;--ground:#12161a;--plain:#57b1e4;\
         --good:#4cc38a;--bad:#ff8a80;",
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

    /// Contrast of WCAG 2, which asks for 3 of graphics.
    fn contrast(a: &str, b: &str) -> f64 {
        let (a, b) = (luminance(a), luminance(b));
        (a.max(b) + 0.05) / (a.min(b) + 0.05)
    }

    /// OKLab (Ottosson 2020): equal distances look equally far apart.
    fn oklab(color: &str) -> [f64; 3] {
        let c =
            channels(color).map(|c| if c <= 0.04045 { c / 12.92 } else { ((c + 0.055) / 1.055).powf(2.4) });
        let times = |matrix: [[f64; 3]; 3], v: [f64; 3]| {
            matrix.map(|row| row.iter().zip(v).map(|(m, x)| m * x).sum::<f64>())
        };
        let cones = times(
            [
                [0.4122214708, 0.5363325363, 0.0514459929],
                [0.2119034982, 0.6806995451, 0.1073969566],
                [0.0883024619, 0.2817188376, 0.6299787005],
            ],
            c,
        );
        times(
            [
                [0.2104542553, 0.7936177850, -0.0040720468],
                [1.9779984951, -2.4285922050, 0.4505937099],
                [0.0259040371, 0.7827717662, -0.8086757660],
            ],
            cones.map(f64::cbrt),
        )
    }

    #[test]
    fn every_color_has_a_contrast_of_3_with_its_paper() {
        for (palette, activities, paper) in
            [(&LIGHT, ACTIVITIES[0], "#ffffff"), (&DARK, ACTIVITIES[1], "#1a1f25")]
        {
            for color in palette.iter().chain(&activities) {
                assert!(contrast(color, paper) >= 3.0, "{color} on {paper}: {}", contrast(color, paper));
            }
        }
    }

    /// No rank has the hue of an activity, nor do two activities have one.
    #[test]
    fn ranks_and_activities_share_no_color() {
        let hue = |[_, a, b]: [f64; 3]| b.atan2(a).to_degrees();
        for (palette, activities) in [(&LIGHT, ACTIVITIES[0]), (&DARK, ACTIVITIES[1])] {
            for activity in activities {
                let other = oklab(activity);
                for rank in palette {
                    let own = oklab(rank);
                    let distance = own.iter().zip(other).map(|(x, y)| (x - y).powi(2)).sum::<f64>().sqrt();
                    assert!(distance > 0.09, "{rank} and {activity}: {distance}");
                }
            }
            // Grey has no hue.
            for activity in &activities[..2] {
                for color in palette.iter().chain(activities[..2].iter().filter(|other| *other != activity)) {
                    let apart = (hue(oklab(color)) - hue(oklab(activity))).abs();
                    let apart = apart.min(360.0 - apart);
                    assert!(apart > 25.0, "{color} and {activity}: {apart} degrees");
                }
            }
        }
    }
}

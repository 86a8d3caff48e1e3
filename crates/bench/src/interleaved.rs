//! Interleaved runs: a GPU at its power limit is a tenth slower at one time than at another, so what is compared runs
//! side by side, each now behind one and now behind another.

/// Of the time with nothing side by side: where less can be hidden, a share of it says nothing.
pub(crate) const LEAST_HIDEABLE: f64 = 0.01;

/// An efficiency that is known less well is no figure.
pub(crate) const LARGEST_NOISE: f64 = 0.2;

/// An efficiency, unless it is known less well than a figure must be.
pub(crate) fn figure(efficiency: Option<f64>, noise: Option<f64>) -> Option<f64> {
    efficiency.filter(|_| noise.is_some_and(|noise| noise <= LARGEST_NOISE))
}

/// An efficiency in a table: `not known` where only its noise is, and a dash where there is none.
pub(crate) fn efficiency_text(efficiency: Option<f64>, noise: Option<f64>) -> String {
    match (efficiency, noise) {
        (Some(efficiency), Some(noise)) if noise >= 0.005 => format!("{efficiency:.2}±{noise:.2}"),
        (Some(efficiency), _) => format!("{efficiency:.2}"),
        (None, Some(_)) => "not known".to_owned(),
        (None, None) => "–".to_owned(),
    }
}

/// The order in which `count` variants run in a round.
pub(crate) fn run_order(round: usize, count: usize) -> impl Iterator<Item = usize> {
    let forwards = round.is_multiple_of(2);
    (0..count).map(move |at| (round + if forwards { at } else { count - 1 - at }) % count)
}

/// By how much each run is shorter than the one of its round with nothing side by side, in seconds.
pub(crate) fn saved(sequential: &[f64], own: &[f64]) -> Vec<f64> {
    sequential.iter().zip(own).map(|(plain, own)| plain - own).collect()
}

/// To how much the median of these is known: twice its standard error, by the middle half of them, which single runs that something else
/// held up do not widen. It is 1.25 times that of a mean, and the middle half of normal values is 1.35 of their deviations wide.
pub(crate) fn noise(samples: &[f64]) -> f64 {
    let mut sorted = samples.to_vec();
    sorted.sort_by(f64::total_cmp);
    let count = sorted.len();
    let quartiles = sorted.get(count / 4).zip(sorted.get(3 * count / 4));
    quartiles.map_or(0.0, |(low, high)| 2.0 * 1.25 / 1.35 * (high - low) / (count as f64).sqrt())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    #[test]
    fn every_round_has_all_and_every_order_comes() {
        let orders: BTreeSet<Vec<usize>> = (0..6).map(|round| run_order(round, 3).collect()).collect();
        assert_eq!(orders.len(), 6);
        for mut order in orders {
            order.sort_unstable();
            assert_eq!(order, [0, 1, 2]);
        }
        assert_eq!(run_order(7, 1).collect::<Vec<_>>(), [0]);
        assert_eq!(run_order(7, 0).count(), 0);
    }

    #[test]
    fn an_efficiency_that_is_not_known_is_no_figure() {
        let text = |efficiency, noise| efficiency_text(figure(efficiency, noise), noise);
        assert_eq!(text(Some(0.93), Some(0.2)), "0.93±0.20");
        assert_eq!(text(Some(0.93), Some(0.21)), "not known");
        assert_eq!(text(Some(0.0), Some(0.0)), "0.00");
        assert_eq!(text(None, None), "–");
    }

    #[test]
    fn noise_is_that_of_the_median() {
        assert_eq!([noise(&[]), noise(&[3.0]), noise(&[2.0; 9])], [0.0; 3]);
        let normal: Vec<f64> = (0..100).map(|i| f64::from(i * 37 % 100)).collect();
        assert!((noise(&normal) - 2.0 * 1.25 / 1.35 * 50.0 / 10.0).abs() < 1e-9);
        // A few runs that were held up change little, and they are not many.
        let mut some: Vec<f64> = normal.iter().map(|value| value / 100.0).collect();
        let before = noise(&some);
        some[3] = 1e6;
        assert!(noise(&some) < 1.1 * before);
        let unlike: Vec<f64> = (0..16).map(|run| if run % 2 == 0 { -1e-3 } else { 1e-3 }).collect();
        assert!(noise(&unlike) > 0.5e-3);
    }
}

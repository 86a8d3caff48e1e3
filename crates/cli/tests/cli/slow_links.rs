//! CPU ranks over imitated links: what is run by default, compared with every policy that CPU ranks have, by the clock.

use std::collections::BTreeMap;

use crate::support::Folder;

/// Every policy that CPU ranks run attention by, and what is run where none is named.
const POLICIES: [&str; 6] = [
    "auto",
    "sequential",
    "concurrent",
    "kernel-barrier",
    "concurrent+sm-margin=1",
    "kernel-barrier+sm-margin=1",
];

/// Runs of each policy, interleaved.
const ROUNDS: usize = 7;

fn median(mut seconds: Vec<f64>) -> f64 {
    seconds.sort_by(f64::total_cmp);
    seconds[seconds.len() / 2]
}

/// One after the other are links on which communication takes a fraction of the computation, as long, and several times as long.
#[test]
#[ignore = "compares times: on a machine that does nothing else"]
fn the_default_is_as_fast_as_the_best() {
    let folder = Folder::new();
    let problem =
        "attention --mask causal:1k --heads-q 4 --heads-kv 2 --head-dim 64 --cp-size 2 --backward --json";
    for link in ["100,0.1", "1000,0.01", "10000,0.002"] {
        let mut taken: BTreeMap<&str, [Vec<f64>; 2]> = BTreeMap::new();
        for round in 0..=ROUNDS {
            for policy in POLICIES {
                let line = format!("{problem} --slow-link {link} --overlap {policy}");
                let document = folder.run(&line).ok().json();
                // The first run of each meets cold files.
                if round > 0 {
                    let of_passes = taken.entry(policy).or_default();
                    for (seconds, pass) in of_passes.iter_mut().zip(["forward", "backward"]) {
                        seconds.push(document["seconds"][pass].as_f64().unwrap());
                    }
                }
            }
        }
        let medians: BTreeMap<&str, f64> = taken
            .into_iter()
            .map(|(policy, of_passes)| (policy, of_passes.map(median).iter().sum()))
            .collect();
        let best = medians.values().copied().fold(f64::INFINITY, f64::min);
        for (policy, seconds) in &medians {
            println!("{link}: {policy} {seconds:.4} s, {:.3} of the best", seconds / best);
        }
        assert!(medians["auto"] <= 1.05 * best, "{link}: {medians:?}");
    }
}

//! A group that lives: thousands of masks prepared, called and dropped, in another order on every rank, and nothing grows. A test
//! program of its own, because it counts what the process has.

use std::fs;
use std::time::Duration;

use counterpoint_exec::{CpuBackend, CpuMachine, CpuTransport, Group, Machine, TcpLoopback, WorldConfig};
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::selftest::Soak;

const RANKS: usize = 4;
/// Without `SOAK_MASKS`, which docs/testing.md names.
const MASKS: usize = 2_000;
/// After so many, nothing grows any more.
const WARM: usize = 100;

#[test]
fn masks_come_and_go_and_nothing_grows() {
    let masks = std::env::var("SOAK_MASKS").map_or(MASKS, |masks| masks.parse().unwrap());
    soak(&CpuMachine::new(0, None).unwrap(), masks);
    soak(&TcpLoopback::new(None), WARM + masks / 10);
}

fn soak<M: Machine<Backend = CpuBackend, Transport = CpuTransport>>(machine: &M, masks: usize) {
    let seed = rand::random();
    println!("seed {seed}");
    let config = WorldConfig { limit: Duration::from_secs(60), poison: false, ..WorldConfig::default() };
    let group = Group::connect(machine, RANKS, config).unwrap();
    let spec = AttentionSpec::new(2, 2, 4, DType::F32);
    let soak = Soak::new(&spec, RANKS, 200, 1..=9, 4, seed).unwrap();
    let step_through = |masks| assert_eq!(soak.run(&group, masks, |part| part()).unwrap().0, 0);
    step_through(0..WARM);
    let before = Footprint::now();
    step_through(WARM..masks);
    let after = Footprint::now();
    println!("{masks} masks: {before:?} before, {after:?} after");
    assert_eq!(after.threads, before.threads);
    assert_eq!(after.descriptors, before.descriptors);
    // Allocators keep some of what they are given back. 10,000 masks leave one or two megabytes.
    assert!(after.resident < before.resident + (6 << 20) + masks * 1024, "{before:?} {after:?}");
    group.close().unwrap();
}

/// What the process has.
#[derive(Debug)]
struct Footprint {
    threads: usize,
    descriptors: usize,
    resident: usize,
}

impl Footprint {
    fn now() -> Self {
        let entries = |folder: &str| fs::read_dir(folder).unwrap().count();
        // A thread that has been joined may take a moment to go.
        let threads = (0..50).map(|_| {
            std::thread::sleep(Duration::from_millis(4));
            entries("/proc/self/task")
        });
        let pages: usize =
            fs::read_to_string("/proc/self/statm").unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        Self {
            threads: threads.min().unwrap(),
            descriptors: entries("/proc/self/fd"),
            resident: pages * 4096,
        }
    }
}

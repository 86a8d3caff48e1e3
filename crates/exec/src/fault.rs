//! Faults that tests inject into runs.

use std::time::Duration;

use crate::OpPlace;

/// Where a fault strikes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FaultPoint {
    /// Before every operation.
    Everywhere,
    /// Before the operation of this index in the Program.
    Op(usize),
    /// Before operations with this label, in this stage when one is given.
    Label {
        /// The label, such as `cast kv`.
        label: String,
        /// The stage; `None` for any.
        stage: Option<usize>,
    },
}

/// What goes wrong.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum FaultKind {
    /// The operation panics.
    Panic,
    /// The operation sleeps before it does anything, and nothing can wake it. Its span shows it.
    Stall(Duration),
    /// The operation starts late by a pseudo-random time of at most `max`, a function of the seed, the rank, the operation
    /// and how often it ran. Its span begins after the delay.
    Delay {
        /// Seed.
        seed: u64,
        /// The longest delay.
        max: Duration,
    },
}

/// A test tool: makes one rank misbehave at chosen operations, so that limits, errors and orders can be tested. It costs
/// nothing when none is given.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FaultInjection {
    /// The rank.
    pub rank: usize,
    /// Only in the Program of this name; `None` for any.
    pub program: Option<String>,
    /// Where.
    pub at: FaultPoint,
    /// What.
    pub kind: FaultKind,
}

impl FaultInjection {
    pub(crate) fn strikes(&self, rank: usize, program: Option<&str>, place: &OpPlace) -> bool {
        self.rank == rank
            && (self.program.is_none() || self.program.as_deref() == program)
            && match &self.at {
                FaultPoint::Everywhere => true,
                FaultPoint::Op(index) => *index == place.index,
                FaultPoint::Label { label, stage } => {
                    **label == *place.label && (stage.is_none() || *stage == place.stage)
                }
            }
    }

    /// On the operation's thread, before it starts: sleeps for a delay.
    pub(crate) fn delay_start(&self, place: &OpPlace, occurrence: u64) {
        if let FaultKind::Delay { seed, max } = self.kind {
            let mut state = seed;
            for word in [self.rank as u64, place.index as u64, occurrence] {
                state = mix(state ^ word);
            }
            std::thread::sleep(max.mul_f64((state >> 11) as f64 / (1u64 << 53) as f64));
        }
    }

    /// On the operation's thread, as the first thing it does: panics or stalls.
    pub(crate) fn strike(&self) {
        match self.kind {
            FaultKind::Panic => panic!("injected panic"),
            FaultKind::Stall(duration) => std::thread::sleep(duration),
            FaultKind::Delay { .. } => {}
        }
    }
}

/// One step of SplitMix64 (Steele, Lea, Flood: Fast splittable pseudorandom number generators, 2014).
fn mix(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

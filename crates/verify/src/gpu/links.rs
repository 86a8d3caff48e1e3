//! Checks of kernels that talk to their peer on another GPU while both run, and of their limit when it never answers.

use std::time::Duration;

use counterpoint_reference::selftest::SelfCheck;

use counterpoint_cuda::kernel::{LinkDirection, LinkEnd, LinkLitmus, LinkPeers};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, Stream, StreamPriority};

/// Device-side barriers: two ranks send each other messages in both ways that there are, `rounds` times with
/// random delays, on the first two of `devices` or on two streams of the only one. Every word must be of its round. Then a rank
/// waits for one that never comes, and must say so in time. Likewise group-casts by kernels that round.
///
/// # Errors
/// When a kernel cannot be compiled or launched.
pub fn selftest_links(devices: &[Device], rounds: u32) -> Result<Vec<SelfCheck>, CudaError> {
    let Some(first) = devices.first().filter(|device| device.arch().is_hopper()) else {
        return Ok(Vec::new());
    };
    let second = devices.get(1).unwrap_or(first);
    let place = if second == first { "two streams of a GPU" } else { "two GPUs" };
    let mut checks = Vec::new();
    for (name, direction) in [("read", LinkDirection::Pull), ("write", LinkDirection::Push)] {
        let ranks = [Side::new(first, direction)?, Side::new(second, direction)?];
        for (at, rank) in ranks.iter().enumerate() {
            rank.launch(at, &ranks, direction, rounds, Duration::from_secs(10))?;
        }
        let mut wrong = 0;
        for rank in &ranks {
            let result = rank.litmus.result(&rank.stream)?;
            wrong += result.wrong + (u64::from(rounds) - result.rounds);
        }
        let name =
            format!("{rounds} barriers of kernels that {name} the other's memory, {place}, stale flags");
        checks.push(SelfCheck::of(name, 0, wrong as f64, 0.0));
    }
    let limit = Duration::from_millis(20);
    let ranks = [Side::new(first, LinkDirection::Pull)?, Side::new(second, LinkDirection::Pull)?];
    ranks[0].launch(0, &ranks, LinkDirection::Pull, 1, limit)?;
    let result = ranks[0].litmus.result(&ranks[0].stream)?;
    let missed = ranks[0].end.missed();
    let named = result.rounds == 0 && missed.is_some_and(|missed| (missed.rank, missed.wanted) == (1, 1));
    let name = format!("a rank that does not come within {limit:?} is named");
    checks.push(SelfCheck::of(name, 0, f64::from(u8::from(!named)), 0.0));
    checks.extend(super::link_casts::checks([first, second], place)?);
    Ok(checks)
}

/// One of two ranks.
struct Side {
    stream: Stream,
    end: LinkEnd,
    litmus: LinkLitmus,
    input: DeviceBuffer,
    output: DeviceBuffer,
}

impl Side {
    fn new(device: &Device, direction: LinkDirection) -> Result<Self, CudaError> {
        let stream = Stream::new(device, StreamPriority::High)?;
        Ok(Self {
            end: LinkEnd::new(&stream)?,
            litmus: LinkLitmus::new(&stream, direction)?,
            input: DeviceBuffer::new(device, LinkLitmus::BYTES)?,
            output: DeviceBuffer::new(device, LinkLitmus::BYTES)?,
            stream,
        })
    }

    fn launch(
        &self,
        rank: usize,
        ranks: &[Self; 2],
        direction: LinkDirection,
        rounds: u32,
        limit: Duration,
    ) -> Result<(), CudaError> {
        let other = 1 - rank;
        let peers = LinkPeers {
            mailboxes: vec![(other, ranks[other].end.mailbox().clone())],
            announce_to: vec![other],
            work_on: vec![other],
        };
        let (input, output) = ([self.input.address()], [self.output.address()]);
        let (announced, own) = match direction {
            LinkDirection::Pull => (input, output),
            LinkDirection::Push => (output, input),
        };
        let call = self.end.call(rank, &peers, &announced, &own, limit)?;
        // SAFETY: the tensors and mailboxes live until both streams are idle; each kernel has one block, on a stream of its own.
        unsafe { self.litmus.launch(&self.stream, &call, rank as u32, rounds) }
    }
}

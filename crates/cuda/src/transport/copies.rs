//! The copy engines: each rank pushes its rows into the other ranks' memory, on a stream for each of them.

use counterpoint_driver::{PitchedCopy, copy_bytes};
use counterpoint_exec::collective::PeerRows;
use counterpoint_mask::Range;

use crate::{CudaError, Device, Event, Stream, StreamPriority};

/// One copy: lines of bytes that lie together on both sides, as far apart as the pitches say, of the tensor with this index.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct CopyRun {
    pub(super) tensor: usize,
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) bytes: u64,
    pub(super) lines: u64,
    pub(super) from_pitch: u64,
    pub(super) to_pitch: u64,
}

/// What goes to one rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct PeerCopies {
    pub(super) rank: usize,
    pub(super) runs: Vec<CopyRun>,
}

/// The largest distance of two lines of one copy that every device takes.
const MOST_PITCH: u64 = (1 << 31) - 1;

/// The rows that go to one rank and those that it receives them as, as few copies: an engine takes microseconds to begin one.
/// Ranges that follow each other on both sides are one line; lines of one length at equal distances are one copy.
pub(super) fn peer_copies(outgoing: &PeerRows, received: &[Range], row_bytes: &[u64]) -> PeerCopies {
    let mut rows: Vec<(Range, Range)> = Vec::new();
    for (&from, &to) in outgoing.rows.iter().zip(received) {
        match rows.last_mut() {
            Some((last_from, last_to)) if last_from.end == from.start && last_to.end == to.start => {
                (last_from.end, last_to.end) = (from.end, to.end);
            }
            _ => rows.push((from, to)),
        }
    }
    let mut runs: Vec<CopyRun> = Vec::new();
    for (tensor, row) in row_bytes.iter().enumerate().filter(|(_, row)| **row > 0) {
        for (from, to) in &rows {
            let line = CopyRun {
                tensor,
                from: from.start as u64 * row,
                to: to.start as u64 * row,
                bytes: from.len() as u64 * row,
                lines: 1,
                from_pitch: 0,
                to_pitch: 0,
            };
            if !runs.last_mut().is_some_and(|run| run.take(&line)) {
                runs.push(line);
            }
        }
    }
    PeerCopies { rank: outgoing.rank, runs }
}

/// How copies share the links of their rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum CopyPace {
    /// At their full rate, which leaves what kernels send hardly any of it.
    Full,
    /// With gaps, in which kernels send: as copies of so many bytes, each of which an engine takes time to begin.
    Pieces(u64),
}

impl CopyPace {
    /// Under a product that sends its tiles. An engine takes some 2.6 us to begin a copy, and as long for a megabyte; such a product needs
    /// a third of the link's rate (8.6 MB in the 77 us of a round of tiles with k = 7168).
    pub(super) const WITH_KERNELS: Self = Self::Pieces(1 << 20);
}

impl PeerCopies {
    /// Cut up as the pace wants it. Lines of one copy stay together.
    pub(super) fn at(mut self, pace: CopyPace) -> Self {
        if let CopyPace::Pieces(bytes) = pace {
            self.runs = self.runs.iter().flat_map(|run| run.pieces(bytes.max(1))).collect();
        }
        self
    }

    pub(super) fn bytes(&self) -> u64 {
        self.runs.iter().map(|run| run.bytes * run.lines).sum()
    }
}

impl CopyRun {
    /// Adds a line, if it lies where the next one would.
    fn take(&mut self, line: &Self) -> bool {
        if (self.tensor, self.bytes) != (line.tensor, line.bytes) {
            return false;
        }
        // Rows may be received in any order, so the next line may lie before this one.
        let distances = (line.from.checked_sub(self.from), line.to.checked_sub(self.to));
        let (Some(from), Some(to)) = distances else { return false };
        let (from_pitch, to_pitch) = match self.lines {
            1 => (from, to),
            lines => (from / lines, to / lines),
        };
        let fits = [from_pitch, to_pitch].iter().all(|pitch| (self.bytes..=MOST_PITCH).contains(pitch));
        let follows = from == from_pitch * self.lines && to == to_pitch * self.lines;
        let alike = self.lines == 1 || (from_pitch, to_pitch) == (self.from_pitch, self.to_pitch);
        if !(fits && follows && alike) {
            return false;
        }
        (self.lines, self.from_pitch, self.to_pitch) = (self.lines + 1, from_pitch, to_pitch);
        true
    }

    /// The same as copies of at most so many bytes, where it is one line.
    fn pieces(self, most: u64) -> impl Iterator<Item = Self> {
        let step = if self.lines == 1 { most } else { self.bytes.max(1) };
        (0..self.bytes.div_ceil(step)).map(move |piece| {
            let begin = piece * step;
            let bytes = step.min(self.bytes - begin);
            Self { from: self.from + begin, to: self.to + begin, bytes, ..self }
        })
    }

    /// Enqueues it, from and to these tensors.
    ///
    /// # Safety
    /// All lines lie inside the tensors, which live until the copy is made, and nobody else touches them meanwhile.
    unsafe fn launch(&self, stream: &Stream, from: u64, to: u64) -> Result<(), CudaError> {
        let (from, to, bytes) = (from + self.from, to + self.to, self.bytes as usize);
        if self.lines == 1 {
            // SAFETY: the caller's promise.
            return unsafe { copy_bytes(stream, from, to, bytes) };
        }
        let (from_pitch, to_pitch) = (self.from_pitch as usize, self.to_pitch as usize);
        let copy = PitchedCopy { from, to, bytes, lines: self.lines as usize, from_pitch, to_pitch };
        // SAFETY: the caller's promise.
        unsafe { copy.launch(stream) }
    }
}

/// Bytes to one rank from which copies to several follow each other, each at the link's full rate: copies to three ranks at once take
/// 1.6 times as long on four H200s. Short ones are begun at once.
const IN_TURN: u64 = 1 << 20;

/// A stream of a rank for each rank that it copies to, and the event that ends what is there. The first one takes long copies.
pub(super) struct CopyStreams {
    streams: Vec<(usize, Stream, Event)>,
}

impl CopyStreams {
    /// Streams to `peers`.
    pub(super) fn new(device: &Device, peers: impl Iterator<Item = usize>) -> Result<Self, CudaError> {
        let stream = |peer| -> Result<_, CudaError> {
            Ok((peer, Stream::new(device, StreamPriority::High)?, Event::new(device)?))
        };
        Ok(Self { streams: peers.map(stream).collect::<Result<_, _>>()? })
    }

    /// Enqueues the copies to all of `peers` behind what is on `queue`, where their ends are awaited by [`CopyStreams::join`]: each
    /// after the event that says that its target may be written. `inputs` are the tensors' addresses, `targets` those of a rank's.
    ///
    /// # Safety
    /// The runs lie inside the tensors, which live until the copies are made, and nobody else touches them meanwhile.
    pub(super) unsafe fn start(
        &self,
        queue: &Stream,
        ready: &Event,
        peers: &[PeerCopies],
        writable: impl Fn(usize) -> Option<Event>,
        inputs: &[u64],
        targets: impl Fn(usize, usize) -> u64,
    ) -> Result<(), CudaError> {
        for peer in peers {
            let own = self.taking(peer).map(|at| &self.streams[at].1);
            let stream = own.unwrap_or(queue);
            if own.is_some() {
                stream.wait(ready)?;
            }
            if let Some(writable) = writable(peer.rank) {
                stream.wait(&writable)?;
            }
            for run in &peer.runs {
                // SAFETY: the caller's promise.
                unsafe { run.launch(stream, inputs[run.tensor], targets(peer.rank, run.tensor)) }?;
            }
        }
        Ok(())
    }

    /// What is enqueued on `queue` from now on comes after the copies to `peers`. Streams that took none are left alone: a graph's capture
    /// may not wait for what is not part of it.
    pub(super) fn join(&self, queue: &Stream, peers: &[PeerCopies]) -> Result<(), CudaError> {
        let took = |at: usize| peers.iter().any(|peer| self.taking(peer) == Some(at));
        for (_, (_, stream, copied)) in self.streams.iter().enumerate().filter(|(at, _)| took(*at)) {
            copied.record(stream)?;
            queue.wait(copied)?;
        }
        Ok(())
    }

    /// Which stream takes the copies to a rank.
    fn taking(&self, peer: &PeerCopies) -> Option<usize> {
        let of_rank = self.streams.iter().position(|(rank, ..)| *rank == peer.rank);
        if peer.bytes() < IN_TURN { of_rank } else { of_rank.map(|_| 0) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn neighbours_are_one_line_and_lines_at_equal_distances_one_copy() {
        let range = |start, end| Range::new(start, end);
        let outgoing = PeerRows {
            rank: 2,
            rows: vec![range(0, 4), range(4, 6), range(10, 16), range(20, 26), range(30, 34), range(40, 44)],
        };
        let received = [range(0, 4), range(4, 6), range(6, 12), range(12, 18), range(50, 54), range(20, 24)];
        let run = |tensor, from, to, bytes, lines, pitches: (u64, u64)| CopyRun {
            tensor,
            from,
            to,
            bytes,
            lines,
            from_pitch: pitches.0,
            to_pitch: pitches.1,
        };
        let expected = vec![
            run(0, 0, 0, 48, 3, (80, 48)),
            run(0, 240, 400, 32, 1, (0, 0)),
            // Before the one before it.
            run(0, 320, 160, 32, 1, (0, 0)),
            run(1, 0, 0, 18, 3, (30, 18)),
            run(1, 90, 150, 12, 1, (0, 0)),
            run(1, 120, 60, 12, 1, (0, 0)),
        ];
        assert_eq!(peer_copies(&outgoing, &received, &[8, 3]), PeerCopies { rank: 2, runs: expected });
    }

    #[test]
    fn pieces_are_the_whole() {
        let rows =
            PeerRows { rank: 1, rows: vec![Range::new(3, 10), Range::new(20, 22), Range::new(30, 32)] };
        let received = [Range::new(0, 7), Range::new(10, 12), Range::new(14, 16)];
        let whole = peer_copies(&rows, &received, &[4]);
        assert_eq!(whole.clone().at(CopyPace::Full), whole);
        let pieces = whole.at(CopyPace::Pieces(12)).runs;
        let of = |run: &CopyRun| (run.from, run.to, run.bytes, run.lines);
        let found: Vec<_> = pieces.iter().map(of).collect();
        assert_eq!(found, [(12, 0, 12, 1), (24, 12, 12, 1), (36, 24, 4, 1), (80, 40, 8, 2)]);
    }

    #[test]
    fn lines_at_other_distances_are_copies_of_their_own() {
        let range = |start| Range::new(start, start + 2);
        let outgoing = PeerRows { rank: 0, rows: [0, 10, 20, 31, 41].map(range).to_vec() };
        let received = [0, 5, 10, 15, 20].map(range);
        let copies = peer_copies(&outgoing, &received, &[4]).runs;
        let found: Vec<_> = copies.iter().map(|run| (run.from, run.lines)).collect();
        assert_eq!(found, [(0, 3), (124, 2)]);
    }
}

//! Products that take rows as they arrive, by themselves: a stream brings rows after random delays while the product runs.

use std::time::Duration;

use counterpoint_bench::gpu::collective::Delays;
use counterpoint_cuda::kernel::{
    BitCheck, ElementType, Gemm, GemmArrivalWords, GemmArriving, GemmLayout, GemmRows, GemmShape, GemmSpec,
    GemmTensors, SignalRaise, WaitLimit, WaitRecord,
};
use counterpoint_cuda::{CudaError, Device, DeviceBuffer, Event, Stream, StreamPriority};
use counterpoint_exec::random_tensor;
use counterpoint_plan::DType;
use counterpoint_reference::selftest::SelfCheck;

/// Ranks whose rows are imitated, of which this is the second; rows of each, of which a group has this many.
const RANKS: usize = 3;
const OWN: usize = 640;
const GROUPS: [usize; 2] = [384, 256];
/// Columns: more tiles than multiprocessors.
const N: usize = 4096;
const K: usize = 512;
/// Multiprocessors that are left to what brings rows.
const MARGIN: u32 = 16;
/// What delays rows, at most: memory is filled meanwhile.
const NOISE_BYTES: usize = 256 << 20;
const LIMIT: Duration = Duration::from_secs(5);

/// Products of both layouts in each kind of tile, `rounds` of them in all, on inputs that alternate: rows of a group come, after a random delay, into
/// memory that has those of the round before. No element may differ from that of the plain product of all rows, and all words must be down
/// again. Then rows never come, and that must be said in time.
///
/// # Errors
/// When a kernel cannot be compiled or launched.
pub(super) fn examine(device: &Device, rounds: u32) -> Result<Vec<SelfCheck>, CudaError> {
    let mut checks = Vec::new();
    for layout in [GemmLayout::Nt, GemmLayout::Nn] {
        let spec = spec(layout);
        let mut shapes: Vec<GemmShape> = Vec::new();
        for shape in GemmArriving::shapes(device, &spec)? {
            let alike = |known: &GemmShape| {
                (known.columns, known.warpgroups, known.handed_parts)
                    == (shape.columns, shape.warpgroups, shape.handed_parts)
            };
            if !shapes.iter().any(alike) {
                shapes.push(shape);
            }
        }
        let rounds = rounds.div_ceil(2 * shapes.len().max(1) as u32);
        let mut wrong = 0;
        for &shape in &shapes {
            wrong += Arrival::new(device, &spec, shape)?.run(rounds)?;
        }
        let name = format!(
            "{} products ({}) of rows that arrive while they run, in {} kinds of tiles, wrong words",
            rounds as usize * shapes.len(),
            layout.name(),
            shapes.len()
        );
        checks.push(SelfCheck::of(name, 0, wrong as f64, 0.0));
    }
    checks.push(wait_in_vain(&device.for_world())?);
    Ok(checks)
}

/// Rows of all ranks in their order: own ones of tensor 0, each group of the others' of one more.
fn spec(layout: GemmLayout) -> GemmSpec {
    let mut sources = Vec::new();
    for rank in 0..RANKS {
        if rank == 1 {
            sources.push(GemmRows { tensor: 0, first: 0, count: OWN });
            continue;
        }
        let rows = GROUPS.iter().enumerate();
        sources.extend(rows.map(|(group, &count)| GemmRows {
            tensor: group + 1,
            first: rank * count,
            count,
        }));
    }
    let mut spec = GemmSpec::new(RANKS * OWN, N, K, layout, ElementType::Bf16);
    spec.sources = sources;
    spec.sm_margin = MARGIN;
    spec
}

/// Rows of each tensor.
fn tensor_rows() -> [usize; 3] {
    [OWN, RANKS * GROUPS[0], RANKS * GROUPS[1]]
}

/// One kernel and its operands.
struct Arrival {
    gemm: GemmArriving,
    computing: Stream,
    bringing: Stream,
    /// Tensors of A as they are in each of two turns, and where they arrive.
    turns: [Vec<DeviceBuffer>; 2],
    arriving: Vec<DeviceBuffer>,
    expected: Vec<DeviceBuffer>,
    b: DeviceBuffer,
    d: DeviceBuffer,
    words: DeviceBuffer,
    raise: SignalRaise,
    noise: DeviceBuffer,
    record: WaitRecord,
}

impl Arrival {
    fn new(device: &Device, spec: &GemmSpec, shape: GemmShape) -> Result<Self, CudaError> {
        let (computing, bringing) =
            (Stream::new(device, StreamPriority::Low)?, Stream::new(device, StreamPriority::High)?);
        let filled = |rows: usize, columns: usize, seed: u64| {
            let tensor = random_tensor(vec![rows, columns], DType::Bf16, seed);
            let buffer = DeviceBuffer::new(device, tensor.bytes().len())?;
            buffer.upload(&computing, 0, tensor.bytes())?;
            Ok::<_, CudaError>(buffer)
        };
        let of_turn = |turn: u64| -> Result<Vec<DeviceBuffer>, CudaError> {
            (0..).zip(tensor_rows()).map(|(tensor, rows)| filled(rows, K, 10 * turn + tensor)).collect()
        };
        let turns = [of_turn(1)?, of_turn(2)?];
        let b = filled(N, K, 99)?;
        let result = || DeviceBuffer::new(device, spec.size.m * N * 2);
        let plain = Gemm::with_shape(&computing, spec, shape)?;
        let mut expected = Vec::new();
        for turn in &turns {
            let d = result()?;
            let a: Vec<u64> = turn.iter().map(DeviceBuffer::address).collect();
            let tensors = GemmTensors { a: &a, b: b.address(), d: &[d.address()], bias: 0, counters: &[] };
            // SAFETY: the tensors are those of the spec and live until the stream is idle.
            unsafe { plain.launch(&computing, &tensors) }?;
            expected.push(d);
        }
        let arriving: Vec<DeviceBuffer> = tensor_rows()
            .iter()
            .map(|rows| DeviceBuffer::new(device, rows * K * 2))
            .collect::<Result<_, _>>()?;
        // A word for each group, and for CTAs that are through.
        let words = DeviceBuffer::from_slice(&computing, &[0u32; GROUPS.len() + 1])?;
        let gemm = GemmArriving::with_shape(&computing, spec, shape)?;
        computing.synchronize()?;
        Ok(Self {
            gemm,
            turns,
            arriving,
            expected,
            b,
            d: result()?,
            words,
            raise: SignalRaise::new(device)?,
            noise: DeviceBuffer::new(device, NOISE_BYTES)?,
            record: WaitRecord::new(device)?,
            computing,
            bringing,
        })
    }

    /// Words that are not what they should be.
    fn run(&self, rounds: u32) -> Result<u64, CudaError> {
        let check = BitCheck::new(&self.computing)?;
        let ended = Event::new(self.computing.device())?;
        let mut delays = Delays::of_rank(0);
        ended.record(&self.computing)?;
        for round in 0..rounds {
            let turn = round as usize % 2;
            self.bringing.wait(&ended)?;
            for group in 1..=GROUPS.len() {
                if let Some(bytes) = delays.next(NOISE_BYTES) {
                    self.noise.slice(0..bytes)?.fill(&self.bringing, 0)?;
                }
                self.arriving[group].copy_from(&self.bringing, 0, &self.turns[turn][group])?;
                // SAFETY: the words live until both streams are idle.
                unsafe { self.raise.launch(&self.bringing, &self.words, group - 1) }?;
            }
            self.multiply(turn, self.record.limit(LIMIT))?;
            check.compare(&self.computing, &self.d, &self.expected[turn])?;
            ended.record(&self.computing)?;
        }
        self.computing.synchronize()?;
        let raised = self.words.download::<u32>(&self.computing, 0, GROUPS.len() + 1)?;
        let unlike = check.unlike(&self.computing)?;
        let late = u64::from(self.record.missed().is_some());
        Ok(unlike + late + raised.into_iter().map(u64::from).sum::<u64>())
    }

    /// Enqueues a product of this turn's own rows and of what arrives.
    fn multiply(&self, turn: usize, limit: WaitLimit) -> Result<(), CudaError> {
        let own = self.turns[turn][0].address();
        let a = [own, self.arriving[1].address(), self.arriving[2].address()];
        let word = |number: usize| self.words.address() + (number * size_of::<u32>()) as u64;
        let tensors =
            GemmTensors { a: &a, b: self.b.address(), d: &[self.d.address()], bias: 0, counters: &[] };
        let words = [0, word(0), word(1)];
        let arrivals = GemmArrivalWords { words: &words, ended: word(GROUPS.len()), limit };
        // SAFETY: the tensors are those of the spec and live until both streams are idle. What raises the words was enqueued before, and has
        // the multiprocessors of the margin; where nothing does, the wait has a limit.
        unsafe { self.gemm.launch(&self.computing, &tensors, &arrivals) }
    }
}

/// The second group never comes.
fn wait_in_vain(device: &Device) -> Result<SelfCheck, CudaError> {
    let limit = Duration::from_millis(20);
    let spec = spec(GemmLayout::Nt);
    let shape = GemmArriving::shapes(device, &spec)?[0];
    let arrival = Arrival::new(device, &spec, shape)?;
    // SAFETY: the words live until both streams are idle.
    unsafe { arrival.raise.launch(&arrival.bringing, &arrival.words, 0) }?;
    arrival.multiply(0, arrival.record.limit(limit))?;
    arrival.computing.synchronize()?;
    let missed = arrival.record.missed().map(|missed| (missed.rank, missed.seen, missed.wanted));
    let named = missed == Some((2, 0, 1)) && device.waits_have_ended();
    let name = format!("rows that do not arrive within {limit:?} are named");
    Ok(SelfCheck::of(name, 0, f64::from(u8::from(!named)), 0.0))
}

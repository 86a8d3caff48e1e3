//! Products whose groups of tiles are signalled while the rest is computed.

use std::time::Duration;

use counterpoint_cost::ProblemSize;
use counterpoint_exec::{
    Backend, CpuMachine, ExecError, GemmCollectiveSpec, HostTensor, Machine, Prepared, ProgramFault,
    TensorFault, Transport, World, WorldConfig, random_tensor,
};
use counterpoint_plan::{Activations, DType, GemmCollective, LinearKind, LinearPlan, LinearSpec, WaveGroups};
use counterpoint_reference::selftest::{SelfCheck, unlike_elements};
use counterpoint_schedule::{
    BufferRole, NormSpec, OverlapPolicy, Program, WeightGradient, WorkerShare, lower_normalised_backward,
    lower_normalised_forward,
};
use half::bf16;

use super::arriving;
use super::fused::{SHAPES, Variant, examine};
use counterpoint_cuda::kernel::{
    ElementType, Gemm, GemmLayout, GemmSignals, GemmSpec, GemmTensors, SignalLitmus, SignalLitmusRound,
    SignalWait, SignalWaits, WaitRecord,
};
use counterpoint_cuda::{
    CudaBackend, CudaError, CudaMachine, CudaTransport, Device, DeviceBuffer, Event, GraphRun, Stream,
    StreamPriority,
};

/// M, N and K of the product whose tiles are read. Its elements are multiples of K, which bf16 has.
const SIZE: [usize; 3] = [4096, 4096, 256];
/// Operands that alternate: a tile of another round has other elements.
const TURNS: usize = 4;
/// Multiprocessors that are left to those who read on the product's own GPU.
const READERS: u32 = 16;
const LIMIT: Duration = Duration::from_secs(5);

/// What a product's signals promise: another kernel, of the same GPU and of another one, reads its tiles as they are signalled, `rounds`
/// times all of them, with random delays, in the ordinary way and by the copy engine, and none may be of another
/// round. Then a stream waits for a signal that never comes, and must say so in time. And the other way round: products take rows as a stream says that
/// they have arrived.
///
/// # Errors
/// When a kernel cannot be compiled or launched.
pub fn selftest_signals(devices: &[Device], rounds: u32) -> Result<Vec<SelfCheck>, CudaError> {
    let Some(first) = devices.first().filter(|device| device.arch().is_hopper()) else {
        return Ok(Vec::new());
    };
    // The kernel that reads is of Hopper; products are of both families.
    let mut checks = vec![read_tiles(first, first, rounds)?, read_tiles(&first.portable(), first, rounds)?];
    if let Some(second) = devices.get(1).filter(|second| *second != first) {
        checks.push(read_tiles(first, second, rounds)?);
    }
    checks.push(wait_in_vain(first)?);
    checks.extend(arriving::examine(first, rounds)?);
    Ok(checks)
}

fn read_tiles(producer: &Device, reader: &Device, rounds: u32) -> Result<SelfCheck, CudaError> {
    let [m, n, k] = SIZE;
    let of_system = producer != reader;
    if of_system {
        producer.enable_access(reader)?;
        reader.enable_access(producer)?;
    }
    let (computing, reading) =
        (Stream::new(producer, StreamPriority::Low)?, Stream::new(reader, StreamPriority::High)?);
    // Reads through a link take long, so there all multiprocessors do it.
    let readers = if of_system { reader.sm_count() } else { READERS };
    let mut spec = GemmSpec::new(m, n, k, GemmLayout::Nt, ElementType::Bf16);
    spec.sm_margin = READERS;
    let shape = Gemm::shapes(producer, &spec)?[0];
    let sizes = vec![1; Gemm::with_shape(&computing, &spec, shape)?.units().len()].into();
    spec.signals = if of_system { GemmSignals::System { sizes } } else { GemmSignals::Device { sizes } };
    let product = Gemm::with_shape(&computing, &spec, shape)?;
    let litmus = SignalLitmus::new(&reading, &product, n)?;
    let words = |value: f32| u32::from(bf16::from_f32(value).to_bits()) * 0x1_0001;
    let filled = |stream: &Stream, elements: usize, value: f32| -> Result<DeviceBuffer, CudaError> {
        let buffer = DeviceBuffer::new(stream.device(), elements * 2)?;
        buffer.fill_words(stream, words(value))?;
        Ok(buffer)
    };
    let a: Vec<DeviceBuffer> =
        (1..=TURNS).map(|turn| filled(&computing, m * k, turn as f32)).collect::<Result<_, _>>()?;
    let b = filled(&computing, n * k, 1.0)?;
    let d = filled(&computing, m * n, -1.0)?;
    // Apart from who waits for them.
    let counters = DeviceBuffer::from_slice(&reading, &vec![0u32; product.units().len()])?;
    computing.synchronize()?;
    let read = Event::new(reader)?;
    for round in 1..=rounds {
        let turn = round as usize % TURNS;
        let tensors = GemmTensors {
            a: &[a[turn].address()],
            b: b.address(),
            d: &[d.address()],
            bias: 0,
            counters: &[counters.address()],
        };
        let at = SignalLitmusRound {
            d: d.address(),
            counters: counters.address(),
            round,
            expected: bf16::from_f32(((turn + 1) * k) as f32).to_bits(),
            of_system,
        };
        // SAFETY: the tensors are those of the spec and live until both streams are idle; those who read take no more multiprocessors
        // than the product leaves, or are on another GPU, and have read the round before.
        unsafe {
            product.launch(&computing, &tensors)?;
            litmus.launch(&reading, &at, readers, LIMIT)?;
        }
        read.record(&reading)?;
        computing.wait(&read)?;
    }
    computing.synchronize()?;
    let result = litmus.result(&reading)?;
    let tiles = u64::from(rounds) * litmus.tiles();
    let place = if of_system { "on another GPU" } else { "on the same GPU" };
    let kernel = if shape.is_portable() { "portable " } else { "" };
    let name = format!(
        "{tiles} {kernel}tiles read {place} while their product runs on, stale words and tiles that never came"
    );
    Ok(SelfCheck::of(name, 0, (result.wrong + (tiles - result.tiles.min(tiles))) as f64, 0.0))
}

fn wait_in_vain(device: &Device) -> Result<SelfCheck, CudaError> {
    let limit = Duration::from_millis(20);
    // What gives up ends the waits of its own world only.
    let device = &device.for_world();
    let stream = Stream::new(device, StreamPriority::High)?;
    let waits = SignalWaits::new(&stream)?;
    let records = [WaitRecord::new(device)?, WaitRecord::new(device)?];
    let counter = DeviceBuffer::from_slice(&stream, &[3u32])?;
    let kernel = SignalWait::new(device)?;
    // SAFETY: the counter and the waits live until the stream is idle. It is 3, and 2 has been waited for by then; the last wait is
    // in vain on purpose.
    unsafe {
        kernel.launch(&stream, &waits, 1, counter.address(), 2, records[0].limit(limit))?;
        kernel.launch(&stream, &waits, 1, counter.address(), 1, records[0].limit(limit))?;
        kernel.launch(&stream, &waits, 2, counter.address(), 4, records[1].limit(limit))?;
    }
    stream.synchronize()?;
    let seen = records[1].missed().map(|missed| (missed.seen, missed.wanted));
    let named = records[0].missed().is_none() && seen == Some((3, 4)) && device.waits_have_ended();
    let name = format!("a signal that does not come within {limit:?} is named");
    Ok(SelfCheck::of(name, 0, f64::from(u8::from(!named)), 0.0))
}

/// Reduce-scatter, all-reduce and all-gather under the policy `signals`, `calls` calls of each kind with random delays on the machine's transport: groups
/// of whole tiles, ragged ones that take several launches, and groups of columns of few rows. Every element must have the bits of the product and the
/// collective one after the other.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_signalled_products(machine: &CudaMachine, calls: usize) -> Result<Vec<SelfCheck>, ExecError> {
    let [shape @ [rows, _, _], ..] = SHAPES;
    // Nothing is left free, so units of tiles are placed one by one; and 16 multiprocessors are.
    let policies = ["signals", "signals+sm-margin=16"].map(str::parse);
    let groups = [WaveGroups::Sizes(vec![rows / 2, rows / 4, rows / 4]), WaveGroups::Fixed(5)];
    let mut checks = Vec::new();
    for (policy, name) in policies.into_iter().zip(["signals", "signals and a margin"]) {
        let Ok(policy) = policy else { continue };
        for groups in &groups {
            let variant = Variant { name, policy, groups: groups.clone() };
            for (_, collective) in GemmCollective::NAMES {
                checks.push(examine(machine, shape, collective, &variant, calls)?);
            }
        }
    }
    for (shape, groups) in COLUMNS {
        for policy in [OverlapPolicy::SIGNALS, OverlapPolicy::default()] {
            let in_columns = format!("{policy} in {groups} groups of columns");
            let variant = Variant { name: &in_columns, policy, groups: WaveGroups::Columns(groups) };
            for collective in [GemmCollective::ReduceScatter, GemmCollective::AllReduce] {
                checks.push(examine(machine, shape, collective, &variant, calls)?);
            }
        }
    }
    Ok(checks)
}

/// Rows of each rank, N and K, and groups of columns: of many tiles in one row, with parts of k, and of a few rows of tiles whose last group
/// is longer.
const COLUMNS: [([usize; 3], usize); 3] =
    [([32, 16384, 128], 4), ([32, 1024, 4096], 2), ([128, 2056, 192], 3)];

/// A whole run of all ranks under the policy `signals` as a CUDA graph, replayed: counters go on from run to run without the host, so the
/// bits of every replay must be those of the direct run. Not by copy engines, whose ranks wait for each other on the host.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_signals_in_graphs(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    const REPLAYS: usize = 20;
    let ranks = machine.devices().len();
    // Products take rows as they arrive where something is left to what brings them.
    let waiting = OverlapPolicy { workers: WorkerShare::Margin(READERS as usize), ..OverlapPolicy::SIGNALS };
    let cases = [
        (GemmCollective::ReduceScatter, OverlapPolicy::SIGNALS),
        (GemmCollective::AllReduce, OverlapPolicy::SIGNALS),
        (GemmCollective::AllGather, waiting),
    ];
    let mut checks = Vec::new();
    for (collective, policy) in cases {
        let spec = GemmCollectiveSpec {
            collective,
            ranks,
            size: ProblemSize { m: SHAPES[0][0] * ranks, n: 512, k: 256 },
            dtype: DType::Bf16,
        };
        let world = WorldConfig { limit: LIMIT, ..WorldConfig::default() };
        let mut prepared = spec.prepare_groups(machine, WaveGroups::Fixed(2), policy, world)?;
        bind_inputs(&mut prepared)?;
        Prepared::run_ranks(&mut prepared)?;
        let results = |ranks: &[Prepared<CudaBackend, CudaTransport>]| -> Result<Vec<HostTensor>, ExecError> {
            ranks.iter().map(|rank| output(rank, "y")).collect()
        };
        let direct = results(&prepared)?;
        let mut graph = GraphRun::capture_ranks(&mut prepared)?;
        let mut unlike = 0;
        for _ in 0..REPLAYS {
            for rank in graph.passes().iter().flat_map(|ranks| ranks.iter()) {
                if let Some(y) = rank.buffer("y") {
                    let setup = rank.backend().setup();
                    let filled = y.memory().fill(setup, 0xff).and_then(|()| setup.synchronize());
                    filled.map_err(|error| rank.backend().error(&"poisoning", error))?;
                }
            }
            graph.start()?;
            graph.finish()?;
            let replayed = results(&*graph.passes()[0])?;
            unlike += direct.iter().zip(&replayed).map(|(a, b)| unlike_elements(a, b)).sum::<usize>();
        }
        let name = format!(
            "{REPLAYS} replays of a graph of a signalled product with {} on {ranks} GPUs, unlike elements",
            collective.name()
        );
        checks.push(SelfCheck::of(name, 0, unlike as f64, 0.0));
    }
    Ok(checks)
}

/// Inputs from seeds: all that a rank's Program has.
fn bind_inputs<B: Backend, T: Transport<B>>(ranks: &mut [Prepared<B, T>]) -> Result<(), ExecError> {
    for (rank, prepared) in ranks.iter_mut().enumerate() {
        let inputs = prepared.program().buffers.iter().filter(|spec| spec.role == BufferRole::Input);
        for spec in inputs.cloned().collect::<Vec<_>>() {
            let seed = (1000 * rank + spec.name.len()) as u64;
            let tensor = random_tensor(spec.shape.clone(), spec.dtype, seed);
            let buffer = prepared.backend().upload(&spec.name, tensor)?;
            prepared.bind(&spec.name, buffer)?;
        }
    }
    Ok(())
}

fn output<B: Backend, T: Transport<B>>(rank: &Prepared<B, T>, name: &str) -> Result<HostTensor, ExecError> {
    let missing = || ExecError::tensor(name, TensorFault::NotAnOutput);
    rank.backend().download(rank.buffer(name).ok_or_else(missing)?)
}

/// With a residual and a weight.
const NORM: NormSpec = NormSpec::new(1e-5);

/// A pass of a row-parallel layer with a residual and RMSNorm behind it.
#[derive(Clone, Copy)]
struct NormalisedPass {
    name: &'static str,
    lower: fn(&LinearPlan, usize, OverlapPolicy) -> Program,
}

const PASSES: [NormalisedPass; 2] = [
    NormalisedPass {
        name: "normalised sums",
        lower: |plan, rank, policy| lower_normalised_forward(plan, rank, NORM, policy),
    },
    NormalisedPass {
        name: "gradients of normalised sums",
        lower: |plan, rank, policy| {
            lower_normalised_backward(plan, rank, NORM, WeightGradient::Written, policy)
        },
    },
];

/// A row-parallel layer with a residual and RMSNorm behind its sums, and its gradients: with groups that travel while one kernel computes
/// all of them, the bits of the same without overlap, and CPU ranks' values up to the roundings of the type.
///
/// # Errors
/// Whatever ends a run.
pub fn selftest_normalised(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    let mut checks = Vec::new();
    for activations in [Activations::SequenceParallel, Activations::Replicated] {
        for pass in PASSES {
            checks.extend(pass.examine(machine, activations)?);
        }
    }
    Ok(checks)
}

impl NormalisedPass {
    fn examine(self, machine: &CudaMachine, activations: Activations) -> Result<[SelfCheck; 2], ExecError> {
        let ranks = machine.devices().len();
        let spec = LinearSpec {
            kind: LinearKind::Row,
            activations,
            tokens: ranks * SHAPES[0][0] + 40,
            in_features: ranks * 192,
            out_features: 520,
            has_bias: true,
            dtype: DType::Bf16,
        };
        let plan = |groups| {
            LinearPlan::new(spec, ranks, groups).map_err(|error| ExecError::Program {
                program: "a selftest".to_owned(),
                rank: 0,
                reason: ProgramFault::NotPlanned { reason: error.to_string() },
            })
        };
        let sequential = OverlapPolicy::SEQUENTIAL;
        let whole = self.outputs(machine, &plan(WaveGroups::Fixed(1))?, sequential)?;
        let mut unlike = 0;
        for groups in [WaveGroups::Fixed(2), WaveGroups::Fixed(7)] {
            let waves = self.outputs(machine, &plan(groups)?, OverlapPolicy::SIGNALS)?;
            unlike += waves.iter().zip(&whole).map(|(a, b)| unlike_elements(a, b)).sum::<usize>();
        }
        let name = format!("{}, {activations:?}, on {ranks} GPUs", self.name);
        let bits = format!("{name}, elements unlike those without overlap");
        let cpu = self.outputs(&CpuMachine::new(0, None)?, &plan(WaveGroups::Fixed(1))?, sequential)?;
        let error = |(found, right): (&HostTensor, &HostTensor)| {
            let (found, right) = (found.to_f64(), right.to_f64());
            let errors: f64 = found.iter().zip(&right).map(|(a, b)| (a - b) * (a - b)).sum();
            (errors / right.iter().map(|x| x * x).sum::<f64>()).sqrt()
        };
        let worst = whole.iter().zip(&cpu).map(error).fold(0.0, |a: f64, b| if b <= a { a } else { b });
        let difference = format!("{name}, relative difference from CPU ranks");
        // Shares, sums and results are rounded to 8 bits on both sides.
        Ok([SelfCheck::of(bits, 0, unlike as f64, 0.0), SelfCheck::of(difference, 0, worst, 1e-2)])
    }

    /// All outputs of every rank.
    fn outputs<M: Machine>(
        self,
        machine: &M,
        plan: &LinearPlan,
        policy: OverlapPolicy,
    ) -> Result<Vec<HostTensor>, ExecError> {
        let world = World::new(plan.tp_size, WorldConfig { limit: LIMIT, ..WorldConfig::default() });
        let ends = machine.connect(&world)?.into_iter().enumerate();
        let mut ranks = ends
            .map(|(rank, (backend, transport))| {
                Prepared::new((self.lower)(plan, rank, policy), backend, transport)
            })
            .collect::<Result<Vec<_>, _>>()?;
        bind_inputs(&mut ranks)?;
        Prepared::run_ranks(&mut ranks)?;
        let of_rank = |rank: &Prepared<M::Backend, M::Transport>| -> Vec<Result<HostTensor, ExecError>> {
            let outputs = rank.program().buffers.iter().filter(|spec| spec.role == BufferRole::Output);
            outputs.map(|spec| output(rank, &spec.name)).collect()
        };
        ranks.iter().flat_map(of_rank).collect()
    }
}

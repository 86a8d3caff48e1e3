//! Groups: calls on tensors of the caller, many in flight, in its memory; what is refused.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_exec::{
    AttentionCalls, AttentionInputs, AttentionOutputs, AttentionRank, Backend, BackwardTensors, BufferAccess,
    Communicator, CpuBackend, CpuBuffer, CpuMachine, ExecError, ForwardTensors, Group, GroupRank, HostTensor,
    HostView, Machine, OpPlace, Pass, RanksRun, RunConfig, TcpLoopback, Ticket, Transport, WorldConfig,
    run_attention,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType, GroupPart, Plan};
use counterpoint_schedule::{OverlapPolicy, StreamKind};
use rand::SeedableRng;
use rand_chacha::ChaCha8Rng;

use crate::support;

const POLICY: OverlapPolicy = OverlapPolicy::new(counterpoint_schedule::StartOrder::Concurrent);

/// A mask with its inputs and the right results.
pub(crate) struct Case {
    pub(crate) plan: Plan,
    pub(crate) spec: AttentionSpec,
    inputs: Vec<AttentionInputs>,
    right: AttentionOutputs,
}

impl Case {
    pub(crate) fn new(mask: &Mask, ranks: usize, spec: AttentionSpec, seed: u64) -> Self {
        let config = PlanConfig { chunk_size: Some(4), ..PlanConfig::new(ranks) };
        let plan = plan_mask(mask, &spec, &config).unwrap();
        let inputs = support::inputs::<f32>(mask, &spec, 1.0, &mut ChaCha8Rng::seed_from_u64(seed));
        let run = RunConfig { deterministic: true, ..RunConfig::default() };
        let right = run_attention(&plan, &spec, &inputs, &run).unwrap().outputs;
        Self { inputs: inputs.of_ranks(&plan).unwrap(), plan, spec, right }
    }

    pub(crate) fn prepare<M: Machine>(&self, group: &Group<M>) -> AttentionCalls<M> {
        group.attention(&self.plan, &self.spec, Pass::ForwardBackward, POLICY, true).unwrap()
    }

    /// One rank's calls, to be kept and dropped by themselves.
    pub(crate) fn prepare_rank<B: Backend, T: Transport<B>>(
        &self,
        rank: &Arc<GroupRank<B, T>>,
    ) -> AttentionRank<B, T> {
        AttentionRank::prepare(rank, &self.plan, &self.spec, Pass::ForwardBackward, POLICY, true).unwrap()
    }

    pub(crate) fn tensors(&self) -> Vec<Tensors> {
        self.inputs.iter().enumerate().map(|(rank, inputs)| Tensors::new(rank, inputs, &self.spec)).collect()
    }

    /// Whether these are the right results, to the last bit.
    pub(crate) fn check(&self, tensors: &[Tensors]) {
        let outputs = tensors.iter().enumerate().map(|(rank, tensors)| (rank, tensors.outputs()));
        let whole = RanksRun::of_outputs(outputs.collect()).into_whole(&self.plan).unwrap();
        assert_eq!(whole.outputs, self.right);
    }
}

/// A rank's tensors.
pub(crate) struct Tensors {
    q: CpuBuffer,
    k: CpuBuffer,
    v: CpuBuffer,
    dout: CpuBuffer,
    out: CpuBuffer,
    lse: CpuBuffer,
    dq: CpuBuffer,
    dk: CpuBuffer,
    dv: CpuBuffer,
}

impl Tensors {
    fn new(rank: usize, inputs: &AttentionInputs, spec: &AttentionSpec) -> Self {
        let buffer = |name: &str, tensor: &HostTensor| CpuBuffer::new(rank, name, tensor.clone());
        let like = |name: &str, tensor: &HostTensor| {
            CpuBuffer::new(rank, name, HostTensor::zeros(tensor.shape().to_vec(), tensor.dtype()))
        };
        let dout = inputs.dout.as_ref().unwrap();
        let lse = HostTensor::zeros(vec![inputs.q.rows(), spec.heads_q], spec.dtype.accumulator());
        Self {
            q: buffer("q", &inputs.q),
            k: buffer("k", &inputs.k),
            v: buffer("v", &inputs.v),
            dout: buffer("dout", dout),
            out: like("out", dout),
            lse: buffer("lse", &lse),
            dq: like("dq", &inputs.q),
            dk: like("dk", &inputs.k),
            dv: like("dv", &inputs.v),
        }
    }

    pub(crate) fn forward(&self) -> ForwardTensors<'_, CpuBackend> {
        let Self { q, k, v, out, lse, .. } = self;
        ForwardTensors { q, k, v, sink: None, out, lse, max_logits: None }
    }

    pub(crate) fn backward(&self) -> BackwardTensors<'_, CpuBackend> {
        let Self { q, k, v, dout, out, lse, dq, dk, dv } = self;
        BackwardTensors { dout, q, k, v, sink: None, out, lse, dlse: None, dq, dk, dv, dsink: None }
    }

    fn outputs(&self) -> AttentionOutputs {
        let tensor = |buffer: &CpuBuffer| buffer.tensor().unwrap();
        AttentionOutputs {
            out: tensor(&self.out),
            lse: tensor(&self.lse),
            max_logits: None,
            dq: Some(tensor(&self.dq)),
            dk: Some(tensor(&self.dk)),
            dv: Some(tensor(&self.dv)),
            dsink: None,
        }
    }
}

pub(crate) fn spec() -> AttentionSpec {
    support::spec(4, 2, 8, 8, DType::F32)
}

fn group(ranks: usize) -> Group<CpuMachine> {
    Group::local(ranks, WorldConfig::default()).unwrap()
}

/// Layers and micro-batches: forwards and backwards of several plans, all enqueued before any is waited for, each rank from a thread
/// of its own or all from one.
#[test]
fn many_calls_of_several_plans_are_in_flight() {
    let group = group(3);
    let masks = [Mask::causal(50).unwrap(), Mask::full(31).unwrap(), Mask::causal(17).unwrap()];
    let cases: Vec<Case> =
        masks.iter().enumerate().map(|(seed, mask)| Case::new(mask, 3, spec(), seed as u64)).collect();
    let prepared: Vec<_> = cases.iter().map(|case| case.prepare(&group)).collect();
    let streams = group.ranks()[0].num_streams();
    // Two micro-batches of each layer.
    let tensors: Vec<Vec<Tensors>> = cases.iter().chain(&cases).map(Case::tensors).collect();
    let mut tickets: Vec<Ticket<CpuBackend>> = Vec::new();
    for (layer, tensors) in tensors.iter().enumerate() {
        let forward: Vec<_> = tensors.iter().map(Tensors::forward).collect();
        tickets.extend(prepared[layer % 3].forward(&forward, None).unwrap());
    }
    std::thread::scope(|scope| {
        for rank in 0..3 {
            let (prepared, tensors) = (&prepared, &tensors);
            scope.spawn(move || {
                for layer in (0..tensors.len()).rev() {
                    let ticket =
                        prepared[layer % 3].ranks()[rank].backward(&tensors[layer][rank].backward(), None);
                    drop(ticket.unwrap());
                }
            });
        }
    });
    // Dropped while calls are under way: nothing waits, and nothing is lost.
    drop(prepared);
    tickets.iter().for_each(|ticket| ticket.wait().unwrap());
    group.synchronize().unwrap();
    cases.iter().chain(&cases).zip(&tensors).for_each(|(case, tensors)| case.check(tensors));
    assert!(tickets.iter().all(|ticket| ticket.is_done().unwrap()));
    assert_eq!(group.ranks()[0].num_streams(), streams);
    group.close().unwrap();
    assert_eq!(group.poll(), Err(ExecError::Closed { rank: 0 }));
}

/// Ranks with a world and connections each, as processes have: one mesh serves all plans.
#[test]
fn processes_call_plans_over_one_connection() {
    let machine = TcpLoopback::new(None);
    let group = Group::connect(&machine, 3, WorldConfig::default()).unwrap();
    for seed in 0..4 {
        let case = Case::new(&Mask::causal(20 + seed).unwrap(), 3, spec(), seed as u64);
        let (prepared, tensors) = (case.prepare(&group), case.tensors());
        let forward: Vec<_> = tensors.iter().map(Tensors::forward).collect();
        drop(prepared.forward(&forward, None).unwrap());
        let backward: Vec<_> = tensors.iter().map(Tensors::backward).collect();
        let tickets = prepared.backward(&backward, None).unwrap();
        tickets.iter().for_each(|ticket| ticket.wait().unwrap());
        case.check(&tensors);
    }
    group.close().unwrap();
}

/// Whoever waits on the host is asked whether it wants to go on: a rank that waits for another that never calls.
#[test]
fn a_wait_on_the_host_can_be_interrupted() {
    let interrupted = || Some("KeyboardInterrupt".to_owned());
    let config = WorldConfig { interrupted, ..WorldConfig::default() };
    // Its rendezvous goes with it.
    let machine = TcpLoopback::new(None);
    let group = Group::connect(&machine, 2, config).unwrap();
    let case = Case::new(&Mask::causal(20).unwrap(), 2, spec(), 0);
    let (prepared, tensors) = (case.prepare(&group), case.tensors());
    let began = Instant::now();
    let ticket = prepared.ranks()[0].forward(&tensors[0].forward(), None).unwrap();
    let gave_up = ExecError::GaveUp { rank: 0, reason: "KeyboardInterrupt".to_owned() };
    assert_eq!(ticket.wait(), Err(gave_up.clone()));
    let waited = began.elapsed();
    assert!(waited > Duration::from_millis(90) && waited < Duration::from_secs(5), "{waited:?}");
    assert_eq!(group.poll(), Err(gave_up));
}

/// A collective reads what a call before it writes, and a call after it what it has brought, with nothing waited for.
#[test]
fn collectives_and_calls_of_a_group_follow_each_other() {
    let case = Case::new(&Mask::causal(30).unwrap(), 2, spec(), 3);
    let (group, tensors) = (group(2), case.tensors());
    let prepared = case.prepare(&group);
    let communicators: Vec<_> = group.ranks().iter().map(|rank| Communicator::on(rank).unwrap()).collect();
    let rows: Vec<usize> = tensors.iter().map(|tensors| tensors.q.shape()[0]).collect();
    let all: Vec<CpuBuffer> = (0..2)
        .map(|rank| CpuBuffer::new(rank, "all", HostTensor::zeros(vec![rows[0] + rows[1], 4, 8], DType::F32)))
        .collect();
    for (rank, communicator) in communicators.iter().enumerate() {
        drop(prepared.ranks()[rank].forward(&tensors[rank].forward(), None).unwrap());
        let part = GroupPart::all_gather_v(rank, &rows);
        let pairs = [(&tensors[rank].out, &all[rank])];
        drop(communicator.group_cast("gather", &part, &pairs, DType::F32).unwrap());
        drop(prepared.ranks()[rank].backward(&tensors[rank].backward(), None).unwrap());
    }
    group.synchronize().unwrap();
    case.check(&tensors);
    let whole: Vec<f32> = tensors
        .iter()
        .flat_map(|tensors| tensors.out.tensor().unwrap().as_slice::<f32>().unwrap().to_vec())
        .collect();
    assert!(all.iter().all(|all| all.tensor().unwrap().as_slice::<f32>().unwrap() == whole));
}

/// q, k and v are views of one projection, and so are their gradients: read and written where they lie.
#[test]
#[allow(unsafe_code)]
fn packed_projections_are_used_in_place() {
    let spec = spec();
    let case = Case::new(&Mask::causal(24).unwrap(), 2, spec, 7);
    let (group, tensors) = (group(2), case.tensors());
    let prepared = case.prepare(&group);
    // A row of a rank's projection: 4 heads of q, 2 of k, 2 of v, of 8 elements each, and 3 elements of somebody else.
    let (width, parts) = (67, [(0, 4), (32, 2), (48, 2)]);
    let mut views = Vec::new();
    for (rank, own) in tensors.iter().enumerate() {
        let rows = own.q.shape()[0];
        let mut projection = vec![-7f32; rows * width];
        for ((at, heads), tensor) in parts.iter().zip([&own.q, &own.k, &own.v]) {
            let tensor = tensor.tensor().unwrap();
            for (row, elements) in tensor.as_slice::<f32>().unwrap().chunks(heads * 8).enumerate() {
                projection[row * width + at..][..heads * 8].copy_from_slice(elements);
            }
        }
        let memory = [projection, vec![-7f32; rows * width]].map(|memory| Arc::new(Shared::new(&memory)));
        views.push((rank, rows, memory));
    }
    let packed = |of: usize, part: usize| -> Vec<CpuBuffer> {
        let view = |(rank, rows, memory): &(usize, usize, [Arc<Shared>; 2])| {
            let (at, heads) = parts[part];
            let access = if of == 0 { BufferAccess::Read } else { BufferAccess::Write };
            let address = memory[of].address(at);
            // SAFETY: the keeper owns the memory, and only the calls below use it until they have ended.
            let view = unsafe {
                HostView::new(
                    address,
                    &[*rows, heads, 8],
                    &[width, 8, 1],
                    DType::F32,
                    access,
                    memory[of].clone(),
                )
            };
            CpuBuffer::borrowed(*rank, "packed", view.unwrap())
        };
        views.iter().map(view).collect()
    };
    let [q, k, v] = [0, 1, 2].map(|part| packed(0, part));
    let [dq, dk, dv] = [0, 1, 2].map(|part| packed(1, part));
    for (rank, own) in tensors.iter().enumerate() {
        let Tensors { out, lse, .. } = own;
        let (q, k, v) = (&q[rank], &k[rank], &v[rank]);
        let forward = ForwardTensors { q, k, v, sink: None, out, lse, max_logits: None };
        drop(prepared.ranks()[rank].forward(&forward, None).unwrap());
    }
    for (rank, own) in tensors.iter().enumerate() {
        let Tensors { out, lse, dout, .. } = own;
        let (q, k, v, dq, dk, dv) = (&q[rank], &k[rank], &v[rank], &dq[rank], &dk[rank], &dv[rank]);
        let backward =
            BackwardTensors { dout, q, k, v, sink: None, out, lse, dlse: None, dq, dk, dv, dsink: None };
        drop(prepared.ranks()[rank].backward(&backward, None).unwrap());
    }
    group.synchronize().unwrap();
    for (rank, own) in tensors.iter().enumerate() {
        own.dq.store(dq[rank].tensor().unwrap()).unwrap();
        own.dk.store(dk[rank].tensor().unwrap()).unwrap();
        own.dv.store(dv[rank].tensor().unwrap()).unwrap();
    }
    case.check(&tensors);
    // What lies between belongs to somebody else.
    for (_, _, memory) in &views {
        for row in memory[1].elements().chunks(width) {
            assert_eq!(row[64..], [-7.0; 3]);
        }
    }
    drop((q, k, v, dq, dk, dv, prepared));
    group.close().unwrap();
    assert!(views.iter().all(|(_, _, memory)| memory.iter().all(|memory| Arc::strong_count(memory) == 1)));
}

/// Memory that somebody else owns and the engine writes: the bits of f32.
struct Shared(Vec<AtomicU32>);

impl Shared {
    fn new(elements: &[f32]) -> Self {
        Self(elements.iter().map(|element| AtomicU32::new(element.to_bits())).collect())
    }

    fn address(&self, element: usize) -> *mut u8 {
        self.0[element].as_ptr().cast()
    }

    fn elements(&self) -> Vec<f32> {
        self.0.iter().map(|bits| f32::from_bits(bits.load(Ordering::Relaxed))).collect()
    }
}

/// A call behind what the caller's stream was given, and before what it is given later; one on another stream behind both. What one rank
/// calls is on the caller's stream itself.
#[test]
fn calls_are_ordered_with_the_stream_of_the_caller() {
    for ranks in [1, 2] {
        let case = Case::new(&Mask::causal(30).unwrap(), ranks, spec(), 3);
        let (group, tensors) = (group(ranks), case.tensors());
        let prepared = case.prepare(&group);
        let made = || -> Vec<_> {
            let ranks = group.ranks().iter();
            ranks.map(|rank| Arc::new(rank.create_stream("caller", StreamKind::Compute).unwrap())).collect()
        };
        let (first, second) = (made(), made());
        let [first, second] = [&first, &second].map(|streams| streams.iter().collect::<Vec<_>>());
        let forward: Vec<_> = tensors.iter().map(Tensors::forward).collect();
        let backward: Vec<_> = tensors.iter().map(Tensors::backward).collect();
        drop(prepared.forward(&forward, Some(&first)).unwrap());
        drop(prepared.backward(&backward, Some(&second)).unwrap());
        for (rank, stream) in group.ranks().iter().zip(&second) {
            rank.backend().synchronize(&[stream]).unwrap();
        }
        case.check(&tensors);
    }
}

/// Another library's stream: what it still has to do to the tensors comes before calls that do not name it, and what it is given later
/// comes after them, on every rank and again and again.
#[test]
fn calls_and_a_neighbour_s_stream_follow_each_other() {
    let case = Case::new(&Mask::causal(30).unwrap(), 2, spec(), 3);
    let (group, tensors) = (group(2), case.tensors());
    let prepared = case.prepare(&group);
    let place = OpPlace::new(0, "the neighbour");
    let neighbours: Vec<_> = group
        .ranks()
        .iter()
        .map(|rank| {
            let stream = Arc::new(rank.create_stream("neighbour", StreamKind::Communication).unwrap());
            rank.order_with(stream.clone());
            stream
        })
        .collect();
    let given: Vec<_> = tensors
        .iter()
        .enumerate()
        .map(|(rank, tensors)| CpuBuffer::new(rank, "given", tensors.q.tensor().unwrap()))
        .collect();
    // Long enough that what is not ordered comes first.
    let long: Vec<_> = (0..2)
        .map(|rank| CpuBuffer::new(rank, "long", HostTensor::zeros(vec![8 << 20, 1], DType::F32)))
        .collect();
    for _ in 0..3 {
        for ((rank, stream), (tensors, given)) in
            group.ranks().iter().zip(&neighbours).zip(tensors.iter().zip(&given))
        {
            let backend = rank.backend();
            backend.poison(stream, &place, vec![tensors.q.clone(), long[rank.rank()].clone()]).unwrap();
            backend.copy(stream, &place, given, &tensors.q).unwrap();
        }
        let forward: Vec<_> = tensors.iter().map(Tensors::forward).collect();
        let backward: Vec<_> = tensors.iter().map(Tensors::backward).collect();
        drop(prepared.forward(&forward, None).unwrap());
        drop(prepared.backward(&backward, None).unwrap());
        for ((rank, stream), tensors) in group.ranks().iter().zip(&neighbours).zip(&tensors) {
            rank.backend().poison(stream, &place, vec![tensors.q.clone()]).unwrap();
        }
        group.synchronize().unwrap();
        case.check(&tensors);
    }
}

#[test]
#[allow(unsafe_code)]
fn what_cannot_be_called_is_refused_and_nothing_is_enqueued() {
    let case = Case::new(&Mask::causal(30).unwrap(), 2, spec(), 3);
    let (group, tensors) = (group(2), case.tensors());
    let prepared = case.prepare(&group);
    let refused = |forward: ForwardTensors<'_, CpuBackend>, words: &[&str]| {
        let error = prepared.ranks()[1].forward(&forward, None).err().unwrap().to_string();
        words.iter().for_each(|word| assert!(error.contains(word), "{word} in {error}"));
    };
    let own = || tensors[1].forward();
    let buffer =
        |shape: &[usize], dtype| CpuBuffer::new(1, "other", HostTensor::zeros(shape.to_vec(), dtype));
    let rows = tensors[1].q.shape()[0];
    let short = buffer(&[rows - 1, 4, 8], DType::F32);
    refused(ForwardTensors { q: &short, ..own() }, &["tensor q", &format!("[{rows}, 4, 8]")]);
    let other_type = buffer(&[rows, 4, 8], DType::F64);
    refused(ForwardTensors { out: &other_type, ..own() }, &["tensor out", "f32", "f64"]);
    refused(ForwardTensors { out: &tensors[1].q, ..own() }, &["tensor out", "shares memory with q"]);
    refused(ForwardTensors { sink: Some(&tensors[1].lse), ..own() }, &["sink", "no input"]);
    let read_only = Arc::new(Shared::new(&vec![0.0; rows * 32]));
    let view = |access| {
        let address = read_only.address(0);
        // SAFETY: the keeper owns the memory; no call uses it.
        unsafe { HostView::new(address, &[rows, 4, 8], &[32, 8, 1], DType::F32, access, read_only.clone()) }
    };
    let borrowed = |access| CpuBuffer::borrowed(1, "borrowed", view(access).unwrap());
    let (reads, writes) = (borrowed(BufferAccess::Read), borrowed(BufferAccess::Write));
    refused(ForwardTensors { out: &reads, ..own() }, &["tensor out", "borrowed for reading"]);
    refused(ForwardTensors { q: &reads, out: &writes, ..own() }, &["tensor out", "shares memory with q"]);
    let forward_alone = group.attention(&case.plan, &case.spec, Pass::Forward, POLICY, true).unwrap();
    let none = forward_alone.ranks()[0].backward(&tensors[0].backward(), None).err().unwrap();
    assert!(none.to_string().contains("forward alone"), "{none}");
    let three = Group::local(3, WorldConfig::default()).unwrap();
    let ranks = three.attention(&case.plan, &case.spec, Pass::Forward, POLICY, true).err().unwrap();
    assert!(ranks.to_string().contains("2 ranks, and the group has 3"), "{ranks}");

    // Nothing has happened: the next call is right.
    group.poll().unwrap();
    let forward: Vec<_> = tensors.iter().map(Tensors::forward).collect();
    drop(prepared.forward(&forward, None).unwrap());
    let backward: Vec<_> = tensors.iter().map(Tensors::backward).collect();
    drop(prepared.backward(&backward, None).unwrap());
    group.synchronize().unwrap();
    case.check(&tensors);
}

#[test]
fn plans_that_differ_are_found_in_the_first_call_and_the_difference_is_named() {
    let small = AttentionSpec { scale: 0.5, ..spec() };
    for (other, words) in [
        (Case::new(&Mask::causal(32).unwrap(), 2, small, 0), &["scale is", "0.5"][..]),
        (Case::new(&Mask::causal(40).unwrap(), 2, spec(), 0), &["seqlen_q", "40", "32"][..]),
        (Case::new(&Mask::full(32).unwrap(), 2, spec(), 0), &["fingerprint", "mask"][..]),
    ] {
        let case = Case::new(&Mask::causal(32).unwrap(), 2, spec(), 0);
        let group = group(2);
        let (own, theirs) = (case.prepare(&group), other.prepare(&group));
        let (own_tensors, their_tensors) = (case.tensors(), other.tensors());
        let tickets = [
            own.ranks()[0].forward(&own_tensors[0].forward(), None),
            theirs.ranks()[1].forward(&their_tensors[1].forward(), None),
        ];
        let error = group.synchronize().unwrap_err();
        assert!(matches!(error, ExecError::PlanDiffers { .. }), "{error}");
        let text = error.to_string();
        words.iter().for_each(|word| assert!(text.contains(word), "{word} in {text}"));
        assert_eq!(group.poll(), Err(error));
        drop(tickets);
    }
}

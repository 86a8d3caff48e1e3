//! What a fresh mask asks of the driver and of other ranks, counted with a driver that has no GPU.

#![allow(unsafe_code)]

use std::thread;
use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_cuda::{
    Arch, CudaMachine, DescribedGpu, Device, DriverCalls, Stream, StreamPriority, Timing, TransportKind,
};
use counterpoint_exec::{
    AttentionCalls, AttentionTask, Backend, BackwardTensors, ExecError, ForwardTensors, Group, HostTensor,
    Machine, Pass, StepTables, TablesFault,
};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan};
use counterpoint_schedule::OverlapPolicy;

mod hollow_driver;
mod support;

use hollow_driver::processes::{LIMIT, config, on_processes, on_processes_that_fail};

const SPEC: AttentionSpec = AttentionSpec {
    heads_q: 4,
    heads_kv: 2,
    head_dim: 128,
    head_dim_v: 128,
    dtype: DType::Bf16,
    scale: 0.088,
    softcap: 0.0,
    seqlen_sink: 0,
    gradient_shares: GradientShares::Accumulators,
    max_logits: false,
    dlse: false,
};

/// Of each rank, in a forward and a backward of these masks: keys that come, gradients that go.
const COLLECTIVES: usize = 3;

/// Of packed documents, others for every number.
fn plan(ranks: usize, number: usize) -> Plan {
    let lengths =
        [900 + 128 * number, 3000 - 64 * number, 200 + 64 * number, 8192 * ranks - 4100 - 128 * number];
    let mask = Documents::from_lengths(lengths).and_then(Mask::causal).unwrap();
    plan_mask(&mask, &SPEC, &PlanConfig::new(ranks)).unwrap()
}

/// A rank's tensors.
struct Tensors<B: Backend> {
    read: [B::Buffer; 4],
    out: B::Buffer,
    lse: B::Buffer,
    gradients: [B::Buffer; 3],
}

impl<B: Backend> Tensors<B> {
    fn new(backend: &B, rows: usize) -> Self {
        let tensor = |name: &str, heads: usize| {
            let zeros = HostTensor::zeros(vec![rows, heads, SPEC.head_dim], SPEC.dtype);
            backend.upload(name, zeros).unwrap()
        };
        let of_queries = |name| tensor(name, SPEC.heads_q);
        let of_keys = |name| tensor(name, SPEC.heads_kv);
        let lse = HostTensor::zeros(vec![rows, SPEC.heads_q], DType::F32);
        Self {
            read: [of_queries("q"), of_keys("k"), of_keys("v"), of_queries("dout")],
            out: of_queries("out"),
            lse: backend.upload("lse", lse).unwrap(),
            gradients: [of_queries("dq"), of_keys("dk"), of_keys("dv")],
        }
    }

    fn forward(&self) -> ForwardTensors<'_, B> {
        let [q, k, v, _] = &self.read;
        ForwardTensors { q, k, v, sink: None, out: &self.out, lse: &self.lse, max_logits: None }
    }

    fn backward(&self) -> BackwardTensors<'_, B> {
        let ([q, k, v, dout], [dq, dk, dv]) = (&self.read, &self.gradients);
        let Self { out, lse, .. } = self;
        BackwardTensors { dout, q, k, v, sink: None, out, lse, dlse: None, dq, dk, dv, dsink: None }
    }
}

fn tensors<M: Machine>(group: &Group<M>, plan: &Plan) -> Vec<Tensors<M::Backend>> {
    let of = |rank: &counterpoint_exec::RankOf<M>| {
        Tensors::new(rank.backend(), plan.ranks[rank.rank()].q_ranges.iter().map(|range| range.len()).sum())
    };
    group.ranks().iter().map(of).collect()
}

fn ready<M: Machine>(group: &Group<M>, plan: &Plan) -> AttentionCalls<M> {
    group.attention(plan, &SPEC, Pass::ForwardBackward, OverlapPolicy::default(), true).unwrap()
}

/// What one forward, or one backward, asks of the driver.
fn counted<M: Machine>(
    calls: &AttentionCalls<M>,
    tensors: &[Tensors<M::Backend>],
    pass: Pass,
) -> (DriverCalls, Duration) {
    let began = Instant::now();
    let (tickets, asked) = DriverCalls::of(|| match pass {
        Pass::Forward => calls.forward(&tensors.iter().map(Tensors::forward).collect::<Vec<_>>(), None),
        Pass::ForwardBackward => {
            calls.backward(&tensors.iter().map(Tensors::backward).collect::<Vec<_>>(), None)
        }
    })
    .unwrap();
    drop(tickets.unwrap());
    (asked, began.elapsed())
}

/// A rank's tables of a mask, those of its forward and of its backward, are one copy. Each collective has two more: its mailbox is cleared, and
/// what its kernels learn of other ranks' rows is sent when all have published theirs. Calls copy nothing.
#[test]
fn tables_of_a_mask_are_one_copy_and_calls_copy_nothing() {
    if support::no_compiler()
        || !hollow_driver::is_loaded("tables_of_a_mask_are_one_copy_and_calls_copy_nothing")
    {
        return;
    }
    for ranks in [1, 2] {
        let machine = CudaMachine::for_ranks(ranks, Timing::Off).unwrap();
        let group = Group::connect(&machine, ranks, config()).unwrap();
        for number in 0..4 {
            let plan = plan(ranks, number);
            let tensors = tensors(&group, &plan);
            let (calls, asked) = DriverCalls::of(|| ready(&group, &plan)).unwrap();
            let collectives = if ranks == 1 { 0 } else { COLLECTIVES };
            assert_eq!(
                asked.uploads(),
                ranks * (1 + 2 * collectives),
                "{ranks} ranks, mask {number}: {asked}"
            );
            for pass in [Pass::Forward, Pass::ForwardBackward] {
                let (asked, _) = counted(&calls, &tensors, pass);
                assert_eq!(asked.uploads(), 0, "{ranks} ranks, mask {number}, {pass:?}: {asked}");
                assert_eq!(asked.synchronizations(), 0, "{ranks} ranks, mask {number}, {pass:?}: {asked}");
                // The first calls of all make events.
                assert!(
                    number == 0 || asked.allocations() == 0,
                    "{ranks} ranks, mask {number}, {pass:?}: {asked}"
                );
            }
        }
        group.close().unwrap();
    }
}

fn task(plan: &Plan, deterministic: bool) -> AttentionTask<'_> {
    AttentionTask::new(plan, &SPEC, Pass::ForwardBackward, OverlapPolicy::default(), deterministic)
}

/// Made from what its description says in another process, they cost a rank the same copies, and nothing else of the driver.
#[test]
fn tables_made_ahead_are_uploaded_as_others_are() {
    if support::no_compiler() || !hollow_driver::is_loaded("tables_made_ahead_are_uploaded_as_others_are") {
        return;
    }
    for ranks in [1, 2] {
        let machine = CudaMachine::for_ranks(ranks, Timing::Off).unwrap();
        let group = Group::connect(&machine, ranks, config()).unwrap();
        let described = serde_json::to_string(&group.ranks()[0].backend().described()).unwrap();
        for (number, deterministic) in [(0, false), (1, true), (2, false), (3, true)] {
            let plan = plan(ranks, number);
            let task = task(&plan, deterministic);
            let gpu: DescribedGpu = serde_json::from_str(&described).unwrap();
            let bytes = (0..ranks).map(|rank| task.tables(&gpu, rank).unwrap().to_bytes());
            let ahead: Vec<_> = bytes.map(|bytes| StepTables::from_bytes(&bytes).unwrap()).collect();
            // The first one loads kernels.
            drop(group.attention_of(&task).unwrap());
            let (made, asked) = DriverCalls::of(|| group.attention_of(&task)).unwrap();
            let (given, asked_given) = DriverCalls::of(|| group.attention_with(&task, &ahead)).unwrap();
            let (made, given) = (made.unwrap(), given.unwrap());
            assert_eq!(asked_given.uploads(), asked.uploads(), "{ranks} ranks, mask {number}: {asked_given}");
            assert_eq!(asked_given.synchronizations(), asked.synchronizations(), "{asked_given}");
            assert_eq!(given.forward_operations(), made.forward_operations());
            assert_eq!(given.backward_operations(), made.backward_operations());
            let tensors = tensors(&group, &plan);
            for pass in [Pass::Forward, Pass::ForwardBackward] {
                assert_eq!(counted(&given, &tensors, pass).0.uploads(), 0, "{ranks} ranks, mask {number}");
            }
        }
        group.close().unwrap();
    }
}

/// With both devices named. The group is as before.
#[test]
fn tables_for_another_device_are_refused() {
    if support::no_compiler() || !hollow_driver::is_loaded("tables_for_another_device_are_refused") {
        return;
    }
    let machine = CudaMachine::for_ranks(1, Timing::Off).unwrap();
    let group = Group::connect(&machine, 1, config()).unwrap();
    let own = group.ranks()[0].backend().described();
    let plan = plan(1, 0);
    let task = task(&plan, false);
    let others = [
        DescribedGpu { sm_count: own.sm_count - 18, ..own.clone() },
        DescribedGpu { arch: Arch::SM_90, ..own.clone() },
        DescribedGpu { name: "NVIDIA H100 80GB HBM3".to_owned(), ..own.clone() },
    ];
    for other in others {
        let tables = task.tables(&other, 0).unwrap();
        let error = group.attention_with(&task, &[tables]).map(drop).unwrap_err();
        assert!(
            matches!(error, ExecError::Tables { rank: 0, reason: TablesFault::Device { .. } }),
            "{error}"
        );
        assert_eq!(
            error.to_string(),
            format!(
                "rank 0 does not take these step tables: they are for {other}, and this rank is on {own}; make them by the \
                 description of the rank's group"
            )
        );
    }
    let tables = task.tables(&own, 0).unwrap();
    drop(group.attention_with(&task, &[tables]).unwrap());
    group.close().unwrap();
}

/// Where a thread has no context, as that of PyTorch's backwards, a call sets this GPU's once and takes it back at its end. A thread
/// that was left it has none of that; it is left the first GPU's alone. On one rank a backward records nothing but its end.
#[test]
fn a_thread_is_left_the_context_of_the_first_gpu() {
    if support::no_compiler() || !hollow_driver::is_loaded("a_thread_is_left_the_context_of_the_first_gpu") {
        return;
    }
    let machine = CudaMachine::for_ranks(1, Timing::Off).unwrap();
    let group = Group::connect(&machine, 1, config()).unwrap();
    let plan = plan(1, 0);
    let (tensors, calls) = (tensors(&group, &plan), ready(&group, &plan));
    let backward = || counted(&calls, &tensors, Pass::ForwardBackward).0;
    let on_a_thread = |work: &(dyn Fn() + Sync)| thread::scope(|scope| scope.spawn(work).join().unwrap());
    let current = || DriverCalls::current_context().unwrap();
    on_a_thread(&|| {
        let asked = backward();
        assert_eq!(asked.of_function("cuCtxSetCurrent"), 2, "{asked}");
        assert_eq!(current(), 0);
        assert_eq!(asked.of_function("cuEventRecord"), 1, "{asked}");
        group.ranks()[0].backend().device().leave_current();
        assert_ne!(current(), 0);
        let asked = backward();
        assert_eq!(asked.of_function("cuCtxSetCurrent"), 0, "{asked}");
        assert_ne!(current(), 0);
    });
    on_a_thread(&|| {
        let [first, second] = [0, 1].map(|ordinal| Device::open(ordinal).unwrap());
        second.leave_current();
        assert_eq!(current(), 0);
        first.leave_current();
        let left = current();
        second.leave_current();
        assert!(left != 0 && current() == left);
    });
    group.close().unwrap();
}

/// What rank 0 does while rank 1 is late, in the first calls of a mask that both have made ready.
#[test]
fn the_first_call_of_a_ready_mask_waits_for_no_rank() {
    if support::no_compiler() || !hollow_driver::is_loaded("the_first_call_of_a_ready_mask_waits_for_no_rank")
    {
        return;
    }
    const LATE: Duration = Duration::from_millis(300);
    let waits = on_processes(2, TransportKind::Auto, |rendezvous, group| {
        let mut waits = Vec::new();
        for number in 0..4 {
            let plan = plan(2, number);
            let tensors = tensors(group, &plan);
            let calls = ready(group, &plan);
            rendezvous.barrier(&format!("ready {number}")).unwrap();
            // What the other has published of its mask comes by a thread.
            thread::sleep(Duration::from_millis(50));
            for pass in [Pass::Forward, Pass::ForwardBackward] {
                rendezvous.barrier(&format!("{number} {pass:?}")).unwrap();
                if rendezvous.rank() == 1 {
                    thread::sleep(LATE);
                }
                let before = group.ranks()[0].backend().world().waits();
                let (asked, took) = counted(&calls, &tensors, pass);
                waits.push((number, pass, group.ranks()[0].backend().world().waits() - before, took, asked));
            }
            group.synchronize().unwrap();
        }
        waits
    });
    for (number, pass, waits, took, asked) in waits.into_iter().flatten() {
        println!("mask {number}, {pass:?}: {waits} waits, {took:?}");
        assert_eq!(waits, 0, "mask {number}, {pass:?}");
        assert!(took < LATE / 2, "mask {number}, {pass:?}: {took:?}");
        assert_eq!(asked.synchronizations(), 0, "mask {number}, {pass:?}: {asked}");
        // Of the whole call, whatever its collectives are.
        assert_eq!(asked.of_function("cuCtxSetCurrent"), 2, "mask {number}, {pass:?}: {asked}");
    }
}

/// Each rank goes ahead, and hears at once that the other has called something else.
#[test]
fn a_rank_that_calls_another_mask_is_named() {
    if support::no_compiler() || !hollow_driver::is_loaded("a_rank_that_calls_another_mask_is_named") {
        return;
    }
    let found = thread::spawn(|| {
        on_processes_that_fail(2, TransportKind::Auto, |rendezvous, group| {
            let plans = [plan(2, 0), plan(2, 1)];
            let both = plans.each_ref().map(|plan| (tensors(group, plan), ready(group, plan)));
            rendezvous.barrier("ready").unwrap();
            thread::sleep(Duration::from_millis(50));
            rendezvous.barrier("begin").unwrap();
            let (tensors, calls) = &both[rendezvous.rank()];
            let began = Instant::now();
            let called =
                calls.forward(&tensors.iter().map(Tensors::forward).collect::<Vec<_>>(), None).map(drop);
            let error = loop {
                if let Err(error) = group.poll() {
                    break error;
                }
                assert!(began.elapsed() < LIMIT / 2, "nobody says that ranks differ");
                thread::sleep(Duration::from_millis(1));
            };
            (called, error, began.elapsed())
        })
    })
    .join()
    .unwrap();
    for (called, error, took) in found {
        assert!(called.is_ok() || called.as_ref() == Err(&error), "{called:?}");
        assert!(matches!(error, ExecError::PlanDiffers { .. }), "{error}");
        assert!(took < LIMIT / 4, "{took:?}");
    }
}

/// An error before anything is enqueued; the group goes on, and memory is lent as before.
#[test]
fn a_call_on_a_stream_that_was_destroyed_is_refused() {
    if support::no_compiler() || !hollow_driver::is_loaded("a_call_on_a_stream_that_was_destroyed_is_refused")
    {
        return;
    }
    for ranks in [1, 2] {
        let machine = CudaMachine::for_ranks(ranks, Timing::Off).unwrap();
        let group = Group::connect(&machine, ranks, config()).unwrap();
        let plan = plan(ranks, 0);
        let (tensors, calls) = (tensors(&group, &plan), ready(&group, &plan));
        let of_ranks: Vec<_> = tensors.iter().map(Tensors::forward).collect();
        let own = |rank: &counterpoint_exec::RankOf<CudaMachine>| {
            Stream::new(rank.backend().device(), StreamPriority::Low).unwrap()
        };
        // SAFETY: the first goes before who borrows it, which is what is tested; nothing is enqueued on it.
        let borrowed = |owned: &[Stream]| -> Vec<_> {
            let ranks = group.ranks().iter().zip(owned);
            ranks.map(|(rank, stream)| unsafe { rank.backend().borrow_stream(stream.raw()) }).collect()
        };
        let mut owned: Vec<Stream> = group.ranks().iter().map(own).collect();
        let gone = borrowed(&owned);
        calls.forward(&of_ranks, Some(&gone.iter().collect::<Vec<_>>())).unwrap();
        owned.clear();
        let call = || calls.forward(&of_ranks, Some(&gone.iter().collect::<Vec<_>>())).map(drop);
        let (called, asked) = DriverCalls::of(call).unwrap();
        let error = called.unwrap_err().to_string();
        assert!(error.contains("has been destroyed"), "{error}");
        for name in ["cuLaunchKernelEx", "cuEventRecord", "cuStreamWaitEvent", "cuMemcpyAsync"] {
            assert_eq!(asked.of_function(name), 0, "{asked}");
        }
        let new: Vec<Stream> = group.ranks().iter().map(own).collect();
        let there = borrowed(&new);
        // Asks for memory, which asks all streams.
        drop((ready(&group, &self::plan(ranks, 1)), tensors.len()));
        calls.forward(&of_ranks, Some(&there.iter().collect::<Vec<_>>())).unwrap();
        group.synchronize().unwrap();
        drop((gone, there));
        group.close().unwrap();
        assert_eq!(machine.devices()[0].take_release_error(), None);
    }
}

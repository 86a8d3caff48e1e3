//! What a fresh mask asks of the driver and of other ranks, counted with a driver that has no GPU.

use std::time::{Duration, Instant};

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_cuda::{CudaMachine, DriverCalls, Timing};
use counterpoint_exec::{
    AttentionCalls, Backend, BackwardTensors, ForwardTensors, Group, HostTensor,
    Machine, Pass, WorldConfig,
};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, GradientShares, Plan};
use counterpoint_schedule::OverlapPolicy;

mod hollow_driver;
mod support;

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

const LIMIT: Duration = Duration::from_secs(20);

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

fn config() -> WorldConfig {
    WorldConfig { limit: LIMIT, poison: false, ..WorldConfig::default() }
}

/// A rank's tables of a mask, those of its forward and of its backward, are one copy. What its kernels learn of other ranks' rows is one more
/// for each collective, made when all have told of it. Calls copy nothing.
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
            assert_eq!(asked.uploads(), ranks * (1 + collectives), "{ranks} ranks, mask {number}: {asked}");
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

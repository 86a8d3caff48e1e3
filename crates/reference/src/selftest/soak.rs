//! A group that lives: masks are prepared, called and dropped, each rank in an order of its own. Who calls it looks at what grows.

use std::collections::VecDeque;
use std::ops::{Range, RangeInclusive};
use std::sync::Arc;

use counterpoint_choose::{PlanConfig, plan_mask};
use counterpoint_exec::{
    AttentionRank, Backend, BackwardTensors, ExecError, ForwardTensors, Group, GroupRank, HostTensor,
    Machine, Pass, ProgramFault, Ticket, Transport,
};
use counterpoint_mask::{Documents, Mask};
use counterpoint_plan::{AttentionSpec, DType, Plan};
use counterpoint_schedule::{BufferRole, BufferSpec, OverlapPolicy};
use half::bf16;

use crate::draw::Draw;

/// The masks of a soak: some plans, which come again and again in a random order.
pub struct Soak {
    spec: AttentionSpec,
    plans: Vec<Plan>,
    seed: u64,
}

impl Soak {
    /// `plans` random packs of documents of such `lengths`, in chunks of `chunk` rows.
    ///
    /// # Errors
    /// [`ExecError::Program`] when there is no plan for such a mask.
    pub fn new(
        spec: &AttentionSpec,
        ranks: usize,
        plans: usize,
        lengths: RangeInclusive<usize>,
        chunk: usize,
        seed: u64,
    ) -> Result<Self, ExecError> {
        let plan = |number: usize| -> Result<Plan, ExecError> {
            let mut draw = Draw::new(seed.wrapping_add(number as u64));
            let lengths: Vec<usize> =
                (0..draw.within(1, 3)).map(|_| draw.within(*lengths.start(), *lengths.end())).collect();
            let refused = |reason: String| ExecError::Program {
                program: "a soak".to_owned(),
                rank: 0,
                reason: ProgramFault::NotPlanned { reason },
            };
            let mask = Documents::from_lengths(lengths)
                .and_then(|documents| match number.is_multiple_of(3) {
                    true => Mask::full(documents),
                    false => Mask::causal(documents),
                })
                .map_err(|error| refused(error.to_string()))?;
            let config = PlanConfig { chunk_size: Some(chunk), ..PlanConfig::new(ranks) };
            plan_mask(&mask, spec, &config).map_err(|error| refused(error.to_string()))
        };
        Ok(Self { spec: *spec, plans: (0..plans).map(plan).collect::<Result<_, _>>()?, seed })
    }

    /// Goes through the masks of these numbers on all ranks of a group, a thread each. All ranks call the same plans in the same order, and
    /// each prepares and drops as it likes. `around` runs a rank's part on its thread, and may count what that asks for. Gives the
    /// wrong elements that were found and what `around` gave, in the order of ranks.
    ///
    /// # Errors
    /// The first of any rank.
    pub fn run<M: Machine, R: Send>(
        &self,
        group: &Group<M>,
        masks: Range<usize>,
        around: impl Fn(&mut dyn FnMut()) -> R + Sync,
    ) -> Result<(usize, Vec<R>), ExecError> {
        let of_rank = |rank| {
            let mut done = Ok(0);
            let counted = around(&mut || done = self.on_rank(rank, masks.clone()));
            done.map(|wrong| (wrong, counted))
        };
        let found: Vec<Result<(usize, R), ExecError>> = std::thread::scope(|scope| {
            let started: Vec<_> = group.ranks().iter().map(|rank| scope.spawn(|| of_rank(rank))).collect();
            let died = || Err(ExecError::GaveUp { rank: 0, reason: "a rank of a soak panicked".to_owned() });
            started.into_iter().map(|thread| thread.join().unwrap_or_else(|_| died())).collect()
        });
        group.synchronize()?;
        let (mut wrong, mut counted) = (0, Vec::with_capacity(found.len()));
        for found in found {
            let (wrong_here, counted_here) = found?;
            wrong += wrong_here;
            counted.push(counted_here);
        }
        Ok((wrong, counted))
    }

    fn on_rank<B: Backend, T: Transport<B>>(
        &self,
        rank: &Arc<GroupRank<B, T>>,
        masks: Range<usize>,
    ) -> Result<usize, ExecError> {
        let mut draw = Draw::new(self.seed ^ (rank.rank() as u64 + 1) ^ masks.start as u64);
        let mut kept: VecDeque<Step<B, T>> = VecDeque::new();
        let mut ahead: VecDeque<Step<B, T>> = VecDeque::new();
        let mut wrong = 0;
        for number in masks.clone() {
            // Some ranks prepare ahead, as a loader does.
            let depth = draw.within(1, 3);
            while ahead.len() < depth && number + ahead.len() < masks.end {
                ahead.push_back(self.step(rank, number + ahead.len())?);
            }
            let Some(mut step) = ahead.pop_front() else { break };
            step.call()?;
            kept.push_back(step);
            while kept.len() > draw.within(0, 5) {
                let at = draw.within(0, kept.len() - 1);
                // Looks at results, or lets a mask go while its calls are under way.
                match kept.remove(at) {
                    Some(step) if draw.chance(10) => wrong += step.wrong(rank.backend())?,
                    gone => drop(gone),
                }
            }
            // No host is further ahead than this.
            if number % 16 == 0
                && let Some(oldest) = kept.front()
            {
                oldest.wait()?;
            }
        }
        Ok(wrong)
    }

    fn step<B: Backend, T: Transport<B>>(
        &self,
        rank: &Arc<GroupRank<B, T>>,
        number: usize,
    ) -> Result<Step<B, T>, ExecError> {
        // The same on all ranks.
        let mut draw = Draw::new(self.seed.wrapping_mul(31).wrapping_add(number as u64));
        let (plan, spec) = (&self.plans[draw.within(0, self.plans.len() - 1)], &self.spec);
        let pass = if number.is_multiple_of(2) { Pass::ForwardBackward } else { Pass::Forward };
        let attention = AttentionRank::prepare(rank, plan, spec, pass, OverlapPolicy::default(), false)?;
        let (rows, backend) = (plan.ranks[rank.rank()].q_rows, rank.backend());
        let given = |name: &str, heads: usize, value: f32| {
            let shape = vec![rows, heads, spec.head_dim];
            let count = shape.iter().product();
            backend.upload(
                name,
                match spec.dtype {
                    DType::Bf16 => HostTensor::from_vec(shape, vec![bf16::from_f32(value); count]),
                    _ => HostTensor::from_vec(shape, vec![value; count]),
                },
            )
        };
        let result = |name: &str, dtype: DType, shape: &[usize]| {
            let (name, shape) = (name.to_owned(), shape.to_vec());
            backend.allocate(&BufferSpec { name, dtype, shape, role: BufferRole::Output })
        };
        let [of_queries, of_keys] = [spec.heads_q, spec.heads_kv].map(|heads| [rows, heads, spec.head_dim]);
        Ok(Step {
            attention,
            q: given("q", spec.heads_q, 0.5)?,
            k: given("k", spec.heads_kv, 0.5)?,
            v: given("v", spec.heads_kv, 1.0)?,
            dout: given("dout", spec.heads_q, 1.0)?,
            out: result("out", spec.dtype, &of_queries)?,
            lse: result("lse", spec.dtype.accumulator(), &of_queries[..2])?,
            gradients: [
                result("dq", spec.dtype, &of_queries)?,
                result("dk", spec.dtype, &of_keys)?,
                result("dv", spec.dtype, &of_keys)?,
            ],
            tickets: Vec::new(),
            pass,
        })
    }
}

/// A mask of its own, with its tensors.
struct Step<B: Backend, T: Transport<B>> {
    attention: AttentionRank<B, T>,
    q: B::Buffer,
    k: B::Buffer,
    v: B::Buffer,
    dout: B::Buffer,
    out: B::Buffer,
    lse: B::Buffer,
    gradients: [B::Buffer; 3],
    tickets: Vec<Ticket<B>>,
    pass: Pass,
}

impl<B: Backend, T: Transport<B>> Step<B, T> {
    fn call(&mut self) -> Result<(), ExecError> {
        let Self { attention, q, k, v, dout, out, lse, gradients: [dq, dk, dv], tickets, pass } = self;
        tickets.push(
            attention.forward(&ForwardTensors { q, k, v, sink: None, out, lse, max_logits: None }, None)?,
        );
        if *pass == Pass::ForwardBackward {
            let backward =
                BackwardTensors { dout, q, k, v, sink: None, out, lse, dlse: None, dq, dk, dv, dsink: None };
            tickets.push(attention.backward(&backward, None)?);
        }
        Ok(())
    }

    fn wait(&self) -> Result<(), ExecError> {
        self.tickets.iter().try_for_each(Ticket::wait)
    }

    /// Means of ones are ones.
    fn wrong(&self, backend: &B) -> Result<usize, ExecError> {
        self.wait()?;
        let out = backend.download(&self.out)?.to_f64();
        // Not a number is not right.
        Ok(out.len() - out.iter().filter(|element| (*element - 1.0).abs() < 0.01).count())
    }
}

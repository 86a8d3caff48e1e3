//! Calls of a group on memory and streams that others own: packed tensors, several calls on their way, graphs of others, many masks.

use std::cell::RefCell;
use std::sync::Arc;
use std::time::Duration;

use counterpoint_exec::{
    AttentionCalls, AttentionInputs, AttentionOutputs, Backend, BackwardTensors, DeviceFault, ExecError,
    ForwardTensors, Group, HostTensor, OpPlace, Pass, RanksRun, RunConfig, TensorFault, Ticket, WorldConfig,
    run_attention_on,
};
use counterpoint_mask::Mask;
use counterpoint_plan::{AttentionSpec, DType};
use counterpoint_reference::selftest::{SelfCheck, unlike_elements};
use counterpoint_schedule::OverlapPolicy;

use super::refusals::refusals;
use super::soak::soak;
use super::staged::StagedAttention;
use counterpoint_cuda::kernel::StartHold;
use counterpoint_cuda::{
    CudaBackend, CudaBuffer, CudaError, CudaMachine, CudaStream, DeviceBuffer, DriverCalls, Graph, Stream,
    StreamPriority,
};

/// Attention called on packed tensors that the caller owns, on the caller's streams, by 1, 2 and 4 ranks: the bits must be those of a run
/// of its own tensors. A call may wait for nothing and make nothing. One rank's calls are replayed from the caller's graph; and many
/// masks are prepared, called and dropped on one group.
///
/// # Errors
/// When the machine cannot run attention at all.
pub(super) fn selftest_calls(machine: &CudaMachine) -> Result<Vec<SelfCheck>, ExecError> {
    let mut checks = Vec::new();
    for ranks in [1, 2, 4] {
        let case = Case::new(machine, Mask::causal(640 * ranks), ranks, 11)?;
        checks.extend(case.check(group(machine, ranks)?, "two calls on their way")?);
        if ranks > 1 {
            checks.extend(case.check(group(machine, ranks)?.overlap_calls(), "two calls that overlap")?);
        }
    }
    checks.extend(refusals(machine)?);
    checks.extend(soak(machine)?);
    Ok(checks)
}

pub(super) fn failed(error: CudaError) -> ExecError {
    ExecError::Device { rank: 0, place: "the calls of others".to_owned(), reason: DeviceFault::call(error) }
}

/// A group whose results are not filled with NaN first.
pub(super) fn group(machine: &CudaMachine, ranks: usize) -> Result<Group<CudaMachine>, ExecError> {
    let config = WorldConfig { limit: Duration::from_secs(30), poison: false, ..WorldConfig::default() };
    Group::connect(machine, ranks, config)
}

/// A mask with its inputs and the right results. It is made before the groups that it is called on, and goes after them.
pub(super) struct Case {
    staged: StagedAttention,
    inputs: Vec<AttentionInputs>,
    right: AttentionOutputs,
    /// Streams of the caller's, which groups have borrowed and may ask until they have gone: whoever drops tensors first, as callers do,
    /// must not destroy them.
    streams: RefCell<Vec<Stream>>,
}

impl Case {
    pub(super) fn new(
        machine: &CudaMachine,
        mask: Result<Mask, counterpoint_mask::MaskError>,
        ranks: usize,
        seed: u64,
    ) -> Result<Self, ExecError> {
        let staged = StagedAttention::new(mask, ranks, 1, seed, Pass::ForwardBackward)?;
        let StagedAttention { spec, plan, inputs } = &staged;
        let run = RunConfig { deterministic: true, ..RunConfig::default() }.with_poison(false);
        let right = run_attention_on(machine, plan, spec, inputs, &run)?.outputs;
        Ok(Self { inputs: inputs.of_ranks(plan)?, staged, right, streams: RefCell::default() })
    }

    pub(super) fn prepare(
        &self,
        group: &Group<CudaMachine>,
    ) -> Result<AttentionCalls<CudaMachine>, ExecError> {
        let StagedAttention { spec, plan, .. } = &self.staged;
        group.attention(plan, spec, Pass::ForwardBackward, OverlapPolicy::default(), true)
    }

    pub(super) fn tensors(&self, group: &Group<CudaMachine>) -> Result<Vec<Tensors>, ExecError> {
        let ranks = group.ranks().iter().zip(&self.inputs);
        ranks.map(|(rank, inputs)| self.tensors_of(rank.backend(), inputs)).collect()
    }

    fn tensors_of(&self, backend: &CudaBackend, inputs: &AttentionInputs) -> Result<Tensors, ExecError> {
        let stream = Stream::new(backend.device(), StreamPriority::Low).map_err(failed)?;
        self.streams.borrow_mut().push(stream.clone());
        Tensors::new(backend, stream, inputs, &self.staged.spec)
    }

    fn check(&self, group: Group<CudaMachine>, how: &str) -> Result<Vec<SelfCheck>, ExecError> {
        let ranks = self.inputs.len();
        let (calls, to_prepare) = DriverCalls::of(|| self.prepare(&group)).map_err(failed)?;
        let calls = calls?;
        // Two micro-batches on their way at once.
        let both = [self.tensors(&group)?, self.tensors(&group)?];
        let step = || -> Result<Vec<Ticket<CudaBackend>>, ExecError> {
            let mut tickets = Vec::new();
            for tensors in &both {
                tickets.extend(forward(&calls, tensors)?);
            }
            for tensors in both.iter().rev() {
                tickets.extend(backward(&calls, tensors)?);
            }
            Ok(tickets)
        };
        both.iter().flatten().try_for_each(Tensors::give_late)?;
        step()?.iter().try_for_each(Ticket::wait)?;
        let mut unlike = 0;
        for tensors in &both {
            unlike += self.unlike(tensors)?;
        }
        let of = |what: &str| format!("{what}, {ranks} ranks, {how}");
        let mut checks = vec![SelfCheck::of(
            of("packed tensors on the caller's streams: with other bits"),
            11,
            unlike as f64,
            0.0,
        )];
        let (tickets, asked) = DriverCalls::of(step).map_err(failed)?;
        tickets?.iter().try_for_each(Ticket::wait)?;
        checks.push(SelfCheck::of(
            of("waits for the device in calls"),
            11,
            asked.synchronizations() as f64,
            0.0,
        ));
        checks.push(SelfCheck::of(of("things made in calls"), 11, asked.allocations() as f64, 0.0));
        checks.push(SelfCheck::of(of("copies to the device in calls"), 11, asked.uploads() as f64, 0.0));
        if ranks == 1 {
            let more = to_prepare.uploads().abs_diff(1);
            let name = of("tables that are not one copy when a mask is made ready");
            checks.push(SelfCheck::of(name, 11, more as f64, 0.0));
        }
        if let ([tensors], 1) = (&both[0][..], ranks) {
            checks.push(self.captured(&calls, tensors)?);
        }
        // In whatever order: nothing waits for another rank.
        drop(calls);
        drop(both);
        group.close()?;
        Ok(checks)
    }

    /// A forward and a backward within a capture of the caller's stream, replayed over other results.
    fn captured(
        &self,
        calls: &AttentionCalls<CudaMachine>,
        tensors: &Tensors,
    ) -> Result<SelfCheck, ExecError> {
        let stream = &tensors.stream;
        let graph = Graph::capture::<CallError>(stream, || {
            drop(forward(calls, std::slice::from_ref(tensors))?);
            drop(backward(calls, std::slice::from_ref(tensors))?);
            Ok(())
        });
        let graph = graph.map_err(|error| match error {
            CallError::Run(error) => error,
            CallError::Cuda(error) => failed(error),
        })?;
        let mut unlike = 0;
        for _ in 0..3 {
            tensors.spoil()?;
            // SAFETY: the tensors and the calls are borrowed, and the stream is waited for.
            unsafe { graph.launch(stream) }.and_then(|()| stream.synchronize()).map_err(failed)?;
            unlike += self.unlike(std::slice::from_ref(tensors))?;
        }
        let name = "calls within the caller's capture, replayed: with other bits".to_owned();
        Ok(SelfCheck::of(name, 11, unlike as f64, 0.0))
    }

    /// Elements that are not the right ones.
    pub(super) fn unlike(&self, tensors: &[Tensors]) -> Result<usize, ExecError> {
        let outputs = tensors.iter().enumerate().map(|(rank, tensors)| Ok((rank, tensors.outputs()?)));
        let outputs = outputs.collect::<Result<_, ExecError>>()?;
        let found = RanksRun::of_outputs(outputs).into_whole(&self.staged.plan)?.outputs;
        let all = |outputs: &AttentionOutputs| -> Vec<HostTensor> {
            let AttentionOutputs { out, lse, dq, dk, dv, .. } = outputs.clone();
            [Some(out), Some(lse), dq, dk, dv].into_iter().flatten().collect()
        };
        let pairs = all(&found).into_iter().zip(all(&self.right));
        Ok(pairs.map(|(found, right)| unlike_elements(&found, &right)).sum())
    }
}

/// What ends a capture of calls.
enum CallError {
    Run(ExecError),
    Cuda(CudaError),
}

impl From<CudaError> for CallError {
    fn from(error: CudaError) -> Self {
        Self::Cuda(error)
    }
}

impl From<ExecError> for CallError {
    fn from(error: ExecError) -> Self {
        Self::Run(error)
    }
}

fn forward(
    calls: &AttentionCalls<CudaMachine>,
    tensors: &[Tensors],
) -> Result<Vec<Ticket<CudaBackend>>, ExecError> {
    let of_ranks: Vec<_> = tensors.iter().map(Tensors::forward).collect();
    calls.forward(&of_ranks, Some(&streams(tensors)))
}

fn backward(
    calls: &AttentionCalls<CudaMachine>,
    tensors: &[Tensors],
) -> Result<Vec<Ticket<CudaBackend>>, ExecError> {
    let of_ranks: Vec<_> = tensors.iter().map(Tensors::backward).collect();
    calls.backward(&of_ranks, Some(&streams(tensors)))
}

fn streams(tensors: &[Tensors]) -> Vec<&Arc<CudaStream>> {
    tensors.iter().map(|tensors| &tensors.borrowed).collect()
}

/// A rank's tensors: queries, keys and values are parts of one packed tensor of the caller's, and so are their gradients.
pub(super) struct Tensors {
    backend: CudaBackend,
    /// The caller's, and as the group has it.
    stream: Stream,
    borrowed: Arc<CudaStream>,
    hold: StartHold,
    /// What the parts are to hold, dense.
    given: [CudaBuffer; 3],
    qkv: [CudaBuffer; 3],
    dqkv: [CudaBuffer; 3],
    dout: CudaBuffer,
    out: CudaBuffer,
    lse: CudaBuffer,
    /// The packed tensors.
    _memory: [DeviceBuffer; 2],
}

impl Tensors {
    /// Tensors of a case, which keeps `stream` until the rank's group has gone.
    fn new(
        backend: &CudaBackend,
        stream: Stream,
        inputs: &AttentionInputs,
        spec: &AttentionSpec,
    ) -> Result<Self, ExecError> {
        // SAFETY: the case keeps the stream, and outlives the rank's group, which keeps nothing but the handle.
        let borrowed = unsafe { backend.borrow_stream(stream.raw()) };
        let hold = StartHold::new(backend.device()).map_err(failed)?;
        let upload = |name: &str, tensor: &HostTensor| backend.upload(name, tensor.clone());
        let given = [upload("q", &inputs.q)?, upload("k", &inputs.k)?, upload("v", &inputs.v)?];
        let [(memory, qkv), (gradient_memory, dqkv)] =
            [packed(backend, spec, inputs.q.rows())?, packed(backend, spec, inputs.q.rows())?];
        let dout = inputs.dout.as_ref().ok_or_else(|| ExecError::tensor("dout", TensorFault::Missing))?;
        let lse = HostTensor::zeros(vec![inputs.q.rows(), spec.heads_q], DType::F32);
        Ok(Self {
            given,
            qkv,
            dqkv,
            dout: upload("dout", dout)?,
            out: upload("out", dout)?,
            lse: upload("lse", &lse)?,
            _memory: [memory, gradient_memory],
            hold,
            borrowed,
            stream,
            backend: backend.clone(),
        })
    }

    fn place() -> OpPlace {
        OpPlace::new(0, "packing")
    }

    /// Puts queries, keys and values where they belong on the caller's stream, some time from now.
    pub(super) fn give_late(&self) -> Result<(), ExecError> {
        self.hold.launch(&self.stream, Duration::from_millis(20)).map_err(failed)?;
        let mut parts = self.given.iter().zip(&self.qkv);
        parts.try_for_each(|(from, to)| self.backend.copy(&self.borrowed, &Self::place(), from, to))
    }

    fn spoil(&self) -> Result<(), ExecError> {
        let results = [&self.out, &self.lse].into_iter().chain(&self.dqkv);
        let mut results = results.map(|tensor| tensor.memory().fill(&self.stream, 0xff));
        results.try_for_each(|filled| filled.map_err(failed))
    }

    /// The caller's stream.
    pub(super) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The same as the group has it.
    pub(super) fn callers(&self) -> &Arc<CudaStream> {
        &self.borrowed
    }

    pub(super) fn forward(&self) -> ForwardTensors<'_, CudaBackend> {
        let [q, k, v] = &self.qkv;
        ForwardTensors { q, k, v, sink: None, out: &self.out, lse: &self.lse, max_logits: None }
    }

    pub(super) fn backward(&self) -> BackwardTensors<'_, CudaBackend> {
        let ([q, k, v], [dq, dk, dv]) = (&self.qkv, &self.dqkv);
        let Self { dout, out, lse, .. } = self;
        BackwardTensors { dout, q, k, v, sink: None, out, lse, dlse: None, dq, dk, dv, dsink: None }
    }

    /// Results as they are behind what is on the caller's stream.
    fn outputs(&self) -> Result<AttentionOutputs, ExecError> {
        let gradients = self.dqkv.iter().zip(&self.given).map(|(packed, like)| {
            let memory = DeviceBuffer::new(self.backend.device(), like.memory().len()).map_err(failed)?;
            let dense = CudaBuffer::new(memory, like.shape(), like.dtype()).map_err(failed)?;
            self.backend.copy(&self.borrowed, &Self::place(), packed, &dense)?;
            Ok(dense)
        });
        let gradients = gradients.collect::<Result<Vec<_>, ExecError>>()?;
        self.stream.synchronize().map_err(failed)?;
        let download = |buffer: &CudaBuffer| self.backend.download(buffer);
        let [dq, dk, dv] = [0, 1, 2].map(|part| download(&gradients[part]));
        Ok(AttentionOutputs {
            out: download(&self.out)?,
            lse: download(&self.lse)?,
            max_logits: None,
            dq: Some(dq?),
            dk: Some(dk?),
            dv: Some(dv?),
            dsink: None,
        })
    }
}

/// `[rows, heads_q + 2 heads_kv, head_dim]` of the caller's, and its parts: queries, keys, values.
fn packed(
    backend: &CudaBackend,
    spec: &AttentionSpec,
    rows: usize,
) -> Result<(DeviceBuffer, [CudaBuffer; 3]), ExecError> {
    let (dim, size) = (spec.head_dim, spec.dtype.size());
    let row = (spec.heads_q + 2 * spec.heads_kv) * dim;
    let memory = DeviceBuffer::new(backend.device(), rows * row * size).map_err(failed)?;
    let part = |head: usize, heads: usize| -> Result<CudaBuffer, CudaError> {
        let (first, bytes) = (head * dim * size, memory.len());
        // SAFETY: the memory is returned with its parts, which go first.
        let all = unsafe { DeviceBuffer::borrow(backend.device(), memory.address(), bytes) };
        CudaBuffer::strided(all.slice(first..bytes)?, &[rows, heads, dim], spec.dtype, [row, dim])
    };
    let (q, kv) = (spec.heads_q, spec.heads_kv);
    let parts = [part(0, q), part(q, kv), part(q + kv, kv)];
    let [q, k, v] = parts.map(|part| part.map_err(failed));
    Ok((memory, [q?, k?, v?]))
}

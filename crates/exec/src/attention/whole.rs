//! The results of ranks put together: of one process's ranks, or of those of all processes on rank 0.

use counterpoint_plan::{DType, Plan};
use counterpoint_schedule::Timeline;
use serde::{Deserialize, Serialize};

use super::{AttentionOutputs, AttentionRun, RanksRun};
use crate::frame::{read_frame, write_frame};
use crate::layout::undispatch;
use crate::{ExecError, HostTensor, Rendezvous, RendezvousError, StoreFault};

impl RanksRun {
    /// The results in global token order, once those of all ranks are here.
    ///
    /// # Errors
    /// [`ExecError::Tensor`] when some are not.
    pub fn into_whole(self, plan: &Plan) -> Result<AttentionRun, ExecError> {
        let Self { outputs, forward, backward, forward_seconds, backward_seconds } = self;
        let mut columns: [Vec<HostTensor>; 7] = Default::default();
        for (_, rank) in outputs {
            let AttentionOutputs { out, lse, max_logits, dq, dk, dv, dsink } = rank;
            let tensors = [Some(out), Some(lse), max_logits, dq, dk, dv, dsink];
            for (column, tensor) in columns.iter_mut().zip(tensors) {
                column.extend(tensor);
            }
        }
        let [out, lse, mut max_logits, dq, dk, dv, mut dsink] = columns;
        let (q, k) = (&plan.q_dispatch, &plan.k_dispatch);
        let gradient = |locals: Vec<HostTensor>, dispatch| -> Result<Option<HostTensor>, ExecError> {
            (!locals.is_empty()).then(|| undispatch(dispatch, &locals)).transpose()
        };
        Ok(AttentionRun {
            outputs: AttentionOutputs {
                out: undispatch(q, &out)?,
                lse: undispatch(q, &lse)?,
                // Of all ranks already, so that every rank has it.
                max_logits: (!max_logits.is_empty()).then(|| max_logits.swap_remove(0)),
                dq: gradient(dq, q)?,
                dk: gradient(dk, k)?,
                dv: gradient(dv, k)?,
                // Likewise.
                dsink: (!dsink.is_empty()).then(|| dsink.swap_remove(0)),
            },
            forward,
            backward,
            forward_seconds,
            backward_seconds,
        })
    }

    /// Brings the results of all processes to rank 0, in global token order there; `None` elsewhere. Every process calls it,
    /// with its own rank's results. A sample of seconds is then the longest that a rank took.
    ///
    /// # Errors
    /// Whatever ended the job.
    pub fn gather(self, rendezvous: &Rendezvous, plan: &Plan) -> Result<Option<AttentionRun>, ExecError> {
        let key = |rank: usize| format!("results of rank {rank}");
        let broken = |rank: usize, reason| ExecError::from(RendezvousError::Broken { rank, reason });
        let own = rendezvous.rank();
        if own != 0 {
            let bytes =
                self.to_bytes().map_err(|error| rendezvous.fail(broken(own, StoreFault::value(error))))?;
            rendezvous.set(&key(own), &bytes)?;
            // Once rank 0 has them this process may end, or have others gathered under the same keys.
            rendezvous.barrier("results")?;
            return Ok(None);
        }
        let mut all = self;
        for rank in 1..rendezvous.world_size() {
            let bytes = rendezvous.take(&key(rank), Some(rank))?;
            let theirs = Self::from_bytes(&bytes).map_err(|reason| rendezvous.fail(broken(rank, reason)))?;
            all.join(theirs);
        }
        rendezvous.barrier("results")?;
        all.into_whole(plan).map(Some)
    }

    fn join(&mut self, other: Self) {
        let longest = |own: &mut Vec<f64>, other: &[f64]| {
            own.iter_mut().zip(other).for_each(|(own, other)| *own = own.max(*other));
        };
        self.outputs.extend(other.outputs);
        self.forward.spans.extend(other.forward.spans);
        if let (Some(own), Some(other)) = (&mut self.backward, other.backward) {
            own.spans.extend(other.spans);
        }
        longest(&mut self.forward_seconds, &other.forward_seconds);
        longest(&mut self.backward_seconds, &other.backward_seconds);
    }

    fn to_bytes(&self) -> std::io::Result<Vec<u8>> {
        let ranks: Vec<(usize, [Option<&HostTensor>; 7])> =
            self.outputs.iter().map(|(rank, outputs)| (*rank, outputs.tensors())).collect();
        let shape =
            |tensor: Option<&HostTensor>| tensor.map(|tensor| (tensor.dtype(), tensor.shape().to_vec()));
        let header = Header {
            ranks: ranks.iter().map(|(rank, tensors)| (*rank, tensors.map(shape))).collect(),
            forward: self.forward.clone(),
            backward: self.backward.clone(),
            forward_seconds: self.forward_seconds.clone(),
            backward_seconds: self.backward_seconds.clone(),
        };
        let payload: Vec<&[u8]> = ranks
            .iter()
            .flat_map(|(_, tensors)| tensors.iter().flatten().map(|tensor| tensor.bytes()))
            .collect();
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &header, &payload)?;
        Ok(bytes)
    }

    fn from_bytes(mut bytes: &[u8]) -> Result<Self, StoreFault> {
        let short = || StoreFault::PartOfResults;
        let frame = read_frame::<Header>(&mut bytes).map_err(StoreFault::value)?;
        let (header, payload) = frame.ok_or_else(short)?;
        let mut rest = payload.as_slice();
        let mut outputs = Vec::with_capacity(header.ranks.len());
        for (rank, shapes) in header.ranks {
            let mut tensors = shapes.into_iter().map(|shape| {
                let Some((dtype, shape)) = shape else { return Ok(None) };
                let bytes = shape.iter().try_fold(dtype.size(), |bytes, &n| bytes.checked_mul(n));
                let part = bytes.and_then(|bytes| rest.split_off(..bytes)).ok_or_else(short)?;
                Ok::<_, StoreFault>(Some(HostTensor::from_bytes(shape, dtype, part)))
            });
            let mut next = || tensors.next().ok_or_else(short).flatten();
            let (out, lse) = (next()?.ok_or_else(short)?, next()?.ok_or_else(short)?);
            let (max_logits, dq, dk, dv, dsink) = (next()?, next()?, next()?, next()?, next()?);
            outputs.push((rank, AttentionOutputs { out, lse, max_logits, dq, dk, dv, dsink }));
        }
        let Header { forward, backward, forward_seconds, backward_seconds, .. } = header;
        Ok(Self { outputs, forward, backward, forward_seconds, backward_seconds })
    }
}

impl AttentionOutputs {
    /// Those that there are, in the order of the fields.
    fn tensors(&self) -> [Option<&HostTensor>; 7] {
        let Self { out, lse, max_logits, dq, dk, dv, dsink } = self;
        [Some(out), Some(lse), max_logits.as_ref(), dq.as_ref(), dk.as_ref(), dv.as_ref(), dsink.as_ref()]
    }
}

/// A tensor's type and shape.
type Layout = (DType, Vec<usize>);

/// What goes before the elements.
#[derive(Serialize, Deserialize)]
struct Header {
    /// Those of the tensors of every rank, in the order of [`AttentionOutputs`].
    ranks: Vec<(usize, [Option<Layout>; 7])>,
    forward: Timeline,
    backward: Option<Timeline>,
    forward_seconds: Vec<f64>,
    backward_seconds: Vec<f64>,
}

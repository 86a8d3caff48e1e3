//! How a collective's rows are moved: what each of the ways does at each point of a call.

use std::sync::Arc;

use counterpoint_exec::collective::{Collective, Pattern, PeerRows};
use counterpoint_schedule::{BufferId, SpanKind};

use super::collective::{Part, PeerPost};
use super::process::Readers;
use super::ready::OwnPart;
use super::{Call, CallError, CudaPending, CudaTransport};
use crate::DeviceBuffer;
use crate::backend::CudaBuffer;

/// How a collective's rows are moved. What depends on the other ranks' rows is made in the first run, and again only if those change.
pub(super) trait Work: Send + Sync {
    /// Enqueues what moves the rows.
    fn fetch(
        &self,
        transport: &CudaTransport,
        call: &Call<'_>,
        pending: &mut CudaPending,
    ) -> Result<(), CallError>;

    /// Enqueues what comes behind that, where ranks follow each other by events. What others have published stays for who has not learnt
    /// yet where this rank's memory is.
    fn end(
        &self,
        _transport: &CudaTransport,
        _call: &Call<'_>,
        _pending: &CudaPending,
    ) -> Result<(), CallError> {
        Ok(())
    }

    /// Adds to this rank's `part` where its tensors lie, as far as others use them; and says who does.
    fn publish<'a>(&'a self, part: &mut Part, tensors: &Tensors<'_>, pattern: &'a Pattern) -> &'a [PeerRows];

    /// Who of other processes learns where they lie, among `users`: every rank of a product learns where the others' are, but elsewhere
    /// memory of the caller's has a stand-in only where somebody uses its rows.
    fn readers<'a>(&self, _users: &'a [PeerRows]) -> Readers<'a> {
        Readers::All
    }

    /// Whether the ranks are connected, where kernels or NCCL do without the host from then on.
    fn is_connected(&self) -> bool {
        false
    }

    /// Whether calls can be captured now; if never, why.
    fn can_be_captured(&self) -> Result<bool, &'static str> {
        Ok(self.is_connected())
    }

    /// Whether its ranks follow each other by events; else by device-side barriers, or NCCL's.
    fn synchronises_by_events(&self) -> bool {
        false
    }

    /// Whether its kernels say themselves when they have started. Copy engines hold no multiprocessor, and fused operations are computation:
    /// those start when they are enqueued.
    fn signals_start(&self) -> bool {
        false
    }

    /// Memory that the others' kernels write to, for as long as it is there: where they take in what comes, and the mailbox.
    fn memory(&self) -> (Option<DeviceBuffer>, Option<DeviceBuffer>) {
        (None, None)
    }

    /// Whether kernels move its rows by lists of those of all ranks.
    fn has_lists(&self) -> bool {
        false
    }

    /// Gathers those lists, where it has some, by what all peers have published of `own`.
    fn gather_ahead(&self, _own: &OwnPart, _posts: &[PeerPost]) -> Result<(), CallError> {
        Ok(())
    }

    /// Whether a call adds nothing to what the others know since the collective was made ready.
    fn is_known(&self) -> bool {
        false
    }

    /// The tensors that other ranks use where they lie.
    fn exposes(&self) -> Exposes {
        Exposes::Nothing
    }

    /// Whether ranks publish once where their memory is; else in every call.
    fn publishes_once(&self) -> bool {
        false
    }

    /// Of a collective whose calls announce by their kernels where tensors are: those tensors, and the ranks that hear of it.
    fn announces(&self, _pairs: &[(BufferId, BufferId)], _pattern: &Pattern) -> Option<Announced> {
        None
    }

    /// What its time is counted as.
    fn span_kind(&self) -> SpanKind {
        SpanKind::Communication
    }
}

/// A collective, and how its rows are moved.
pub(super) type CollectiveWork = (Collective, Arc<dyn Work>);

/// Tensors whose place calls announce, and the ranks to which they do.
pub(super) struct Announced {
    pub(super) tensors: Vec<BufferId>,
    pub(super) to: Vec<usize>,
}

/// What other ranks use where it lies.
pub(super) enum Exposes {
    Nothing,
    /// Rows that are sent; `own`: those that the rank keeps as well.
    Inputs {
        own: bool,
    },
    /// Rows that come in.
    Outputs,
    /// All rows of a tensor that ranks write.
    Written(BufferId),
}

/// The tensors of a call: inputs and outputs, and where they lie.
pub(super) struct Tensors<'a> {
    pub(super) pairs: &'a [(BufferId, BufferId)],
    pub(super) buffers: &'a [CudaBuffer],
}

impl Tensors<'_> {
    pub(super) fn inputs(&self) -> Vec<CudaBuffer> {
        self.pairs.iter().map(|(input, _)| self.buffers[input.0].clone()).collect()
    }

    pub(super) fn outputs(&self) -> Vec<CudaBuffer> {
        self.pairs.iter().map(|(_, output)| self.buffers[output.0].clone()).collect()
    }
}

//! A rank's side of a product whose rows travel while it is computed: memory for what the others' kernels send, and where the others
//! have theirs.

use counterpoint_exec::collective::PeerRows;
use counterpoint_schedule::BufferId;

use super::collective::{Part, PeerPost};
use super::fused::Rows;
use super::link_side::LinkSide;
use super::{Call, CallError, CudaMeeting, CudaTransport, untold};
use crate::backend::CudaBuffer;
use crate::kernel::{CtaWaits, LinkCall, LinkPeers};
use crate::{CudaError, DeviceBuffer, Stream};

/// One rank's side.
pub(super) struct ProductSide {
    /// Where what the others send comes in, and is counted.
    exchange: DeviceBuffer,
    /// Rows of a tensor that the others write as well, in all ranks' copies of it.
    written: Option<Rows>,
    link: LinkSide<Met>,
}

/// What a rank knows of the others.
pub(super) struct Met {
    peers: LinkPeers,
    /// Of each rank its memory for what comes in.
    pub(super) exchanges: Vec<u64>,
    /// Of each rank where its copy has the rows that ranks write; empty where they write none.
    pub(super) written: Vec<u64>,
    _memory: Vec<DeviceBuffer>,
}

impl ProductSide {
    /// Whether the ranks know each other.
    pub(super) fn has_met(&self) -> bool {
        self.link.has_met()
    }

    /// The tensor that the others write as well.
    pub(super) fn written(&self) -> Option<BufferId> {
        self.written.map(|rows| rows.buffer)
    }

    /// Tells the others where this rank takes in what they send.
    pub(super) fn tell(&self, part: &mut Part, buffers: &[CudaBuffer]) {
        part.mailbox = Some(self.link.mailbox());
        part.staging = Some(self.exchange.clone());
        part.outputs = self.written.iter().map(|rows| buffers[rows.buffer.0].clone()).collect();
    }
}

impl CudaTransport {
    /// A side with these many bytes for what the others send, of which the first `zeroed` are zero. Made on `setup`, which is waited
    /// for.
    pub(super) fn product_side(
        &self,
        setup: &Stream,
        bytes: usize,
        zeroed: usize,
        written: Option<Rows>,
    ) -> Result<ProductSide, CudaError> {
        let exchange = DeviceBuffer::new(&self.device, bytes)?;
        exchange.slice(0..zeroed)?.fill(setup, 0)?;
        setup.synchronize()?;
        Ok(ProductSide { exchange, written, link: LinkSide::new(setup)? })
    }

    /// What this rank knows of the others. In the first run `ranks` tell it where their memory is, and `users` are told that it has
    /// learnt that; from then on the end of every run also asks for the `waits` of its CTAs.
    pub(super) fn met_of_product<'a>(
        &self,
        call: &Call<'_>,
        meeting: &CudaMeeting,
        side: &'a ProductSide,
        waits: Option<&CtaWaits>,
        ranks: impl Iterator<Item = usize>,
        users: &[PeerRows],
    ) -> Result<&'a Met, CallError> {
        let posts = || self.posts_of(call, meeting, ranks.collect());
        side.link.met_by(call, self.setup()?, posts, |posts, _| {
            let met = self.met_for_product(call, side, posts)?;
            users.iter().for_each(|peer| self.release_post(peer.rank, meeting.sequence));
            if let Some(waits) = waits {
                call.backend.watch(call.place.to_string(), waits.clone());
            }
            Ok(met)
        })
    }

    /// What this rank knows by the posts of all others.
    fn met_for_product(
        &self,
        call: &Call<'_>,
        side: &ProductSide,
        posts: &[PeerPost],
    ) -> Result<Met, CallError> {
        let of_each = |own: u64| vec![own; self.world.size()];
        let mut exchanges = of_each(side.exchange.address());
        let mut written = side.written.map_or(Vec::new(), |rows| of_each(rows.address(call.buffers)));
        let (mut mailboxes, mut memory) = (Vec::new(), Vec::new());
        for (rank, post) in posts {
            let (rank, part) = (*rank, &post.payload);
            let (Some(mailbox), Some(exchange)) = (&part.mailbox, &part.staging) else {
                return Err(untold(rank));
            };
            exchanges[rank] = exchange.address();
            mailboxes.push((rank, mailbox.clone()));
            memory.push(exchange.clone());
            if let Some(rows) = &side.written {
                let theirs = part.outputs.first().ok_or_else(|| untold(rank))?;
                written[rank] = theirs.address() + rows.offset;
                memory.push(theirs.memory().clone());
            }
        }
        let others: Vec<usize> = (0..self.world.size()).filter(|&rank| rank != self.rank).collect();
        let peers = LinkPeers { mailboxes, announce_to: others.clone(), work_on: others };
        Ok(Met { peers, exchanges, written, _memory: memory })
    }

    /// A run of this rank's kernel, which announces no tensors: where they are, all know since they met.
    pub(super) fn product_call(&self, side: &ProductSide, met: &Met) -> Result<LinkCall, CudaError> {
        self.link_call(&side.link, &met.peers, &[], &[])
    }
}

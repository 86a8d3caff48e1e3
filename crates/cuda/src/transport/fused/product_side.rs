//! A rank's side of a product whose rows travel while it is computed: memory for what the others' kernels send, and where the others
//! have theirs.

use counterpoint_exec::collective::PeerRows;
use counterpoint_schedule::BufferId;

use super::Rows;
use crate::backend::CudaBuffer;
use crate::kernel::{CtaWaits, LinkCall, LinkPeers};
use crate::transport::collective::{Part, PeerPost};
use crate::transport::link_side::LinkSide;
use crate::transport::{Call, CallError, CudaPending, CudaTransport, unpublished};
use crate::{CudaError, DeviceBuffer, Stream};

/// One rank's side.
pub(in crate::transport) struct ProductSide {
    /// Where what the others send comes in, and is counted.
    exchange: DeviceBuffer,
    /// Rows of a tensor that the others write as well, in all ranks' copies of it.
    written: Option<Rows>,
    link: LinkSide<Connected>,
}

/// What a rank knows of the others.
pub(in crate::transport) struct Connected {
    peers: LinkPeers,
    /// Of each rank its memory for what comes in.
    pub(in crate::transport) exchanges: Vec<u64>,
    /// Of each rank where its copy has the rows that ranks write; empty where they write none.
    pub(in crate::transport) written: Vec<u64>,
    _memory: Vec<DeviceBuffer>,
}

impl ProductSide {
    /// Whether the ranks know each other.
    pub(in crate::transport) fn is_connected(&self) -> bool {
        self.link.is_connected()
    }

    /// The tensor that the others write as well.
    pub(in crate::transport) fn written(&self) -> Option<BufferId> {
        self.written.map(|rows| rows.buffer)
    }

    /// Publishes where this rank takes in what the others send.
    pub(in crate::transport) fn publish(&self, part: &mut Part, buffers: &[CudaBuffer]) {
        part.mailbox = Some(self.link.mailbox());
        part.staging = Some(self.exchange.clone());
        part.outputs = self.written.iter().map(|rows| buffers[rows.buffer.0].clone()).collect();
    }
}

impl CudaTransport {
    /// A side with these many bytes for what the others send, of which the first `zeroed` are zero. Made on `setup`, which is waited
    /// for.
    pub(in crate::transport) fn product_side(
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

    /// What this rank knows of the others. In the first run `ranks` publish where their memory is, and `users` are notified that this one has
    /// learnt it; from then on the end of every run also asks for the `waits` of its CTAs.
    pub(in crate::transport) fn product_connected<'a>(
        &self,
        call: &Call<'_>,
        pending: &CudaPending,
        side: &'a ProductSide,
        waits: Option<&CtaWaits>,
        ranks: impl Iterator<Item = usize>,
        users: &[PeerRows],
    ) -> Result<&'a Connected, CallError> {
        let posts = || self.posts_of(call, pending, ranks.collect());
        side.link.connected_by(
            call,
            self.setup()?,
            || false,
            posts,
            |posts, _| {
                let connected = self.connect_product(call, side, posts)?;
                users.iter().for_each(|peer| self.release_post(peer.rank, pending.sequence));
                if let Some(waits) = waits {
                    call.backend.watch(call.place.to_string(), waits.clone());
                }
                Ok(connected)
            },
        )
    }

    /// What this rank knows by the posts of all others.
    fn connect_product(
        &self,
        call: &Call<'_>,
        side: &ProductSide,
        posts: &[PeerPost],
    ) -> Result<Connected, CallError> {
        let of_each = |own: u64| vec![own; self.world.size()];
        let mut exchanges = of_each(side.exchange.address());
        let mut written = side.written.map_or(Vec::new(), |rows| of_each(rows.address(call.buffers)));
        let (mut mailboxes, mut memory) = (Vec::new(), Vec::new());
        for (rank, post) in posts {
            let (rank, part) = (*rank, &post.payload);
            let (Some(mailbox), Some(exchange)) = (&part.mailbox, &part.staging) else {
                return Err(unpublished(rank));
            };
            exchanges[rank] = exchange.address();
            mailboxes.push((rank, mailbox.clone()));
            memory.push(exchange.clone());
            if let Some(rows) = &side.written {
                let theirs = part.outputs.first().ok_or_else(|| unpublished(rank))?;
                written[rank] = theirs.address() + rows.offset;
                memory.push(theirs.memory().clone());
            }
        }
        let others: Vec<usize> = (0..self.world.size()).filter(|&rank| rank != self.rank).collect();
        let peers = LinkPeers { mailboxes, announce_to: others.clone(), work_on: others };
        Ok(Connected { peers, exchanges, written, _memory: memory })
    }

    /// A run of this rank's kernel, which announces no tensors: where they are, all know since the first run.
    pub(in crate::transport) fn product_call(
        &self,
        side: &ProductSide,
        connected: &Connected,
    ) -> Result<LinkCall, CudaError> {
        self.link_call(&side.link, &connected.peers, &[], &[])
    }
}

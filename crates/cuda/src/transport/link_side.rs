//! A rank's side of a collective whose kernels pass a device-side barrier: in the first run the host exchanges what each rank must know of
//! the others, and it keeps that for all later runs.

use std::sync::{Arc, Mutex, OnceLock};

use super::collective::PeerPost;
use super::lists::Lists;
use super::{Call, CallError, CudaTransport};
use crate::kernel::{LinkCall, LinkEnd, LinkPeers};
use crate::sync::lock;
use crate::{CudaError, DeviceBuffer, Stream};

/// One rank's side; `Connected` is what it knows of the others.
pub(super) struct LinkSide<Connected> {
    end: Arc<LinkEnd>,
    /// Made when ranks connect, in the first run.
    connected: OnceLock<Connected>,
    /// What that will be where the others call their collectives of this number.
    ahead: Mutex<Option<(u64, Connected)>>,
    lists: Lists,
}

impl<Connected> LinkSide<Connected> {
    /// Of a rank that knows nobody yet, made on `setup`, which is waited for.
    pub(super) fn new(setup: &Stream) -> Result<Self, CudaError> {
        Ok(Self {
            end: Arc::new(LinkEnd::new(setup)?),
            connected: OnceLock::new(),
            ahead: Mutex::default(),
            lists: Lists::new(setup.device())?,
        })
    }

    /// What the rank knows of the others, once they are connected.
    pub(super) fn connected(&self) -> Option<&Connected> {
        self.connected.get()
    }

    /// Whether the ranks know each other.
    pub(super) fn is_connected(&self) -> bool {
        self.connected().is_some()
    }

    pub(super) fn mailbox(&self) -> DeviceBuffer {
        self.end.mailbox().clone()
    }

    /// Gathers what the rank will know once the others call their collectives with this `number`, unless it has.
    pub(super) fn gather_ahead(
        &self,
        number: u64,
        setup: &Stream,
        gather: impl FnOnce(&Stream) -> Result<Connected, CallError>,
    ) -> Result<(), CallError> {
        let mut ahead = lock(&self.ahead);
        if ahead.is_none() && !self.is_connected() {
            *ahead = Some((number, self.lists.upload(setup, gather)?));
        }
        Ok(())
    }

    /// What the rank knows of the others: in the first run what was gathered ahead, where it `goes_ahead` with that, or is of their `posts`;
    /// or what `gather` makes of them for the device on the stream that it is given, a handle of `setup`. From then on the end of every
    /// run asks whether a rank was waited for in vain.
    pub(super) fn connected_by(
        &self,
        call: &Call<'_>,
        setup: &Stream,
        goes_ahead: impl FnOnce() -> bool,
        posts: impl FnOnce() -> Result<Vec<PeerPost>, CallError>,
        gather: impl FnOnce(&[PeerPost], &Stream) -> Result<Connected, CallError>,
    ) -> Result<&Connected, CallError> {
        let connected = match self.connected.get() {
            Some(connected) => connected,
            None => {
                let mut ahead = lock(&self.ahead);
                let known = if ahead.is_some() && goes_ahead() { ahead.take() } else { None };
                let connected = match known {
                    Some((_, connected)) => connected,
                    None => {
                        drop(ahead);
                        let posts = posts()?;
                        let of_these = |(number, _): &(u64, Connected)| {
                            posts.iter().all(|(_, post)| post.payload.number == *number)
                        };
                        match lock(&self.ahead).take().filter(of_these) {
                            Some((_, connected)) => connected,
                            None => self.lists.upload(setup, |lists| gather(&posts, lists))?,
                        }
                    }
                };
                call.backend.watch_link(call.place.to_string(), self.end.clone());
                self.connected.get_or_init(|| connected)
            }
        };
        self.lists.follow(call.stream.queue())?;
        Ok(connected)
    }
}

impl CudaTransport {
    /// A call of this rank's, as [`LinkEnd::call`], whose waits have the world's limit.
    pub(super) fn link_call<Connected>(
        &self,
        side: &LinkSide<Connected>,
        peers: &LinkPeers,
        announced: &[u64],
        own: &[u64],
    ) -> Result<LinkCall, CudaError> {
        side.end.call(self.rank, peers, announced, own, self.world.config().limit)
    }
}

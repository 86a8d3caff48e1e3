//! What ranks publish of a collective when they make it ready, long before it is called: its rows, and memory that the others'
//! kernels write to. A rank that knows this of all its peers gathers its lists of rows ahead, which its first call then finds.
//!
//! Ranks make collectives ready in any order. What is made ahead is of those that have the same number on every rank, as they have where
//! all make the same ready one after the other; a first call uses it where its peers call those.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, Weak};

use counterpoint_exec::collective::{Collective, Post};

use super::call::CallError;
use super::collective::{Part, PeerPost, Work};
use crate::sync::lock;
use crate::{Device, Stream};

/// What ranks have published, those of this process and, where ranks are processes, the others.
#[derive(Default)]
pub(super) struct ReadyParts(Mutex<Parts>);

#[derive(Default)]
struct Parts {
    /// By number and rank.
    parts: BTreeMap<(u64, usize), Arc<Post<Part>>>,
    /// Likewise those of this process, which need what their peers publish.
    own: BTreeMap<(u64, usize), Weak<OwnPart>>,
}

/// A collective of this process that is ready, and what its lists are gathered with. It is known as long as it lives.
pub(super) struct OwnPart {
    pub(super) rank: usize,
    pub(super) number: u64,
    pub(super) post: Arc<Post<Part>>,
    pub(super) work: Arc<Work>,
    pub(super) device: Device,
    /// With nothing of a call on it.
    pub(super) setup: Stream,
    pub(super) known: Arc<ReadyParts>,
}

impl ReadyParts {
    /// What `rank` has published of its collective with this number.
    pub(super) fn of(&self, rank: usize, number: u64) -> Option<Arc<Post<Part>>> {
        lock(&self.0).parts.get(&(number, rank)).cloned()
    }

    /// `rank`, which is another process, has made a collective ready. Those that wait for it gather their lists on this thread.
    pub(super) fn record(&self, rank: usize, number: u64, part: Post<Part>) {
        lock(&self.0).parts.insert((number, rank), Arc::new(part));
        self.gather(number);
    }

    /// Likewise a rank of this process.
    pub(super) fn add(&self, own: &Arc<OwnPart>) {
        {
            let mut known = lock(&self.0);
            known.parts.insert((own.number, own.rank), own.post.clone());
            known.own.insert((own.number, own.rank), Arc::downgrade(own));
        }
        self.gather(own.number);
    }

    /// A collective of `rank` is gone.
    pub(super) fn forget(&self, rank: usize, number: u64) {
        let mut known = lock(&self.0);
        known.parts.remove(&(number, rank));
        known.own.remove(&(number, rank));
    }

    /// Has ranks of this process gather the lists of their collectives with this number, as far as all their peers have published.
    fn gather(&self, number: u64) {
        let own: Vec<Arc<OwnPart>> = {
            let known = lock(&self.0);
            let numbered = known.own.range((number, 0)..=(number, usize::MAX));
            numbered.filter_map(|(_, own)| own.upgrade()).collect()
        };
        for own in own {
            let posts = own.collective().pattern.peers().into_iter();
            let posts = posts.map(|rank| Some((rank, self.of(rank, number)?))).collect::<Option<Vec<_>>>();
            let Some(posts) = posts else { continue };
            let fit = |(peer, post): &PeerPost| own.post.check_peer(own.rank, number, *peer, post).is_ok();
            if posts.iter().all(fit) {
                // The first call makes them where this did not, and says why it cannot.
                own.gather(&posts).ok();
            }
        }
    }
}

impl OwnPart {
    fn collective(&self) -> &Collective {
        &self.post.collective
    }

    fn gather(&self, posts: &[PeerPost]) -> Result<(), CallError> {
        let (number, setup) = (self.number, &self.setup);
        self.device.despite_captures(|| match &*self.work {
            Work::Link(work) => {
                let gather = |lists: &Stream| work.gather(&self.device, self.collective(), posts, lists);
                work.side.gather_ahead(number, setup, gather)
            }
            Work::BackwardReduce(work) => {
                let gather = |lists: &Stream| work.gather(self.rank, self.collective(), posts, lists);
                work.side.gather_ahead(number, setup, gather)
            }
            Work::Pull(_) | Work::GemmReduce(_) | Work::CastGemm(_) | Work::Push(_) | Work::Exchange(_) => {
                Ok(())
            }
        })
    }
}

impl Drop for OwnPart {
    fn drop(&mut self) {
        self.known.forget(self.rank, self.number);
    }
}

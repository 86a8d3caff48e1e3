//! Joining a group of processes through a store that they share, ours or another's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;

use serde::{Deserialize, Serialize};

use super::attempt::broken;
use super::{Attempt, Group};
use crate::{ExecError, JobToken, Rendezvous, RendezvousError, TcpMachine, WorldConfig};

/// Where in an attempt's records rank 0's [`RendezvousPlace`] is.
const RENDEZVOUS: &str = "rendezvous";

/// Values by key that all processes of a job see: what a group needs of a launcher to find its ranks. [`Rendezvous`] is one; PyTorch's
/// `Store` is another.
pub trait Store: Send + Sync {
    /// Gives every process `value` under `key`, replacing what was there.
    ///
    /// # Errors
    /// When the store cannot be reached.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError>;

    /// The value of a key, or none while it is not set. Does not wait.
    ///
    /// # Errors
    /// When the store cannot be reached.
    fn find(&self, key: &str) -> Result<Option<Vec<u8>>, ExecError>;
}

impl Store for Rendezvous {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        Self::set(self, key, value)
    }

    fn find(&self, key: &str) -> Result<Option<Vec<u8>>, ExecError> {
        Self::find(self, key)
    }
}

/// How a group of processes is joined.
#[derive(Clone, Debug)]
pub struct JoinConfig {
    /// An address of rank 0's host at which all ranks reach it: this host's loopback where all are on one. Only rank 0's counts.
    pub address: IpAddr,
    /// Limits and test tools.
    pub world: WorldConfig,
}

impl Default for JoinConfig {
    fn default() -> Self {
        Self { address: Ipv4Addr::LOCALHOST.into(), world: WorldConfig::default() }
    }
}

/// Where rank 0 waits for the others, and what they prove to it that they are.
#[derive(Serialize, Deserialize)]
struct RendezvousPlace {
    address: SocketAddr,
    token: [u8; JobToken::BYTES],
}

impl Rendezvous {
    /// Joins the other ranks through a store, in an attempt of all: collective. However often each has tried before, and whatever its calls
    /// then came to, all ranks find each other in the newest attempt. An error that a rank has in it ends it for all.
    ///
    /// # Errors
    /// As [`Attempt::begin`] and [`Attempt::join`].
    pub fn through(
        store: &dyn Store,
        rank: usize,
        world_size: usize,
        config: &JoinConfig,
    ) -> Result<Arc<Self>, ExecError> {
        Attempt::begin(store, rank, world_size, config.world.limit)?.join(store, config)
    }
}

impl Attempt {
    /// Joins the other ranks: rank 0 listens at a free port and says so in the store, together with a token that ranks prove to each other.
    ///
    /// # Errors
    /// The store's; the attempt's; [`RendezvousError::Listen`]; [`RendezvousError::NotJoined`] and [`RendezvousError::Absent`] with the
    /// ranks that did not come within the limit.
    pub fn join(&self, store: &dyn Store, config: &JoinConfig) -> Result<Arc<Rendezvous>, ExecError> {
        self.rendezvous(store, config).map_err(|error| self.fail(store, error))
    }

    fn rendezvous(&self, store: &dyn Store, config: &JoinConfig) -> Result<Arc<Rendezvous>, ExecError> {
        let (rank, world_size, limit) = (self.rank(), self.world_size(), config.world.limit);
        let (watch, broken) = (self.watch(store), |error| broken(rank, error));
        if rank > 0 {
            let place = self.of_rank_0(store, RENDEZVOUS, limit)?;
            let place: RendezvousPlace = serde_json::from_slice(&place).map_err(broken)?;
            let token = JobToken::from_bytes(place.token);
            return Rendezvous::join_watched(place.address, rank, world_size, &token, limit, &watch);
        }
        let cannot_listen = |error: std::io::Error| {
            ExecError::from(RendezvousError::Listen {
                address: config.address.to_string(),
                text: error.to_string(),
                variable: crate::RENDEZVOUS_VARIABLE.to_owned(),
            })
        };
        let token = JobToken::random().map_err(cannot_listen)?;
        let listener = TcpListener::bind((config.address, 0)).map_err(cannot_listen)?;
        let host = Rendezvous::host(listener, world_size, &token, limit)?;
        let address = SocketAddr::new(config.address, host.port());
        let place = RendezvousPlace { address, token: token.to_bytes() };
        store.set(&self.key(RENDEZVOUS), &serde_json::to_vec(&place).map_err(broken)?)?;
        host.join_watched(config.address, limit, &watch)
    }
}

impl Group<TcpMachine> {
    /// Joins CPU ranks that are processes, or threads that join each for itself: this one is `rank` of `world_size`. Collective; as
    /// [`Rendezvous::through`].
    ///
    /// # Errors
    /// As there; when the ranks cannot connect to each other.
    pub fn join(
        store: &dyn Store,
        rank: usize,
        world_size: usize,
        config: &JoinConfig,
    ) -> Result<Self, ExecError> {
        let attempt = Attempt::begin(store, rank, world_size, config.world.limit)?;
        Self::join_in(&attempt, store, config)
    }

    /// The same in an attempt that has begun.
    ///
    /// # Errors
    /// As [`Attempt::join`]; when the ranks cannot connect to each other.
    pub fn join_in(attempt: &Attempt, store: &dyn Store, config: &JoinConfig) -> Result<Self, ExecError> {
        let (rendezvous, world_size) = (attempt.join(store, config)?, attempt.world_size());
        let machine = TcpMachine::new(rendezvous.clone(), 0, None)?;
        Self::connect_at(&rendezvous, machine, world_size, config.world.clone())
    }
}

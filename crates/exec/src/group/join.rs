//! Joining a group of processes through a store that they share, ours or another's.

use std::net::{IpAddr, Ipv4Addr, SocketAddr, TcpListener};
use std::sync::Arc;
use std::time::Duration;

use serde::{Deserialize, Serialize};

use super::Group;
use crate::{ExecError, JobToken, Rendezvous, RendezvousError, StoreFault, TcpMachine, WorldConfig};

/// Values by key that all processes of a job see: what a group needs of a launcher to find its ranks. [`Rendezvous`] is one; PyTorch's
/// `Store` is another.
pub trait Store: Send + Sync {
    /// Gives every process `value` under `key`, replacing what was there.
    ///
    /// # Errors
    /// When the store cannot be reached.
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError>;

    /// The value of a key that has been set.
    ///
    /// # Errors
    /// When there is none, or the store cannot be reached.
    fn get(&self, key: &str) -> Result<Vec<u8>, ExecError>;

    /// Adds to the counter `key`, which starts at 0; gives its new value.
    ///
    /// # Errors
    /// When the store cannot be reached.
    fn add(&self, key: &str, by: i64) -> Result<i64, ExecError>;

    /// Returns once `key` has been set.
    ///
    /// # Errors
    /// When it is not within `limit`.
    fn wait(&self, key: &str, limit: Duration) -> Result<(), ExecError>;
}

impl Store for Rendezvous {
    fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        Self::set(self, key, value)
    }

    fn get(&self, key: &str) -> Result<Vec<u8>, ExecError> {
        Self::get(self, key, None)
    }

    fn add(&self, key: &str, by: i64) -> Result<i64, ExecError> {
        Self::add(self, key, by)
    }

    /// For the rendezvous's own limit.
    fn wait(&self, key: &str, _limit: Duration) -> Result<(), ExecError> {
        Self::get(self, key, None).map(drop)
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
    /// Joins the other ranks through a store: rank 0 listens at a free port and says so in the store, together with a token that
    /// ranks prove to each other. All ranks call it as often as each other; the n-th call of one finds the n-th of the others, so that
    /// after a failure they join anew.
    ///
    /// # Errors
    /// The store's; [`RendezvousError::Listen`]; [`RendezvousError::Absent`] with the ranks that did not come within the limit.
    pub fn through(
        store: &dyn Store,
        rank: usize,
        world_size: usize,
        config: &JoinConfig,
    ) -> Result<Arc<Self>, ExecError> {
        let limit = config.world.limit;
        let number = store.add(&format!("counterpoint/joined/{rank}"), 1)?;
        let key = format!("counterpoint/group/{number}");
        let broken = |error: serde_json::Error| {
            ExecError::from(RendezvousError::Broken { rank, reason: StoreFault::value(error) })
        };
        if rank > 0 {
            store.wait(&key, limit)?;
            let place: RendezvousPlace = serde_json::from_slice(&store.get(&key)?).map_err(broken)?;
            return Self::join(place.address, rank, world_size, &JobToken::from_bytes(place.token), limit);
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
        let host = Self::host(listener, world_size, &token, limit)?;
        let address = SocketAddr::new(config.address, host.port());
        let place = RendezvousPlace { address, token: token.to_bytes() };
        store.set(&key, &serde_json::to_vec(&place).map_err(broken)?)?;
        host.join(config.address, limit)
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
        let rendezvous = Rendezvous::through(store, rank, world_size, config)?;
        let machine = TcpMachine::new(rendezvous.clone(), 0, None)?;
        Self::connect_at(&rendezvous, machine, world_size, config.world.clone())
    }
}

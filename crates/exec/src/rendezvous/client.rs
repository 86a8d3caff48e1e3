use std::io;
use std::net::{IpAddr, Shutdown};
use std::sync::Arc;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::RendezvousError;
use super::connection::{ANSWER, Connection, broken};
use super::knock::{Candidates, connect};
use super::launch::Launch;
use super::message::{Keep, Reply, Request};
use super::server::Server;
use crate::ExecError;
use crate::world::World;

/// How long rank 0 keeps the store for ranks that have not left yet.
const FAREWELL: Duration = Duration::from_secs(5);
/// Likewise once the job has failed.
const HEARD: Duration = Duration::from_secs(1);

/// One rank's place among ranks that are processes. Dropping it is the farewell.
pub struct Rendezvous {
    connection: Arc<Connection>,
    roster: Vec<Seat>,
    /// The address by which this rank reaches the host of rank 0.
    host_of_rank_0: IpAddr,
    server: Option<Server>,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Seat {
    /// Equal for ranks of one host only.
    host: String,
    /// As seen from its connection to rank 0.
    address: IpAddr,
}

impl Rendezvous {
    /// Joins the other ranks; rank 0 hosts the store. Returns once all have come. `limit` is that of this and every later
    /// wait.
    ///
    /// # Errors
    /// [`RendezvousError::Listen`], [`RendezvousError::Unreachable`], [`RendezvousError::Refused`];
    /// [`RendezvousError::Absent`] with the ranks that did not come.
    pub fn join(launch: &Launch, limit: Duration) -> Result<Arc<Self>, ExecError> {
        let began = Instant::now();
        let (server, stream) = if launch.rank == 0 {
            let (server, address) = Server::start(launch, limit)?;
            (Some(server), connect(launch, &Candidates::Known(address), began, limit)?)
        } else {
            (None, connect(launch, &Candidates::Of(&launch.meeting), began, limit)?)
        };
        let broken = |error: io::Error| broken(launch.rank, &error);
        let (own, host_of_rank_0) =
            stream.local_addr().and_then(|own| Ok((own.ip(), stream.peer_addr()?.ip()))).map_err(broken)?;
        let connection = Connection::open(launch, stream, limit).map_err(broken)?;
        let mut joined = Self { connection, roster: Vec::new(), host_of_rank_0, server };
        let seat = Seat { host: host_name(), address: own };
        let seats = joined.all_gather("start", &serde_json::to_vec(&seat).unwrap_or_default())?;
        joined.roster = seats
            .iter()
            .map(|seat| serde_json::from_slice(seat))
            .collect::<Result<_, _>>()
            .map_err(|error| broken(error.into()))?;
        Ok(Arc::new(joined))
    }

    /// This rank.
    pub fn rank(&self) -> usize {
        self.connection.rank
    }

    /// Ranks.
    pub fn world_size(&self) -> usize {
        self.connection.world_size
    }

    /// The limit of every wait.
    pub fn limit(&self) -> Duration {
        self.connection.limit
    }

    /// The ranks on this rank's host, this one among them, ascending.
    pub fn ranks_on_this_host(&self) -> Vec<usize> {
        let same = |rank: &usize| self.roster[*rank].host == self.roster[self.rank()].host;
        (0..self.world_size()).filter(same).collect()
    }

    /// An address by which this rank reaches the host of `rank`.
    pub fn address_of(&self, rank: usize) -> IpAddr {
        // Ranks beside rank 0 may know their host by its loopback, which means another host elsewhere.
        if self.roster[rank].host == self.roster[0].host {
            self.host_of_rank_0
        } else {
            self.roster[rank].address
        }
    }

    /// Gives every rank `value` under `key`, replacing what was there.
    ///
    /// # Errors
    /// Whatever ended the job.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        self.connection.check()?;
        self.connection.say(&Request::Set { key: key.to_owned() }, value)
    }

    /// The value of `key`, once some rank has set it.
    ///
    /// # Errors
    /// [`RendezvousError::Unset`] at the limit; whatever ended the job.
    pub fn get(&self, key: &str) -> Result<Vec<u8>, ExecError> {
        self.value(key, Keep::Yes)
    }

    /// As [`Rendezvous::get`], and the key is unset: the store does not keep what only one rank wants.
    ///
    /// # Errors
    /// As [`Rendezvous::get`].
    pub fn take(&self, key: &str) -> Result<Vec<u8>, ExecError> {
        self.value(key, Keep::No)
    }

    fn value(&self, key: &str, keep: Keep) -> Result<Vec<u8>, ExecError> {
        let began = Instant::now();
        let ask = |id| Request::Get { id, key: key.to_owned(), keep };
        match self.connection.ask(ask, &[], format!("`{key}`"), self.limit())? {
            Some((_, value)) => Ok(value),
            None => Err(self.fail(ExecError::from(RendezvousError::Unset {
                rank: self.rank(),
                key: key.to_owned(),
                waited: began.elapsed(),
            }))),
        }
    }

    /// Adds to the counter `key`, which starts at 0; gives its new value.
    ///
    /// # Errors
    /// Whatever ended the job.
    pub fn add(&self, key: &str, by: i64) -> Result<i64, ExecError> {
        let ask = |id| Request::Add { id, key: key.to_owned(), by };
        match self.connection.ask(ask, &[], format!("counter `{key}`"), self.limit())? {
            Some((Reply::Count { value, .. }, _)) => Ok(value),
            _ => Err(self.fail(self.no_answer())),
        }
    }

    /// Every rank's bytes, in the order of ranks. All ranks call it with the same `place`, as often as they like.
    ///
    /// # Errors
    /// [`RendezvousError::Absent`] with the ranks that did not come within the limit; whatever ended the job.
    pub fn all_gather(&self, place: &str, own: &[u8]) -> Result<Vec<Vec<u8>>, ExecError> {
        let began = Instant::now();
        let gather = |id| Request::Gather { id, place: place.to_owned() };
        let gathered = self.connection.ask(gather, own, format!("`{place}`"), self.limit())?;
        if let Some((Reply::Gathered { lengths, .. }, all)) = gathered {
            let mut rest = all.as_slice();
            let mut part = |length: usize| rest.split_off(..length).map(<[u8]>::to_vec);
            let parts: Option<Vec<Vec<u8>>> = lengths.into_iter().map(&mut part).collect();
            return parts.ok_or_else(|| self.fail(self.no_answer()));
        }
        let waited = began.elapsed();
        let missing = |id| Request::Missing { id, place: place.to_owned() };
        let missing = self.connection.ask(missing, &[], format!("`{place}`"), ANSWER)?;
        let error = match missing {
            Some((Reply::Missing { ranks, .. }, _)) => ExecError::from(RendezvousError::Absent {
                rank: self.rank(),
                place: format!("`{place}`"),
                waited,
                missing: ranks,
                world_size: self.world_size(),
            }),
            _ => self.no_answer(),
        };
        Err(self.fail(error))
    }

    /// Returns once all ranks have come.
    ///
    /// # Errors
    /// As [`Rendezvous::all_gather`].
    pub fn barrier(&self, place: &str) -> Result<(), ExecError> {
        self.all_gather(place, &[]).map(drop)
    }

    /// Ends the job with an error of this rank, which every other rank gets from whatever it waits for. Returns the job's
    /// error, which is another when that came first.
    pub fn fail(&self, error: ExecError) -> ExecError {
        self.connection.fail(error)
    }

    /// Lets `world`, whose one rank here is this one, share the job's failures: an error of either is one of both, and
    /// a rank that waits asks others through this rendezvous.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the world has more or fewer ranks than have met here.
    pub fn attach(&self, world: &Arc<World>) -> Result<(), ExecError> {
        let (expected, met) = (world.size(), self.world_size());
        if expected != met {
            let reason = format!(
                "its world has {expected} ranks and {met} have met; start as many processes as it has ranks"
            );
            let collective = "connecting the ranks".to_owned();
            return Err(ExecError::BadCollective { rank: self.rank(), collective, reason });
        }
        world.attach(self.connection.clone());
        self.connection.attach(world);
        Ok(())
    }

    /// As the death of the process does.
    #[cfg(test)]
    pub(super) fn break_connection(&self) {
        self.connection.close(Shutdown::Both);
    }

    fn no_answer(&self) -> ExecError {
        let reason = "it does not answer".to_owned();
        RendezvousError::Broken { rank: self.rank(), reason }.into()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.connection.say(&Request::Leave, &[]).ok();
        if let Some(server) = &self.server {
            self.connection.close(Shutdown::Write);
            // Of a job that has failed, those who still listen have heard.
            server.drain(if self.connection.check().is_ok() { FAREWELL } else { HEARD });
        }
        self.connection.close(Shutdown::Both);
    }
}

/// A name that only this host has: names of containers may be alike, and the kernel's boot is not.
fn host_name() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    format!("{} {}", read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/random/boot_id"))
}

//! A rank's side of the rendezvous: joining, values, counters, gatherings, and the end of the job.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::admission::with_size;
use super::connection::{ANSWER, Connection, broken};
use super::launch::Launch;
use super::local_token::LocalToken;
use super::message::{Hello, Keep, Reply, Request};
use super::seek::{Identity, Listening, Seated, Seeker, open};
use super::server::Server;
use super::watch::{Watch, unwatched, watched};
use super::{Facet, RENDEZVOUS_VARIABLE, RendezvousError};
use crate::network::{JobToken, descriptor_limit, is_out_of_descriptors};
use crate::world::{World, after};
use crate::{CollectiveFault, ExecError, StoreFault};

/// How long rank 0 keeps the store for ranks that have not left yet.
const FAREWELL: Duration = Duration::from_secs(5);
/// Likewise once the job has failed.
const HEARD: Duration = Duration::from_secs(1);

/// One rank's place among ranks that are processes. Dropping it is the farewell, and waits for nobody: on rank 0 a thread keeps the store
/// until the others have left too. A process that ends next waits for them by [`Rendezvous::leave`] first.
pub struct Rendezvous {
    connection: Arc<Connection>,
    roster: Vec<Roster>,
    /// The address by which this rank reaches the host of rank 0.
    host_of_rank_0: IpAddr,
    /// What processes of this job prove to each other, and those of no other job can.
    token: JobToken,
    /// Until this rank leaves.
    host: Mutex<Option<RendezvousHost>>,
}

/// Where a rank is.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
struct Roster {
    /// Equal for ranks of one host only.
    host: String,
    /// As seen from its connection to rank 0.
    address: IpAddr,
}

/// The store that ranks join, in the process of rank 0. It is reached until it is dropped, or the [`Rendezvous`] that has taken it
/// is.
pub struct RendezvousHost {
    server: Server,
    _local: Option<LocalToken>,
    token: JobToken,
    world_size: usize,
}

impl RendezvousHost {
    /// The port where it listens.
    pub fn port(&self) -> u16 {
        self.server.port()
    }

    /// Joins as rank 0, by an address of this host at which the other ranks reach it too. As [`Rendezvous::join`]; the store is
    /// then the rendezvous's.
    ///
    /// # Errors
    /// As there.
    pub fn join(self, address: IpAddr, limit: Duration) -> Result<Arc<Rendezvous>, ExecError> {
        self.join_watched(address, limit, &unwatched)
    }

    /// The same until `watch` ends it.
    pub(crate) fn join_watched(
        self,
        address: IpAddr,
        limit: Duration,
        watch: &dyn Watch,
    ) -> Result<Arc<Rendezvous>, ExecError> {
        let address = SocketAddr::new(address, self.port());
        let (token, world_size) = (self.token.clone(), self.world_size);
        let seek = |seeker: &Seeker<'_>| seeker.seek_at(address, &token);
        let (ranks, place) = ((0, world_size), address.to_string());
        Rendezvous::seated(ranks, Vec::new(), &place, limit, Some(self), watch, seek)
    }
}

impl Rendezvous {
    /// Hosts the store for a job of `world_size` ranks that have `token`, at a listener of the caller's, from now on; rank 0 does
    /// it, and joins by [`RendezvousHost::join`]. `limit` is how long the store waits for ranks, and for one that takes nothing.
    ///
    /// # Errors
    /// [`RendezvousError::Listen`] when the system gives no threads.
    pub fn host(
        listener: TcpListener,
        world_size: usize,
        token: &JobToken,
        limit: Duration,
    ) -> Result<RendezvousHost, ExecError> {
        Self::hosted(listener, world_size, token.clone(), Vec::new(), None, limit)
    }

    /// Joins the ranks of a job whose store is hosted at `address`. Returns once all have come. `limit` is that of this and every
    /// later wait.
    ///
    /// # Errors
    /// [`RendezvousError::Unreachable`] where nothing that has the token listens; [`RendezvousError::AnotherJob`] when the rank is
    /// there already; [`RendezvousError::Disagreement`] when ranks were given other numbers of ranks;
    /// [`RendezvousError::Absent`] with the ranks that did not come; [`RendezvousError::Descriptors`].
    pub fn join(
        address: SocketAddr,
        rank: usize,
        world_size: usize,
        token: &JobToken,
        limit: Duration,
    ) -> Result<Arc<Self>, ExecError> {
        Self::join_watched(address, rank, world_size, token, limit, &unwatched)
    }

    /// The same until `watch` ends it.
    pub(crate) fn join_watched(
        address: SocketAddr,
        rank: usize,
        world_size: usize,
        token: &JobToken,
        limit: Duration,
        watch: &dyn Watch,
    ) -> Result<Arc<Self>, ExecError> {
        let seek = |seeker: &Seeker<'_>| seeker.seek_at(address, token);
        let (ranks, place) = ((rank, world_size), address.to_string());
        Self::seated(ranks, Vec::new(), &place, limit, None, watch, seek)
    }

    /// Joins the other ranks that a launcher started; rank 0 hosts the store. All ranks must have the same `facets`, which are
    /// compared before anything else. Otherwise as [`Rendezvous::join`].
    ///
    /// # Errors
    /// As there; [`RendezvousError::Listen`]; [`RendezvousError::Variable`] where ranks of several hosts have no secret.
    pub fn join_launched(launch: &Launch, facets: &[Facet], limit: Duration) -> Result<Arc<Self>, ExecError> {
        let identity = Identity::of(launch)?;
        let (ranks, place) = ((launch.rank, launch.world_size), launch.point.to_string());
        let facets = facets.to_vec();
        if launch.rank > 0 {
            let seek = |seeker: &Seeker<'_>| seeker.seek(launch, &identity);
            return Self::seated(ranks, facets, &place, limit, None, &unwatched, seek);
        }
        let Listening { listener, address, token, local } = open(launch, &identity, limit)?;
        let host = Self::hosted(listener, launch.world_size, token.clone(), facets.clone(), local, limit)?;
        let seek = |seeker: &Seeker<'_>| seeker.seek_at(address, &token);
        Self::seated(ranks, facets, &place, limit, Some(host), &unwatched, seek)
    }

    fn hosted(
        listener: TcpListener,
        world_size: usize,
        token: JobToken,
        facets: Vec<Facet>,
        local: Option<LocalToken>,
        limit: Duration,
    ) -> Result<RendezvousHost, ExecError> {
        let address =
            listener.local_addr().map_or_else(|_| "its port".to_owned(), |address| address.to_string());
        let server = Server::start(listener, &token, world_size, facets, limit).map_err(|error| {
            if is_out_of_descriptors(&error) {
                return RendezvousError::Descriptors { rank: 0, world_size, limit: descriptor_limit() };
            }
            let (text, variable) = (error.to_string(), RENDEZVOUS_VARIABLE.to_owned());
            RendezvousError::Listen { address, text, variable }
        })?;
        Ok(RendezvousHost { server, _local: local, token, world_size })
    }

    /// Takes the seat that `seek` finds, and waits for the other ranks: one limit for both, before which `watch` may end either.
    fn seated(
        (rank, world_size): (usize, usize),
        facets: Vec<Facet>,
        place: &str,
        limit: Duration,
        host: Option<RendezvousHost>,
        watch: &dyn Watch,
        seek: impl FnOnce(&Seeker<'_>) -> Result<Seated, ExecError>,
    ) -> Result<Arc<Self>, ExecError> {
        let began = Instant::now();
        let deadline = after(began, limit);
        let hello = Hello { rank, facets: with_size(world_size, facets) };
        let Seated { stream, session, token } =
            seek(&Seeker { hello: &hello, world_size, place, began, deadline, watch })?;
        let broken = |error: io::Error| broken(rank, &error);
        let (own, host_of_rank_0) =
            stream.local_addr().and_then(|own| Ok((own.ip(), stream.peer_addr()?.ip()))).map_err(broken)?;
        let connection = Connection::open(rank, world_size, stream, limit).map_err(broken)?;
        let token = token.derive(&["session", &session]);
        let host = Mutex::new(host);
        let mut joined = Self { connection, roster: Vec::new(), host_of_rank_0, token, host };
        let own = Roster { host: host_name(), address: own };
        let own = serde_json::to_vec(&own).unwrap_or_default();
        let all = watched(&joined.connection, watch, || joined.all_gather_since("start", &own, began));
        // Those who come late are to hear why.
        let all = all.inspect_err(|_| joined.leave())?;
        joined.roster = all
            .iter()
            .map(|one| serde_json::from_slice(one))
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

    /// An address by which this rank reaches `rank`.
    pub fn address_of(&self, rank: usize) -> IpAddr {
        let (own, host_of_rank_0) = (&self.roster[self.rank()].host, &self.roster[0].host);
        let Roster { host, address } = &self.roster[rank];
        match host == host_of_rank_0 && host != own {
            // Ranks of that host may know it by its loopback, which means another host here.
            true => self.host_of_rank_0,
            false => *address,
        }
    }

    /// The address at which this rank listens for others: that by which all of them reach it, or else any.
    pub(crate) fn listening_address(&self) -> IpAddr {
        let own = self.roster[self.rank()].address;
        match own {
            _ if self.roster.iter().all(|other| other.address == own) => own,
            IpAddr::V4(_) => Ipv4Addr::UNSPECIFIED.into(),
            IpAddr::V6(_) => Ipv6Addr::UNSPECIFIED.into(),
        }
    }

    /// What processes of this job prove to each other for `purpose`.
    pub(crate) fn token_for(&self, purpose: &str) -> JobToken {
        self.token.derive(&["purpose", purpose])
    }

    /// Gives every rank `value` under `key`, replacing what was there.
    ///
    /// # Errors
    /// Whatever ended the job.
    pub fn set(&self, key: &str, value: &[u8]) -> Result<(), ExecError> {
        self.connection.check()?;
        let deadline = after(Instant::now(), self.limit());
        self.connection.say(&Request::Set { key: key.to_owned() }, value, deadline)
    }

    /// The value of `key`, once it is set: by rank `setter`, where that is known.
    ///
    /// # Errors
    /// [`RendezvousError::Unset`], which names that rank, at the limit; whatever ended the job.
    pub fn get(&self, key: &str, setter: Option<usize>) -> Result<Vec<u8>, ExecError> {
        self.value(key, setter, Keep::Yes)
    }

    /// As [`Rendezvous::get`], and the key is unset: the store does not keep what only one rank wants.
    ///
    /// # Errors
    /// As [`Rendezvous::get`].
    pub fn take(&self, key: &str, setter: Option<usize>) -> Result<Vec<u8>, ExecError> {
        self.value(key, setter, Keep::No)
    }

    fn value(&self, key: &str, setter: Option<usize>, keep: Keep) -> Result<Vec<u8>, ExecError> {
        let began = Instant::now();
        let ask = |id| Request::Get { id, key: key.to_owned(), keep };
        match self.connection.ask(ask, &[], format!("`{key}`"), after(began, self.limit()))? {
            Some((_, value)) => Ok(value),
            None => Err(self.fail(ExecError::from(RendezvousError::Unset {
                rank: self.rank(),
                key: key.to_owned(),
                setter,
                waited: began.elapsed(),
            }))),
        }
    }

    /// The value of `key`, if it is set now.
    ///
    /// # Errors
    /// Whatever ended the job.
    pub fn find(&self, key: &str) -> Result<Option<Vec<u8>>, ExecError> {
        let ask = |id| Request::Find { id, key: key.to_owned() };
        match self.connection.ask(ask, &[], format!("`{key}`"), after(Instant::now(), self.limit()))? {
            Some((Reply::Value { .. }, value)) => Ok(Some(value)),
            Some((Reply::Unset { .. }, _)) => Ok(None),
            _ => Err(self.fail(self.no_answer())),
        }
    }

    /// Adds to the counter `key`, which starts at 0; gives its new value.
    ///
    /// # Errors
    /// Whatever ended the job.
    pub fn add(&self, key: &str, by: i64) -> Result<i64, ExecError> {
        let ask = |id| Request::Add { id, key: key.to_owned(), by };
        match self.connection.ask(
            ask,
            &[],
            format!("counter `{key}`"),
            after(Instant::now(), self.limit()),
        )? {
            Some((Reply::Count { value, .. }, _)) => Ok(value),
            _ => Err(self.fail(self.no_answer())),
        }
    }

    /// Every rank's bytes, in the order of ranks. All ranks call it with the same `place`, as often as they like.
    ///
    /// # Errors
    /// [`ExecError::Left`] with a rank that has left and never comes; [`RendezvousError::Absent`] with the ranks that did not come within
    /// the limit; whatever ended the job.
    pub fn all_gather(&self, place: &str, own: &[u8]) -> Result<Vec<Vec<u8>>, ExecError> {
        self.all_gather_since(place, own, Instant::now())
    }

    /// As [`Rendezvous::all_gather`]; the limit counts from when it `began`.
    fn all_gather_since(&self, place: &str, own: &[u8], began: Instant) -> Result<Vec<Vec<u8>>, ExecError> {
        let gather = |id| Request::Gather { id, place: place.to_owned() };
        let gathered = self.connection.ask(gather, own, format!("`{place}`"), after(began, self.limit()))?;
        if let Some((Reply::Gathered { lengths, .. }, all)) = gathered {
            let mut rest = all.as_slice();
            let mut part = |length: usize| rest.split_off(..length).map(<[u8]>::to_vec);
            let parts: Option<Vec<Vec<u8>>> = lengths.into_iter().map(&mut part).collect();
            return parts.ok_or_else(|| self.fail(self.no_answer()));
        }
        if let Some((Reply::Left { rank: left, .. }, _)) = gathered {
            let error = ExecError::Left { left, rank: self.rank(), place: format!("`{place}`") };
            return Err(self.fail(error));
        }
        let waited = began.elapsed();
        let missing = |id| Request::Missing { id, place: place.to_owned() };
        let missing = self.connection.ask(missing, &[], format!("`{place}`"), Instant::now() + ANSWER)?;
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

    /// Every rank's value, in the order of ranks, as [`Rendezvous::all_gather`] does for bytes.
    ///
    /// # Errors
    /// As [`Rendezvous::all_gather`]; [`RendezvousError::Broken`] for what is no such value.
    pub fn gather<T: Serialize + DeserializeOwned>(&self, place: &str, own: &T) -> Result<Vec<T>, ExecError> {
        let not_whole = |error: serde_json::Error| {
            ExecError::from(RendezvousError::Broken { rank: self.rank(), reason: StoreFault::value(error) })
        };
        let own = serde_json::to_vec(own).map_err(not_whole)?;
        let all = self.all_gather(place, &own)?;
        all.iter().map(|one| serde_json::from_slice(one).map_err(not_whole)).collect()
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

    /// Says farewell, and on rank 0, whose process has the store, waits until the others have: for some seconds at most, or for one where
    /// the job has failed and those who still listen have heard. Nothing can be asked of it afterwards.
    pub fn leave(&self) {
        if let Some(farewell) = self.farewell() {
            farewell.wait();
        }
    }

    /// Leaves when what this gives goes: for a process that ends then, however it does.
    pub fn leaving_at_the_end(&self) -> LeavingAtTheEnd<'_> {
        LeavingAtTheEnd(self)
    }

    /// Says farewell. What is left to wait for, on rank 0, until it has left.
    fn farewell(&self) -> Option<Farewell> {
        let host = self.host.lock().unwrap_or_else(PoisonError::into_inner).take();
        if !self.connection.say_farewell() {
            return None;
        }
        let Some(host) = host else {
            self.connection.close(Shutdown::Both);
            return None;
        };
        self.connection.close(Shutdown::Write);
        let limit = if self.connection.check().is_ok() { FAREWELL } else { HEARD };
        Some(Farewell { host, connection: self.connection.clone(), limit })
    }

    /// Lets `world`, whose one rank here is this one, share the job's failures: an error of either is one of both, and
    /// a rank that waits asks others through this rendezvous.
    ///
    /// # Errors
    /// [`ExecError::BadCollective`] when the world has more or fewer ranks than have joined here.
    pub fn attach(&self, world: &Arc<World>) -> Result<(), ExecError> {
        let (expected, joined) = (world.size(), self.world_size());
        if expected != joined {
            let reason = CollectiveFault::WorldSize { expected, joined }.into();
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
        RendezvousError::Broken { rank: self.rank(), reason: StoreFault::NoAnswer }.into()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        if let Some(farewell) = self.farewell() {
            // Without a thread the store goes at once.
            thread::Builder::new().name("rendezvous farewell".to_owned()).spawn(move || farewell.wait()).ok();
        }
    }
}

/// See [`Rendezvous::leaving_at_the_end`].
#[must_use = "it leaves when this is dropped"]
pub struct LeavingAtTheEnd<'a>(&'a Rendezvous);

impl Drop for LeavingAtTheEnd<'_> {
    fn drop(&mut self) {
        self.0.leave();
    }
}

/// The store of a rank that has left, which others may still ask.
struct Farewell {
    host: RendezvousHost,
    connection: Arc<Connection>,
    limit: Duration,
}

impl Farewell {
    fn wait(self) {
        self.host.server.drain(self.limit);
        self.connection.close(Shutdown::Both);
    }
}

/// A name that only this host has: names of containers may be alike, and the kernel's boot is not.
fn host_name() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    format!("{} {}", read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/random/boot_id"))
}

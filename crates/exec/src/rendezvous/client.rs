use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Shutdown, SocketAddr, TcpStream, ToSocketAddrs};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, Weak};
use std::thread;
use std::time::{Duration, Instant};

use serde::{Deserialize, Serialize};

use super::RendezvousError;
use super::launch::{Launch, MeetingPoint};
use super::message::{Hello, Keep, PROTOCOL, RankActivity, Reply, Request, Welcome};
use super::server::Server;
use crate::ExecError;
use crate::frame::{FrameLimits, read_frame, write_frame};
use crate::monitor::{Monitor, lock};
use crate::world::{RemoteRanks, World, after};

/// Of one attempt to connect, and of the answer to it.
const ATTEMPT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);
/// What only the store, or a reader that does nothing else, must answer.
const ANSWER: Duration = Duration::from_secs(2);
/// How long rank 0 keeps the store for ranks that have not left yet.
const FAREWELL: Duration = Duration::from_secs(5);

/// One rank's place among ranks that are processes. Dropping it is the farewell.
pub struct Rendezvous {
    shared: Arc<Shared>,
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

struct Shared {
    rank: usize,
    world_size: usize,
    limit: Duration,
    writer: Mutex<TcpStream>,
    next: AtomicU64,
    state: Monitor<State>,
    worlds: Mutex<Vec<Weak<World>>>,
}

#[derive(Default)]
struct State {
    answers: BTreeMap<u64, (Reply, Vec<u8>)>,
    /// Where this rank waits, for others that ask.
    waits: BTreeMap<u64, String>,
    failure: Option<ExecError>,
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
        stream.set_write_timeout(Some(limit)).map_err(broken)?;
        let shared = Arc::new(Shared {
            rank: launch.rank,
            world_size: launch.world_size,
            limit,
            writer: Mutex::new(stream.try_clone().map_err(broken)?),
            next: AtomicU64::new(0),
            state: Monitor::new(State::default()),
            worlds: Mutex::default(),
        });
        let listening = shared.clone();
        thread::Builder::new()
            .name(format!("rank {} rendezvous", launch.rank))
            .spawn(move || listening.listen(stream))
            .map_err(broken)?;
        let mut joined = Self { shared, roster: Vec::new(), host_of_rank_0, server };
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
        self.shared.rank
    }

    /// Ranks.
    pub fn world_size(&self) -> usize {
        self.shared.world_size
    }

    /// The limit of every wait.
    pub fn limit(&self) -> Duration {
        self.shared.limit
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
        self.shared.check()?;
        self.shared.say(&Request::Set { key: key.to_owned() }, value)
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
        match self.shared.ask(ask, &[], format!("`{key}`"), self.limit())? {
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
        match self.shared.ask(ask, &[], format!("counter `{key}`"), self.limit())? {
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
        let gathered = self.shared.ask(gather, own, format!("`{place}`"), self.limit())?;
        if let Some((Reply::Gathered { lengths, .. }, all)) = gathered {
            let mut rest = all.as_slice();
            let mut part = |length: usize| rest.split_off(..length).map(<[u8]>::to_vec);
            let parts: Option<Vec<Vec<u8>>> = lengths.into_iter().map(&mut part).collect();
            return parts.ok_or_else(|| self.fail(self.no_answer()));
        }
        let waited = began.elapsed();
        let missing = |id| Request::Missing { id, place: place.to_owned() };
        let missing = self.shared.ask(missing, &[], format!("`{place}`"), ANSWER)?;
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
        self.shared.fail(error)
    }

    /// Lets `world`, whose one rank here is this one, share the job's failures: an error of either is one of both, and
    /// a rank that waits asks others through this rendezvous.
    pub fn attach(&self, world: &Arc<World>) {
        world.attach(self.shared.clone());
        let mut worlds = lock(&self.shared.worlds);
        worlds.retain(|known| known.strong_count() > 0 && !std::ptr::eq(known.as_ptr(), Arc::as_ptr(world)));
        worlds.push(Arc::downgrade(world));
        drop(worlds);
        if let Err(error) = self.shared.check() {
            world.fail(error);
        }
    }

    /// As the death of the process does.
    #[cfg(test)]
    pub(super) fn break_connection(&self) {
        lock(&self.shared.writer).shutdown(Shutdown::Both).ok();
    }

    fn no_answer(&self) -> ExecError {
        let reason = "it does not answer".to_owned();
        RendezvousError::Broken { rank: self.rank(), reason }.into()
    }
}

impl Drop for Rendezvous {
    fn drop(&mut self) {
        self.shared.say(&Request::Leave, &[]).ok();
        if let Some(server) = &self.server {
            lock(&self.shared.writer).shutdown(Shutdown::Write).ok();
            server.drain(FAREWELL);
        }
        lock(&self.shared.writer).shutdown(Shutdown::Both).ok();
    }
}

impl Shared {
    fn check(&self) -> Result<(), ExecError> {
        self.state.peek(|state| state.failure.clone()).map_or(Ok(()), Err)
    }

    fn say(&self, request: &Request, payload: &[u8]) -> Result<(), ExecError> {
        write_frame(&mut *lock(&self.writer), request, &[payload]).map_err(|error| {
            // What the store said before it went away explains it better.
            self.state.wait_until(
                Instant::now() + ANSWER,
                || false,
                |state| state.failure.as_ref().map(drop),
            );
            self.fail(broken(self.rank, &error))
        })
    }

    /// The answer to a question, or `None` at the limit.
    fn ask(
        &self,
        question: impl FnOnce(u64) -> Request,
        payload: &[u8],
        place: String,
        limit: Duration,
    ) -> Result<Option<(Reply, Vec<u8>)>, ExecError> {
        self.check()?;
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.state.update(|state| state.waits.insert(id, place));
        let said = self.say(&question(id), payload);
        let answer = said.map(|()| {
            let deadline = after(Instant::now(), limit);
            self.state.wait_until(
                deadline,
                || false,
                |state| {
                    // An answer that came before the failure is one.
                    let answer = state.answers.remove(&id).map(Ok);
                    answer.or_else(|| state.failure.clone().map(Err))
                },
            )
        });
        self.state.update(|state| state.waits.remove(&id));
        answer?.transpose()
    }

    fn fail(&self, error: ExecError) -> ExecError {
        let mut is_first = false;
        let failure = self.state.update(|state| {
            is_first = state.failure.is_none();
            state.failure.get_or_insert(error).clone()
        });
        if is_first {
            // Not by `say`: a store that cannot be told has gone, and with it the job.
            write_frame(&mut *lock(&self.writer), &Request::Fail { error: failure.clone() }, &[]).ok();
            self.fail_worlds(&failure);
        }
        failure
    }

    /// What the store said, or what its silence means.
    fn hear_of_failure(&self, error: ExecError) {
        let failure = self.state.update(|state| state.failure.get_or_insert(error).clone());
        self.fail_worlds(&failure);
    }

    fn fail_worlds(&self, error: &ExecError) {
        let worlds: Vec<_> = lock(&self.worlds).iter().filter_map(Weak::upgrade).collect();
        worlds.iter().for_each(|world| drop(world.fail(error.clone())));
    }

    /// Everything that the store says, until it closes the connection.
    fn listen(&self, mut stream: TcpStream) {
        loop {
            match read_frame::<Reply>(&mut stream, FrameLimits::PEER) {
                Ok(Some((reply, payload))) => self.hear(reply, payload),
                Ok(None) => return self.hear_of_failure(self.lost(0)),
                Err(error) if error.kind() == io::ErrorKind::ConnectionReset => {
                    return self.hear_of_failure(self.lost(0));
                }
                Err(error) => return self.hear_of_failure(broken(self.rank, &error)),
            }
        }
    }

    fn hear(&self, reply: Reply, payload: Vec<u8>) {
        match reply {
            Reply::Value { id }
            | Reply::Count { id, .. }
            | Reply::Gathered { id, .. }
            | Reply::Missing { id, .. }
            | Reply::Activity { id, .. } => self.state.update(|state| {
                // Nobody takes an answer that comes after the limit.
                if state.waits.contains_key(&id) {
                    state.answers.insert(id, (reply, payload));
                }
            }),
            Reply::Describe { asker, id } => {
                let activity = self.activity();
                self.say(&Request::Activity { asker, id, activity }, &[]).ok();
            }
            Reply::Failed { rank, error } => self.hear_of_failure(error.of_rank(rank)),
            Reply::Lost { rank } => self.hear_of_failure(self.lost(rank)),
        }
    }

    fn lost(&self, lost: usize) -> ExecError {
        RendezvousError::Lost { lost, rank: self.rank, doing: self.activity().doing }.into()
    }

    /// What this rank is doing: in its world while it has one, else here.
    fn activity(&self) -> RankActivity {
        let world = lock(&self.worlds).iter().rev().find_map(Weak::upgrade);
        let place = self.state.peek(|state| state.waits.values().next().cloned());
        match (place, world) {
            (Some(place), _) => {
                RankActivity { doing: format!("it waits for all at {place}"), waits_for: None }
            }
            (None, Some(world)) => world.activity_of(self.rank),
            (None, None) => RankActivity { doing: "it is between two steps".to_owned(), waits_for: None },
        }
    }
}

impl RemoteRanks for Shared {
    fn rank(&self) -> usize {
        self.rank
    }

    fn tell(&self, error: &ExecError) {
        self.fail(error.clone());
    }

    fn activity_of(&self, rank: usize) -> Option<RankActivity> {
        let id = self.next.fetch_add(1, Ordering::Relaxed);
        self.state.update(|state| state.waits.insert(id, format!("what rank {rank} does")));
        let said = write_frame(&mut *lock(&self.writer), &Request::Ask { id, rank }, &[]);
        let deadline = Instant::now() + ANSWER;
        let answer = said
            .ok()
            .and_then(|()| self.state.wait_until(deadline, || false, |state| state.answers.remove(&id)));
        self.state.update(|state| state.waits.remove(&id));
        match answer {
            Some((Reply::Activity { activity, .. }, _)) => Some(activity),
            _ => None,
        }
    }
}

fn broken(rank: usize, error: &io::Error) -> ExecError {
    RendezvousError::Broken { rank, reason: error.to_string() }.into()
}

/// Where to look for the store.
enum Candidates<'a> {
    /// This process has it.
    Known(SocketAddr),
    Of(&'a MeetingPoint),
}

impl Candidates<'_> {
    fn addresses(&self) -> io::Result<Vec<SocketAddr>> {
        match self {
            Self::Known(address) => Ok(vec![*address]),
            Self::Of(meeting) => {
                let mut all = Vec::new();
                for &port in &meeting.ports {
                    all.extend((meeting.host.as_str(), port).to_socket_addrs()?);
                }
                Ok(all)
            }
        }
    }
}

/// Looks for the store until it is there, or `limit` is over.
fn connect(
    launch: &Launch,
    candidates: &Candidates<'_>,
    began: Instant,
    limit: Duration,
) -> Result<TcpStream, ExecError> {
    let deadline = after(began, limit);
    let mut reason = String::new();
    loop {
        for address in candidates.addresses().unwrap_or_else(|error| {
            reason = format!("{} cannot be looked up: {error}", launch.meeting.host);
            Vec::new()
        }) {
            match knock(launch, address, deadline) {
                Ok((stream, Welcome::Joined)) => return Ok(stream),
                Ok((_, Welcome::AnotherJob)) => reason = format!("another job listens at {address}"),
                Ok((_, Welcome::Refused { reason })) => {
                    return Err(RendezvousError::Refused { rank: launch.rank, reason }.into());
                }
                // The first word is the one that counts, where there are several ports.
                Err(error) if reason.is_empty() => reason = error.to_string(),
                Err(_) => {}
            }
        }
        if Instant::now() + PAUSE >= deadline {
            let (rank, address) = (launch.rank, launch.meeting.to_string());
            return Err(
                RendezvousError::Unreachable { rank, address, waited: began.elapsed(), reason }.into()
            );
        }
        thread::sleep(PAUSE);
    }
}

/// One attempt.
fn knock(launch: &Launch, address: SocketAddr, deadline: Instant) -> io::Result<(TcpStream, Welcome)> {
    let left = || deadline.saturating_duration_since(Instant::now()).clamp(PAUSE, ATTEMPT);
    let mut stream = TcpStream::connect_timeout(&address, left())?;
    stream.set_nodelay(true)?;
    stream.set_read_timeout(Some(left()))?;
    stream.set_write_timeout(Some(left()))?;
    let hello = Hello {
        protocol: PROTOCOL,
        job: launch.meeting.job.clone(),
        rank: launch.rank,
        world_size: launch.world_size,
    };
    write_frame(&mut stream, &hello, &[])?;
    let answer = read_frame::<Welcome>(&mut stream, FrameLimits::STRANGER)?;
    let (welcome, _) = answer.ok_or_else(|| io::Error::from(io::ErrorKind::UnexpectedEof))?;
    stream.set_read_timeout(None)?;
    Ok((stream, welcome))
}

/// A name that only this host has: names of containers may be alike, and the kernel's boot is not.
fn host_name() -> String {
    let read = |path: &str| std::fs::read_to_string(path).unwrap_or_default().trim().to_owned();
    format!("{} {}", read("/proc/sys/kernel/hostname"), read("/proc/sys/kernel/random/boot_id"))
}

//! How a rank gets to the store: what the job's token is, where rank 0 listens, and asking there for a seat.

use std::io::{self, ErrorKind};
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr, TcpListener, TcpStream, ToSocketAddrs, UdpSocket};
use std::thread;
use std::time::{Duration, Instant};

use super::launch::{JOB_SECRET_VARIABLE, Launch, RendezvousPoint, SECRET_CHARACTERS};
use super::local_token::{LocalName, LocalToken, NameError};
use super::message::{Hello, Welcome};
use super::watch::Watch;
use super::{RENDEZVOUS_VARIABLE, RendezvousError};
use crate::frame::read_frame;
use crate::network::{JobToken, KnockError, Until, descriptor_limit, is_out_of_descriptors, knock};
use crate::{ExecError, SeatFault, SeekFault, SeveralHosts, VariableFault};

const PAUSE: Duration = Duration::from_millis(20);
/// How long rank 0 waits for the end of another job at the same place.
const PREDECESSOR: Duration = Duration::from_secs(2);
/// How long a rank that has no seat looks for another: at other ports, and where the other job may end and its own follow.
const ELSEWHERE: Duration = Duration::from_secs(3);

/// How the job's ranks know each other.
pub(super) enum Identity {
    /// All were given a secret.
    Secret(JobToken),
    /// All are of one user on this host, and rank 0 hands out a token.
    Local(LocalName),
}

impl Identity {
    /// What it is for this rank.
    pub(super) fn of(launch: &Launch) -> Result<Self, RendezvousError> {
        let point = &launch.point;
        if let Some(secret) = &launch.secret {
            return Ok(Self::Secret(JobToken::of_secret(secret.text(), &point.job)));
        }
        let needed = |because| RendezvousError::Variable {
            variable: JOB_SECRET_VARIABLE.to_owned(),
            reason: VariableFault::NoSecret { least: SECRET_CHARACTERS, because },
        };
        let address = point.to_string();
        if launch.one_host == Some(false) {
            return Err(needed(SeveralHosts::Launcher { launcher: launch.launcher.to_string() }));
        }
        // Where the name cannot be looked up, looking for rank 0 says so.
        let is_elsewhere = addresses(&point.host).is_ok_and(|all| own_addresses(&all).is_empty());
        if launch.rank > 0 && is_elsewhere {
            return Err(needed(SeveralHosts::FirstElsewhere { host: point.host.clone() }));
        }
        let name = LocalName::of(&format!("{address} {}", point.job));
        name.map(Self::Local).map_err(|error| cannot_listen(launch, &error))
    }
}

/// Addresses of a host.
fn addresses(host: &str) -> io::Result<Vec<IpAddr>> {
    Ok((host, 0).to_socket_addrs()?.map(|address| address.ip()).collect())
}

/// Those of them that are this host's: nothing else can be listened at.
fn own_addresses(all: &[IpAddr]) -> Vec<IpAddr> {
    let is_foreign = |error: &io::Error| error.kind() == ErrorKind::AddrNotAvailable;
    let is_own = |address: &IpAddr| !UdpSocket::bind((*address, 0)).is_err_and(|error| is_foreign(&error));
    all.iter().copied().filter(is_own).collect()
}

/// What rank 0 has before it serves.
pub(super) struct Listening {
    pub(super) listener: TcpListener,
    /// By which rank 0 reaches itself, as its neighbours do.
    pub(super) address: SocketAddr,
    pub(super) token: JobToken,
    /// Where the token is handed out.
    pub(super) local: Option<LocalToken>,
}

/// Listens for the ranks of a job at the first free port.
pub(super) fn open(
    launch: &Launch,
    identity: &Identity,
    limit: Duration,
) -> Result<Listening, RendezvousError> {
    let point = &launch.point;
    let refused = |error: io::Error| cannot_listen(launch, &error);
    let name = match identity {
        Identity::Secret(token) => {
            let (listener, address) = listen(launch)?;
            return Ok(Listening { listener, address, token: token.clone(), local: None });
        }
        Identity::Local(name) => name,
    };
    let until = Instant::now() + limit.min(PREDECESSOR);
    let claimed = loop {
        match name.claim() {
            Ok(claimed) => break claimed,
            Err(NameError::Taken { .. }) if Instant::now() < until => thread::sleep(PAUSE),
            Err(NameError::Taken { process }) => {
                let reason = SeatFault::OtherHost { process };
                let (rank, address) = (launch.rank, point.to_string());
                return Err(RendezvousError::AnotherJob { rank, address, reason });
            }
            Err(NameError::Io(error)) => return Err(refused(error)),
        }
    };
    let (listener, address) = listen(launch)?;
    let token = JobToken::random().map_err(refused)?;
    let local = claimed.hand_out(&token, address.port()).map_err(refused)?;
    Ok(Listening { listener, address, token, local: Some(local) })
}

/// Listens at the first port that is free, at the address by which ranks of this host reach it where all are here.
fn listen(launch: &Launch) -> Result<(TcpListener, SocketAddr), RendezvousError> {
    let point = &launch.point;
    let all = addresses(&point.host).unwrap_or_default();
    let own = own_addresses(&all).first().copied();
    let v6 = own.map_or(!all.is_empty() && all.iter().all(IpAddr::is_ipv6), |own| own.is_ipv6());
    let (any, loopback): (IpAddr, IpAddr) = match v6 {
        true => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
        false => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
    };
    let is_here = launch.one_host.unwrap_or_else(|| own.is_some_and(|own| own.is_loopback()));
    let at = own.filter(|_| is_here).unwrap_or(any);
    let mut failed = io::Error::other("there is no port to try");
    for &port in &point.ports {
        match TcpListener::bind((at, port)) {
            // The name may be one that only others know this host by.
            Ok(listener) => return Ok((listener, SocketAddr::new(own.unwrap_or(loopback), port))),
            Err(error) => failed = error,
        }
    }
    Err(cannot_listen(launch, &failed))
}

/// Why rank 0 does not listen.
pub(super) fn cannot_listen(launch: &Launch, error: &io::Error) -> RendezvousError {
    let Launch { rank, world_size, ref point, .. } = *launch;
    if is_out_of_descriptors(error) {
        return RendezvousError::Descriptors { rank, world_size, limit: descriptor_limit() };
    }
    let (text, variable) = (error.to_string(), RENDEZVOUS_VARIABLE.to_owned());
    RendezvousError::Listen { address: point.to_string(), text, variable }
}

/// A rank that looks for a seat.
pub(super) struct Seeker<'a> {
    pub(super) hello: &'a Hello,
    pub(super) world_size: usize,
    /// Where it looks, in words.
    pub(super) place: &'a str,
    pub(super) began: Instant,
    pub(super) deadline: Instant,
    /// What may end it before.
    pub(super) watch: &'a dyn Watch,
}

/// A seat.
pub(super) struct Seated {
    pub(super) stream: TcpStream,
    pub(super) session: String,
    pub(super) token: JobToken,
}

/// What came of asking at one address.
enum Asked {
    Seated(Seated),
    NoSeat(SeatFault),
    /// Something listens there, and it is not rank 0 of this job.
    Stranger(SeekFault),
    Failed(SeekFault),
}

/// Why no seat was found.
#[derive(Default)]
struct Failures {
    /// What the last round of attempts found.
    last: SeekFault,
    /// The stranger seen last.
    stranger: Option<SeekFault>,
}

impl Failures {
    fn round(&mut self, failed: Option<SeekFault>, stranger: Option<SeekFault>) {
        self.last = stranger.clone().or(failed).unwrap_or_default();
        self.stranger = stranger.or(self.stranger.take());
    }

    /// A stranger explains more than a connection that was refused after it had left.
    fn reason(self) -> SeekFault {
        match self.stranger {
            Some(stranger) if stranger != self.last => {
                SeekFault::StrangerBefore { stranger: stranger.into(), last: self.last.into() }
            }
            _ => self.last,
        }
    }
}

impl Seeker<'_> {
    /// Looks for rank 0 until it is there, or the time for it is over.
    pub(super) fn seek(&self, launch: &Launch, identity: &Identity) -> Result<Seated, ExecError> {
        let point = &launch.point;
        let mut no_seat: Option<(Instant, SeatFault)> = None;
        let mut failures = Failures::default();
        loop {
            // Where there are several ports, the first word of a round is the one that counts.
            let (mut failed, mut stranger) = (None, None);
            match self.candidates(point, identity)? {
                Ok(candidates) => {
                    for (address, token) in candidates {
                        match self.ask(address, &token)? {
                            Asked::Seated(seated) => return Ok(seated),
                            Asked::NoSeat(reason) => {
                                no_seat = Some(no_seat.map_or((Instant::now(), reason), |no_seat| no_seat))
                            }
                            Asked::Stranger(fault) => stranger = stranger.or(Some(fault)),
                            Asked::Failed(fault) => failed = failed.or(Some(fault)),
                        }
                    }
                }
                Err(fault) => failed = Some(fault),
            }
            failures.round(failed, stranger);
            if let Some((_, reason)) = no_seat.take_if(|(since, _)| since.elapsed() >= ELSEWHERE) {
                let (rank, address) = (self.hello.rank, self.place.to_owned());
                return Err(RendezvousError::AnotherJob { rank, address, reason }.into());
            }
            if Instant::now() + PAUSE >= self.deadline {
                return Err(self.unreachable(failures.reason()));
            }
            thread::sleep(PAUSE);
        }
    }

    /// Asks for a seat at one address until there is one, or the time for it is over.
    pub(super) fn seek_at(&self, address: SocketAddr, token: &JobToken) -> Result<Seated, ExecError> {
        loop {
            let reason = match self.ask(address, token)? {
                Asked::Seated(seated) => return Ok(seated),
                Asked::NoSeat(reason) => {
                    let (rank, address) = (self.hello.rank, self.place.to_owned());
                    return Err(RendezvousError::AnotherJob { rank, address, reason }.into());
                }
                Asked::Stranger(fault) | Asked::Failed(fault) => fault,
            };
            if Instant::now() + PAUSE >= self.deadline {
                return Err(self.unreachable(reason));
            }
            (self.watch)()?;
            thread::sleep(PAUSE);
        }
    }

    fn unreachable(&self, reason: SeekFault) -> ExecError {
        let (rank, address, waited) = (self.hello.rank, self.place.to_owned(), self.began.elapsed());
        RendezvousError::Unreachable { rank, address, waited, reason: Box::new(reason) }.into()
    }

    /// Where rank 0 may listen now, or why nobody knows yet.
    fn candidates(
        &self,
        point: &RendezvousPoint,
        identity: &Identity,
    ) -> Result<Result<Vec<(SocketAddr, JobToken)>, SeekFault>, ExecError> {
        let hosts = match addresses(&point.host) {
            Ok(hosts) => hosts,
            Err(error) => {
                let (host, text) = (point.host.clone(), error.to_string());
                return Ok(Err(SeekFault::UnknownHost { host, text }));
            }
        };
        let at = |ports: &[u16], token: &JobToken| {
            let each =
                ports.iter().flat_map(|&port| hosts.iter().map(move |&host| SocketAddr::new(host, port)));
            each.map(|address| (address, token.clone())).collect()
        };
        Ok(match identity {
            Identity::Secret(token) => Ok(at(&point.ports, token)),
            Identity::Local(name) => match name.ask(self.deadline) {
                Ok(Some((token, port))) => Ok(at(&[port], &token)),
                Ok(None) => Err(SeekFault::NoProcess),
                Err(error) => Err(self.without(&error)?),
            },
        })
    }

    /// One attempt.
    fn ask(&self, address: SocketAddr, token: &JobToken) -> Result<Asked, ExecError> {
        let hello = serde_json::to_vec(self.hello).unwrap_or_default();
        let stream = match knock(address, token, &hello, self.deadline) {
            Ok(stream) => stream,
            Err(KnockError::AnotherVersion { own, theirs }) => {
                let rank = self.hello.rank;
                return Err(RendezvousError::OtherVersion { rank, own, theirs }.into());
            }
            Err(KnockError::Io(error)) => return self.without(&error).map(Asked::Failed),
            Err(KnockError::AnotherKind) => return Ok(Asked::Stranger(SeekFault::AnotherKind { address })),
            Err(KnockError::AnotherToken) => {
                return Ok(Asked::Stranger(SeekFault::AnotherSecret { address }));
            }
        };
        // A process that may not be of the job is kept waiting: until the deadline, not for one attempt.
        let answer = read_frame::<Welcome>(&mut Until { stream: &stream, deadline: self.deadline });
        Ok(match answer {
            Ok(Some((Welcome::Joined { session }, _))) => {
                let ready = stream.set_read_timeout(None).and_then(|()| stream.set_write_timeout(None));
                let seated = Seated { stream, session, token: token.clone() };
                ready
                    .map_or_else(|error| Asked::Failed(SeekFault::system(&error)), |()| Asked::Seated(seated))
            }
            Ok(Some((Welcome::NoSeat { reason }, _))) => Asked::NoSeat(reason),
            Ok(Some((Welcome::Refused { error }, _))) => return Err(error),
            Ok(None) => Asked::Failed(SeekFault::Closed { address }),
            Err(error) => Asked::Failed(SeekFault::Broken { address, text: error.to_string() }),
        })
    }

    /// What an error of the system says, unless trying again is of no use.
    fn without(&self, error: &io::Error) -> Result<SeekFault, ExecError> {
        if is_out_of_descriptors(error) {
            let (rank, world_size, limit) = (self.hello.rank, self.world_size, descriptor_limit());
            return Err(RendezvousError::Descriptors { rank, world_size, limit }.into());
        }
        Ok(SeekFault::system(error))
    }
}

//! The store's sockets, in the process of rank 0: a thread that lets ranks in, and one for each that listens to it.

use std::collections::BTreeMap;
use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use super::launch::{Launch, MeetingPoint};
use super::message::{Hello, PROTOCOL, Request, Welcome};
use super::store::{Letter, Store};
use super::{RENDEZVOUS_VARIABLE, RendezvousError};
use crate::frame::{FrameLimits, read_frame, write_frame};
use crate::monitor::Monitor;

/// How often a thread that may not block looks again.
const PAUSE: Duration = Duration::from_millis(2);
/// Who connects says who it is within this.
const HELLO_LIMIT: Duration = Duration::from_secs(5);

/// The store while it can be reached.
pub(super) struct Server {
    shared: Arc<Shared>,
}

struct Shared {
    world_size: usize,
    job: String,
    /// Of a write to a rank.
    limit: Duration,
    state: Monitor<State>,
}

struct State {
    store: Store,
    connections: BTreeMap<usize, Connection>,
    /// Ranks that have joined at any time.
    joined: usize,
    closing: bool,
}

/// To write to a rank.
enum Connection {
    Open(TcpStream),
    Closed,
}

impl Server {
    /// Listens for the ranks of a job at the first free port, for `limit`, and serves them until it is dropped. Gives the
    /// address by which this process itself reaches it.
    pub(super) fn start(launch: &Launch, limit: Duration) -> Result<(Self, SocketAddr), RendezvousError> {
        let (listener, address) = listen(&launch.meeting)?;
        let refused = |error: io::Error| not_listening(&launch.meeting, error.to_string());
        listener.set_nonblocking(true).map_err(refused)?;
        let state = State {
            store: Store::new(launch.world_size),
            connections: BTreeMap::new(),
            joined: 0,
            closing: false,
        };
        let shared = Arc::new(Shared {
            world_size: launch.world_size,
            job: launch.meeting.job.clone(),
            limit,
            state: Monitor::new(state),
        });
        let accepting = shared.clone();
        let deadline = Instant::now() + limit;
        thread::Builder::new()
            .name("rendezvous".to_owned())
            .spawn(move || accepting.accept(&listener, deadline))
            .map_err(refused)?;
        Ok((Self { shared }, address))
    }

    /// Waits until every rank that joined has left, for `limit`.
    pub(super) fn drain(&self, limit: Duration) {
        let open = |state: &State| {
            state.connections.values().any(|connection| matches!(connection, Connection::Open(_)))
        };
        let deadline = Instant::now() + limit;
        self.shared.state.wait_until(deadline, || false, |state| (!open(state)).then_some(()));
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.state.update(|state| {
            state.closing = true;
            for connection in state.connections.values() {
                if let Connection::Open(stream) = connection {
                    // Ends the thread that listens to it.
                    stream.shutdown(Shutdown::Both).ok();
                }
            }
        });
    }
}

/// Listens at the first port that is free: on the loopback only where that is what the host's name means.
fn listen(meeting: &MeetingPoint) -> Result<(TcpListener, SocketAddr), RendezvousError> {
    let mut reason = "there is no port to try".to_owned();
    for &port in &meeting.ports {
        let addresses = (meeting.host.as_str(), port).to_socket_addrs();
        let addresses: Vec<_> = addresses.map(Iterator::collect).unwrap_or_default();
        let loopback = addresses.iter().find(|address| address.ip().is_loopback());
        let v6 = addresses.iter().all(|address| address.is_ipv6()) && !addresses.is_empty();
        let (any, own): (IpAddr, IpAddr) = match loopback {
            Some(address) => (address.ip(), address.ip()),
            // The name may be one that only others know this host by.
            None if v6 => (Ipv6Addr::UNSPECIFIED.into(), Ipv6Addr::LOCALHOST.into()),
            None => (Ipv4Addr::UNSPECIFIED.into(), Ipv4Addr::LOCALHOST.into()),
        };
        match TcpListener::bind((any, port)) {
            Ok(listener) => return Ok((listener, SocketAddr::new(own, port))),
            Err(error) => reason = error.to_string(),
        }
    }
    Err(not_listening(meeting, reason))
}

fn not_listening(meeting: &MeetingPoint, reason: String) -> RendezvousError {
    let variable = RENDEZVOUS_VARIABLE.to_owned();
    RendezvousError::Listen { address: meeting.to_string(), reason, variable }
}

impl Shared {
    /// Lets ranks in until all have come, or the time for it is over.
    fn accept(self: &Arc<Self>, listener: &TcpListener, deadline: Instant) {
        let waiting = || self.state.peek(|state| !state.closing && state.joined < self.world_size);
        while waiting() && Instant::now() < deadline {
            match listener.accept() {
                Ok((stream, _)) => {
                    let serving = self.clone();
                    let name = "rendezvous rank".to_owned();
                    // Without a thread the stream is closed, and who connected is told by that.
                    thread::Builder::new().name(name).spawn(move || serving.serve(stream)).ok();
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
    }

    /// Everything that one connection says.
    fn serve(&self, mut stream: TcpStream) {
        let Some(rank) = self.welcome(&mut stream) else { return };
        while let Ok(Some((request, payload))) = read_frame::<Request>(&mut stream, FrameLimits::PEER) {
            self.state.update(|state| {
                let letters = state.store.hear(rank, request, payload);
                self.send(state, letters);
            });
        }
        self.state.update(|state| {
            state.connections.insert(rank, Connection::Closed);
            let letters = if state.closing { Vec::new() } else { state.store.lose(rank) };
            self.send(state, letters);
        });
    }

    /// Who it is, once it has been let in.
    fn welcome(&self, stream: &mut TcpStream) -> Option<usize> {
        stream.set_nonblocking(false).ok()?;
        stream.set_nodelay(true).ok()?;
        stream.set_read_timeout(Some(HELLO_LIMIT)).ok()?;
        stream.set_write_timeout(Some(self.limit)).ok()?;
        let (hello, _) = read_frame::<Hello>(stream, FrameLimits::STRANGER).ok()??;
        stream.set_read_timeout(None).ok()?;
        let rank = hello.rank;
        let mut answer = self.judge(&hello);
        // Under the lock: nothing may be sent to the rank before its welcome.
        self.state.update(|state| {
            if answer == Welcome::Joined && state.connections.contains_key(&rank) {
                let reason = format!("there is a rank {rank} already; give every process a rank of its own");
                answer = Welcome::Refused { reason };
            }
            let written = write_frame(stream, &answer, &[]);
            match answer {
                Welcome::Joined => {
                    written.ok()?;
                    state.connections.insert(rank, Connection::Open(stream.try_clone().ok()?));
                    state.joined += 1;
                    let letters = state.store.greet(rank);
                    self.send(state, letters);
                    Some(rank)
                }
                Welcome::AnotherJob => None,
                Welcome::Refused { reason } => {
                    // A job that was started wrong: nobody should wait for the limit to hear of it.
                    let error = RendezvousError::Refused { rank, reason };
                    let letters = state.store.fail(self.world_size, error.into());
                    self.send(state, letters);
                    None
                }
            }
        })
    }

    fn judge(&self, hello: &Hello) -> Welcome {
        let refused = |reason| Welcome::Refused { reason };
        let Hello { protocol, job, rank, world_size } = hello;
        if *job != self.job {
            return Welcome::AnotherJob;
        }
        if *protocol != PROTOCOL {
            return refused(format!(
                "it speaks version {protocol} of the protocol and rank 0 version {PROTOCOL}; install one version everywhere"
            ));
        }
        if *world_size != self.world_size {
            return refused(format!(
                "it is one of {world_size} ranks and rank 0 one of {}; give all processes the same number",
                self.world_size
            ));
        }
        if *rank >= self.world_size {
            return refused(format!("there are {world_size} ranks, counted from 0"));
        }
        Welcome::Joined
    }

    /// A rank that cannot be written to is lost, which its own thread finds out.
    fn send(&self, state: &mut State, letters: Vec<Letter>) {
        for Letter { to, reply, payload } in letters {
            let Some(Connection::Open(stream)) = state.connections.get_mut(&to) else { continue };
            if write_frame(stream, &reply, &[&payload]).is_err() {
                stream.shutdown(Shutdown::Both).ok();
            }
        }
    }
}

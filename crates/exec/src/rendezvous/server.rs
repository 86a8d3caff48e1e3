//! The store in the process of rank 0: a door that lets ranks in, a thread for each that listens to it, and one that sends what
//! connections did not take at once.

use std::collections::BTreeMap;
use std::io::{self, PipeReader, PipeWriter, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::ioctl_fionbio;
use rustix::net::{SendFlags, send};

use super::admission::{Admission, Verdict};
use super::message::{Hello, Request, Welcome};
use super::outbox::Outbox;
use super::store::{Letter, Store};
use super::{Facet, RendezvousError};
use crate::ExecError;
use crate::frame::{frame_head, read_frame};
use crate::monitor::{Monitor, lock};
use crate::network::{Door, Doorman, JobToken, descriptor_limit, poll_until};
use crate::world::after;

/// Of the threads that listen: one for each rank, which call little.
const STACK: usize = 256 << 10;

/// The store while it can be reached.
pub(super) struct Server {
    shared: Arc<Shared>,
    port: u16,
    /// Open until it goes: a process that comes late is answered that it has no seat.
    _door: Door,
}

struct Shared {
    world_size: usize,
    session: String,
    /// For how long a rank may take nothing.
    limit: Duration,
    /// Ranks are awaited until then.
    door_shuts: Instant,
    state: Monitor<State>,
    /// A byte in it wakes the thread that sends, and its end ends that.
    backlog: Mutex<PipeWriter>,
}

struct State {
    store: Store,
    seats: BTreeMap<usize, Seat>,
    admission: Admission<TcpStream>,
    closing: bool,
}

/// A rank that has joined.
enum Seat {
    Taken(Outbox),
    Left,
}

impl Server {
    /// Serves the ranks of a job that were started with these facets and have the token, until it is dropped.
    pub(super) fn start(
        listener: TcpListener,
        token: &JobToken,
        world_size: usize,
        facets: Vec<Facet>,
        limit: Duration,
    ) -> io::Result<Self> {
        let port = listener.local_addr()?.port();
        let (wakes, backlog) = io::pipe()?;
        ioctl_fionbio(&wakes, true)?;
        ioctl_fionbio(&backlog, true)?;
        let state = State {
            store: Store::new(world_size),
            seats: BTreeMap::new(),
            admission: Admission::new(world_size, facets),
            closing: false,
        };
        let shared = Arc::new(Shared {
            world_size,
            session: session()?,
            limit,
            door_shuts: after(Instant::now(), limit),
            state: Monitor::new(state),
            backlog: Mutex::new(backlog),
        });
        let sending = Arc::downgrade(&shared);
        thread::Builder::new().name("rendezvous post".to_owned()).stack_size(STACK).spawn(move || {
            let mut wakes = wakes;
            while let Some(shared) = sending.upgrade() {
                let (streams, until) = shared.backlog();
                drop(shared);
                if !wait_for_room(&mut wakes, &streams, until) {
                    return;
                }
                if let Some(shared) = sending.upgrade() {
                    shared.deliver();
                }
            }
        })?;
        let doorman = Seats { shared: shared.clone() };
        let door = Door::open(listener, token.clone(), doorman, "rendezvous")?;
        Ok(Self { shared, port, _door: door })
    }

    /// Where it listens.
    pub(super) fn port(&self) -> u16 {
        self.port
    }

    /// Waits until every rank that joined has left, for `limit`. Ranks that come late to a job that has failed are to hear
    /// why.
    pub(super) fn drain(&self, limit: Duration) {
        let open = |state: &State| state.seats.values().any(|seat| matches!(seat, Seat::Taken(_)));
        let expected = |state: &State| {
            let shared = &self.shared;
            let missing = state.admission.seated() < shared.world_size;
            state.store.has_failed() && missing && Instant::now() < shared.door_shuts
        };
        let deadline = Instant::now() + limit;
        let over = |state: &mut State| (!open(state) && !expected(state)).then_some(());
        self.shared.state.wait_until(deadline, || false, over);
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        self.shared.state.update(|state| {
            state.closing = true;
            for seat in state.seats.values() {
                if let Seat::Taken(outbox) = seat {
                    // Ends the thread that listens to it.
                    outbox.stream().shutdown(Shutdown::Both).ok();
                }
            }
        });
    }
}

/// What no other job is called.
fn session() -> io::Result<String> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(io::Error::from)?;
    Ok(bytes.iter().map(|byte| format!("{byte:02x}")).collect())
}

/// Waits until one of the connections takes something or there is more to send, until `until`; `false` once there never will be.
fn wait_for_room(wakes: &mut PipeReader, streams: &[Arc<TcpStream>], until: Option<Instant>) -> bool {
    let mut fds = vec![PollFd::new(&*wakes, PollFlags::IN)];
    fds.extend(streams.iter().map(|stream| PollFd::new(stream, PollFlags::OUT)));
    poll_until(&mut fds, until);
    drop(fds);
    // Neither end of the pipe blocks.
    !matches!(wakes.read(&mut [0; 64]), Ok(0))
}

/// Gives seats to those whom the door lets in.
struct Seats {
    shared: Arc<Shared>,
}

impl Doorman for Seats {
    fn admit(&mut self, stream: TcpStream, hello: &[u8]) {
        // What has the token and speaks this version is a rank.
        let Ok(Hello { rank, facets }) = serde_json::from_slice(hello) else { return };
        self.shared.state.update(|state| {
            let verdicts = state.admission.ask(rank, facets, stream, Instant::now());
            for verdict in verdicts {
                match verdict {
                    Verdict::Seat { rank, connection } => self.seat(state, rank, connection),
                    Verdict::NoSeat { connection, reason } => {
                        say_once(&connection, &Welcome::NoSeat { reason })
                    }
                }
            }
        });
    }

    fn due(&mut self) -> Option<Instant> {
        let now = Instant::now();
        self.shared.state.peek(|state| state.admission.due())?;
        self.shared.state.update(|state| {
            if let Some((error, connections)) = state.admission.overdue(now) {
                let error = ExecError::from(error);
                for connection in connections {
                    say_once(&connection, &Welcome::Refused { error: error.clone() });
                }
                let letters = state.store.fail(self.shared.world_size, error);
                self.shared.send(state, letters);
            }
            state.admission.due()
        })
    }

    fn out_of_descriptors(&mut self) {
        let shared = &self.shared;
        shared.state.update(|state| {
            if state.admission.seated() < shared.world_size {
                let limit = descriptor_limit();
                let error = RendezvousError::Descriptors { rank: 0, world_size: shared.world_size, limit };
                let letters = state.store.fail(shared.world_size, error.into());
                shared.send(state, letters);
            }
        });
    }
}

impl Seats {
    /// Lets a rank in, and starts the thread that listens to it.
    fn seat(&self, state: &mut State, rank: usize, stream: TcpStream) {
        let stream = Arc::new(stream);
        let session = self.shared.session.clone();
        say_once(&stream, &Welcome::Joined { session });
        state.seats.insert(rank, Seat::Taken(Outbox::new(stream.clone())));
        let shared = self.shared.clone();
        let listening = thread::Builder::new()
            .name(format!("rendezvous of {rank}"))
            .stack_size(STACK)
            .spawn(move || shared.listen(rank, &stream));
        let mut letters = state.store.greet(rank);
        if let Err(error) = listening {
            let stream = format!("from rank {rank}");
            let error = ExecError::Thread { rank: 0, stream, text: error.to_string() };
            letters.extend(state.store.fail(self.shared.world_size, error));
        }
        self.shared.send(state, letters);
    }
}

/// The first thing that a connection is sent, which fits into the buffer of a new one. It may be the last: who does not take it is
/// not waited for.
fn say_once(stream: &TcpStream, welcome: &Welcome) {
    if let Ok(bytes) = frame_head(welcome, 0) {
        send(stream, &bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).ok();
    }
}

impl Shared {
    /// Everything that a rank says.
    fn listen(&self, rank: usize, mut stream: &TcpStream) {
        while let Ok(Some((request, payload))) = read_frame::<Request>(&mut stream) {
            self.state.update(|state| {
                let letters = state.store.hear(rank, request, Arc::new(payload));
                self.send(state, letters);
            });
        }
        self.state.update(|state| {
            state.seats.insert(rank, Seat::Left);
            let letters = if state.closing { Vec::new() } else { state.store.lose(rank) };
            self.send(state, letters);
        });
    }

    /// Sends what connections take, and leaves the rest to the thread that sends. A rank that cannot be written to is lost, which
    /// its own thread finds out.
    fn send(&self, state: &mut State, letters: Vec<Letter>) {
        let mut is_left = false;
        for Letter { to, reply, payload } in letters {
            let Some(Seat::Taken(outbox)) = state.seats.get_mut(&to) else { continue };
            if outbox.post(&reply, payload).is_err() {
                outbox.stream().shutdown(Shutdown::Both).ok();
            }
            is_left |= outbox.waits_since().is_some();
        }
        if is_left {
            lock(&self.backlog).write_all(&[0]).ok();
        }
    }

    /// The connections for which there is something to send, and when the first of them has taken nothing for too long.
    fn backlog(&self) -> (Vec<Arc<TcpStream>>, Option<Instant>) {
        self.state.peek(|state| {
            let (mut streams, mut until) = (Vec::new(), None::<Instant>);
            for seat in state.seats.values() {
                let Seat::Taken(outbox) = seat else { continue };
                let Some(since) = outbox.waits_since() else { continue };
                let end = after(since, self.limit);
                until = Some(until.map_or(end, |until| until.min(end)));
                streams.push(outbox.stream().clone());
            }
            (streams, until)
        })
    }

    /// Sends what connections take now. A rank that has taken nothing for the limit ends the job.
    fn deliver(&self) {
        self.state.update(|state| {
            let mut letters = Vec::new();
            for (&rank, seat) in &mut state.seats {
                let Seat::Taken(outbox) = seat else { continue };
                let is_broken = outbox.flush().is_err();
                let waited = outbox.waits_since().map(|since| since.elapsed());
                let stopped = waited.filter(|&waited| waited >= self.limit);
                if let Some(waited) = stopped {
                    let error = RendezvousError::Unresponsive { rank, waited };
                    letters.extend(state.store.fail(rank, error.into()));
                }
                if is_broken || stopped.is_some() {
                    outbox.stream().shutdown(Shutdown::Both).ok();
                }
            }
            self.send(state, letters);
        });
    }
}

//! One connection for every pair of ranks that are processes, which only processes of this job get.

use std::io::{self, ErrorKind};
use std::net::{Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, mpsc};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::connecting;
use crate::cpu_transport::{Courier, PeerMessage};
use crate::frame::{read_frame, write_frame};
use crate::monitor::lock;
use crate::network::{Door, Doorman, JobToken, KnockError, descriptor_limit, is_out_of_descriptors, knock};
use crate::world::{World, after};
use crate::{ConnectionFault, ExecError, Recipient, Rendezvous, RendezvousError};

/// Between two attempts to connect.
const PAUSE: Duration = Duration::from_millis(20);
/// Between looks at whether the world has failed.
const LOOK: Duration = Duration::from_millis(20);
/// A rank that ends with an error notifies all of it before its connections close: how long to wait for the better word.
const GRACE: Duration = Duration::from_secs(1);

/// A rank's connections to all others, which are other processes. Dropping it is the farewell.
pub struct Mesh<M> {
    world: Arc<World>,
    rank: usize,
    /// By rank; none to itself.
    peers: Vec<Option<Arc<Peer>>>,
    answers: Mutex<Option<Answers<M>>>,
}

/// What is sent by a thread of its own.
struct Answers<M> {
    queue: mpsc::Sender<(usize, M)>,
    thread: thread::JoinHandle<()>,
}

/// What goes over a connection.
#[derive(Serialize, Deserialize)]
enum Letter<M> {
    Message(M),
    /// The connection may end from now on.
    Farewell,
}

struct Peer {
    rank: usize,
    stream: TcpStream,
    /// Held while a message is written, so that none comes into another.
    writing: Mutex<()>,
    /// It has said that it needs nothing more.
    gone: AtomicBool,
}

/// Takes the connections of ranks of larger numbers.
struct Greeter(mpsc::Sender<Arrival>);

/// What comes to the door.
enum Arrival {
    Peer(usize, TcpStream),
    OutOfDescriptors,
}

impl Doorman for Greeter {
    fn admit(&mut self, stream: TcpStream, hello: &[u8]) {
        if let Ok(peer) = serde_json::from_slice(hello) {
            self.0.send(Arrival::Peer(peer, stream)).ok();
        }
    }

    fn out_of_descriptors(&mut self) {
        self.0.send(Arrival::OutOfDescriptors).ok();
    }
}

impl<M: Serialize + DeserializeOwned> Mesh<M> {
    /// Connects this rank to all others, which do the same with the same `name`.
    ///
    /// # Errors
    /// [`RendezvousError::Absent`] with the ranks that did not come within the limit; whatever ended the job.
    pub fn connect<R: Recipient<Message = M>>(
        rendezvous: &Rendezvous,
        world: &Arc<World>,
        recipient: &Arc<R>,
        name: &str,
    ) -> Result<Self, ExecError> {
        let (rank, ranks) = (rendezvous.rank(), rendezvous.world_size());
        let began = Instant::now();
        let deadline = after(began, world.config().limit);
        let failed = |peer, error: &io::Error| match is_out_of_descriptors(error) {
            true => out_of_descriptors(rank, ranks),
            false => lost(world, rank, peer, ConnectionFault::system(error)),
        };
        let token = rendezvous.token_for(&format!("connections {name}"));
        let listener =
            TcpListener::bind((rendezvous.listening_address(), 0)).map_err(|error| failed(rank, &error))?;
        let port = listener.local_addr().map_err(|error| failed(rank, &error))?.port();
        let (arrive, arrivals) = mpsc::channel();
        let door = Door::open(listener, token.clone(), Greeter(arrive), &format!("rank {rank} connections"));
        let door = door.map_err(|error| failed(rank, &error))?;
        let ports = rendezvous.gather(&format!("connections {name}"), &port)?;

        let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
        for (peer, &port) in ports.iter().enumerate().take(rank) {
            let address = SocketAddr::new(rendezvous.address_of(peer), port);
            let stream = reach(world, address, &token, rank, deadline)?;
            streams[peer] = Some(stream.map_err(|error| failed(peer, &error))?);
        }
        while let Some(missing) = (rank + 1..ranks).find(|&peer| streams[peer].is_none()) {
            world.check()?;
            if Instant::now() >= deadline {
                let missing = (missing..ranks).filter(|&peer| streams[peer].is_none()).collect();
                let (place, waited) = (connecting().to_string(), began.elapsed());
                let absent = RendezvousError::Absent { rank, place, waited, missing, world_size: ranks };
                return Err(absent.into());
            }
            match arrivals.recv_timeout(LOOK) {
                Ok(Arrival::Peer(peer, stream)) if (rank + 1..ranks).contains(&peer) => {
                    streams[peer] = Some(stream);
                }
                Ok(Arrival::OutOfDescriptors) => return Err(out_of_descriptors(rank, ranks)),
                Ok(Arrival::Peer(..)) | Err(_) => {}
            }
        }
        drop(door);
        let peers = (0..ranks).map(|_| None).collect();
        let mut mesh = Self { world: world.clone(), rank, peers, answers: Mutex::default() };
        for (peer, stream) in streams.into_iter().enumerate() {
            let Some(stream) = stream else { continue };
            mesh.peers[peer] = Some(mesh.attend(peer, stream, recipient)?);
        }
        Ok(mesh)
    }

    /// Starts the thread that takes what `peer` sends.
    fn attend<R: Recipient<Message = M>>(
        &self,
        rank: usize,
        stream: TcpStream,
        recipient: &Arc<R>,
    ) -> Result<Arc<Peer>, ExecError> {
        let ready =
            stream.set_nodelay(true).and_then(|()| stream.set_write_timeout(Some(self.world.config().limit)));
        ready.map_err(|error| lost(&self.world, self.rank, rank, ConnectionFault::system(error)))?;
        let (writing, gone) = (Mutex::default(), AtomicBool::new(false));
        let peer = Arc::new(Peer { rank, stream, writing, gone });
        let (reading, recipient, world, own) =
            (peer.clone(), recipient.clone(), self.world.clone(), self.rank);
        thread::Builder::new()
            .name(format!("rank {own} from {rank}"))
            .spawn(move || match reading.listen(&*recipient) {
                Ok(()) => recipient.ended(rank),
                Err(reason) => drop(fail_after_grace(&world, own, rank, reason)),
            })
            .map_err(|error| ExecError::Thread {
                rank: self.rank,
                stream: format!("from rank {rank}"),
                text: error.to_string(),
            })?;
        Ok(peer)
    }
}

impl<M> Mesh<M> {
    /// Sends a message, with a payload of these parts, to `peer`; what goes to this rank itself goes nowhere. Messages to one
    /// rank arrive in the order in which they were sent. May wait for the peer's process to take them, for the world's limit.
    ///
    /// # Errors
    /// The world's, which a connection that has broken becomes.
    pub fn send(&self, peer: usize, message: &M, payload: &[&[u8]]) -> Result<(), ExecError>
    where
        M: Serialize,
    {
        send(&self.world, self.rank, self.peers[peer].as_deref(), message, payload)
    }

    /// Sends a message as [`Mesh::send`], by a thread of its own, and does not wait: for a [`Recipient`], on whose reading the peer may
    /// wait while it writes, as this rank may write to it. What goes wrong ends the world.
    ///
    /// # Errors
    /// [`ExecError::Thread`] when the system gives no thread.
    pub fn answer(&self, peer: usize, message: M) -> Result<(), ExecError>
    where
        M: Serialize + Send + 'static,
    {
        let mut answers = lock(&self.answers);
        let queue = match &*answers {
            Some(Answers { queue, .. }) => queue,
            None => &answers.insert(self.start_to_answer()?).queue,
        };
        // The thread goes once the world has failed.
        queue.send((peer, message)).ok();
        Ok(())
    }

    fn start_to_answer(&self) -> Result<Answers<M>, ExecError>
    where
        M: Serialize + Send + 'static,
    {
        let (queue, queued) = mpsc::channel::<(usize, M)>();
        let (world, rank, peers) = (self.world.clone(), self.rank, self.peers.clone());
        let name = format!("rank {rank} answers");
        let answer = move || {
            let mut queued = queued.into_iter();
            while queued.next().is_some_and(|(peer, message)| {
                send(&world, rank, peers[peer].as_deref(), &message, &[]).is_ok()
            }) {}
        };
        let thread = thread::Builder::new().name(name).spawn(answer).map_err(|error| ExecError::Thread {
            rank,
            stream: "answers".to_owned(),
            text: error.to_string(),
        })?;
        Ok(Answers { queue, thread })
    }
}

/// See [`Mesh::send`].
fn send<M: Serialize>(
    world: &World,
    rank: usize,
    peer: Option<&Peer>,
    message: &M,
    payload: &[&[u8]],
) -> Result<(), ExecError> {
    let Some(peer) = peer else { return Ok(()) };
    match peer.write(&Letter::Message(message), payload) {
        Ok(()) => Ok(()),
        // It is through with all collectives and has no rows to get.
        Err(_) if peer.gone.load(Ordering::Acquire) => Ok(()),
        Err(error) => {
            let reason = match error.kind() {
                ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                    ConnectionFault::TookNothing { limit: world.config().limit }
                }
                _ => ConnectionFault::system(error),
            };
            Err(fail_after_grace(world, rank, peer.rank, reason))
        }
    }
}

impl<M> Mesh<M> {
    /// Notifies all that this rank may go at any time: who hears its connection end is not to take that for a loss.
    pub fn say_farewell(&self) {
        if !self.world.has_failed() {
            self.peers.iter().flatten().for_each(|peer| drop(peer.write(&Letter::<()>::Farewell, &[])));
        }
    }
}

impl Courier for Mesh<PeerMessage> {
    fn world_size(&self) -> usize {
        self.peers.len()
    }

    fn send(&self, peer: usize, message: &PeerMessage, payload: &[&[u8]]) -> Result<(), ExecError> {
        Mesh::send(self, peer, message, payload)
    }
}

impl<M> Drop for Mesh<M> {
    /// Says farewell. The other direction stays open for what is still on its way here: to close it would make the system
    /// throw away what the peer has not read.
    fn drop(&mut self) {
        if let Some(Answers { queue, thread }) = lock(&self.answers).take() {
            drop(queue);
            // Answers come before the farewell, which waits no less for a peer that reads nothing.
            if !self.world.has_failed() {
                thread.join().ok();
            }
        }
        self.say_farewell();
        for peer in self.peers.iter().flatten() {
            peer.stream.shutdown(Shutdown::Write).ok();
        }
    }
}

impl Peer {
    fn write(&self, letter: &Letter<impl Serialize>, payload: &[&[u8]]) -> io::Result<()> {
        let _writing = lock(&self.writing);
        write_frame(&mut &self.stream, letter, payload)
    }

    /// Takes what it sends, until its farewell.
    fn listen<R: Recipient>(&self, recipient: &R) -> Result<(), ConnectionFault> {
        let mut stream = &self.stream;
        loop {
            match read_frame::<Letter<R::Message>>(&mut stream) {
                Ok(Some((Letter::Farewell, _))) => {
                    self.gone.store(true, Ordering::Release);
                    recipient.left(self.rank);
                }
                Ok(Some((Letter::Message(message), payload))) => {
                    recipient.receive(self.rank, message, &payload)?;
                }
                _ if self.gone.load(Ordering::Acquire) => return Ok(()),
                Ok(None) => return Err(ConnectionFault::Closed),
                Err(error) => return Err(ConnectionFault::system(error)),
            }
        }
    }
}

/// Fails the world with the loss of a connection, unless it hears of the cause meanwhile.
fn fail_after_grace(world: &World, rank: usize, peer: usize, reason: ConnectionFault) -> ExecError {
    if let Err(cause) = world.sleep_until(Instant::now() + GRACE) {
        return cause;
    }
    world.fail(lost(world, rank, peer, reason))
}

fn lost(world: &World, rank: usize, peer: usize, reason: ConnectionFault) -> ExecError {
    let doing = world.activity_of(rank).doing;
    RendezvousError::Connection { rank, peer, reason, doing }.into()
}

fn out_of_descriptors(rank: usize, world_size: usize) -> ExecError {
    RendezvousError::Descriptors { rank, world_size, limit: descriptor_limit() }.into()
}

/// Connects to a rank's door. It has said that it is open, but strangers may be in the way for a moment.
fn reach(
    world: &World,
    address: SocketAddr,
    token: &JobToken,
    rank: usize,
    deadline: Instant,
) -> Result<io::Result<TcpStream>, ExecError> {
    loop {
        world.check()?;
        let error = match knock(address, token, rank.to_string().as_bytes(), deadline) {
            Ok(stream) => return Ok(Ok(stream)),
            Err(KnockError::Io(error)) => error,
            Err(error) => io::Error::other(error.to_string()),
        };
        if is_out_of_descriptors(&error) || Instant::now() + PAUSE >= deadline {
            return Ok(Err(error));
        }
        thread::sleep(PAUSE);
    }
}

#[cfg(test)]
mod tests;

use std::collections::hash_map::RandomState;
use std::hash::BuildHasher;
use std::io::{self, ErrorKind};
use std::marker::PhantomData;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, Shutdown, SocketAddr, TcpListener, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::{Duration, Instant};

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::connecting;
use crate::cpu_transport::{Courier, PeerMessage};
use crate::frame::{FrameLimits, read_frame, write_frame};
use crate::monitor::lock;
use crate::world::{World, after};
use crate::{ExecError, Rendezvous, RendezvousError};

const PAUSE: Duration = Duration::from_millis(2);
/// Who connects says who it is within this.
const HELLO_LIMIT: Duration = Duration::from_secs(5);
/// A rank that ends with an error tells all of it before its connections close: how long to wait for the better word.
const GRACE: Duration = Duration::from_secs(1);

/// Takes what the ranks of other processes send, on a thread for each of them.
pub trait Recipient: Send + Sync + 'static {
    /// What they send.
    type Message: Serialize + DeserializeOwned;

    /// Takes a message of `peer`, in the order in which it was sent.
    ///
    /// # Errors
    /// In words, when it makes no sense: the world fails then.
    fn receive(&self, peer: usize, message: Self::Message, payload: &[u8]) -> Result<(), String>;
}

/// A rank's connections to all others, which are other processes. Dropping it is the farewell.
pub struct Mesh<M> {
    world: Arc<World>,
    rank: usize,
    /// By rank; none to itself.
    peers: Vec<Option<Arc<Peer>>>,
    messages: PhantomData<fn(M)>,
}

/// What goes over a connection.
#[derive(Serialize, Deserialize)]
enum Letter<M> {
    Message(M),
    /// Nothing more will come.
    Farewell,
}

struct Peer {
    rank: usize,
    writer: Mutex<TcpStream>,
    /// It has said that it needs nothing more.
    gone: AtomicBool,
}

/// Where a rank listens, and the word by which it knows those who were told so.
#[derive(Debug, Serialize, Deserialize)]
struct Door {
    port: u16,
    word: u64,
}

/// The first thing that a rank says to one of a smaller number.
#[derive(Debug, Serialize, Deserialize)]
struct Hello {
    word: u64,
    rank: usize,
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
        let alone = rendezvous.ranks_on_this_host().len() == ranks;
        let failed = |peer, error: &io::Error| lost(world, rank, peer, error.to_string());
        let listener = listen(alone, rendezvous.address_of(rank)).map_err(|error| failed(rank, &error))?;
        let port = listener.local_addr().map_err(|error| failed(rank, &error))?.port();
        let door = Door { port, word: RandomState::new().hash_one(name) };
        let doors = gather(rendezvous, &format!("connections {name}"), &door)?;

        let mut streams: Vec<Option<TcpStream>> = (0..ranks).map(|_| None).collect();
        for (peer, theirs) in doors.iter().enumerate().take(rank) {
            let address = SocketAddr::new(rendezvous.address_of(peer), theirs.port);
            let hello = Hello { word: theirs.word, rank };
            streams[peer] = Some(knock(address, &hello, deadline).map_err(|error| failed(peer, &error))?);
        }
        listener.set_nonblocking(true).map_err(|error| failed(rank, &error))?;
        while let Some(missing) = (rank + 1..ranks).find(|&peer| streams[peer].is_none()) {
            world.check()?;
            if Instant::now() >= deadline {
                let missing = (missing..ranks).filter(|&peer| streams[peer].is_none()).collect();
                let (place, waited) = (connecting().to_string(), began.elapsed());
                let absent = RendezvousError::Absent { rank, place, waited, missing, world_size: ranks };
                return Err(absent.into());
            }
            match listener.accept() {
                Ok((stream, _)) => {
                    // Whoever does not know the word is none of ours.
                    if let Some((peer, stream)) = admit(stream, door.word)
                        && (rank + 1..ranks).contains(&peer)
                    {
                        streams[peer] = Some(stream);
                    }
                }
                Err(_) => thread::sleep(PAUSE),
            }
        }
        let peers = (0..ranks).map(|_| None).collect();
        let mut mesh = Self { world: world.clone(), rank, peers, messages: PhantomData };
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
        let ready = stream
            .set_nodelay(true)
            .and_then(|()| stream.set_write_timeout(Some(self.world.config().limit)))
            .and_then(|()| stream.try_clone());
        let writer = ready.map_err(|error| lost(&self.world, self.rank, rank, error.to_string()))?;
        let peer = Arc::new(Peer { rank, writer: Mutex::new(writer), gone: AtomicBool::new(false) });
        let (reading, recipient, world, own) =
            (peer.clone(), recipient.clone(), self.world.clone(), self.rank);
        thread::Builder::new()
            .name(format!("rank {own} from {rank}"))
            .spawn(move || {
                if let Err(reason) = reading.listen(stream, &*recipient) {
                    fail_after_grace(&world, own, rank, reason);
                }
            })
            .map_err(|error| ExecError::Thread {
                rank: self.rank,
                stream: format!("from rank {rank}"),
                reason: error.to_string(),
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
        let Some(peer) = &self.peers[peer] else { return Ok(()) };
        let sent = write_frame(&mut *lock(&peer.writer), &Letter::Message(message), payload);
        match sent {
            Ok(()) => Ok(()),
            // It is through with all collectives and has no rows to get.
            Err(_) if peer.gone.load(Ordering::Acquire) => Ok(()),
            Err(error) => {
                let reason = match error.kind() {
                    ErrorKind::WouldBlock | ErrorKind::TimedOut => {
                        format!("it took nothing for {:.3} s", self.world.config().limit.as_secs_f64())
                    }
                    _ => error.to_string(),
                };
                Err(fail_after_grace(&self.world, self.rank, peer.rank, reason))
            }
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
        for peer in self.peers.iter().flatten() {
            let mut writer = lock(&peer.writer);
            if !self.world.has_failed() {
                write_frame(&mut *writer, &Letter::<()>::Farewell, &[]).ok();
            }
            writer.shutdown(Shutdown::Write).ok();
        }
    }
}

impl Peer {
    /// Takes what it sends, until its farewell.
    fn listen<R: Recipient>(&self, mut stream: TcpStream, recipient: &R) -> Result<(), String> {
        loop {
            match read_frame::<Letter<R::Message>>(&mut stream, FrameLimits::PEER) {
                Ok(Some((Letter::Farewell, _))) => self.gone.store(true, Ordering::Release),
                Ok(Some((Letter::Message(message), payload))) => {
                    recipient.receive(self.rank, message, &payload)?;
                }
                _ if self.gone.load(Ordering::Acquire) => return Ok(()),
                Ok(None) => return Err("it closed the connection".to_owned()),
                Err(error) => return Err(error.to_string()),
            }
        }
    }
}

/// Fails the world with the loss of a connection, unless it hears of the cause meanwhile.
fn fail_after_grace(world: &World, rank: usize, peer: usize, reason: String) -> ExecError {
    if let Err(cause) = world.sleep_until(Instant::now() + GRACE) {
        return cause;
    }
    world.fail(lost(world, rank, peer, reason))
}

fn lost(world: &World, rank: usize, peer: usize, reason: String) -> ExecError {
    let doing = world.activity_of(rank).doing;
    RendezvousError::Connection { rank, peer, reason, doing }.into()
}

fn listen(alone: bool, own: IpAddr) -> io::Result<TcpListener> {
    let any = match (alone, own) {
        (true, own) if own.is_loopback() => own,
        (_, IpAddr::V4(_)) => Ipv4Addr::UNSPECIFIED.into(),
        (_, IpAddr::V6(_)) => Ipv6Addr::UNSPECIFIED.into(),
    };
    TcpListener::bind((any, 0))
}

fn gather(rendezvous: &Rendezvous, place: &str, own: &Door) -> Result<Vec<Door>, ExecError> {
    let broken = |error: serde_json::Error| {
        ExecError::from(RendezvousError::Broken { rank: rendezvous.rank(), reason: error.to_string() })
    };
    let own = serde_json::to_vec(own).map_err(broken)?;
    let doors = rendezvous.all_gather(place, &own)?;
    doors.iter().map(|door| serde_json::from_slice(door).map_err(broken)).collect()
}

fn knock(address: SocketAddr, hello: &Hello, deadline: Instant) -> io::Result<TcpStream> {
    let left = deadline.saturating_duration_since(Instant::now()).max(PAUSE);
    let mut stream = TcpStream::connect_timeout(&address, left)?;
    stream.set_write_timeout(Some(HELLO_LIMIT))?;
    write_frame(&mut stream, hello, &[])?;
    Ok(stream)
}

fn admit(mut stream: TcpStream, word: u64) -> Option<(usize, TcpStream)> {
    stream.set_nonblocking(false).ok()?;
    stream.set_read_timeout(Some(HELLO_LIMIT)).ok()?;
    let (hello, _) = read_frame::<Hello>(&mut stream, FrameLimits::STRANGER).ok()??;
    stream.set_read_timeout(None).ok()?;
    (hello.word == word).then_some((hello.rank, stream))
}

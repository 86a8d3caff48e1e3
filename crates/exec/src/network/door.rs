//! Lets in connections that prove the job's token, on a thread of its own in which nothing waits for one of them.

use std::io::{self, ErrorKind, PipeWriter, Read};
use std::net::{TcpListener, TcpStream};
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags, Timespec};
use rustix::net::{SendFlags, send};

use super::handshake::{CLAIM_BYTES, GREETING_BYTES, Greeting, MAX_HELLO, Transcript, VERSION};
use super::token::{JobToken, PROOF_BYTES};
use super::{descriptor_limit, is_out_of_descriptors};

/// Who connects has this long for all of the handshake.
const HANDSHAKE: Duration = Duration::from_secs(5);
/// Connections in the middle of a handshake, at most. Beyond it the oldest that has not yet greeted makes room, so that many slow
/// ones keep no other out.
const MAX_PENDING: usize = 256;
/// Connections that are accepted between two looks at those that are pending.
const BATCH: usize = 64;
/// How long descriptors may be lacking before that is an error: others of this process may be given back meanwhile.
const WITHOUT_DESCRIPTORS: Duration = Duration::from_secs(1);
/// Between two attempts meanwhile.
const REST: Duration = Duration::from_millis(50);

/// Decides about those who have the token.
pub(crate) trait Doorman: Send + 'static {
    /// Takes a connection, which blocks, with what it said after its proof. Must not wait.
    fn admit(&mut self, stream: TcpStream, hello: &[u8]);

    /// Does what is due, and says when the next thing is.
    fn due(&mut self) -> Option<Instant> {
        None
    }

    /// This process has had no file descriptors for connections for a while.
    fn out_of_descriptors(&mut self);
}

/// A door. It closes when this is dropped; connections that were let in stay.
pub(crate) struct Door {
    /// The thread ends when its other end closes.
    _open: PipeWriter,
}

impl Door {
    /// Opens it.
    pub(crate) fn open(
        listener: TcpListener,
        token: JobToken,
        mut doorman: impl Doorman,
        name: &str,
    ) -> io::Result<Self> {
        listener.set_nonblocking(true)?;
        let (closed, open) = io::pipe()?;
        let most = descriptor_limit().map_or(MAX_PENDING as u64, |limit| limit / 8);
        let most = most.clamp(4, MAX_PENDING as u64) as usize;
        let mut hall = Hall { listener, token, most, pending: Vec::new(), lacking: None, rest: None };
        thread::Builder::new().name(name.to_owned()).spawn(move || {
            while hall.wait(&closed, doorman.due()) {
                hall.accept(&mut doorman);
                hall.attend(&mut doorman);
            }
        })?;
        Ok(Self { _open: open })
    }
}

/// Where connections wait while they are not known.
struct Hall {
    listener: TcpListener,
    token: JobToken,
    /// Connections that may be pending.
    most: usize,
    /// The oldest first.
    pending: Vec<Pending>,
    /// Since when there have been no descriptors.
    lacking: Option<Instant>,
    /// No connection is accepted before.
    rest: Option<Instant>,
}

impl Hall {
    /// Waits until there is something to do; `false` once the door is closed.
    fn wait(&mut self, closed: &io::PipeReader, due: Option<Instant>) -> bool {
        let expiries = self.pending.iter().map(|pending| pending.deadline);
        let first = expiries.chain(due).chain(self.rest).min();
        let mut fds = vec![PollFd::new(closed, PollFlags::IN)];
        if self.rest.is_none_or(|rest| rest <= Instant::now()) {
            fds.push(PollFd::new(&self.listener, PollFlags::IN));
        }
        fds.extend(self.pending.iter().map(|pending| PollFd::new(&pending.stream, PollFlags::IN)));
        poll_until(&mut fds, first);
        fds[0].revents().is_empty()
    }

    fn accept(&mut self, doorman: &mut impl Doorman) {
        if self.rest.is_some_and(|rest| rest > Instant::now()) {
            return;
        }
        self.rest = None;
        for _ in 0..BATCH {
            match self.listener.accept() {
                Ok((stream, _)) => {
                    if self.pending.len() >= self.most {
                        self.make_room();
                    }
                    self.pending.extend(Pending::new(stream).ok());
                }
                Err(error) if is_out_of_descriptors(&error) => {
                    let since = *self.lacking.get_or_insert_with(Instant::now);
                    if since.elapsed() >= WITHOUT_DESCRIPTORS {
                        doorman.out_of_descriptors();
                    }
                    // Those in the middle of a handshake are given the time for it.
                    self.pending.retain(|pending| !pending.is_silent_since(REST));
                    self.rest = Some(Instant::now() + REST);
                    return;
                }
                Err(error) if error.kind() == ErrorKind::WouldBlock => {
                    self.lacking = None;
                    return;
                }
                // One that went away before it was accepted.
                Err(_) => {}
            }
        }
    }

    /// Closes a connection: one that has not greeted before one that has.
    fn make_room(&mut self) {
        let silent = self.pending.iter().position(|pending| matches!(pending.stage, Stage::Greeting));
        self.pending.remove(silent.unwrap_or(0));
    }

    /// Goes on with every handshake that can.
    fn attend(&mut self, doorman: &mut impl Doorman) {
        let now = Instant::now();
        for mut pending in std::mem::take(&mut self.pending) {
            match pending.step(&self.token) {
                Step::Waits if pending.deadline > now => self.pending.push(pending),
                Step::Waits | Step::Ends => {}
                Step::Proved(hello) => {
                    let Pending { stream, .. } = pending;
                    if stream.set_nonblocking(false).and_then(|()| stream.set_nodelay(true)).is_ok() {
                        doorman.admit(stream, &hello);
                    }
                }
            }
        }
    }
}

/// A connection of someone.
struct Pending {
    stream: TcpStream,
    deadline: Instant,
    stage: Stage,
    /// What has come of the message that is awaited.
    bytes: Vec<u8>,
}

/// What is awaited next.
enum Stage {
    Greeting,
    Claim(Box<Transcript>),
    Hello(usize),
}

/// What came of a look at a connection.
enum Step {
    Waits,
    /// It has closed, or is not one of the job.
    Ends,
    Proved(Vec<u8>),
}

impl Pending {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nonblocking(true)?;
        let deadline = Instant::now() + HANDSHAKE;
        Ok(Self { stream, deadline, stage: Stage::Greeting, bytes: Vec::new() })
    }

    /// Whether it has not greeted for so long.
    fn is_silent_since(&self, time: Duration) -> bool {
        let since = HANDSHAKE.saturating_sub(self.deadline.saturating_duration_since(Instant::now()));
        matches!(self.stage, Stage::Greeting) && since >= time
    }

    /// Reads what is there, as far as the handshake goes.
    fn step(&mut self, token: &JobToken) -> Step {
        loop {
            let wanted = match self.stage {
                Stage::Greeting => GREETING_BYTES,
                Stage::Claim(_) => CLAIM_BYTES,
                Stage::Hello(bytes) => bytes,
            };
            match self.fill(wanted) {
                Ok(true) => {}
                Ok(false) => return Step::Waits,
                Err(_) => return Step::Ends,
            }
            let bytes = std::mem::take(&mut self.bytes);
            match &self.stage {
                Stage::Greeting => match self.answer(&bytes, token) {
                    Some(transcript) => self.stage = Stage::Claim(Box::new(transcript)),
                    None => return Step::Ends,
                },
                Stage::Claim(transcript) => {
                    let (proof, length) = bytes.split_at(PROOF_BYTES);
                    let length =
                        length.try_into().map_or(usize::MAX, |length| u32::from_le_bytes(length) as usize);
                    if !transcript.is_guest(token, proof) || length > MAX_HELLO {
                        return Step::Ends;
                    }
                    self.stage = Stage::Hello(length);
                }
                Stage::Hello(_) => return Step::Proved(bytes),
            }
        }
    }

    /// Whether so many bytes have come. No more are read, and memory is taken for those that are there.
    fn fill(&mut self, wanted: usize) -> io::Result<bool> {
        let mut block = [0; 4096];
        while self.bytes.len() < wanted {
            let room = (wanted - self.bytes.len()).min(block.len());
            match self.stream.read(&mut block[..room]) {
                Ok(0) => return Err(ErrorKind::UnexpectedEof.into()),
                Ok(read) => self.bytes.extend_from_slice(&block[..read]),
                Err(error) if error.kind() == ErrorKind::WouldBlock => return Ok(false),
                Err(error) if error.kind() == ErrorKind::Interrupted => {}
                Err(error) => return Err(error),
            }
            if matches!(self.stage, Stage::Greeting) && !Greeting::may_begin_with(&self.bytes) {
                return Err(ErrorKind::InvalidData.into());
            }
        }
        Ok(true)
    }

    /// Answers a greeting; `None` where that is none, or the answer cannot be sent at once.
    fn answer(&self, greeting: &[u8], token: &JobToken) -> Option<Transcript> {
        let guest = Greeting::parse(greeting)?;
        let own = Greeting::new().ok()?;
        let transcript = Transcript::of(&guest, &own);
        let answer = [own.bytes(), &transcript.door_proof(token)].concat();
        // So few bytes fit into the buffer of a new connection.
        let sent = send(&self.stream, &answer, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).ok()?;
        (sent == answer.len() && guest.version() == VERSION).then_some(transcript)
    }
}

/// Waits until something happens to one of the descriptors, or it is `until`.
pub(crate) fn poll_until(fds: &mut [PollFd<'_>], until: Option<Instant>) {
    let left = until.map(|until| until.saturating_duration_since(Instant::now()));
    // A millisecond more than nothing, so that a deadline has passed when the wait for it ends.
    let left = left.and_then(|left| Timespec::try_from(left + Duration::from_millis(1)).ok());
    if rustix::event::poll(fds, left.as_ref()).is_err() {
        fds.iter_mut().for_each(PollFd::clear_revents);
    }
}

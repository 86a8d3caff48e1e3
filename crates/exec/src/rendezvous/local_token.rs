//! How ranks of one host and one user get a token without being given a secret: rank 0 makes a random one and hands it out over a
//! Unix socket whose name follows from the rendezvous of the job. The kernel says which user is at the other end, on both sides, so that
//! no other user gets the token or can give one. The name lives as long as the process: nothing is left behind, and a second job
//! at the same place finds it taken.

use std::io::{self, PipeWriter, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::thread;
use std::time::{Duration, Instant};

use rustix::event::{PollFd, PollFlags};
use rustix::io::Errno;
use rustix::net::sockopt::socket_peercred;
use rustix::net::{
    AddressFamily, SendFlags, SocketAddrUnix, SocketFlags, SocketType, accept_with, bind, connect, listen,
    send, socket_with,
};
use rustix::process::geteuid;
use sha2::{Digest, Sha256};

use crate::network::{JobToken, poll_until};

/// Connections that wait to be accepted.
const BACKLOG: i32 = 1024;
/// Bytes that are handed out: the token and the port.
const GIFT_BYTES: usize = JobToken::BYTES + 2;
/// How long rank 0 may take to hand it out.
const HANDED_OUT: Duration = Duration::from_secs(2);
/// Between two attempts to accept, where there are no descriptors.
const REST: Duration = Duration::from_millis(50);

/// Hands out the token and the port where rank 0 listens. The name is free again when this is dropped.
pub(super) struct LocalToken {
    /// The thread ends when its other end closes.
    _open: PipeWriter,
}

/// Why rank 0 cannot hand out a token.
#[derive(Debug)]
pub(super) enum NameError {
    /// Another process has the name.
    Taken {
        /// Its number, where it is of this user and still there.
        process: Option<i32>,
    },
    Io(io::Error),
}

/// The name of `place`, which jobs of that rendezvous have in common.
pub(super) struct LocalName(SocketAddrUnix);

impl LocalName {
    pub(super) fn of(place: &str) -> io::Result<Self> {
        let digest = Sha256::digest(place);
        let digest: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
        let name = format!("counterpoint-{}-{digest}", geteuid().as_raw());
        Ok(Self(SocketAddrUnix::new_abstract_name(name.as_bytes())?))
    }

    /// Takes the name. What waits for the token is served by [`Claimed::hand_out`].
    pub(super) fn claim(&self) -> Result<Claimed, NameError> {
        let failed = |error: Errno| NameError::Io(error.into());
        let socket = socket().map_err(failed)?;
        match bind(&socket, &self.0) {
            Ok(()) => {}
            Err(Errno::ADDRINUSE) => return Err(NameError::Taken { process: self.owner() }),
            Err(error) => return Err(failed(error)),
        }
        listen(&socket, BACKLOG).map_err(failed)?;
        Ok(Claimed(socket))
    }

    /// The token and the port that rank 0 hands out; `None` while nothing does.
    ///
    /// # Errors
    /// The system's, when there is no descriptor for a connection; in words, what has the name but is not of this user.
    pub(super) fn ask(&self, deadline: Instant) -> io::Result<Option<(JobToken, u16)>> {
        let socket = socket()?;
        match connect(&socket, &self.0) {
            Ok(()) => {}
            // No such name, or too many ranks that ask at this moment.
            Err(Errno::CONNREFUSED | Errno::AGAIN) => return Ok(None),
            Err(error) => return Err(error.into()),
        }
        let owner = socket_peercred(&socket)?.uid;
        if owner != geteuid() {
            let reason = format!("a process of another user (number {}) has this job's name", owner.as_raw());
            return Err(io::Error::other(reason));
        }
        rustix::io::ioctl_fionbio(&socket, false)?;
        let mut stream = UnixStream::from(socket);
        let left = deadline.saturating_duration_since(Instant::now()).min(HANDED_OUT);
        stream.set_read_timeout(Some(left.max(Duration::from_millis(1))))?;
        // So few bytes come in one piece. Rank 0 is of this user: it may end meanwhile, and does nothing worse.
        let mut gift = [0; GIFT_BYTES];
        if stream.read(&mut gift).ok() != Some(GIFT_BYTES) {
            return Ok(None);
        }
        let [token @ .., low, high] = gift;
        Ok(Some((JobToken::from_bytes(token), u16::from_le_bytes([low, high]))))
    }

    /// The process that has the name, where it is of this user.
    fn owner(&self) -> Option<i32> {
        let socket = socket().ok()?;
        connect(&socket, &self.0).ok()?;
        let owner = socket_peercred(&socket).ok()?;
        (owner.uid == geteuid()).then(|| owner.pid.as_raw_nonzero().get())
    }
}

fn socket() -> Result<OwnedFd, Errno> {
    socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::NONBLOCK | SocketFlags::CLOEXEC, None)
}

/// A name that is this process's, which does not answer yet.
pub(super) struct Claimed(OwnedFd);

impl Claimed {
    /// Hands out the token and the port from now on, on a thread of its own.
    ///
    /// # Errors
    /// The system's, when it gives no thread.
    pub(super) fn hand_out(self, token: &JobToken, port: u16) -> io::Result<LocalToken> {
        let (closed, open) = io::pipe()?;
        let gift = [token.to_bytes().as_slice(), &port.to_le_bytes()].concat();
        thread::Builder::new().name("rendezvous token".to_owned()).spawn(move || {
            let mut rest = None;
            loop {
                let mut fds = vec![PollFd::new(&closed, PollFlags::IN)];
                if rest.is_none() {
                    fds.push(PollFd::new(&self.0, PollFlags::IN));
                }
                poll_until(&mut fds, rest);
                if !fds[0].revents().is_empty() {
                    return;
                }
                rest = hand_out_once(self.0.as_fd(), &gift).err().map(|_| Instant::now() + REST);
            }
        })?;
        Ok(LocalToken { _open: open })
    }
}

/// Gives all who wait what is theirs, where they are of this user. Nothing here waits.
fn hand_out_once(socket: impl AsFd, gift: &[u8]) -> Result<(), Errno> {
    loop {
        match accept_with(&socket, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
            Ok(guest) => {
                if socket_peercred(&guest).is_ok_and(|guest| guest.uid == geteuid()) {
                    // So few bytes fit into the buffer of a new connection.
                    send(&guest, gift, SendFlags::DONTWAIT | SendFlags::NOSIGNAL).ok();
                }
            }
            Err(Errno::AGAIN) => return Ok(()),
            Err(Errno::CONNABORTED | Errno::INTR) => {}
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn soon() -> Instant {
        Instant::now() + Duration::from_secs(20)
    }

    #[test]
    fn the_token_is_handed_out_while_rank_0_lives() {
        let name = LocalName::of(&format!("a test of process {}", std::process::id())).unwrap();
        assert!(name.ask(soon()).unwrap().is_none());
        let token = JobToken::random().unwrap();
        let claimed = name.claim().unwrap();
        let second = name.claim().err();
        let own = std::process::id() as i32;
        assert!(matches!(second, Some(NameError::Taken { process: Some(process) }) if process == own));
        let handed_out = claimed.hand_out(&token, 29_501).unwrap();
        for _ in 0..50 {
            let (found, port) = name.ask(soon()).unwrap().unwrap();
            assert_eq!((found.to_bytes(), port), (token.to_bytes(), 29_501));
        }
        drop(handed_out);
        while name.ask(soon()).unwrap().is_some() {}
        // The name is free again.
        while name.claim().is_err() {
            assert!(Instant::now() < soon());
        }
    }
}

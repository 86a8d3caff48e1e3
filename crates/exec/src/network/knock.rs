//! The guest's side of a handshake.

use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

use thiserror::Error;

use super::handshake::{ANSWER_BYTES, GREETING_BYTES, Greeting, MAX_HELLO, Transcript, VERSION};
use super::{JobToken, Until};

/// Of connecting and of proving, each; a door answers at once.
const ATTEMPT: Duration = Duration::from_secs(5);
/// The shortest time that connecting is given.
const MOMENT: Duration = Duration::from_millis(1);

/// Why a door did not open.
#[derive(Debug, Error)]
pub(crate) enum KnockError {
    #[error("{0}")]
    Io(#[from] io::Error),
    /// What listens there is of another kind.
    #[error("what listens there is not counterpoint")]
    AnotherKind,
    #[error("what listens there does not have this job's secret")]
    AnotherToken,
    /// It has the token.
    #[error("it speaks version {theirs} of the protocol and this process version {own}")]
    AnotherVersion { own: u32, theirs: u32 },
}

/// Connects to a door, proves the token to it and has it prove its own, then says `hello`. What the door makes of that comes
/// as the first message of the stream.
pub(crate) fn knock(
    address: SocketAddr,
    token: &JobToken,
    hello: &[u8],
    deadline: Instant,
) -> Result<TcpStream, KnockError> {
    if hello.len() > MAX_HELLO {
        let reason = format!("a hello of {} bytes is too long", hello.len());
        return Err(io::Error::new(ErrorKind::InvalidInput, reason).into());
    }
    let left = deadline.saturating_duration_since(Instant::now()).clamp(MOMENT, ATTEMPT);
    let stream = TcpStream::connect_timeout(&address, left)?;
    stream.set_nodelay(true)?;
    let deadline = deadline.min(Instant::now() + ATTEMPT);
    let mut until = Until { stream: &stream, deadline };
    let own = Greeting::new()?;
    until.write_all(own.bytes())?;
    let mut answer = [0; ANSWER_BYTES];
    until.read_exact(&mut answer)?;
    let (theirs, proof) = answer.split_at(GREETING_BYTES);
    let theirs = Greeting::parse(theirs).ok_or(KnockError::AnotherKind)?;
    let transcript = Transcript::of(&own, &theirs);
    if !transcript.is_door(token, proof) {
        return Err(KnockError::AnotherToken);
    }
    if theirs.version() != VERSION {
        return Err(KnockError::AnotherVersion { own: VERSION, theirs: theirs.version() });
    }
    let mut claim = transcript.guest_proof(token).to_vec();
    claim.extend_from_slice(&(hello.len() as u32).to_le_bytes());
    claim.extend_from_slice(hello);
    until.write_all(&claim)?;
    stream.set_read_timeout(None)?;
    stream.set_write_timeout(None)?;
    Ok(stream)
}

//! Finding the store, which may not listen yet, nor where one looks first.

use std::io;
use std::net::{SocketAddr, TcpStream, ToSocketAddrs};
use std::thread;
use std::time::{Duration, Instant};

use super::RendezvousError;
use super::launch::{Launch, MeetingPoint};
use super::message::{Hello, PROTOCOL, Welcome};
use crate::ExecError;
use crate::frame::{FrameLimits, read_frame, write_frame};
use crate::world::after;

/// Of one attempt to connect, and of the answer to it.
const ATTEMPT: Duration = Duration::from_secs(5);
const PAUSE: Duration = Duration::from_millis(20);

/// Where to look for the store.
pub(super) enum Candidates<'a> {
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
pub(super) fn connect(
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

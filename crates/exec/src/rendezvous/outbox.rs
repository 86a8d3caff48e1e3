//! What the store has to send to a rank. Nothing here waits: what a connection does not take at once stays, and is sent when it
//! takes more, so that a rank that has stopped holds up no other.

use std::collections::VecDeque;
use std::io;
use std::net::TcpStream;
use std::sync::Arc;
use std::time::Instant;

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::message::Reply;
use super::store::Payload;
use crate::frame::frame_head;

/// Bytes that one connection is given before another is served.
const QUANTUM: usize = 1 << 20;

/// A rank's connection, and what is still to be sent over it.
pub(super) struct Outbox {
    stream: Arc<TcpStream>,
    messages: VecDeque<Message>,
    /// When the connection last took something, or the first message came.
    progress: Instant,
}

/// A message of which some has been sent.
struct Message {
    head: Vec<u8>,
    payload: Payload,
    sent: usize,
}

impl Outbox {
    pub(super) fn new(stream: Arc<TcpStream>) -> Self {
        Self { stream, messages: VecDeque::new(), progress: Instant::now() }
    }

    pub(super) fn stream(&self) -> &Arc<TcpStream> {
        &self.stream
    }

    /// Since when the connection has taken nothing of what there is; `None` where there is nothing.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        (!self.messages.is_empty()).then_some(self.progress)
    }

    /// Sends a message, at once as far as the connection takes it.
    ///
    /// # Errors
    /// The connection's, and that of a message that is too long.
    pub(super) fn post(&mut self, reply: &Reply, payload: Payload) -> io::Result<()> {
        let head = frame_head(reply, payload.len() as u64)?;
        if self.messages.is_empty() {
            self.progress = Instant::now();
        }
        self.messages.push_back(Message { head, payload, sent: 0 });
        if self.messages.len() == 1 { self.flush() } else { Ok(()) }
    }

    /// Sends what the connection takes.
    ///
    /// # Errors
    /// The connection's.
    pub(super) fn flush(&mut self) -> io::Result<()> {
        let mut left = QUANTUM;
        while let Some(message) = self.messages.front_mut().filter(|_| left > 0) {
            let rest = message.rest();
            if rest.is_empty() {
                self.messages.pop_front();
                continue;
            }
            let bytes = &rest[..rest.len().min(left)];
            match send(&self.stream, bytes, SendFlags::DONTWAIT | SendFlags::NOSIGNAL) {
                Ok(sent) => {
                    message.sent += sent;
                    left -= sent;
                    self.progress = Instant::now();
                }
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }
}

impl Message {
    /// What is left of its head, or else of its payload.
    fn rest(&self) -> &[u8] {
        match self.head.get(self.sent..).filter(|head| !head.is_empty()) {
            Some(head) => head,
            None => self.payload.get(self.sent - self.head.len()..).unwrap_or_default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;
    use std::time::Duration;

    use super::*;
    use crate::frame::read_frame;

    #[test]
    fn what_a_connection_does_not_take_waits_and_arrives_whole() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let mut reader = TcpStream::connect(listener.local_addr().unwrap()).unwrap();
        let mut outbox = Outbox::new(Arc::new(listener.accept().unwrap().0));
        let large: Payload = Arc::new((0..40u32 << 20).map(|at| at as u8).collect());
        let value = |id| Reply::Value { id };
        let began = Instant::now();
        outbox.post(&value(1), large.clone()).unwrap();
        outbox.post(&value(2), Arc::new(vec![7])).unwrap();
        outbox.post(&value(3), Payload::default()).unwrap();
        assert!(began.elapsed() < Duration::from_secs(5), "nothing waits");
        assert!(outbox.waits_since().is_some_and(|since| since >= began));
        let read = thread::spawn(move || {
            let mut next = || read_frame::<Reply>(&mut reader).unwrap().unwrap();
            [next(), next(), next()]
        });
        while outbox.waits_since().is_some() {
            outbox.flush().unwrap();
        }
        let expected = [(value(1), large.to_vec()), (value(2), vec![7]), (value(3), Vec::new())];
        assert!(read.join().unwrap() == expected);
    }
}

//! Streams whose reads and writes end at one moment, however many calls they take.

use std::io::{self, ErrorKind, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

/// A stream up to a deadline. A peer that sends or takes a byte now and then does not put it off.
pub(crate) struct Until<'a> {
    pub(crate) stream: &'a TcpStream,
    pub(crate) deadline: Instant,
}

impl Until<'_> {
    /// What is left, at least a moment, for a timeout of nothing means none.
    fn left(&self) -> io::Result<Option<Duration>> {
        let left = self.deadline.saturating_duration_since(Instant::now());
        if left.is_zero() { Err(ErrorKind::TimedOut.into()) } else { Ok(Some(left)) }
    }
}

/// A timeout of the system's, under the name that it has elsewhere.
fn timed_out(error: io::Error) -> io::Error {
    if error.kind() == ErrorKind::WouldBlock { ErrorKind::TimedOut.into() } else { error }
}

impl Read for Until<'_> {
    fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
        self.stream.set_read_timeout(self.left()?)?;
        let mut stream = self.stream;
        stream.read(bytes).map_err(timed_out)
    }
}

impl Write for Until<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.stream.set_write_timeout(self.left()?)?;
        let mut stream = self.stream;
        stream.write(bytes).map_err(timed_out)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::net::TcpListener;
    use std::thread;

    use super::*;

    #[test]
    fn a_byte_now_and_then_puts_nothing_off() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let address = listener.local_addr().unwrap();
        let slow = thread::spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            while stream.write_all(&[1]).is_ok() {
                thread::sleep(Duration::from_millis(20));
            }
        });
        let stream = TcpStream::connect(address).unwrap();
        let began = Instant::now();
        let deadline = began + Duration::from_millis(200);
        let error = Until { stream: &stream, deadline }.read_exact(&mut [0; 1000]).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::TimedOut);
        assert!((200..2000).contains(&began.elapsed().as_millis()), "{:?}", began.elapsed());
        drop(stream);
        slow.join().unwrap();
    }
}

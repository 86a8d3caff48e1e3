//! Messages between processes, as bytes of a stream: two lengths, a header in JSON, and a payload of raw bytes.

use std::io::{self, ErrorKind, Read, Write};

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::available_memory;

/// Bytes of a header that is let in: the splits of a collective, never rows.
const MAX_HEADER: u32 = 64 << 20;
/// Bytes of a payload that is let in.
const MAX_PAYLOAD: u64 = 1 << 44;
/// Payloads up to here are read without a look at the machine's memory.
const SMALL_PAYLOAD: u64 = 16 << 20;

/// Writes one message, whose payload is the parts one after the other.
///
/// # Errors
/// The stream's.
pub(crate) fn write_frame(
    stream: &mut impl Write,
    header: &impl Serialize,
    payload: &[&[u8]],
) -> io::Result<()> {
    let bytes = payload.iter().map(|part| part.len() as u64).sum();
    // One write for all that is short: a segment of its own for the lengths would cost as much as the rest.
    let head = frame_head(header, bytes)?;
    stream.write_all(&head)?;
    payload.iter().try_for_each(|part| stream.write_all(part))?;
    stream.flush()
}

/// What comes before a message's payload of `payload_bytes`: both lengths and the header.
///
/// # Errors
/// [`ErrorKind::InvalidInput`] for a header that is too long.
pub(crate) fn frame_head(header: &impl Serialize, payload_bytes: u64) -> io::Result<Vec<u8>> {
    let header = serde_json::to_vec(header)?;
    let header_bytes = u32::try_from(header.len()).ok().filter(|&bytes| bytes <= MAX_HEADER);
    let header_bytes = header_bytes.ok_or_else(|| {
        io::Error::new(ErrorKind::InvalidInput, format!("a header of {} bytes is too long", header.len()))
    })?;
    let mut head = Vec::with_capacity(12 + header.len());
    head.extend_from_slice(&header_bytes.to_le_bytes());
    head.extend_from_slice(&payload_bytes.to_le_bytes());
    head.extend_from_slice(&header);
    Ok(head)
}

/// Reads one message of a process of this job; `None` where the stream ended before it.
///
/// # Errors
/// The stream's; [`ErrorKind::InvalidData`] for what is no message, [`ErrorKind::OutOfMemory`] for a payload that memory
/// cannot hold.
pub(crate) fn read_frame<H: DeserializeOwned>(stream: &mut impl Read) -> io::Result<Option<(H, Vec<u8>)>> {
    let mut head = [0; 12];
    loop {
        match stream.read(&mut head[..1]) {
            Ok(0) => return Ok(None),
            Ok(_) => break stream.read_exact(&mut head[1..])?,
            // A signal of the program's, whose handler ran on this thread.
            Err(error) if error.kind() == ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    let [h0, h1, h2, h3, payload @ ..] = head;
    let header_bytes = u32::from_le_bytes([h0, h1, h2, h3]);
    let payload_bytes = u64::from_le_bytes(payload);
    if header_bytes > MAX_HEADER || payload_bytes > MAX_PAYLOAD {
        let reason = format!("a message of {header_bytes} and {payload_bytes} bytes is none of ours");
        return Err(io::Error::new(ErrorKind::InvalidData, reason));
    }
    let mut header = vec![0; header_bytes as usize];
    stream.read_exact(&mut header)?;
    let header = serde_json::from_slice(&header)?;
    // Asking reads files of the system, for which small messages do not wait.
    let available = if payload_bytes > SMALL_PAYLOAD { available_memory() } else { None };
    if let Some(available) = available.filter(|&available| available < payload_bytes) {
        let reason = format!("{payload_bytes} bytes arrive and {available} are available");
        return Err(io::Error::new(ErrorKind::OutOfMemory, reason));
    }
    let mut payload = vec![0; payload_bytes as usize];
    stream.read_exact(&mut payload)?;
    Ok(Some((header, payload)))
}

/// Bytes of the message that begins here, once its lengths have come.
#[cfg(feature = "mpi")]
pub(crate) fn frame_length(bytes: &[u8]) -> Option<usize> {
    let [h0, h1, h2, h3, payload @ ..] = *bytes.first_chunk::<12>()?;
    let header = u64::from(u32::from_le_bytes([h0, h1, h2, h3]));
    usize::try_from(12 + header + u64::from_le_bytes(payload)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_written_is_read() {
        let mut bytes = Vec::new();
        write_frame(&mut bytes, &("a", 7u64), &[b"xy", b"", b"z"]).unwrap();
        write_frame(&mut bytes, &("b", u64::MAX), &[]).unwrap();
        let mut stream = bytes.as_slice();
        let mut next = || read_frame::<(String, u64)>(&mut stream).unwrap();
        assert_eq!(next(), Some((("a".to_owned(), 7), b"xyz".to_vec())));
        assert_eq!(next(), Some((("b".to_owned(), u64::MAX), Vec::new())));
        assert_eq!(next(), None);
    }

    /// Python's handlers of signals interrupt the calls of the thread that they happen to run on.
    #[test]
    fn a_signal_is_no_end_of_a_stream() {
        /// Every read but the second of two is interrupted.
        struct Interrupted<'a>(&'a [u8], bool);

        impl Read for Interrupted<'_> {
            fn read(&mut self, bytes: &mut [u8]) -> io::Result<usize> {
                self.1 = !self.1;
                if self.1 { Err(ErrorKind::Interrupted.into()) } else { self.0.read(bytes) }
            }
        }

        let mut bytes = Vec::new();
        write_frame(&mut bytes, &7u64, &[b"xy"]).unwrap();
        let mut stream = Interrupted(&bytes, false);
        assert_eq!(read_frame::<u64>(&mut stream).unwrap(), Some((7, b"xy".to_vec())));
        assert_eq!(read_frame::<u64>(&mut stream).unwrap(), None);
    }

    #[test]
    fn what_is_no_message_is_refused_before_memory_is_taken() {
        let read = |bytes: &[u8]| {
            let mut stream = bytes;
            read_frame::<u64>(&mut stream).unwrap_err().kind()
        };
        assert_eq!(read(b"GET / HTTP/1.1\r\n\r\n"), ErrorKind::InvalidData);
        let mut long = Vec::new();
        write_frame(&mut long, &1u64, &[&[0; 9]]).unwrap();
        assert_eq!(read(&long[..long.len() - 1]), ErrorKind::UnexpectedEof);
        let mut vast = long.clone();
        vast[4..12].copy_from_slice(&(1u64 << 43).to_le_bytes());
        assert_eq!(read(&vast), ErrorKind::OutOfMemory);
    }
}

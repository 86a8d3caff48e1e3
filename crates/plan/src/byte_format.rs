//! Values as bytes for other processes of the same version: who wrote them, and a checksum of what they are.

use postcard::ser_flavors::Flavor;
use serde::{Deserialize, Serialize};
use thiserror::Error;

/// How values of one kind are written as bytes. Memory of what is read is bounded by that of the bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ByteFormat {
    /// Bytes begin with it.
    magic: [u8; 4],
    /// What the values are called.
    what: &'static str,
    /// Counts up where values are written otherwise, or mean something else.
    number: u32,
}

/// Why bytes are not read.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, Error)]
#[non_exhaustive]
pub enum BytesFault {
    /// Bytes of something else.
    #[error("these {bytes} bytes are no {what}")]
    Unknown {
        /// How many there are.
        bytes: usize,
        /// What they should have been.
        what: String,
    },
    /// Made by another version.
    #[error(
        "they were made by counterpoint {theirs}, and this is {own}; make them with the version that takes them"
    )]
    Version {
        /// Who made them.
        theirs: String,
        /// Who was to take them.
        own: String,
    },
    /// Bytes that are not those that were made.
    #[error("their {bytes} bytes are not those that were made: some are missing, or were changed on the way")]
    Damaged {
        /// How many there are.
        bytes: usize,
    },
}

/// Bytes of the checksum, behind magic and version.
const CHECKSUM: usize = 8;

impl ByteFormat {
    /// Of values that are called so.
    pub const fn new(magic: [u8; 4], what: &'static str, number: u32) -> Self {
        Self { magic, what, number }
    }

    /// This package and the format, as bytes name who made them.
    pub fn version(&self) -> String {
        format!("{} ({} {})", env!("CARGO_PKG_VERSION"), self.what, self.number)
    }

    /// A value as bytes.
    ///
    /// # Panics
    /// When it does not serialise: all lists have known lengths.
    pub fn write(&self, value: &impl Serialize) -> Vec<u8> {
        let version = self.version();
        let mut bytes = self.magic.to_vec();
        bytes.push(version.len() as u8);
        bytes.extend_from_slice(version.as_bytes());
        let content = postcard::serialize_with_flavor(value, Gathered(Vec::new()))
            .expect("what is written serialises: its lists have known lengths, and memory takes all bytes");
        bytes.extend_from_slice(&checksum(&content));
        bytes.extend_from_slice(&content);
        bytes
    }

    /// The value that was written first, and the bytes behind it: of a value that is read in parts.
    ///
    /// # Errors
    /// For bytes that this version has not written so, or that are not as they were.
    pub fn read_first<'a, T: Deserialize<'a>>(&self, bytes: &'a [u8]) -> Result<(T, Rest<'a>), BytesFault> {
        let unknown = BytesFault::Unknown { bytes: bytes.len(), what: self.what.to_owned() };
        let Some((&length, rest)) = bytes.strip_prefix(&self.magic).and_then(<[u8]>::split_first) else {
            return Err(unknown);
        };
        let damaged = BytesFault::Damaged { bytes: bytes.len() };
        let (Some(theirs), Some(rest)) = (rest.get(..length as usize), rest.get(length as usize..)) else {
            return Err(damaged);
        };
        let own = self.version();
        if theirs != own.as_bytes() {
            return Err(BytesFault::Version { theirs: String::from_utf8_lossy(theirs).into_owned(), own });
        }
        match rest.split_at_checked(CHECKSUM) {
            Some((said, content)) if said == checksum(content) => {
                let (first, content) = postcard::take_from_bytes(content).map_err(|_| damaged)?;
                Ok((first, Rest { content, bytes: bytes.len() }))
            }
            _ => Err(damaged),
        }
    }

    /// The value that was written.
    ///
    /// # Errors
    /// As [`ByteFormat::read_first`].
    pub fn read<'a, T: Deserialize<'a>>(&self, bytes: &'a [u8]) -> Result<T, BytesFault> {
        let ((), rest) = self.read_first(bytes)?;
        rest.read()
    }
}

/// What comes behind the first of a value.
#[derive(Clone, Copy, Debug)]
pub struct Rest<'a> {
    content: &'a [u8],
    /// Of all.
    bytes: usize,
}

impl<'a> Rest<'a> {
    /// Reads it.
    ///
    /// # Errors
    /// [`BytesFault::Damaged`] for bytes of something else.
    pub fn read<T: Deserialize<'a>>(&self) -> Result<T, BytesFault> {
        match postcard::take_from_bytes(self.content) {
            Ok((value, [])) => Ok(value),
            _ => Err(BytesFault::Damaged { bytes: self.bytes }),
        }
    }
}

/// FNV-1a over words of eight bytes: what was changed on the way is found at the speed of memory. Every step can be undone, so that a
/// change of one word always shows.
fn checksum(content: &[u8]) -> [u8; CHECKSUM] {
    const BASIS: u64 = 0xcbf2_9ce4_8422_2325;
    const PRIME: u64 = 0x0100_0000_01b3;
    let (words, rest) = content.as_chunks::<8>();
    let mut last = [0; 8];
    last[..rest.len()].copy_from_slice(rest);
    let length = content.len().to_le_bytes();
    let words = words.iter().chain([&last, &length]);
    words.fold(BASIS, |hash, word| (hash ^ u64::from_le_bytes(*word)).wrapping_mul(PRIME)).to_le_bytes()
}

/// What is serialised, in memory.
struct Gathered(Vec<u8>);

impl Flavor for Gathered {
    type Output = Vec<u8>;

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.0.push(byte);
        Ok(())
    }

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.extend_from_slice(bytes);
        Ok(())
    }

    fn finalize(self) -> postcard::Result<Vec<u8>> {
        Ok(self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FORMAT: ByteFormat = ByteFormat::new(*b"CPXX", "numbers", 3);

    #[test]
    fn values_come_back_whole_or_in_parts() {
        let value = (vec![7_u64, 1 << 40], "and words".to_owned(), Some(-2.5));
        let bytes = FORMAT.write(&value);
        assert_eq!(FORMAT.read(&bytes), Ok(value.clone()));
        let (first, rest) = FORMAT.read_first::<Vec<u64>>(&bytes).unwrap();
        assert_eq!((first, rest.read()), (value.0, Ok((value.1, value.2))));
        assert_eq!(FORMAT.read::<[u64; 9]>(&bytes), Err(BytesFault::Damaged { bytes: bytes.len() }));
    }

    #[test]
    fn bytes_that_were_not_made_so_are_refused() {
        let bytes = FORMAT.write(&vec![1_u32; 9]);
        let read = |bytes: &[u8]| FORMAT.read::<Vec<u32>>(bytes).unwrap_err();
        for junk in [&b""[..], b"CPX", b"CPXX", b"PK\x03\x04 an archive"] {
            let fault = read(junk);
            assert_eq!(fault, BytesFault::Unknown { bytes: junk.len(), what: "numbers".to_owned() });
            assert_eq!(fault.to_string(), format!("these {} bytes are no numbers", junk.len()));
        }
        let other = ByteFormat { number: 4, ..FORMAT }.write(&vec![1_u32; 9]);
        let fault = read(&other);
        assert_eq!(
            fault,
            BytesFault::Version { theirs: FORMAT.version().replace('3', "4"), own: FORMAT.version() }
        );
        assert!(fault.to_string().contains("(numbers 4), and this is"), "{fault}");
        // Cut anywhere, or any bit of it another behind the version.
        for end in 5..bytes.len() {
            assert_eq!(read(&bytes[..end]), BytesFault::Damaged { bytes: end });
        }
        for (at, bit) in (5 + bytes[4] as usize..bytes.len()).flat_map(|at| (0..8).map(move |bit| (at, bit)))
        {
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            assert_eq!(read(&damaged), BytesFault::Damaged { bytes: bytes.len() }, "bit {bit} of byte {at}");
        }
        let longer = [&bytes[..], &[0]].concat();
        assert_eq!(read(&longer), BytesFault::Damaged { bytes: longer.len() });
    }
}

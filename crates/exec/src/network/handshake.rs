//! The messages by which two processes prove to each other that they have one token. All are of fixed length, but for the hello,
//! which comes after the proof and says its length.

use super::token::{JobToken, PROOF_BYTES};

/// What every greeting begins with.
const MAGIC: [u8; 8] = *b"cntrpnt\n";
/// Changed with every change of what processes say to each other.
pub(super) const VERSION: u32 = 3;
const NONCE_BYTES: usize = 32;
/// Bytes of a greeting: magic, version, nonce.
pub(super) const GREETING_BYTES: usize = 8 + 4 + NONCE_BYTES;
/// Bytes of the door's answer: its greeting and its proof.
pub(super) const ANSWER_BYTES: usize = GREETING_BYTES + PROOF_BYTES;
/// Bytes of what proves the other side: its proof and the hello's length.
pub(super) const CLAIM_BYTES: usize = PROOF_BYTES + 4;
/// The longest hello.
pub(super) const MAX_HELLO: usize = 1 << 20;

const OF_DOOR: &[u8] = b"counterpoint door";
const OF_GUEST: &[u8] = b"counterpoint guest";

/// The first message of either side.
#[derive(Clone, Copy)]
pub(super) struct Greeting([u8; GREETING_BYTES]);

impl Greeting {
    /// With a nonce that was never used.
    pub(super) fn new() -> std::io::Result<Self> {
        let mut bytes = [0; GREETING_BYTES];
        bytes[..8].copy_from_slice(&MAGIC);
        bytes[8..12].copy_from_slice(&VERSION.to_le_bytes());
        getrandom::fill(&mut bytes[12..]).map_err(std::io::Error::from)?;
        Ok(Self(bytes))
    }

    /// `None` for bytes that are no greeting.
    pub(super) fn parse(bytes: &[u8]) -> Option<Self> {
        let bytes: [u8; GREETING_BYTES] = bytes.try_into().ok()?;
        bytes.starts_with(&MAGIC).then_some(Self(bytes))
    }

    /// Whether the bytes that have come so far may become a greeting.
    pub(super) fn may_begin_with(bytes: &[u8]) -> bool {
        bytes.iter().zip(&MAGIC).all(|(a, b)| a == b)
    }

    pub(super) fn bytes(&self) -> &[u8] {
        &self.0
    }

    pub(super) fn version(&self) -> u32 {
        let [_, _, _, _, _, _, _, _, a, b, c, d, ..] = self.0;
        u32::from_le_bytes([a, b, c, d])
    }
}

/// Both greetings: what proofs are made over.
pub(super) struct Transcript {
    bytes: [u8; 2 * GREETING_BYTES],
}

impl Transcript {
    pub(super) fn of(guest: &Greeting, door: &Greeting) -> Self {
        let mut bytes = [0; 2 * GREETING_BYTES];
        bytes[..GREETING_BYTES].copy_from_slice(guest.bytes());
        bytes[GREETING_BYTES..].copy_from_slice(door.bytes());
        Self { bytes }
    }

    pub(super) fn door_proof(&self, token: &JobToken) -> [u8; PROOF_BYTES] {
        token.proof(OF_DOOR, &self.bytes)
    }

    pub(super) fn is_door(&self, token: &JobToken, proof: &[u8]) -> bool {
        token.verify(OF_DOOR, &self.bytes, proof)
    }

    pub(super) fn guest_proof(&self, token: &JobToken) -> [u8; PROOF_BYTES] {
        token.proof(OF_GUEST, &self.bytes)
    }

    pub(super) fn is_guest(&self, token: &JobToken, proof: &[u8]) -> bool {
        token.verify(OF_GUEST, &self.bytes, proof)
    }
}

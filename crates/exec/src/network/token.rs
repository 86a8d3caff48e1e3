//! The secret that the processes of one job share, and proofs of knowing it.

use std::{fmt, io};

use hmac::{Hmac, KeyInit, Mac};
use sha2::{Digest, Sha256};

/// What the processes of one job share and no other process has. It is never sent by this crate: a process proves to another that
/// it has it.
#[derive(Clone)]
pub struct JobToken([u8; Self::BYTES]);

/// Bytes of a proof.
pub(super) const PROOF_BYTES: usize = 32;

impl JobToken {
    /// Its length.
    pub const BYTES: usize = 32;

    /// One that no other job has.
    ///
    /// # Errors
    /// The system's, when it gives no random numbers.
    pub fn random() -> io::Result<Self> {
        let mut bytes = [0; Self::BYTES];
        getrandom::fill(&mut bytes).map_err(io::Error::from)?;
        Ok(Self(bytes))
    }

    /// As [`JobToken::to_bytes`] gave it, for launchers that carry it from rank 0 to the others.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Self {
        Self(bytes)
    }

    /// Its bytes, which only processes of the job may see.
    pub fn to_bytes(&self) -> [u8; Self::BYTES] {
        self.0
    }

    /// The token of `job` among those that have been given `secret`.
    pub fn of_secret(secret: &str, job: &str) -> Self {
        // A key of fixed length, for an HMAC takes one of any length but not without an error type.
        Self(Sha256::digest(secret).into()).derive(&["job", job])
    }

    /// A token for one purpose, from which this one does not follow.
    pub(crate) fn derive(&self, purpose: &[&str]) -> Self {
        let mut mac = self.mac(b"counterpoint token");
        for part in purpose {
            mac.update(&(part.len() as u64).to_le_bytes());
            mac.update(part.as_bytes());
        }
        Self(mac.finalize().into_bytes().into())
    }

    /// Proves knowledge of the token to one that sees the same transcript. Each side has a `role` of its own, so that no proof can
    /// be sent back.
    pub(super) fn proof(&self, role: &[u8], transcript: &[u8]) -> [u8; PROOF_BYTES] {
        let mut mac = self.mac(role);
        mac.update(transcript);
        mac.finalize().into_bytes().into()
    }

    /// Whether a proof is right, in time that does not depend on where it is wrong.
    pub(super) fn verify(&self, role: &[u8], transcript: &[u8], proof: &[u8]) -> bool {
        let mut mac = self.mac(role);
        mac.update(transcript);
        mac.verify_slice(proof).is_ok()
    }

    fn mac(&self, role: &[u8]) -> Hmac<Sha256> {
        // HMAC pads a short key with zeros to the length of a block.
        let mut key = [0; 64];
        key[..Self::BYTES].copy_from_slice(&self.0);
        let mut mac = Hmac::new(&key.into());
        mac.update(&(role.len() as u64).to_le_bytes());
        mac.update(role);
        mac
    }
}

impl fmt::Debug for JobToken {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JobToken(..)")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn proofs_are_of_one_token_role_and_transcript() {
        let token = JobToken::random().unwrap();
        let proof = token.proof(b"a", b"bc");
        assert!(token.verify(b"a", b"bc", &proof));
        assert!(!token.verify(b"ab", b"c", &proof) && !token.verify(b"a", b"bd", &proof));
        assert!(!token.verify(b"a", b"bc", &proof[..31]) && !token.verify(b"a", b"bc", b""));
        assert!(!JobToken::random().unwrap().verify(b"a", b"bc", &proof));
        assert!(JobToken::from_bytes(token.to_bytes()).verify(b"a", b"bc", &proof));
        assert_eq!(format!("{token:?}"), "JobToken(..)");
    }

    #[test]
    fn tokens_of_jobs_and_purposes_differ() {
        let all = [
            JobToken::of_secret("secret", "job"),
            JobToken::of_secret("secret", "job 2"),
            JobToken::of_secret("secret 2", "job"),
            JobToken::of_secret("secret", "job").derive(&["a", "b"]),
            JobToken::of_secret("secret", "job").derive(&["ab"]),
        ];
        for (at, token) in all.iter().enumerate() {
            assert!(all[..at].iter().all(|other| other.0 != token.0), "{at}");
        }
        assert_eq!(JobToken::of_secret("secret", "job").0, all[0].0);
    }
}

//! Digests of what ranks compare, as they are shown.

use sha2::{Digest, Sha256};

/// What distinguishes contents, short enough to be read.
pub fn digest(bytes: &[u8]) -> String {
    shown(Sha256::digest(bytes).as_slice())
}

/// The first half of a SHA-256.
pub fn shown(digest: &[u8]) -> String {
    let hex: String = digest.iter().take(16).map(|byte| format!("{byte:02x}")).collect();
    format!("SHA-256 {hex}...")
}

//! What the cache keeps of one kernel: a magic line, a checksum of all that follows, the compiler's log, the cubin.

use sha2::{Digest, Sha256};

use super::Cubin;

const MAGIC: &[u8] = b"counterpoint cubin 1\n";
const HASH_BYTES: usize = 32;

/// The file's contents.
pub(super) fn encode(cubin: &Cubin) -> Vec<u8> {
    let mut payload = Vec::with_capacity(8 + cubin.log.len() + cubin.image.len());
    payload.extend((cubin.log.len() as u64).to_le_bytes());
    payload.extend(cubin.log.as_bytes());
    payload.extend(&cubin.image);
    let hash = Sha256::digest(&payload);
    [MAGIC, &hash, &payload].concat()
}

/// The kernel in a file's contents, or why it is not what was written.
pub(super) fn decode(contents: &[u8]) -> Result<Cubin, &'static str> {
    let rest = contents.strip_prefix(MAGIC).ok_or("it does not begin like one")?;
    let (hash, payload) = rest.split_at_checked(HASH_BYTES).ok_or("it is cut off")?;
    if Sha256::digest(payload).as_slice() != hash {
        return Err("its checksum is wrong");
    }
    let (len, rest) = payload.split_first_chunk().ok_or("it is cut off")?;
    let len = usize::try_from(u64::from_le_bytes(*len)).map_err(|_| "its log is too long")?;
    let (log, image) = rest.split_at_checked(len).ok_or("its log is too long")?;
    let log = String::from_utf8(log.to_vec()).map_err(|_| "its log is no text")?;
    Ok(Cubin { image: image.to_vec(), log })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_damage_is_found() {
        let cubin = Cubin { image: vec![1, 2, 3], log: "ptxas".to_owned() };
        let contents = encode(&cubin);
        assert_eq!(decode(&contents), Ok(cubin));
        for len in 0..contents.len() {
            assert!(decode(&contents[..len]).is_err(), "cut to {len} bytes");
        }
        for index in 0..contents.len() {
            let mut damaged = contents.clone();
            damaged[index] ^= 0x10;
            assert!(decode(&damaged).is_err(), "byte {index} changed");
        }
        assert!(decode(&[contents, vec![0]].concat()).is_err(), "longer than written");
    }
}

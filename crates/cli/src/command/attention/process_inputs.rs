//! That ranks which read their rows from files of their own have read rows of one and the same tensors.
//!
//! Ranks that have opened the very file of rank 0, on its host, need no proof. Every other one makes a digest of the rows that it has
//! read, and rank 0 reads the same rows from its own file and makes theirs: each row is hashed once by the rank that has it and once by
//! rank 0, at 1 to 2 GB/s a core, and nothing is hashed where all ranks are on one host.

use std::collections::BTreeMap;

use counterpoint_console::{
    CliError,
    digest::shown,
    input::FileState,
    launched::{ended, gather},
};
use counterpoint_exec::{AttentionInputs, HostTensor, Rendezvous, RendezvousError};
use sha2::{Digest, Sha256};

use super::tensors::Tensors;

/// Compares the rows that this rank has read with those in the file of rank 0, which all ranks call. `read` gives a rank's rows from
/// this process's file.
pub(super) fn agree_on_rows(
    rendezvous: &Rendezvous,
    tensors: &mut Tensors,
    own: &AttentionInputs,
    read: impl Fn(&mut Tensors, usize) -> Result<AttentionInputs, CliError>,
) -> Result<(), CliError> {
    let Some(file) = tensors.file() else { return Ok(()) };
    file.refuse_changed()?;
    let states: Vec<FileState> = gather(rendezvous, "files of tensors", file.state())?;
    let rank = rendezvous.rank();
    let (near, first) = (rendezvous.ranks_on_this_host(), &states[0]);
    let has_the_same = |rank: usize| near.contains(&0) && near.contains(&rank) && states[rank] == *first;
    let mut digests = BTreeMap::new();
    if rank > 0 && !has_the_same(rank) {
        digests.insert(rank, digest_of(own));
    }
    if rank == 0 {
        for other in (1..states.len()).filter(|&other| !has_the_same(other)) {
            digests.insert(other, digest_of(&read(tensors, other)?));
        }
        if let Some(file) = tensors.file() {
            file.refuse_changed()?;
        }
    }
    let all: Vec<BTreeMap<usize, String>> = gather(rendezvous, "rows of tensors", &digests)?;
    for (other, digests) in all.iter().enumerate().skip(1) {
        let (theirs, expected) = (digests.get(&other), all[0].get(&other));
        if theirs != expected {
            let what = format!("a digest of the rows of --input that rank {other} reads");
            let value = |digest: Option<&String>| digest.cloned().unwrap_or_else(|| "missing".to_owned());
            let values = vec![(value(expected), vec![0]), (value(theirs), vec![other])];
            return Err(ended(RendezvousError::Disagreement { what, values }.into()));
        }
    }
    Ok(())
}

fn digest_of(inputs: &AttentionInputs) -> String {
    let mut hash = Sha256::new();
    let AttentionInputs { q, k, v, sink, dout, dlse } = inputs;
    for tensor in [Some(q), Some(k), Some(v), sink.as_ref(), dout.as_ref(), dlse.as_ref()] {
        hash.update(tensor.map_or(&[][..], HostTensor::bytes));
    }
    shown(hash.finalize().as_slice())
}

//! Random patterns of group collectives that match between ranks.

use counterpoint_exec::{HostElement, HostTensor};
use counterpoint_mask::Range;
use counterpoint_plan::{DType, GroupPart, OwnedSplit, RemoteSplit};
use half::{bf16, f16};
use rand::RngExt;
use rand::seq::SliceRandom;
use rand_chacha::ChaCha8Rng;

pub(crate) const DTYPES: [DType; 4] = [DType::F64, DType::F32, DType::Bf16, DType::F16];

/// Every rank's part, with the rows of its two tensors.
#[derive(Clone, Debug)]
pub(crate) struct Pattern {
    pub(crate) parts: Vec<GroupPart>,
    pub(crate) owned_rows: Vec<usize>,
    pub(crate) remote_rows: Vec<usize>,
}

/// Where each remote row comes from.
pub(crate) fn moves(pattern: &Pattern) -> Vec<Move> {
    let mut out = Vec::new();
    for (rank, part) in pattern.parts.iter().enumerate() {
        for source in 0..pattern.parts.len() {
            let sent =
                pattern.parts[source].owned.iter().filter(|split| split.ranks.contains(&(rank as u32)));
            let sent = sent.flat_map(|split| split.rows.start..split.rows.end);
            let received = part.remote.iter().filter(|split| split.rank as usize == source);
            let received = received.flat_map(|split| split.rows.start..split.rows.end);
            for (owned_row, remote_row) in sent.zip(received) {
                out.push(Move { owner: source, owned_row, holder: rank, remote_row });
            }
        }
    }
    out
}

/// One row of one rank that another holds.
pub(crate) struct Move {
    pub(crate) owner: usize,
    pub(crate) owned_row: usize,
    pub(crate) holder: usize,
    pub(crate) remote_row: usize,
}

/// Splits in random places with random destinations (none, some, all, the rank itself), expected in a random order with
/// gaps between them.
pub(crate) fn random(rng: &mut ChaCha8Rng, world_size: usize) -> Pattern {
    let mut parts = vec![GroupPart::default(); world_size];
    let owned_rows: Vec<usize> = (0..world_size).map(|_| rng.random_range(0..24)).collect();
    let mut remote_rows = vec![0; world_size];
    for (part, &rows) in parts.iter_mut().zip(&owned_rows) {
        let mut start = 0;
        while start < rows {
            let end = rng.random_range(start..=rows);
            let chance = rng.random_range(0.0..1.2);
            let ranks = (0..world_size as u32).filter(|_| rng.random_bool(f64::min(chance, 1.0))).collect();
            part.owned.push(OwnedSplit { rows: Range::new(start, end), ranks });
            start = end + rng.random_range(0..3);
        }
    }
    for rank in 0..world_size {
        // Splits of one source keep their order; those of different sources are shuffled together.
        let mut sources = Vec::new();
        let mut lengths = vec![Vec::new(); world_size];
        for (source, part) in parts.iter().enumerate() {
            for split in part.owned.iter().filter(|split| split.ranks.contains(&(rank as u32))) {
                sources.push(source);
                lengths[source].push(split.rows.len());
            }
        }
        sources.shuffle(rng);
        let mut next = vec![0; world_size];
        for source in sources {
            let start = remote_rows[rank] + rng.random_range(0..3);
            let end = start + lengths[source][next[source]];
            next[source] += 1;
            parts[rank].remote.push(RemoteSplit { rows: Range::new(start, end), rank: source as u32 });
            remote_rows[rank] = end;
        }
    }
    Pattern { parts, owned_rows, remote_rows }
}

/// A tensor of these values, each rounded to the type.
pub(crate) fn tensor(shape: &[usize], dtype: DType, values: &[f64]) -> HostTensor {
    fn of<T: HostElement>(shape: &[usize], values: &[f64]) -> HostTensor {
        HostTensor::from_vec(shape.to_vec(), values.iter().map(|&value| T::from_f64(value)).collect())
    }
    match dtype {
        DType::F64 => of::<f64>(shape, values),
        DType::F32 => of::<f32>(shape, values),
        DType::Bf16 => of::<bf16>(shape, values),
        DType::F16 => of::<f16>(shape, values),
    }
}

/// A value rounded to a type.
pub(crate) fn round(value: f64, dtype: DType) -> f64 {
    tensor(&[1], dtype, &[value]).to_f64()[0]
}

/// Relative distance of neighbouring values.
pub(crate) fn epsilon(dtype: DType) -> f64 {
    match dtype {
        DType::F64 => f64::EPSILON,
        DType::F32 => f64::from(f32::EPSILON),
        DType::Bf16 => f64::from(bf16::EPSILON),
        DType::F16 => f64::from(f16::EPSILON),
    }
}

use half::{bf16, f16};
use rayon::ThreadPool;
use rayon::prelude::*;

use super::Element;
use crate::HostData;

/// Elements that a thread converts at a time.
const CHUNK: usize = 1 << 14;

/// Copies `src` into `dst`, converting the element type; every value is rounded once, to nearest even.
///
/// # Panics
/// When the lengths differ.
pub fn cast(src: &HostData, dst: &mut HostData, threads: &ThreadPool) {
    threads.install(|| match (src, dst) {
        (HostData::F64(src), HostData::F64(dst)) => dst.copy_from_slice(src),
        (HostData::F64(src), HostData::F32(dst)) => by_value(src, dst),
        (HostData::F64(src), HostData::Bf16(dst)) => by_value(src, dst),
        (HostData::F64(src), HostData::F16(dst)) => by_value(src, dst),
        (HostData::F32(src), HostData::F64(dst)) => by_value(src, dst),
        (HostData::Bf16(src), HostData::F64(dst)) => by_value(src, dst),
        (HostData::F16(src), HostData::F64(dst)) => by_value(src, dst),
        (HostData::F32(src), HostData::F32(dst)) => dst.copy_from_slice(src),
        (HostData::F32(src), HostData::Bf16(dst)) => chunks(src, dst, bf16::narrow),
        (HostData::F32(src), HostData::F16(dst)) => chunks(src, dst, f16::narrow),
        (HostData::Bf16(src), HostData::F32(dst)) => chunks(src, dst, bf16::widen),
        (HostData::F16(src), HostData::F32(dst)) => chunks(src, dst, f16::widen),
        (HostData::Bf16(src), HostData::Bf16(dst)) => dst.copy_from_slice(src),
        (HostData::F16(src), HostData::F16(dst)) => dst.copy_from_slice(src),
        (HostData::Bf16(src), HostData::F16(dst)) => by_value(src, dst),
        (HostData::F16(src), HostData::Bf16(dst)) => by_value(src, dst),
    });
}

fn chunks<S: Sync, D: Send>(src: &[S], dst: &mut [D], convert: impl Fn(&[S], &mut [D]) + Sync) {
    assert_eq!(src.len(), dst.len(), "a cast keeps the number of elements");
    src.par_chunks(CHUNK).zip(dst.par_chunks_mut(CHUNK)).for_each(|(src, dst)| convert(src, dst));
}

/// Through f64, which holds every value of every type exactly.
fn by_value<S: Element, D: Element>(src: &[S], dst: &mut [D]) {
    chunks(src, dst, |src, dst| {
        for (src, dst) in src.iter().zip(dst) {
            *dst = D::from_f64(src.to_f64());
        }
    });
}

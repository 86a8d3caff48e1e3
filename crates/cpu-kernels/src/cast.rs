//! Conversions of tensors between element types on the CPU.

use counterpoint_mask::Range;
use counterpoint_plan::DType;
use rayon::ThreadPool;
use rayon::prelude::*;

use crate::element::{HostElement, convert_element, with_host_element};
use crate::tensor::{TensorMut, TensorRef};

/// Elements that a thread converts at a time.
const CHUNK: usize = 1 << 14;

/// Copies `src` into `dst`, converting the element type; every value is rounded once, to nearest even.
///
/// # Panics
/// When the numbers of elements differ.
pub fn cast(src: TensorRef<'_>, dst: &mut TensorMut<'_>, threads: &ThreadPool) {
    let types = (src.dtype(), dst.dtype());
    cast_elements(types, src.bytes(), dst.bytes_mut(), threads);
}

/// As [`cast`], of the rows of `src` from the first on to the rows `to` of `dst`, one range after the other.
///
/// # Panics
/// When a range leaves `dst`, or `src` has fewer rows or rows of another size.
pub fn cast_rows(src: TensorRef<'_>, dst: &mut TensorMut<'_>, to: &[Range], threads: &ThreadPool) {
    let types = (src.dtype(), dst.dtype());
    let (from_row, to_row) = (src.row_elements() * types.0.size(), dst.row_elements() * types.1.size());
    let (mut rest, dst) = (src.bytes(), dst.bytes_mut());
    for rows in to {
        let (here, behind) = rest.split_at(rows.len() * from_row);
        cast_elements(types, here, &mut dst[rows.start * to_row..rows.end * to_row], threads);
        rest = behind;
    }
}

fn cast_elements((from, to): (DType, DType), src: &[u8], dst: &mut [u8], threads: &ThreadPool) {
    assert_eq!(src.len() / from.size(), dst.len() / to.size(), "a cast keeps the number of elements");
    let convert: fn(&[u8], &mut [u8]) =
        with_host_element!(from, S => with_host_element!(to, D => convert_chunk::<S, D>));
    threads.install(|| {
        let chunks = src.par_chunks(CHUNK * from.size()).zip(dst.par_chunks_mut(CHUNK * to.size()));
        chunks.for_each(|(src, dst)| convert(src, dst));
    });
}

fn convert_chunk<S: HostElement, D: HostElement>(src: &[u8], dst: &mut [u8]) {
    let (src, dst) = (bytemuck::cast_slice::<u8, S>(src), bytemuck::cast_slice_mut::<u8, D>(dst));
    for (src, dst) in src.iter().zip(dst) {
        *dst = convert_element(*src);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tensor::HostTensor;

    #[test]
    fn every_element_is_converted_whatever_the_threads() {
        let count = 3 * CHUNK + 5;
        let src = HostTensor::from_vec(vec![count], (0..count).map(|x| (x as f32).sin()).collect());
        for threads in [1, 3] {
            let threads = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for dtype in [DType::Bf16, DType::F16, DType::F32, DType::F64] {
                let mut dst = HostTensor::zeros(vec![count], dtype);
                cast(src.view(), &mut dst.view_mut(), &threads);
                let rounded = |x: f64| with_host_element!(dtype, T => convert_element::<f64, T>(x).to_f64());
                let expected = src.to_f64().into_iter().map(rounded);
                assert!(dst.to_f64().into_iter().eq(expected), "{dtype}");
                let mut wide = HostTensor::zeros(vec![count], DType::F64);
                cast(dst.view(), &mut wide.view_mut(), &threads);
                assert_eq!(wide.to_f64(), dst.to_f64());
            }
        }
    }

    #[test]
    fn rows_come_to_their_places() {
        let threads = rayon::ThreadPoolBuilder::new().num_threads(2).build().unwrap();
        let src = HostTensor::from_vec(vec![3, 2], vec![1.0f32, 2.0, 3.0, 4.0, 5.0, 6.0]);
        let mut dst = HostTensor::zeros(vec![5, 2], DType::F64);
        cast_rows(src.view(), &mut dst.view_mut(), &[Range::new(0, 1), Range::new(2, 4)], &threads);
        assert_eq!(dst.to_f64(), [1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 5.0, 6.0, 0.0, 0.0]);
    }
}

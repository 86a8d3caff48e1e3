//! Rows between tensors, through the type on the wire.

use counterpoint_mask::Range;
use counterpoint_plan::DType;

use crate::element::{HostElement, convert_element, with_host_element};
use crate::tensor::{HostTensor, TensorMut, TensorRef};

/// Copies rows of `src` to rows of `dst`, rounded to the type on the wire. `src` has the type of `dst`, or has been rounded.
pub fn copy_rows(src: TensorRef<'_>, from: Range, dst: &mut TensorMut<'_>, to: Range, wire: DType) {
    let row = src.row_elements();
    with_host_element!(dst.dtype(), T => {
        let Some(dst) = dst.as_mut_slice::<T>() else { return };
        let dst = &mut dst[to.start * row..to.end * row];
        match src.as_slice::<T>() {
            Some(src) if keeps_every_value(T::DTYPE, wire) => {
                dst.copy_from_slice(&src[from.start * row..from.end * row]);
            }
            _ => load(src, from.start * row, wire, dst),
        }
    });
}

/// The rows of `ranges`, one after the other, in the type on the wire.
pub fn pack_rows(src: TensorRef<'_>, ranges: &[Range], wire: DType) -> HostTensor {
    let mut shape = src.shape().to_vec();
    shape[0] = ranges.iter().map(Range::len).sum();
    let mut packed = HostTensor::zeros(shape, wire);
    let mut start = 0;
    for &range in ranges {
        let rows = Range::new(start, start + range.len());
        copy_rows(src, range, &mut packed.view_mut(), rows, wire);
        start = rows.end;
    }
    packed
}

/// Converts elements `start .. start + dst.len()` of `src` through the type on the wire to `R`.
pub(crate) fn load<R: HostElement>(src: TensorRef<'_>, start: usize, wire: DType, dst: &mut [R]) {
    with_host_element!(src.dtype(), P => {
        let Some(src) = src.as_slice::<P>() else { return };
        let src = &src[start..start + dst.len()];
        if keeps_every_value(P::DTYPE, wire) {
            dst.iter_mut().zip(src).for_each(|(dst, src)| *dst = convert_element(*src));
        } else {
            with_host_element!(wire, W => {
                dst.iter_mut().zip(src).for_each(|(dst, src)| *dst = convert_element::<W, R>(convert_element::<P, W>(*src)));
            });
        }
    });
}

/// Converts a whole tensor.
pub fn convert_all(src: TensorRef<'_>, dst: &mut TensorMut<'_>) {
    with_host_element!(dst.dtype(), D => {
        if let Some(dst) = dst.as_mut_slice::<D>() {
            load::<D>(src, 0, src.dtype(), dst);
        }
    });
}

/// Converts row `row` of one tensor to that of another.
pub fn convert_row(src: TensorRef<'_>, row: usize, dst: &mut TensorMut<'_>) {
    let elements = dst.row_elements();
    let at = row * elements;
    with_host_element!(dst.dtype(), D => {
        if let Some(dst) = dst.as_mut_slice::<D>() {
            load::<D>(src, at, src.dtype(), &mut dst[at..at + elements]);
        }
    });
}

/// Whether a value of type `narrow` survives the way through `wide`.
fn keeps_every_value(narrow: DType, wide: DType) -> bool {
    narrow == wide || wide == DType::F64 || (wide == DType::F32 && narrow != DType::F64)
}

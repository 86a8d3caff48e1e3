//! Host memory that somebody else owns, such as a tensor of PyTorch: where it is, how it lies, and until when it stays.
//!
//! Unsafe code, as of the matrix product and of memory that processes share: a description of foreign memory cannot be checked, so making one
//! is unsafe and what it promises is written at [`HostView::new`]. Everything else is bounds-checked.

use std::any::Any;
use std::ops::Range;
use std::ptr::NonNull;
use std::sync::Arc;

use counterpoint_plan::DType;

use crate::{BufferAccess, ExecError, TensorFault, TensorMut, TensorRef};

/// Keeps borrowed memory where it is as long as a clone of it lives: a handle of the tensor, say.
pub type MemoryKeeper = Arc<dyn Any + Send + Sync>;

/// A tensor in host memory of somebody else.
#[derive(Clone)]
pub struct HostView {
    address: NonNull<u8>,
    shape: Vec<usize>,
    /// In elements.
    strides: Vec<usize>,
    dtype: DType,
    access: BufferAccess,
    _keeper: MemoryKeeper,
}

// SAFETY: who made the view has promised that the memory stays and that no one else uses it in a way that excludes this use, on
// whatever thread (`HostView::new`); the view itself only holds an address.
#[allow(unsafe_code)]
unsafe impl Send for HostView {}
// SAFETY: as above; shared views only read (`HostView::view`), and writing takes a unique one (`HostView::view_mut`).
#[allow(unsafe_code)]
unsafe impl Sync for HostView {}

impl HostView {
    /// Elements of `dtype` at `address`, `shape[i]` of them `strides[i]` elements apart along axis `i`. The elements of the last
    /// axis are next to each other. Use it by [`CpuBuffer::borrowed`](crate::CpuBuffer::borrowed).
    ///
    /// # Errors
    /// [`ExecError::Tensor`] for a null or misaligned address, other numbers of strides than axes, a last axis that is not dense, or
    /// strides by which two indices of a written tensor name one element.
    ///
    /// # Safety
    /// Until the last clone of `keeper` is dropped, which is when no call uses the memory any more, even after one has failed:
    /// - all elements lie in one allocation that stays where it is, and hold initialised values;
    /// - with [`BufferAccess::Read`] no one writes them while a call that was given them runs;
    /// - with [`BufferAccess::Write`] no one else reads or writes them while such a call runs.
    ///
    /// A call runs from when it is enqueued until its ticket says that it is done.
    #[allow(unsafe_code)]
    pub unsafe fn new(
        address: *mut u8,
        shape: &[usize],
        strides: &[usize],
        dtype: DType,
        access: BufferAccess,
        keeper: MemoryKeeper,
    ) -> Result<Self, ExecError> {
        let refuse = |fault: TensorFault| ExecError::tensor("borrowed memory", fault);
        if shape.is_empty() || shape.len() != strides.len() {
            return Err(refuse(TensorFault::StrideCount { strides: strides.len(), shape: shape.to_vec() }));
        }
        let is_empty = shape.contains(&0);
        // An empty tensor may have any address; nothing is read there.
        let address = if is_empty { NonNull::<u64>::dangling().cast().as_ptr() } else { address };
        let Some(pointer) = NonNull::new(address) else {
            return Err(refuse(TensorFault::Null));
        };
        if !pointer.addr().get().is_multiple_of(dtype.size()) {
            let address = pointer.addr().get();
            return Err(refuse(TensorFault::Misaligned { address, size: dtype.size() }));
        }
        let last = shape.len() - 1;
        if !is_empty && shape[last] > 1 && strides[last] != 1 {
            return Err(refuse(TensorFault::LastAxisApart { stride: strides[last] }));
        }
        let described = || (shape.to_vec(), strides.to_vec());
        let overflows = || {
            let (shape, strides) = described();
            refuse(TensorFault::BeyondAddresses { shape, strides })
        };
        let furthest = shape.iter().zip(strides).try_fold(0usize, |sum, (size, stride)| {
            sum.checked_add(size.saturating_sub(1).checked_mul(*stride)?)
        });
        let bytes = furthest.and_then(|elements| elements.checked_add(1)?.checked_mul(dtype.size()));
        bytes.filter(|bytes| isize::try_from(*bytes).is_ok()).ok_or_else(overflows)?;
        let view = Self {
            address: pointer,
            shape: shape.to_vec(),
            strides: strides.to_vec(),
            dtype,
            access,
            _keeper: keeper,
        };
        if access == BufferAccess::Write && !view.is_injective() {
            let (shape, strides) = described();
            return Err(refuse(TensorFault::NamedTwice { shape, strides }));
        }
        Ok(view)
    }

    /// Its shape; the first axis is rows (tokens).
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// Its element type.
    pub fn dtype(&self) -> DType {
        self.dtype
    }

    /// How it may be used.
    pub fn access(&self) -> BufferAccess {
        self.access
    }

    /// Whether its elements lie one after the other, in the order of their indices.
    pub fn is_dense(&self) -> bool {
        let mut expected = 1;
        self.shape.contains(&0)
            || self.shape.iter().zip(&self.strides).rev().all(|(&size, &stride)| {
                let fits = size == 1 || stride == expected;
                expected *= size;
                fits
            })
    }

    /// Where it lies.
    pub(super) fn extent(&self) -> Extent {
        let begin = self.address.addr().get();
        let (rows, stride) = (self.shape[0], self.strides[0] * self.dtype.size());
        let span = self.span();
        let before_last = stride * rows.saturating_sub(1);
        Extent { addresses: begin..begin + span, stride, row: span.saturating_sub(before_last) }
    }

    /// Bytes from the first element to behind the last.
    fn span(&self) -> usize {
        if self.shape.contains(&0) {
            return 0;
        }
        let furthest: usize =
            self.shape.iter().zip(&self.strides).map(|(size, stride)| (size - 1) * stride).sum();
        (furthest + 1) * self.dtype.size()
    }

    /// Whether no two indices name one element: sorted by stride, each axis begins beyond the reach of those below it.
    fn is_injective(&self) -> bool {
        let mut axes: Vec<(usize, usize)> = self
            .strides
            .iter()
            .copied()
            .zip(self.shape.iter().copied())
            .filter(|(_, size)| *size > 1)
            .collect();
        axes.sort_unstable();
        let mut reach = 0;
        axes.iter().all(|(stride, size)| {
            let fits = *stride > reach;
            reach += stride * (size - 1);
            fits
        })
    }

    /// The tensor.
    ///
    /// # Panics
    /// When it is not dense.
    #[allow(unsafe_code)]
    pub(super) fn view(&self) -> TensorRef<'_> {
        assert!(self.is_dense(), "strided memory is copied before operations use it");
        // SAFETY: `new` was promised `span` initialised bytes of one allocation at this address, which its keeper, held here, keeps,
        // and that no one writes them meanwhile; a slice of another call that writes is kept away by the buffer's lock.
        let bytes = unsafe { std::slice::from_raw_parts(self.address.as_ptr(), self.span()) };
        TensorRef::new(&self.shape, self.dtype, bytes)
    }

    /// The tensor, to write.
    ///
    /// # Panics
    /// When it is not dense, or for reading.
    #[allow(unsafe_code)]
    pub(super) fn view_mut(&mut self) -> TensorMut<'_> {
        assert!(self.is_dense(), "strided memory is copied before operations use it");
        assert_eq!(self.access, BufferAccess::Write, "borrowed for reading");
        // SAFETY: as in `view`; the memory is given for writing, and the unique borrow is the only one of its buffer.
        let bytes = unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr(), self.span()) };
        TensorMut::new(&self.shape, self.dtype, bytes)
    }

    /// Copies its elements, in the order of their indices, to `dense`, which has as many bytes.
    #[allow(unsafe_code)]
    pub(super) fn gather(&self, dense: &mut [u8]) {
        let run = self.run_bytes();
        assert_eq!(dense.len(), self.runs() * run, "a copy of the same number of elements");
        let mut to = dense.chunks_exact_mut(run.max(1));
        self.for_each_run(|at| {
            if let Some(to) = to.next() {
                // SAFETY: `at` is the offset of an index within the shape, whose last axis is dense, so that `run` bytes from there are
                // among those promised to `new`.
                to.copy_from_slice(unsafe { std::slice::from_raw_parts(self.address.as_ptr().add(at), run) });
            }
        });
    }

    /// Copies the elements of `dense` to it.
    ///
    /// # Panics
    /// When it is for reading.
    #[allow(unsafe_code)]
    pub(super) fn scatter(&mut self, dense: &[u8]) {
        assert_eq!(self.access, BufferAccess::Write, "borrowed for reading");
        let run = self.run_bytes();
        assert_eq!(dense.len(), self.runs() * run, "a copy of the same number of elements");
        let mut from = dense.chunks_exact(run.max(1));
        self.for_each_run(|at| {
            if let Some(from) = from.next() {
                // SAFETY: as in `gather`; the memory is given for writing and borrowed uniquely here.
                let to = unsafe { std::slice::from_raw_parts_mut(self.address.as_ptr().add(at), run) };
                to.copy_from_slice(from);
            }
        });
    }

    /// Bytes of the last axis.
    fn run_bytes(&self) -> usize {
        self.shape.last().map_or(0, |size| size * self.dtype.size())
    }

    fn runs(&self) -> usize {
        self.shape[..self.shape.len() - 1].iter().product()
    }

    /// The offsets in bytes of all rows of the last axis, in the order of their indices.
    fn for_each_run(&self, mut each: impl FnMut(usize)) {
        let outer = self.shape.len() - 1;
        let mut index = vec![0; outer];
        for _ in 0..self.runs() {
            let at: usize = index.iter().zip(&self.strides).map(|(index, stride)| index * stride).sum();
            each(at * self.dtype.size());
            for axis in (0..outer).rev() {
                index[axis] += 1;
                if index[axis] < self.shape[axis] {
                    break;
                }
                index[axis] = 0;
            }
        }
    }
}

/// Where a tensor lies: rows of `row` bytes, `stride` bytes apart.
#[derive(Clone, Debug)]
pub(super) struct Extent {
    addresses: Range<usize>,
    stride: usize,
    row: usize,
}

impl Extent {
    /// Whether two tensors may have a byte in common. Those whose rows are equally far apart may lie between each other, as q, k and v
    /// of one projection do; of others that are interleaved it is assumed.
    pub(super) fn overlaps(&self, other: &Self) -> bool {
        if self.addresses.start >= other.addresses.end || other.addresses.start >= self.addresses.end {
            return false;
        }
        if self.stride != other.stride || self.stride < self.row || other.stride < other.row {
            return true;
        }
        // Modulo the stride, one row of each: they are apart if each ends before the other begins anew.
        let ahead =
            (other.addresses.start as i128 - self.addresses.start as i128).rem_euclid(self.stride as i128);
        ahead < self.row as i128 || ahead + other.row as i128 > self.stride as i128
    }
}

#[cfg(test)]
#[allow(unsafe_code)]
mod tests {
    use super::*;

    fn view(memory: &mut [f32], shape: &[usize], strides: &[usize]) -> Result<HostView, ExecError> {
        let address = memory.as_mut_ptr().cast();
        // SAFETY: the tests look at the memory only while they use no view of it.
        unsafe { HostView::new(address, shape, strides, DType::F32, BufferAccess::Write, Arc::new(())) }
    }

    #[test]
    fn strided_rows_are_gathered_and_scattered() {
        // q, k and v of two heads of two elements, packed in rows of 12.
        let mut packed: Vec<f32> = (0..36u8).map(f32::from).collect();
        let mut k = view(&mut packed[4..], &[3, 2, 2], &[12, 2, 1]).unwrap();
        assert!(!k.is_dense());
        let mut dense = [0f32; 12];
        k.gather(bytemuck::cast_slice_mut(&mut dense));
        assert_eq!(dense, [4., 5., 6., 7., 16., 17., 18., 19., 28., 29., 30., 31.]);
        k.scatter(bytemuck::cast_slice(&[-1f32; 12]));
        let changed = packed.iter().filter(|value| **value == -1.0).count();
        assert_eq!((changed, packed[3], packed[8], packed[16]), (12, 3.0, 8.0, -1.0));
    }

    #[test]
    fn tensors_between_each_other_do_not_overlap() {
        let mut packed = vec![0f32; 36];
        let mut part =
            |at: usize, width: usize| view(&mut packed[at..], &[2, width], &[12, 1]).unwrap().extent();
        let (q, k, both) = (part(0, 4), part(4, 4), part(2, 4));
        assert!(!q.overlaps(&k) && !k.overlaps(&q) && q.overlaps(&q));
        assert!(both.overlaps(&q) && q.overlaps(&both) && k.overlaps(&both));
        // Begins in the second row, before and behind the others.
        assert!(part(12, 4).overlaps(&q) && !part(12, 4).overlaps(&k) && !part(20, 3).overlaps(&k));
        let dense = view(&mut packed, &[36], &[1]).unwrap().extent();
        assert!(dense.overlaps(&k) && k.overlaps(&dense));
    }

    #[test]
    fn what_cannot_be_used_is_refused_in_a_sentence() {
        let mut memory = vec![0f32; 64];
        let refused = |result: Result<HostView, ExecError>| result.err().unwrap().to_string();
        assert!(refused(view(&mut memory, &[4, 2], &[2, 2])).contains("next to each other"));
        assert!(refused(view(&mut memory, &[4, 4], &[2, 1])).contains("name some element twice"));
        assert!(refused(view(&mut memory, &[4], &[1, 1])).contains("2 strides"));
        let odd = memory.as_mut_ptr().cast::<u8>().wrapping_add(2);
        // SAFETY: refused before it is used.
        let misaligned =
            unsafe { HostView::new(odd, &[1], &[1], DType::F32, BufferAccess::Read, Arc::new(())) };
        assert!(refused(misaligned).contains("multiple"));
        // SAFETY: refused before it is used.
        let null = unsafe {
            HostView::new(std::ptr::null_mut(), &[1], &[1], DType::F32, BufferAccess::Read, Arc::new(()))
        };
        assert!(refused(null).contains("null"));
        assert!(refused(view(&mut memory, &[usize::MAX, 2], &[2, 1])).contains("address space"));
        assert!(view(&mut memory, &[0, 2], &[7, 1]).unwrap().is_dense());
    }
}

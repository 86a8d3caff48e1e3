//! Tensor maps of TMA, with every restriction of the driver checked in words.

use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::driver::sys::{
    CUtensorMapDataType, CUtensorMapFloatOOBfill, CUtensorMapInterleave, CUtensorMapL2promotion,
    CUtensorMapSwizzle,
};

use crate::library::call;
use crate::{CudaError, Device, TensorMapFault};

/// What the bulk copy engine knows about a tensor; an argument of kernels, by value, as a `__grid_constant__` of 128 bytes
/// that is aligned to 64. [`TensorMapSpec::encode`] makes it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(C, align(64))]
pub struct TensorMap {
    opaque: [u64; 16],
}

/// The type of a tensor's elements. It says what a reduction adds and what "not a number" would be; loads and stores only
/// care for its size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum TensorMapElement {
    /// 16 bits.
    Bf16,
    /// 16 bits.
    F16,
    /// 32 bits.
    F32,
    /// 32 bits.
    I32,
    /// 8 bits.
    U8,
}

impl TensorMapElement {
    /// Its size.
    pub const fn bytes(self) -> u32 {
        match self {
            Self::Bf16 | Self::F16 => 2,
            Self::F32 | Self::I32 => 4,
            Self::U8 => 1,
        }
    }
}

/// How a box's rows are permuted in shared memory so that columns are read without bank conflicts: 16-byte pieces of a span
/// change places by the number of their row.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Swizzle {
    /// Row after row.
    #[default]
    None,
    /// Within 32 bytes.
    Span32,
    /// Within 64 bytes.
    Span64,
    /// Within 128 bytes: what wgmma likes best.
    Span128,
}

impl Swizzle {
    /// The longest inner row of a box in bytes, where it is limited.
    const fn span(self) -> Option<u32> {
        match self {
            Self::None => None,
            Self::Span32 => Some(32),
            Self::Span64 => Some(64),
            Self::Span128 => Some(128),
        }
    }
}

/// How much of a row the second level cache fetches when a part of it is missed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum L2Promotion {
    /// Only what is missed.
    None,
    /// 64 bytes.
    Bytes64,
    /// 128 bytes.
    Bytes128,
    /// 256 bytes.
    #[default]
    Bytes256,
}

/// Axes of the largest tensor that the copy engine knows.
const MOST_AXES: usize = 5;

/// A tensor as the bulk copy engine is to see it ("tiled" mode), and the box that one copy moves. Axes go from the innermost
/// outwards. Holds no heap memory: maps are made at every launch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TensorMapSpec {
    element: TensorMapElement,
    address: u64,
    rank: usize,
    dims: [u64; MOST_AXES],
    strides: [u64; MOST_AXES],
    /// Axes that `strides` was given for.
    strides_for: usize,
    box_dims: [u32; MOST_AXES],
    swizzle: Swizzle,
    promotion: L2Promotion,
}

impl TensorMapSpec {
    /// A tensor of `RANK` axes at `address`: `dims` elements along each axis, `box_dims` of which one copy moves.
    /// Contiguous, unless [`TensorMapSpec::strides`] says otherwise.
    pub fn new<const RANK: usize>(
        element: TensorMapElement,
        address: u64,
        dims: [u64; RANK],
        box_dims: [u32; RANK],
    ) -> Self {
        const { assert!(RANK >= 1 && RANK <= MOST_AXES, "tensor maps have 1 to 5 axes") };
        let mut spec = Self {
            element,
            address,
            rank: RANK,
            dims: [1; MOST_AXES],
            strides: [0; MOST_AXES],
            strides_for: RANK,
            box_dims: [1; MOST_AXES],
            swizzle: Swizzle::None,
            promotion: L2Promotion::default(),
        };
        spec.dims[..RANK].copy_from_slice(&dims);
        spec.box_dims[..RANK].copy_from_slice(&box_dims);
        let mut stride = u64::from(element.bytes());
        for (axis, dim) in dims.into_iter().enumerate() {
            spec.strides[axis] = stride;
            stride = stride.saturating_mul(dim);
        }
        spec
    }

    /// Bytes from one element to the next along each axis but the innermost, whose elements are neighbours.
    #[must_use]
    pub fn strides<const OUTER: usize>(mut self, strides: [u64; OUTER]) -> Self {
        const { assert!(OUTER < MOST_AXES, "tensor maps have 1 to 5 axes") };
        self.strides[1..=OUTER].copy_from_slice(&strides);
        self.strides_for = OUTER + 1;
        self
    }

    /// How rows are permuted in shared memory.
    #[must_use]
    pub fn swizzle(mut self, swizzle: Swizzle) -> Self {
        self.swizzle = swizzle;
        self
    }

    /// How much the second level cache fetches.
    #[must_use]
    pub fn promotion(mut self, promotion: L2Promotion) -> Self {
        self.promotion = promotion;
        self
    }

    /// Bytes of shared memory that one copy fills, which is what its barrier must expect.
    pub fn box_bytes(&self) -> u32 {
        self.box_dims.iter().product::<u32>() * self.element.bytes()
    }

    /// Which restriction of the driver's it breaks.
    fn check(&self) -> Result<(), TensorMapFault> {
        let element = u64::from(self.element.bytes());
        if self.address == 0 || !self.address.is_multiple_of(16) {
            return Err(TensorMapFault::Address { address: self.address });
        }
        if self.strides_for != self.rank {
            return Err(TensorMapFault::StrideCount { strides: self.strides_for - 1, axes: self.rank });
        }
        for axis in 0..self.rank {
            let (dim, box_dim, stride) = (self.dims[axis], self.box_dims[axis], self.strides[axis]);
            if dim == 0 || dim > 1 << 32 {
                return Err(TensorMapFault::Elements { axis, elements: dim });
            }
            if box_dim == 0 || box_dim > 256 {
                return Err(TensorMapFault::BoxElements { axis, elements: box_dim });
            }
            if axis > 0 && (!stride.is_multiple_of(16) || stride >= 1 << 40) {
                return Err(TensorMapFault::Stride { axis, bytes: stride });
            }
        }
        let row = u64::from(self.box_dims[0]) * element;
        if !row.is_multiple_of(16) {
            return Err(TensorMapFault::BoxRow { bytes: row });
        }
        if let Some(span) = self.swizzle.span().filter(|&span| row > u64::from(span)) {
            return Err(TensorMapFault::Swizzle { bytes: row, most: span });
        }
        Ok(())
    }

    /// The map, for kernels of `device`. `tensor` names it in errors.
    ///
    /// # Errors
    /// [`CudaError::TensorMap`] with the restriction that it breaks; when the driver refuses.
    pub fn encode(&self, device: &Device, tensor: &str) -> Result<TensorMap, CudaError> {
        self.check().map_err(|reason| CudaError::TensorMap { tensor: tensor.to_owned(), reason })?;
        // The driver encodes them for the current context.
        let driver = device.bind()?;
        let element = match self.element {
            TensorMapElement::Bf16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
            TensorMapElement::F16 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT16,
            TensorMapElement::F32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_FLOAT32,
            TensorMapElement::I32 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_INT32,
            TensorMapElement::U8 => CUtensorMapDataType::CU_TENSOR_MAP_DATA_TYPE_UINT8,
        };
        let swizzle = match self.swizzle {
            Swizzle::None => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_NONE,
            Swizzle::Span32 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_32B,
            Swizzle::Span64 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_64B,
            Swizzle::Span128 => CUtensorMapSwizzle::CU_TENSOR_MAP_SWIZZLE_128B,
        };
        let promotion = match self.promotion {
            L2Promotion::None => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_NONE,
            L2Promotion::Bytes64 => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_64B,
            L2Promotion::Bytes128 => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_128B,
            L2Promotion::Bytes256 => CUtensorMapL2promotion::CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        };
        let element_strides = [1u32; MOST_AXES];
        // The driver's header asks for more alignment than our own type has.
        let mut map = MaybeUninit::<cudarc::driver::sys::CUtensorMap>::zeroed();
        // SAFETY: the arrays have at least `rank` entries (`rank - 1` of strides), and the driver writes the whole map. The
        // address is only noted; kernels that use the map are launched by unsafe calls.
        let map = unsafe {
            call!(
                driver,
                cuTensorMapEncodeTiled(
                    map.as_mut_ptr(),
                    element,
                    self.rank as u32,
                    ptr::without_provenance_mut::<c_void>(self.address as usize),
                    self.dims.as_ptr(),
                    self.strides[1..].as_ptr(),
                    self.box_dims.as_ptr(),
                    element_strides.as_ptr(),
                    CUtensorMapInterleave::CU_TENSOR_MAP_INTERLEAVE_NONE,
                    swizzle,
                    promotion,
                    CUtensorMapFloatOOBfill::CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
                )
            )?;
            map.assume_init()
        };
        Ok(TensorMap { opaque: map.opaque })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn refused(spec: TensorMapSpec) -> String {
        spec.check().unwrap_err().to_string()
    }

    #[test]
    fn restrictions_are_refused_with_figures() {
        let spec =
            |address, dims, box_dims| TensorMapSpec::new(TensorMapElement::Bf16, address, dims, box_dims);
        let good = spec(256, [128, 8, 1000], [64, 1, 128]);
        assert_eq!(good.check(), Ok(()));
        assert_eq!(good.box_bytes(), 64 * 128 * 2);
        assert!(refused(spec(8, [128, 8, 1000], [64, 1, 128])).contains("0x8 is not a multiple of 16"));
        assert!(refused(spec(256, [128, 0, 1000], [64, 1, 128])).contains("axis 1 has 0 elements"));
        assert!(refused(spec(256, [128, 8, 1000], [64, 1, 257])).contains("257 elements along axis 2"));
        assert!(refused(spec(256, [12, 8, 1000], [8, 1, 1])).contains("stride of 24 bytes"));
        assert!(refused(spec(256, [128, 8, 1000], [4, 1, 1])).contains("8 bytes; it takes multiples of 16"));
        let wide = spec(256, [128, 8, 1000], [128, 1, 1]);
        assert_eq!(wide.check(), Ok(()));
        assert!(refused(wide.swizzle(Swizzle::Span128)).contains("256 bytes, and this swizzle takes 128"));
        assert!(refused(good.strides([256])).contains("1 strides for 3 axes"));
        assert!(refused(good.strides([1 << 40, 16])).contains("axis 1 has a stride of 1099511627776"));
    }
}

//! Memory of a device that another process of the same host opens.

use std::ptr;

use cudarc::driver::sys::{CUipcMemHandle, CUpointer_attribute};

use super::DeviceBuffer;
use crate::library::call;
use crate::{CudaError, Device};

/// The allocation that an address lies in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AllocationPlace {
    /// Distinguishes it from every other allocation of the process, freed ones too.
    pub id: u64,
    /// Its first byte.
    pub base: u64,
    /// Its size.
    pub bytes: usize,
}

impl AllocationPlace {
    /// Where `address`, of this device's memory, lies.
    ///
    /// # Errors
    /// When it lies in none.
    pub fn of(device: &Device, address: u64) -> Result<Self, CudaError> {
        let driver = device.bind()?;
        let (mut id, mut base, mut bytes) = (0u64, 0, 0);
        // SAFETY: the pointers are to locals of the right types.
        unsafe {
            let attribute = CUpointer_attribute::CU_POINTER_ATTRIBUTE_BUFFER_ID;
            call!(driver, cuPointerGetAttribute(ptr::from_mut(&mut id).cast(), attribute, address))?;
            call!(driver, cuMemGetAddressRange_v2(&mut base, &mut bytes, address))?;
        }
        Ok(Self { id, base, bytes })
    }

    /// What names it to other processes of this host.
    ///
    /// # Errors
    /// [`CudaError::NotShareable`] when it is of a kind that is not shared (made by cuMemCreate, or from a pool), or the system shares
    /// none.
    pub fn handle(&self, device: &Device) -> Result<Vec<u8>, CudaError> {
        let driver = device.bind()?;
        let mut handle = CUipcMemHandle { reserved: [0; 64] };
        // SAFETY: the pointer is to a local.
        unsafe { call!(driver, cuIpcGetMemHandle(&mut handle, self.base)) }
            .map_err(|error| CudaError::NotShareable { bytes: self.bytes, text: error.to_string() })?;
        Ok(handle.reserved.map(|byte| byte as u8).into())
    }
}

/// An allocation of another process, opened for a device of this one. Dropping it closes it, after which that process may
/// free it.
#[derive(Debug)]
pub struct OpenedMemory {
    device: Device,
    base: u64,
    bytes: usize,
}

impl OpenedMemory {
    /// Opens what a handle names, of `bytes`. Access between GPUs is enabled where it is another's memory.
    ///
    /// # Errors
    /// When the handle names nothing, or `device` cannot reach that memory.
    pub fn open(device: &Device, handle: &[u8], bytes: usize) -> Result<Self, CudaError> {
        const LAZY_ENABLE_PEER_ACCESS: u32 = 1;
        let driver = device.bind()?;
        let mut base = 0;
        let handle = CUipcMemHandle { reserved: handle_bytes(handle) };
        // SAFETY: the pointer is to a local; the memory is closed in drop.
        unsafe { call!(driver, cuIpcOpenMemHandle_v2(&mut base, handle, LAZY_ENABLE_PEER_ACCESS)) }?;
        Ok(Self { device: device.clone(), base, bytes })
    }

    /// Where it begins for kernels and copies of this process.
    pub fn base(&self) -> u64 {
        self.base
    }

    /// A part of it.
    ///
    /// # Safety
    /// This value outlives the buffer, its clones and what is enqueued with them.
    ///
    /// # Errors
    /// [`CudaError::OutOfBounds`].
    pub unsafe fn part(&self, offset: usize, bytes: usize) -> Result<DeviceBuffer, CudaError> {
        // SAFETY: the caller's promise, about memory that is as long as its owner says.
        let whole = unsafe { DeviceBuffer::borrow(&self.device, self.base, self.bytes) };
        whole.slice(offset..offset.saturating_add(bytes))
    }
}

impl Drop for OpenedMemory {
    fn drop(&mut self) {
        self.device.release(|driver| {
            // SAFETY: opened in open, and nothing uses it any more.
            unsafe { call!(driver, cuIpcCloseMemHandle(self.base)) }
        });
    }
}

/// A handle as the driver has it. One of another length was never the driver's, who will say so.
pub(crate) fn handle_bytes(handle: &[u8]) -> [std::ffi::c_char; 64] {
    std::array::from_fn(|at| handle.get(at).copied().unwrap_or(0) as std::ffi::c_char)
}

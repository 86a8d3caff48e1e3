//! What does not change about a GPU, asked of the driver.

use std::ffi::{c_char, c_int};

use cudarc::driver::sys::{CUdevice, CUdevice_attribute, CUuuid};

use super::Device;
use crate::CudaError;
use crate::arch::Capability;
use crate::library::{Driver, call};

/// What does not change about a GPU.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DeviceProperties {
    /// Such as `NVIDIA H200`.
    pub name: String,
    /// Identifies this GPU, such as `GPU-6c5f0b0e-…`.
    pub uuid: String,
    /// Compute capability.
    pub capability: Capability,
    /// Streaming multiprocessors.
    pub sm_count: u32,
    /// Bytes of the level 2 cache.
    pub l2_bytes: usize,
    /// Bytes of shared memory that one block may have when it asks for them.
    pub shared_bytes_per_block: usize,
    /// Bytes of device memory in all.
    pub memory_bytes: usize,
}

pub(super) fn handle(driver: &Driver, ordinal: usize) -> Result<CUdevice, CudaError> {
    let count = Device::count()?;
    if ordinal >= count {
        return Err(CudaError::DeviceOrdinal { ordinal, count });
    }
    let mut handle = 0;
    // SAFETY: the pointer is to a local of the right type; the ordinal is below the count, which is a c_int.
    unsafe { call!(driver, cuDeviceGet(&mut handle, ordinal as c_int)) }?;
    Ok(handle)
}

pub(super) fn properties(driver: &Driver, handle: CUdevice) -> Result<DeviceProperties, CudaError> {
    use CUdevice_attribute as A;
    let attribute = |attribute: A| -> Result<u32, CudaError> {
        let mut value = 0;
        // SAFETY: the pointer is to a local of the right type.
        unsafe { call!(driver, cuDeviceGetAttribute(&mut value, attribute, handle)) }?;
        Ok(value.unsigned_abs())
    };
    let mut name = [0u8; 256];
    let mut uuid = CUuuid { bytes: [0; 16] };
    let mut memory_bytes = 0;
    // SAFETY: the buffers are as large as said, the driver writes a terminated string.
    unsafe {
        call!(driver, cuDeviceGetName(name.as_mut_ptr().cast::<c_char>(), name.len() as c_int, handle))?;
        call!(driver, cuDeviceGetUuid_v2(&mut uuid, handle))?;
        call!(driver, cuDeviceTotalMem_v2(&mut memory_bytes, handle))?;
    }
    let name = name.split(|&byte| byte == 0).next().unwrap_or_default();
    Ok(DeviceProperties {
        name: String::from_utf8_lossy(name).into_owned(),
        uuid: format_uuid(uuid.bytes.map(|byte| byte as u8)),
        capability: Capability {
            major: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            minor: attribute(A::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        },
        sm_count: attribute(A::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        l2_bytes: attribute(A::CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE)? as usize,
        shared_bytes_per_block: attribute(A::CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN)? as usize,
        memory_bytes,
    })
}

/// As nvidia-smi prints it.
fn format_uuid(bytes: [u8; 16]) -> String {
    let hex = |range: std::ops::Range<usize>| -> String {
        bytes[range].iter().map(|byte| format!("{byte:02x}")).collect()
    };
    format!("GPU-{}-{}-{}-{}-{}", hex(0..4), hex(4..6), hex(6..8), hex(8..10), hex(10..16))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn uuid_as_nvidia_smi_prints_it() {
        let bytes = std::array::from_fn(|index| index as u8 + 0xa0);
        assert_eq!(format_uuid(bytes), "GPU-a0a1a2a3-a4a5-a6a7-a8a9-aaabacadaeaf");
    }
}

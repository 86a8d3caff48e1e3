//! A check of the checker: guard bytes around buffers show a kernel that writes out of bounds.

use counterpoint_reference::selftest::SelfCheck;

use counterpoint_cuda::{
    CudaError, Device, DeviceBuffer, KernelSource, Launch, MemoryGuard, Stream, StreamPriority,
};

/// Whether guard bytes would show it: a kernel writes a little too far, in front of a buffer and behind it, and once where it may.
///
/// # Errors
/// When the kernel cannot be compiled or launched.
pub fn selftest_guard(device: &Device) -> Result<Vec<SelfCheck>, CudaError> {
    let stream = Stream::new(device, StreamPriority::Low)?;
    let source = KernelSource::new("write_byte", device.arch())
        .line("extern \"C\" __global__ void write_byte(unsigned char* byte) { *byte = 1; }");
    let write = device.function(&source)?;
    let mut checks = Vec::new();
    const BYTES: usize = 1000;
    let places = [
        ("at the start of", 0i64, 0),
        ("in front of", -1, 1),
        ("behind", BYTES as i64, 1),
        ("at the end of", BYTES as i64 - 1, 0),
    ];
    for (name, offset, found) in places {
        let guard = MemoryGuard::begin(device);
        let buffer = DeviceBuffer::new(device, BYTES)?;
        let address = buffer.address().wrapping_add_signed(offset);
        // SAFETY: the byte lies in the buffer's allocation, guard bytes included, which lives until the stream is idle.
        unsafe { write.launch(&stream, &Launch::linear(1, 1), &(address,)) }?;
        stream.synchronize()?;
        drop(buffer);
        let report = guard.report();
        let seen = report.overwritten.iter().map(|overwrite| overwrite.count).sum::<usize>();
        // One buffer was watched, and as many bytes found as were written next to it.
        let error = (report.buffers as f64 - 1.0).abs() + (seen as f64 - f64::from(found)).abs();
        checks.push(SelfCheck::of(format!("a byte written {name} a buffer"), 0, error, 0.0));
    }
    Ok(checks)
}

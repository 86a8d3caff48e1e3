//! What a device does on the host, with a driver that has no GPU.

#![allow(unsafe_code)]

use std::ffi::{c_char, c_int, c_void};
use std::panic::{AssertUnwindSafe, catch_unwind};

use counterpoint_cuda::{CudaError, Device};

#[expect(dead_code, reason = "there are no ranks here, threads or processes")]
mod hollow_driver;
mod support;

unsafe extern "C" {
    fn dlopen(name: *const c_char, flags: c_int) -> *mut c_void;
    fn dlsym(library: *mut c_void, name: *const c_char) -> *mut c_void;
}

/// The calling thread's capture mode, which it keeps.
fn capture_mode() -> c_int {
    const LAZY: c_int = 1;
    // SAFETY: the driver is loaded, and has this function of this signature; the pointer is to a local.
    unsafe {
        let library = dlopen(c"libcuda.so.1".as_ptr(), LAZY);
        let exchange = dlsym(library, c"cuThreadExchangeStreamCaptureMode".as_ptr());
        assert!(!exchange.is_null());
        let exchange: unsafe extern "C" fn(*mut c_int) -> u32 = std::mem::transmute(exchange);
        let mut mode = 0;
        assert_eq!(exchange(&mut mode), 0);
        assert_eq!(exchange(&mut { mode }), 0);
        mode
    }
}

/// However the work ends that is done in another mode.
#[test]
fn a_thread_keeps_its_capture_mode() {
    const RELAXED: c_int = 2;
    if support::no_compiler() || !hollow_driver::is_loaded("a_thread_keeps_its_capture_mode") {
        return;
    }
    let device = Device::open(0).unwrap();
    let before = capture_mode();
    assert_ne!(before, RELAXED);
    let inside = device.despite_captures(|| Ok::<_, CudaError>(capture_mode()));
    assert_eq!((inside, capture_mode()), (Ok(RELAXED), before));
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        device.despite_captures(|| -> Result<(), CudaError> { panic!("as a bug would") })
    }));
    assert!(panicked.is_err());
    assert_eq!(capture_mode(), before);
}

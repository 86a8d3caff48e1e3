//! What tests of this crate share.

use counterpoint_cuda::compiler_version;

/// Whether there is no compiler, in which case a test says that it was skipped. Where `CI` is set that is a failure: the test
/// command brings NVRTC along.
pub(crate) fn no_compiler() -> bool {
    match compiler_version() {
        Ok(_) => false,
        Err(error) => {
            assert!(std::env::var_os("CI").is_none(), "{error}");
            eprintln!("SKIPPED, which CI would not accept: {error}");
            true
        }
    }
}

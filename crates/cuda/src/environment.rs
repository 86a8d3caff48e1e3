//! The environment variables of this crate, in one list for help and documentation.

use counterpoint_exec::EnvironmentVariable;

/// All that this crate reads. There are no others, and none of them switches something experimental.
pub const ENVIRONMENT: [EnvironmentVariable; 5] = [
    EnvironmentVariable { name: crate::CACHE_VARIABLE, purpose: "the folder of compiled kernels" },
    EnvironmentVariable {
        name: crate::CACHE_OWNER_VARIABLE,
        purpose: "the number of a user whose compiled kernels are trusted too",
    },
    EnvironmentVariable {
        name: crate::library::NVRTC_VARIABLE,
        purpose: "the folder of libnvrtc.so.* and libnvrtc-builtins.so.*",
    },
    EnvironmentVariable { name: crate::library::NCCL_VARIABLE, purpose: "the folder of libnccl.so.2" },
    EnvironmentVariable {
        name: crate::library::CUBLASLT_VARIABLE,
        purpose: "the folder of libcublasLt.so.*",
    },
];

/// How many hardware queues the driver was told to use. The driver's own variable: set by whoever starts the program, only looked
/// at here.
pub(crate) fn max_connections() -> Option<String> {
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()
}

use counterpoint_exec::EnvironmentVariable;

/// All that this crate reads. There are no others, and none of them switches something experimental.
pub const ENVIRONMENT: [EnvironmentVariable; 3] = [
    EnvironmentVariable { name: crate::CACHE_VARIABLE, purpose: "the folder of compiled kernels" },
    EnvironmentVariable {
        name: crate::library::NVRTC_VARIABLE,
        purpose: "the folder of libnvrtc.so.* and libnvrtc-builtins.so.*",
    },
    EnvironmentVariable { name: crate::library::NCCL_VARIABLE, purpose: "the folder of libnccl.so.2" },
];

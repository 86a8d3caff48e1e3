/// A variable of the environment that changes what the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvironmentVariable {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub purpose: &'static str,
}

/// All of them. There are no others, and none of them switches something experimental.
pub const ENVIRONMENT: [EnvironmentVariable; 4] = [
    EnvironmentVariable { name: crate::CACHE_VARIABLE, purpose: "the folder of compiled kernels" },
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

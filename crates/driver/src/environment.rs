//! The environment variables of this crate, in one list for help and documentation.

use crate::compile::{CACHE_OWNER_VARIABLE, CACHE_VARIABLE};
use crate::library::{CUBLASLT_VARIABLE, NCCL_VARIABLE, NVRTC_VARIABLE};

/// All variables of our own that this crate reads, each with what it is for. None of them switches something experimental.
pub const ENVIRONMENT: [(&str, &str); 5] = [
    (CACHE_VARIABLE, "the folder of compiled kernels"),
    (CACHE_OWNER_VARIABLE, "the number of a user whose compiled kernels are trusted too"),
    (NVRTC_VARIABLE, "the folder of libnvrtc.so.* and libnvrtc-builtins.so.*"),
    (NCCL_VARIABLE, "the folder of libnccl.so.2"),
    (CUBLASLT_VARIABLE, "the folder of libcublasLt.so.*"),
];

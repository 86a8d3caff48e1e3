//! The CUDA backend: libraries opened at run time, streams, memory, kernels and their compilation.
//!
//! The only crate that names CUDA. Building it needs no toolkit and starting a program that links it needs no library:
//! both are looked for when a device is first asked for.
#![warn(clippy::unwrap_used)]
#![allow(unsafe_code)]

//! Ranks on the CPU. One program, because what most takes to compile are the kernels, by type, which each of several would have.

mod attention;
mod attention_kernels;
mod attention_tensors;
mod experts;
mod gemm_collective;
mod group;
mod group_collective;
mod group_ends;
mod group_faults;
mod group_join;
mod group_model;
mod group_overlap;
mod hosting;
mod linear;
mod linear_layers;
mod non_finite;
mod normalised;
mod shared_input;
mod softcap;
mod step_tables;
mod support;
mod tcp;

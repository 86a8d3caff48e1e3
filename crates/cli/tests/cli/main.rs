//! The command line as its users meet it. One program: one for each command would each take as long to compile as all of it.

mod attention;
mod bench_attention;
mod bench_collective;
mod bench_cp;
mod bench_gemm;
mod bench_gemm_collective;
mod bench_moe;
mod bench_tp;
mod doctor;
mod help;
mod hostile;
mod input;
mod json;
mod mask;
mod plan;
mod processes;
mod profile;
mod selftest;
mod simulate;
mod slow_links;
mod support;
mod tune;
mod width;

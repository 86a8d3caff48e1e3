//! The kernels that only move memory compile for every architecture, without spills and within their registers.
mod support;

use counterpoint_cuda::compile;
use counterpoint_cuda::kernel::{MatrixUnit, specialisations};

#[test]
fn they_compile_without_spills() {
    if support::no_compiler() {
        return;
    }
    let helpers: Vec<_> =
        specialisations().into_iter().filter(|kernel| kernel.matrix_unit == MatrixUnit::None).collect();
    assert!(helpers.len() >= 50, "{}", helpers.len());
    for kernel in &helpers {
        let cubin = compile(&kernel.source).unwrap();
        let (name, log) = (kernel.source.name(), &cubin.log);
        assert!(
            log.contains("0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads"),
            "{name}: {log}"
        );
        assert!(!log.contains("warning"), "{name}: {log}");
        let used = log.split("Used ").nth(1).and_then(|rest| rest.split(' ').next());
        let registers: u32 = used.and_then(|count| count.parse().ok()).unwrap();
        assert!(registers <= kernel.register_limit, "{name}: {registers} registers");
    }
}

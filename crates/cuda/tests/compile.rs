//! Every kernel that ships compiles, and is what its launch needs. Needs NVRTC, no GPU.

use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use counterpoint_cuda::kernel::{MatrixUnit, SharedLayout, Specialisation, shared_layouts, specialisations};
use counterpoint_cuda::{Arch, CubinCache, CudaError, KernelSource, compile, compiler_version, examine};

mod support;

#[test]
fn names_are_unique() {
    let mut names: Vec<_> =
        specialisations().iter().map(|one| (one.source.arch(), one.source.name().to_owned())).collect();
    let count = names.len();
    names.sort();
    names.dedup();
    assert_eq!(names.len(), count);
}

#[test]
fn all_that_ship() {
    if support::no_compiler() {
        return;
    }
    let all = specialisations();
    let (mut done, mut told) = (0, Instant::now());
    let report = examine(&all, &CubinCache::from_environment(), |name| {
        done += 1;
        if told.elapsed() >= Duration::from_secs(5) {
            told = Instant::now();
            // Not by a macro, whose lines the test's harness would keep to itself.
            let _ = writeln!(std::io::stderr(), "compiled {done} of {} kernels; {name}", all.len());
        }
    })
    .unwrap();
    assert!(report.failed.is_empty(), "{:#?}", report.failed);
    assert_eq!(report.kernels.len(), all.len());
}

#[test]
fn host_and_kernels_agree_on_layouts() {
    if support::no_compiler() {
        return;
    }
    let layouts = shared_layouts();
    for arch in [Arch::SM_90A, Arch::SM_80] {
        compile(&SharedLayout::assertions(&layouts, arch)).unwrap();
    }
    // A difference of any kind is found.
    let wrong = |change: fn(&mut SharedLayout)| {
        let mut layout = layouts[0].clone();
        change(&mut layout);
        compile(&SharedLayout::assertions(&[layout], Arch::SM_90A)).unwrap_err().to_string()
    };
    assert!(wrong(|layout| layout.bytes += 4).contains("size of Tile"));
    assert!(wrong(|layout| layout.alignment *= 2).contains("alignment of Tile"));
    assert!(wrong(|layout| layout.fields[1].1 += 4).contains("Tile::end"));
    assert!(wrong(|layout| layout.fields[2].2 += 4).contains("Tile::run_begin"));
}

#[test]
fn a_users_own_kernel_finds_its_header() {
    if support::no_compiler() {
        return;
    }
    let text = include_str!("../../../examples/06-user-kernel/silu.cu");
    for arch in [Arch::SM_90A, Arch::SM_80] {
        assert!(!compile(&KernelSource::new("silu", arch).line(text)).unwrap().image.is_empty());
    }
}

#[test]
fn errors_carry_the_compilers_words() {
    if support::no_compiler() {
        return;
    }
    let source = KernelSource::new("f", Arch::SM_80).line("#include <stdint.h>");
    let CudaError::Compile { kernel, arch, log } = compile(&source).unwrap_err() else { panic!() };
    assert_eq!((kernel.as_str(), arch.as_str()), ("f", "sm_80"));
    assert!(log.contains("f.cu(1)") && log.contains("stdint.h"), "{log}");
}

fn one(name: &str, matrix_unit: MatrixUnit, body: &str) -> Specialisation {
    let source = KernelSource::new(name, Arch::SM_90A)
        .line(format_args!("extern \"C\" __global__ void {name}(float* x, int* index) {{ {body} }}"));
    Specialisation { source, matrix_unit, register_limit: 168 }
}

/// 1 KB of each thread's own memory, indexed at run time.
const LOCAL: &str = "float a[256]; for (int i = 0; i < 256; ++i) a[i] = x[i * index[0]]; \
     for (int i = 0; i < 256; ++i) a[index[i] & 255] += a[i]; x[0] = a[index[1] & 255] + a[index[2] & 255];";

/// A product on tensor cores whose result nothing reads, which is no reason to leave it out.
const MATRIX: &str = "float d[4] = {x[0], x[1], x[2], x[3]}; unsigned a = index[0], b = index[1]; \
     asm volatile(\"mma.sync.aligned.m16n8k8.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%0,%1,%2,%3};\" \
     : \"+f\"(d[0]), \"+f\"(d[1]), \"+f\"(d[2]), \"+f\"(d[3]) : \"r\"(a), \"r\"(a), \"r\"(b)); x[4] = d[0];";

#[test]
fn what_is_wrong_with_a_kernel_is_found() {
    if support::no_compiler() {
        return;
    }
    let kernels = [
        one("good", MatrixUnit::None, "x[0] += 1;"),
        one("local", MatrixUnit::None, LOCAL),
        one("remark", MatrixUnit::None, "int unused; x[0] += 1;"),
        one("broken", MatrixUnit::None, "nonsense"),
        one("warp", MatrixUnit::Warp, MATRIX),
        one("no_warp", MatrixUnit::Warp, "x[0] += 1;"),
        one("no_warpgroup", MatrixUnit::Warpgroup, MATRIX),
        Specialisation { register_limit: 4, ..one("crowded", MatrixUnit::None, "x[0] += 1;") },
    ];
    let folder = tempfile::tempdir().unwrap();
    let cache = CubinCache::at(folder.path());
    let mut heard = 0;
    let report = examine(&kernels, &cache, |_| heard += 1).unwrap();
    assert_eq!(heard, kernels.len());
    let faults = |name: &str| -> Vec<_> {
        let faults = report.failed.iter().filter(|fault| fault.name == name);
        faults.map(|fault| fault.reason.as_str()).collect()
    };
    assert_eq!(faults("good"), [""; 0]);
    assert!(
        matches!(faults("local")[..], [local] if local.contains("1024 bytes of local memory")),
        "{report:?}"
    );
    assert!(faults("remark").iter().any(|reason| reason.contains("never referenced")), "{report:?}");
    assert!(matches!(faults("broken")[..], [reason] if reason.contains("nonsense")));
    assert!(matches!(faults("crowded")[..], [reason] if reason.contains("its launch leaves it 4")));
    let names: Vec<_> = report.kernels.iter().map(|kernel| kernel.name.as_str()).collect();
    assert_eq!(names, ["good", "local", "remark", "warp", "no_warp", "no_warpgroup", "crowded"]);
    let good = &report.kernels[0];
    assert!(good.arch == "sm_90a" && good.registers > 0 && good.local_bytes == 0 && good.spill_bytes == 0);
    assert_eq!(faults("warp"), [""; 0]);
    assert_eq!(good.hgmma, Some(0));
    assert_eq!(faults("no_warp"), ["holds no HMMA instruction"]);
    assert_eq!(faults("no_warpgroup"), ["holds no HGMMA instruction"]);
    // From the cache the judgement is the same.
    assert_eq!(examine(&kernels, &cache, |_| {}).unwrap(), report);
}

/// Wheels and toolkits have `bin` beside `lib`.
fn disassembler() -> Option<PathBuf> {
    let lib = compiler_version().ok()?.path.parent()?.to_owned();
    let folders = [lib.parent()?.join("bin"), PathBuf::from("/usr/local/cuda/bin")];
    folders.map(|folder| folder.join("nvdisasm")).into_iter().find(|program| program.is_file())
}

#[test]
fn machine_code_is_counted_as_the_disassembler_prints_it() {
    if support::no_compiler() {
        return;
    }
    let Some(program) = disassembler() else {
        assert!(std::env::var_os("CI").is_none(), "the test command brings nvdisasm along");
        return eprintln!("SKIPPED, which CI would not accept: no nvdisasm to compare with");
    };
    // One kernel of each kind that multiplies matrices, on each side's operand forms.
    let (folder, cache) = (tempfile::tempdir().unwrap(), CubinCache::from_environment());
    let mut kinds = specialisations();
    kinds.retain(|one| one.matrix_unit == MatrixUnit::Warpgroup);
    kinds.truncate(2);
    kinds.extend([one("warp", MatrixUnit::Warp, MATRIX), one("plain", MatrixUnit::None, "x[0] += 1;")]);
    let report = examine(&kinds, &cache, |_| {}).unwrap();
    for (one, report) in kinds.iter().zip(&report.kernels) {
        let file = folder.path().join("kernel");
        let cubin = cache.cubins(&[&one.source]).remove(0).unwrap().cubin;
        std::fs::write(&file, cubin.image).unwrap();
        let output = std::process::Command::new(&program).arg("--print-code").arg(&file).output().unwrap();
        let text = String::from_utf8(output.stdout).unwrap();
        let printed = text.lines().filter(|line| line.contains(" HGMMA.")).count();
        assert_eq!(report.hgmma, Some(printed as u32), "{}", report.name);
        assert_eq!(printed > 0, one.matrix_unit == MatrixUnit::Warpgroup);
        let warps = text.lines().filter(|line| line.contains(" HMMA.")).count();
        assert_eq!(warps > 0, one.matrix_unit == MatrixUnit::Warp);
    }
}

//! Every kernel that ships compiles, and is what its launch needs. Needs NVRTC, no GPU.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use counterpoint_cuda::SharedLayout;
use counterpoint_cuda::kernel::{MatrixUnit, Specialisation, shared_layouts, specialisations};
use counterpoint_cuda::{
    Arch, CubinCache, CudaError, KernelSource, compile, compiler_version, examine, kernel_source,
};
use ledger::{Entry, Ledger};
use live_line::LiveLine;
use rand::SeedableRng;
use rand::seq::IndexedRandom;
use rand_chacha::ChaCha8Rng;

mod ledger;
mod live_line;
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

/// Kernels that each run compiles whatever the ledger says, so that it cannot rot.
const SAMPLE: usize = 8;

/// Every kernel is what its launch needs. Of kernels whose code has not changed the ledger says so. `GOLDEN=record` compiles those that
/// have and writes the ledger, `GOLDEN=all` compiles every kernel that ships and holds it to the ledger.
#[test]
fn all_that_ship() {
    let all = specialisations();
    let recorded = ledger::recorded(&all);
    let ledger = Ledger::read();
    let wanted = std::env::var("GOLDEN").unwrap_or_default();
    if !wanted.is_empty() && support::no_compiler() {
        return;
    }
    match wanted.as_str() {
        "record" => record(&ledger, &recorded),
        "all" => verify_all(&ledger, &all, &recorded),
        "" => compare(&ledger, &all, &recorded),
        other => panic!("GOLDEN is `{other}`; `record` writes the ledger, `all` compiles every kernel"),
    }
}

const HOW: &str =
    "where this is meant, `GOLDEN=record cargo test -p counterpoint-cuda --test compile` records it";

fn compare(ledger: &Ledger, all: &[Specialisation], recorded: &[&Specialisation]) {
    let gone = ledger.without_kernel(recorded);
    assert!(gone.is_empty(), "the ledger has kernels that do not ship: {gone:#?}; {HOW}");
    let stale = ledger.stale(recorded);
    for kernel in recorded {
        if let Some(entry) = ledger.entries.get(&ledger::name(kernel)) {
            let faults = entry.faults(kernel);
            assert!(faults.is_empty(), "{}: {faults:?}", kernel.source.name());
        }
    }
    if support::no_compiler() {
        let names: Vec<_> = stale.iter().map(|kernel| kernel.source.name()).collect();
        return assert!(
            names.is_empty(),
            "the code of these has changed since they were recorded: {names:#?}"
        );
    }
    let compiler = ledger::compiler_name(&compiler_version().unwrap());
    let sample = match compiler == ledger.compiler {
        true => random_sample(all),
        // Of another compiler nothing is known.
        false => {
            eprintln!(
                "the ledger is of {}, and this is {compiler}: every kernel in it is compiled",
                ledger.compiler
            );
            recorded.iter().map(|kernel| (*kernel).clone()).collect()
        }
    };
    let kernels: Vec<_> = stale.iter().map(|kernel| (*kernel).clone()).chain(sample).collect();
    let found = compiled(&kernels);
    if compiler == ledger.compiler {
        let differences = differences(ledger, all, &kernels, &found);
        assert!(differences.is_empty(), "{differences:#?}\n{HOW}");
    }
}

fn record(ledger: &Ledger, recorded: &[&Specialisation]) {
    let compiler = ledger::compiler_name(&compiler_version().unwrap());
    let stale = if compiler == ledger.compiler { ledger.stale(recorded) } else { recorded.to_vec() };
    let stale: Vec<_> = stale.into_iter().cloned().collect();
    let mut new = Ledger { compiler, entries: ledger.entries.clone() };
    let names: Vec<_> = recorded.iter().map(|kernel| ledger::name(kernel)).collect();
    new.entries.retain(|name, _| names.contains(name));
    for (kernel, entry) in stale.iter().zip(compiled(&stale)) {
        new.entries.insert(ledger::name(kernel), entry);
    }
    new.write();
    eprintln!("{} kernels compiled, {} in the ledger", stale.len(), new.entries.len());
}

fn verify_all(ledger: &Ledger, all: &[Specialisation], recorded: &[&Specialisation]) {
    let gone = ledger.without_kernel(recorded);
    assert!(gone.is_empty(), "the ledger has kernels that do not ship: {gone:#?}; {HOW}");
    let differences = differences(ledger, all, all, &compiled(all));
    assert!(differences.is_empty(), "{differences:#?}\n{HOW}");
}

/// How kernels that were compiled now differ from the ledger, or from the twin that the ledger holds instead.
fn differences(
    ledger: &Ledger,
    all: &[Specialisation],
    kernels: &[Specialisation],
    found: &[Entry],
) -> Vec<String> {
    let differs = |(kernel, found): (&Specialisation, &Entry)| match ledger::twin(kernel, all) {
        None => ledger.difference(kernel, found),
        Some(twin) => {
            let (key, figures) = (ledger::key(twin), found.figures);
            let difference = ledger.difference(twin, &Entry { key, figures })?;
            Some(format!("{} is not as its twin {difference}", kernel.source.name()))
        }
    };
    kernels.iter().zip(found).filter_map(differs).collect()
}

/// Compiles kernels, or finds them in the cache, none of which may have a fault.
fn compiled(kernels: &[Specialisation]) -> Vec<Entry> {
    let mut line = LiveLine::new(std::io::stderr(), Duration::from_secs(5));
    let mut done = 0;
    let report = examine(kernels, &CubinCache::from_environment(), |name| {
        done += 1;
        line.show(format_args!("compiled {done} of {} kernels; {name}", kernels.len()));
    })
    .unwrap();
    assert!(report.failed.is_empty(), "{:#?}", report.failed);
    kernels.iter().zip(&report.kernels).map(|(kernel, report)| Entry::of(kernel, report)).collect()
}

/// What [`a_test_that_compiles_is_not_silent`] looks at from outside.
#[test]
#[ignore = "run by another test"]
fn shows_a_live_line() {
    LiveLine::new(std::io::stderr(), Duration::ZERO).show(format_args!("compiled 3 of 4 kernels; gemm"));
}

#[test]
fn a_test_that_compiles_is_not_silent() {
    let arguments = ["--exact", "shows_a_live_line", "--ignored"];
    let child = Command::new(std::env::current_exe().unwrap()).args(arguments).output().unwrap();
    let (stdout, stderr) = (String::from_utf8_lossy(&child.stdout), String::from_utf8_lossy(&child.stderr));
    assert!(child.status.success() && stdout.contains("1 passed"), "{stdout}{stderr}");
    assert!(stderr.contains("compiled 3 of 4 kernels; gemm\n"), "the harness kept the line: {stderr:?}");
}

/// Some of all kernels, others in each run.
fn random_sample(all: &[Specialisation]) -> Vec<Specialisation> {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap();
    let seed = std::env::var("SEED").map_or(now.as_nanos() as u64, |seed| seed.parse().unwrap());
    let mut rng = ChaCha8Rng::seed_from_u64(seed);
    let sample: Vec<_> = all.sample(&mut rng, SAMPLE).cloned().collect();
    let names: Vec<_> = sample.iter().map(|kernel| kernel.source.name()).collect();
    eprintln!("SEED={seed} compiles {names:?}");
    sample
}

#[test]
fn stale_and_wrong_entries_of_the_ledger_are_found() {
    let all = specialisations();
    let kernels = &ledger::recorded(&all)[..3];
    let mut ledger = Ledger { compiler: "NVRTC".to_owned(), entries: Default::default() };
    assert_eq!(ledger.stale(kernels).len(), 3);
    let figures = [Some(100), Some(0), Some(0), Some(0), None];
    for kernel in kernels {
        ledger.entries.insert(ledger::name(kernel), Entry { key: ledger::key(kernel), figures });
    }
    assert!(ledger.stale(kernels).is_empty());
    assert_eq!(Ledger::parse(&ledger.text()), ledger);
    let found = Entry { key: ledger::key(kernels[0]), figures };
    assert_eq!(ledger.difference(kernels[0], &found), None);
    // Another figure, other code, another limit, a kernel that is gone, a damaged line.
    let more = Entry { figures: [Some(101), Some(0), Some(8), Some(0), None], ..found.clone() };
    let difference = ledger.difference(kernels[0], &more).unwrap();
    assert!(difference.contains("registers 101 instead of 100, spill_bytes 8 instead of 0"), "{difference}");
    let mut changed = kernels[1].clone();
    changed.source = changed.source.line("int more;");
    assert_eq!(ledger.stale(&[kernels[0], &changed]), [&changed]);
    assert!(
        found.faults(&Specialisation { register_limit: 99, ..kernels[0].clone() })[0]
            .contains("leaves it 99")
    );
    assert!(more.faults(kernels[0]).iter().any(|fault| fault.contains("spills")));
    let warpgroup = Specialisation { matrix_unit: MatrixUnit::Warpgroup, ..kernels[0].clone() };
    assert!(found.faults(&warpgroup).iter().any(|fault| fault.contains("no HGMMA")));
    assert_eq!(ledger.without_kernel(&kernels[..2]).len(), 1);
    let text = ledger.text();
    let cut = &text[..text.len() - 3];
    assert_eq!(Ledger::parse(cut).stale(kernels).len(), 1);
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
        assert!(!compile(&kernel_source("silu", arch).line(text)).unwrap().image.is_empty());
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

/// Wheels and toolkits have `bin` next to `lib`.
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

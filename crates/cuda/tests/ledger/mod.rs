//! The ledger of kernels in `kernels.tsv`: what each kernel's code was when it was compiled last, and what came out. A kernel whose code
//! is still the same needs no compiler to be judged.

mod code;

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;

use counterpoint_cuda::kernel::{MatrixUnit, Specialisation};
use counterpoint_cuda::{CompilerVersion, KernelReport};

const PATH: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/ledger/kernels.tsv");

/// What is recorded of a kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Digest of its code.
    pub(crate) key: String,
    /// Registers, bytes of local memory, bytes of spills, and matrix instructions of warpgroups and of warps.
    pub(crate) figures: [Option<u32>; 5],
}

/// The names of [`Entry::figures`].
const FIGURES: [&str; 5] = ["registers", "local_bytes", "spill_bytes", "hgmma", "hmma"];

/// Entries by architecture and name.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Ledger {
    /// The compiler that the figures come from.
    pub(crate) compiler: String,
    pub(crate) entries: BTreeMap<(String, String), Entry>,
}

/// How a kernel is named in a ledger.
pub(crate) fn name(kernel: &Specialisation) -> (String, String) {
    (kernel.source.arch().to_string(), kernel.source.name().to_owned())
}

/// The digest of all that a kernel's machine code depends on but the compiler: its text, the headers that it includes, and the target.
/// Comments and spaces do not count.
pub(crate) fn key(kernel: &Specialisation) -> String {
    code::digest(&kernel.source)
}

/// The compiler as a ledger names it.
pub(crate) fn compiler_name(compiler: &CompilerVersion) -> String {
    let (major, minor) = compiler.version;
    format!("NVRTC {major}.{minor}, {} bytes", compiler.bytes)
}

impl Entry {
    pub(crate) fn of(kernel: &Specialisation, report: &KernelReport) -> Self {
        let KernelReport { registers, local_bytes, spill_bytes, hgmma, hmma, .. } = report;
        Self {
            key: key(kernel),
            figures: [Some(*registers), Some(*local_bytes), Some(*spill_bytes), *hgmma, *hmma],
        }
    }

    /// What is wrong with a kernel of these figures.
    pub(crate) fn faults(&self, kernel: &Specialisation) -> Vec<String> {
        let [registers, local_bytes, spill_bytes, hgmma, hmma] = self.figures;
        let mut faults = Vec::new();
        if registers.is_none_or(|registers| registers == 0 || registers > kernel.register_limit) {
            faults.push(format!(
                "takes {registers:?} registers, its launch leaves it {}",
                kernel.register_limit
            ));
        }
        if local_bytes != Some(0) || spill_bytes != Some(0) {
            faults.push(format!("takes {local_bytes:?} bytes of local memory, spills {spill_bytes:?}"));
        }
        match kernel.matrix_unit {
            MatrixUnit::Warpgroup if hgmma == Some(0) => faults.push("holds no HGMMA instruction".to_owned()),
            MatrixUnit::Warp if hmma == Some(0) => faults.push("holds no HMMA instruction".to_owned()),
            _ => {}
        }
        faults
    }
}

impl Ledger {
    pub(crate) fn read() -> Self {
        Self::parse(&fs::read_to_string(PATH).unwrap_or_default())
    }

    pub(crate) fn write(&self) {
        fs::write(PATH, self.text()).expect("the ledger can be written");
    }

    /// The first line names the compiler, the second the columns.
    pub(crate) fn text(&self) -> String {
        let mut out = format!("# {}\narch\tkernel\tkey\t{}\n", self.compiler, FIGURES.join("\t"));
        for ((arch, name), Entry { key, figures }) in &self.entries {
            let figures = figures.map(|figure| figure.map_or_else(|| "-".to_owned(), |n| n.to_string()));
            let _ = writeln!(out, "{arch}\t{name}\t{key}\t{}", figures.join("\t"));
        }
        out
    }

    /// The ledger of a text; lines that are not whole are left out, so that their kernels count as not recorded.
    pub(crate) fn parse(text: &str) -> Self {
        let mut lines = text.lines();
        let compiler = lines.next().unwrap_or_default().trim_start_matches("# ").to_owned();
        let entry = |line: &str| {
            let mut columns = line.split('\t').map(str::to_owned);
            let (arch, name, key) = (columns.next()?, columns.next()?, columns.next()?);
            let figures: Vec<Option<u32>> = columns.map(|figure| figure.parse().ok()).collect();
            Some(((arch, name), Entry { key, figures: figures.try_into().ok()? }))
        };
        Self { compiler, entries: lines.skip(1).filter_map(entry).collect() }
    }

    /// Those of `kernels` that are not recorded, or were recorded with other code.
    pub(crate) fn stale<'a>(&self, kernels: &[&'a Specialisation]) -> Vec<&'a Specialisation> {
        let is_stale = |kernel: &Specialisation| {
            self.entries.get(&name(kernel)).is_none_or(|entry| entry.key != key(kernel))
        };
        kernels.iter().copied().filter(|kernel| is_stale(kernel)).collect()
    }

    /// What was recorded and is none of `kernels`.
    pub(crate) fn without_kernel(&self, kernels: &[&Specialisation]) -> Vec<String> {
        let known: Vec<_> = kernels.iter().map(|kernel| name(kernel)).collect();
        let gone = self.entries.keys().filter(|recorded| !known.contains(recorded));
        gone.map(|(arch, name)| format!("{name} for {arch}")).collect()
    }

    /// How what was compiled now differs from the record, figure by figure; empty where nothing does.
    pub(crate) fn difference(&self, kernel: &Specialisation, found: &Entry) -> Option<String> {
        let (arch, name) = name(kernel);
        let Some(recorded) = self.entries.get(&(arch.clone(), name.clone())) else {
            return Some(format!("{name} for {arch} is not recorded"));
        };
        let mut changes: Vec<String> = FIGURES
            .iter()
            .zip(recorded.figures.iter().zip(&found.figures))
            .filter(|(_, (was, is))| was != is)
            .map(|(figure, (was, is))| format!("{figure} {} instead of {}", shown(*is), shown(*was)))
            .collect();
        if recorded.key != found.key {
            changes.push("its code has changed".to_owned());
        }
        (!changes.is_empty()).then(|| format!("{name} for {arch}: {}", changes.join(", ")))
    }
}

fn shown(figure: Option<u32>) -> String {
    figure.map_or_else(|| "none".to_owned(), |figure| figure.to_string())
}

/// The kernels that the ledger holds. Of matrix kernels it leaves out those for which a twin stands: f16 where the same kernel is there in
/// bf16 for the same target. Every target is held: what fits in registers on sm_80 may spill on sm_90. `GOLDEN=all` compiles the twins
/// too: none may have a fault, and a twin has the same figures.
pub(crate) fn recorded(all: &[Specialisation]) -> Vec<&Specialisation> {
    all.iter().filter(|kernel| twin(kernel, all).is_none()).collect()
}

/// The kernel that stands for another one in the ledger.
pub(crate) fn twin<'a>(kernel: &Specialisation, all: &'a [Specialisation]) -> Option<&'a Specialisation> {
    if kernel.matrix_unit == MatrixUnit::None {
        return None;
    }
    let (arch, own) = name(kernel);
    // `f16` is a word of a name of its own; the one in `bf16` is not.
    let bf16 =
        own.split('_').map(|word| if word == "f16" { "bf16" } else { word }).collect::<Vec<_>>().join("_");
    if bf16 == own {
        return None;
    }
    let wanted = (arch, bf16);
    all.iter().find(|other| name(other) == wanted)
}

//! A case of the golden record: what is examined, as text, and digests of it.

use std::thread::available_parallelism;

use counterpoint::plan::DType;
use counterpoint::schedule::{Mover, OverlapPolicy, WorkerShare};
use sha2::{Digest, Sha256};

pub(crate) const DTYPES: [DType; 4] = [DType::F32, DType::Bf16, DType::F64, DType::F16];

pub(crate) const POLICIES: [&str; 8] = [
    "sequential",
    "concurrent",
    "kernel-barrier",
    "signals",
    "concurrent+fused",
    "concurrent+copy-engine",
    "concurrent+sm-margin=4",
    "kernel-barrier+priority",
];

/// The name under which outputs are recorded that have the same bits on every machine.
const ANY_MACHINE: &str = "any";

/// One case: its parts and outputs as text.
pub(crate) struct Case {
    /// Its kind and number.
    pub(crate) name: String,
    /// What is special about it, for people.
    pub(crate) text: String,
    /// The plan and each Program.
    pub(crate) parts: Vec<(String, String)>,
    /// Machine and what the case's run left.
    pub(crate) outputs: Vec<(String, String)>,
}

impl Case {
    pub(crate) fn new(name: String, text: String) -> Self {
        Self { name, text, parts: Vec::new(), outputs: Vec::new() }
    }

    pub(crate) fn part(&mut self, name: &str, text: String) {
        self.parts.push((name.to_owned(), text));
    }

    /// Records what `run` leaves as that of machines like this one, whatever number of threads computes.
    pub(crate) fn outputs_of_this_machine(&mut self, run: impl Fn(usize) -> String) {
        self.outputs(machine(), run);
    }

    /// Likewise of what has the same bits on all machines.
    pub(crate) fn outputs_of_any_machine(&mut self, run: impl Fn(usize) -> String) {
        self.outputs(ANY_MACHINE.to_owned(), run);
    }

    fn outputs(&mut self, machine: String, run: impl Fn(usize) -> String) {
        let all = run(0);
        let one_thread = available_parallelism().map_or(0, |cores| cores.get() - 1);
        if one_thread > 0 {
            assert!(run(one_thread) == all, "{}: bits depend on the number of threads", self.name);
        }
        self.outputs.push((machine, all));
    }
}

/// What bits of sums of products depend on: the C library's `exp` and `ln`, and the instructions that `matrixmultiply` picks.
pub(crate) fn machine() -> String {
    let system = format!("{}-{}", std::env::consts::ARCH, std::env::consts::OS);
    #[cfg(target_arch = "x86_64")]
    let features = [
        (std::is_x86_feature_detected!("fma") && std::is_x86_feature_detected!("avx2"), "fma"),
        (std::is_x86_feature_detected!("avx512f"), "avx512f"),
    ];
    #[cfg(not(target_arch = "x86_64"))]
    let features: [(bool, &str); 0] = [];
    let names = features.into_iter().filter(|(has, _)| *has).map(|(_, name)| format!("+{name}"));
    system + &names.collect::<String>()
}

/// What of `policy` CPU ranks can do, on so many threads fewer than the machine has.
pub(crate) fn on_cpu(policy: OverlapPolicy, margin: usize) -> OverlapPolicy {
    OverlapPolicy {
        start: policy.start,
        mover: if policy.mover == Mover::Fused { Mover::Fused } else { Mover::Transport },
        workers: if margin == 0 { WorkerShare::Common } else { WorkerShare::Margin(margin) },
        ..OverlapPolicy::default()
    }
}

pub(crate) fn dtype_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F64 => "f64",
        DType::F32 => "f32",
        DType::Bf16 => "bf16",
        DType::F16 => "f16",
    }
}

/// 64 bits of the SHA-256 of a text, in hexadecimal.
pub(crate) fn digest(text: &str) -> String {
    Sha256::digest(text.as_bytes())[..8].iter().map(|byte| format!("{byte:02x}")).collect()
}

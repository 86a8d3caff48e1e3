//! `counterpoint doctor`.

mod calibrate;
mod job;
mod overlap;

use std::fmt::Write;
use std::path::{Path, PathBuf};

use counterpoint_console::{self as console, CliError, Schema, device, output::shown, profile};
use counterpoint_cuda::{CubinCache, CudaError, Device};
use counterpoint_exec::EnvironmentVariable;
use counterpoint_report::{format_bytes, printable};
use serde::Serialize;

use crate::arguments::DoctorArguments;

/// What this machine has, as JSON has it.
#[derive(Debug, Serialize)]
struct Machine {
    version: &'static str,
    cpu: String,
    cpu_threads: usize,
    memory_available_bytes: Option<u64>,
    gpus: Vec<Gpu>,
    /// Pairs of GPUs that do not reach each other's memory.
    unreachable: Vec<[usize; 2]>,
    /// The newest CUDA that the driver supports.
    driver_cuda: Option<String>,
    nvrtc: Option<Library>,
    nccl: Option<Library>,
    cache: Option<Cache>,
    environment: Vec<Variable>,
    /// What other variables of this job do to it.
    job: Vec<job::Finding>,
    missing: Vec<Missing>,
}

#[derive(Debug, Serialize)]
struct Gpu {
    ordinal: usize,
    name: String,
    uuid: String,
    capability: String,
    /// What kernels are compiled for.
    arch: String,
    /// `hopper`, `portable` or `none`.
    kernels: &'static str,
    sm_count: u32,
    memory_bytes: usize,
}

#[derive(Debug, Serialize)]
struct Library {
    version: String,
    path: PathBuf,
}

#[derive(Debug, Serialize)]
struct Cache {
    folder: PathBuf,
    entries: usize,
    bytes: u64,
}

#[derive(Debug, Serialize)]
struct Variable {
    name: String,
    /// `None` where it is not set.
    value: Option<String>,
    /// `None` where nothing reads it: most likely a misspelt name.
    purpose: Option<&'static str>,
}

/// Something that the machine lacks.
#[derive(Debug, Serialize)]
struct Missing {
    what: &'static str,
    costs: &'static str,
    /// What was found instead, and what to do.
    remedy: String,
}

/// `counterpoint doctor`.
pub(crate) fn run(arguments: &DoctorArguments) -> Result<(), CliError> {
    if arguments.overlap {
        return overlap::run(arguments);
    }
    if arguments.calibrate {
        return calibrate::run(arguments);
    }
    let machine = Machine::look();
    if arguments.json {
        console::print_json(Schema::Doctor, &machine)
    } else {
        console::print(&machine.describe())
    }
}

impl Machine {
    fn look() -> Self {
        let mut missing = Vec::new();
        let mut note = |what, costs, remedy: String| missing.push(Missing { what, costs, remedy });

        let gpus = gpus().unwrap_or_else(|error| {
            note("GPU", "everything runs on the CPU (--device cpu)", error.to_string());
            Vec::new()
        });
        for gpu in gpus.iter().filter(|gpu| gpu.kernels == "none") {
            let remedy = format!(
                "GPU {} ({}) has capability {}; 8.0 is needed",
                gpu.ordinal, gpu.name, gpu.capability
            );
            note("GPU that kernels can run on", "this GPU is of no use", remedy);
        }
        let unreachable = unreachable(gpus.len());
        if let Some([from, to]) = unreachable.first() {
            let remedy = format!("GPU {from} does not reach GPU {to}; see nvidia-smi topo -p2p r");
            note("access between GPUs", "ranks exchange rows through NCCL (--transport nccl)", remedy);
        }
        let nvrtc = counterpoint_cuda::compiler_version().map(|found| {
            let (major, minor) = found.version;
            Library { version: format!("{major}.{minor}"), path: found.path }
        });
        let nvrtc = nvrtc.map_err(|error| {
            note("NVRTC", "kernels cannot be compiled, so --device cuda does not work", error.to_string());
        });
        let nccl = counterpoint_cuda::nccl_version();
        let nccl = nccl.map(|found| Library { version: found.version, path: found.path }).map_err(|error| {
            note("NCCL", "no exchange between GPUs of several processes or nodes", error.to_string());
        });
        let cache = CubinCache::from_environment();
        let usage = cache.usage();
        if let Some(warning) = cache.look() {
            note("cache of kernels", "every process compiles its kernels anew", warning.to_string());
        }
        Self {
            version: env!("CARGO_PKG_VERSION"),
            cpu: device::cpu_name(),
            cpu_threads: device::cpu_threads(),
            memory_available_bytes: counterpoint_exec::available_memory(),
            driver_cuda: Device::driver_version().ok().map(|(major, minor)| format!("{major}.{minor}")),
            gpus,
            unreachable,
            nvrtc: nvrtc.ok(),
            nccl: nccl.ok(),
            cache: cache.folder().map(|folder| Cache {
                folder: folder.to_owned(),
                entries: usage.entries,
                bytes: usage.bytes,
            }),
            environment: environment(),
            job: job::findings(),
            missing,
        }
    }

    fn describe(&self) -> String {
        let mut text = String::new();
        let mut line = |name: &str, value: String| {
            let _ = writeln!(text, "{name:12}  {value}");
        };
        line("counterpoint", self.version.to_owned());
        line("CPU", self.cpu.clone());
        if let Some(bytes) = self.memory_available_bytes {
            line("memory", format!("{} available", format_bytes(bytes)));
        }
        for gpu in &self.gpus {
            let Gpu { ordinal, name, uuid, capability, arch, kernels, sm_count, memory_bytes } = gpu;
            let memory = format_bytes(*memory_bytes as u64);
            line(
                &format!("GPU {ordinal}"),
                format!("{name}, {memory}, {sm_count} SMs, capability {capability}"),
            );
            line("", format!("{kernels} kernels, compiled for {arch}; {uuid}"));
        }
        if self.gpus.len() > 1 {
            let pairs = self.unreachable.iter().map(|[from, to]| format!("{from} to {to}"));
            let reach = match pairs.collect::<Vec<_>>() {
                none if none.is_empty() => "all reach each other's memory".to_owned(),
                some => format!("do not reach the other's memory: {}", some.join(", ")),
            };
            line("GPUs", reach);
        }
        if let Some(version) = &self.driver_cuda {
            line("driver", format!("for CUDA {version} and older"));
        }
        for (name, library) in [("NVRTC", &self.nvrtc), ("NCCL", &self.nccl)] {
            if let Some(Library { version, path }) = library {
                line(name, format!("{version}, {}", shown(path)));
            }
        }
        if let Some(Cache { folder, entries, bytes }) = &self.cache {
            let kernels = console::count(*entries, "compiled kernel");
            line("cache", format!("{}: {kernels}, {}", shown(folder), format_bytes(*bytes)));
        }
        text.push_str("\nEnvironment\n");
        for Variable { name, value, purpose } in &self.environment {
            let value = value.as_ref().map_or("not set".to_owned(), |value| format!("= {value}"));
            let purpose = purpose.unwrap_or("nothing reads it; is it misspelt?");
            let _ = writeln!(text, "  {} {} ({purpose})", printable(name), printable(&value));
        }
        text.push_str("\nJob\n");
        for finding in &self.job {
            let _ = writeln!(text, "  {}", printable(&finding.describe()));
        }
        for (index, Missing { what, costs, remedy }) in self.missing.iter().enumerate() {
            if index == 0 {
                text.push_str("\nMissing\n");
            }
            let _ = writeln!(text, "  {what}: {costs}.\n    {remedy}");
        }
        text
    }
}

fn gpus() -> Result<Vec<Gpu>, CudaError> {
    let gpu = |ordinal| {
        let properties = Device::properties_of(ordinal)?;
        let arch = counterpoint_cuda::Arch::of(properties.capability);
        let kernels = match properties.capability.major {
            _ if arch.is_hopper() => "hopper",
            8.. => "portable",
            _ => "none",
        };
        Ok(Gpu {
            ordinal,
            name: properties.name,
            uuid: properties.uuid,
            capability: properties.capability.to_string(),
            arch: arch.to_string(),
            kernels,
            sm_count: properties.sm_count,
            memory_bytes: properties.memory_bytes,
        })
    };
    (0..Device::count()?).map(gpu).collect()
}

/// Pairs (from, to) of GPUs of which the first cannot read and write the second's memory.
fn unreachable(gpus: usize) -> Vec<[usize; 2]> {
    let pairs = (0..gpus).flat_map(|from| (0..gpus).map(move |to| [from, to]));
    let others = pairs.filter(|[from, to]| from != to);
    others.filter(|&[from, to]| !Device::reaches(from, to).unwrap_or(false)).collect()
}

/// Every variable that something reads.
fn known_variables() -> impl Iterator<Item = EnvironmentVariable> {
    counterpoint_exec::ENVIRONMENT
        .into_iter()
        .chain(counterpoint_cuda::ENVIRONMENT)
        .chain(profile::ENVIRONMENT)
}

/// The variables that something reads, and whatever else is set and called like them.
fn environment() -> Vec<Variable> {
    let text = |value: std::ffi::OsString| Path::new(&value).display().to_string();
    let known = known_variables().map(|variable| Variable {
        name: variable.name.to_owned(),
        value: std::env::var_os(variable.name).map(text),
        purpose: Some(variable.purpose),
    });
    let mut variables: Vec<_> = known.collect();
    let mut unknown: Vec<_> = std::env::vars_os()
        .map(|(name, value)| (text(name), text(value)))
        .filter(|(name, _)| {
            name.starts_with("COUNTERPOINT_") && known_variables().all(|known| known.name != name)
        })
        .collect();
    unknown.sort();
    variables.extend(unknown.into_iter().map(|(name, value)| Variable {
        name,
        value: Some(value),
        purpose: None,
    }));
    variables
}

//! What a selftest consists of.

use std::fmt;

use thiserror::Error;

/// A name that no group of checks has.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("`{name}` is not a group of checks")]
pub(crate) struct UnknownGroup {
    name: String,
}

/// Checks that belong together, in the order in which they are reported.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Group {
    Cpu,
    CpuLinear,
    Tcp,
    Hostile,
    Guard,
    Callers,
    Kernels,
    PortableKernels,
    Attention,
    PortableAttention,
    LongSequence,
    Collectives,
    RmsNorm,
    Gemm,
    PortableGemm,
    Linear,
    PortableLinear,
    LibraryLinear,
    Graphs,
    CompiledKernels,
    Barriers,
    Signals,
    Neighbours,
    ProcessBits,
    ProcessNodes,
    ProcessLayers,
    ProcessDisagreement,
    ProcessDeaths,
    ProcessLateDeaths,
    ProcessStops,
    ProcessMemory,
    ProcessBitsAfter,
    NvlinkFaults,
    CopyEngineFaults,
    NcclFaults,
    Isolation,
    NvlinkExhaustion,
    CopyEngineExhaustion,
    NcclExhaustion,
    GpusAttention,
    NvlinkCollectives,
    SharedCollectives,
    CopyEngineCollectives,
    NcclCollectives,
    EngineCollectives,
    NvlinkSteps,
    CopyEngineSteps,
    NcclSteps,
    Fused,
    NvlinkSignalled,
    CopyEngineSignalled,
    NcclSignalled,
    NvlinkLinear,
    CopyEngineLinear,
    NcclLinear,
    LibrarySums,
    NvlinkRepeats,
    CopyEngineRepeats,
    NcclRepeats,
}

impl Group {
    pub(crate) const ALL: [Self; 59] = [
        Self::Cpu,
        Self::CpuLinear,
        Self::Tcp,
        Self::Hostile,
        Self::Guard,
        Self::Callers,
        Self::Kernels,
        Self::PortableKernels,
        Self::Attention,
        Self::PortableAttention,
        Self::LongSequence,
        Self::Collectives,
        Self::RmsNorm,
        Self::Gemm,
        Self::PortableGemm,
        Self::Linear,
        Self::PortableLinear,
        Self::LibraryLinear,
        Self::Graphs,
        Self::CompiledKernels,
        Self::Barriers,
        Self::Signals,
        Self::Neighbours,
        Self::ProcessBits,
        Self::ProcessNodes,
        Self::ProcessLayers,
        Self::ProcessDisagreement,
        Self::ProcessDeaths,
        Self::ProcessLateDeaths,
        Self::ProcessStops,
        Self::ProcessMemory,
        Self::ProcessBitsAfter,
        Self::NvlinkFaults,
        Self::CopyEngineFaults,
        Self::NcclFaults,
        Self::Isolation,
        Self::NvlinkExhaustion,
        Self::CopyEngineExhaustion,
        Self::NcclExhaustion,
        Self::GpusAttention,
        Self::NvlinkCollectives,
        Self::SharedCollectives,
        Self::CopyEngineCollectives,
        Self::NcclCollectives,
        Self::EngineCollectives,
        Self::NvlinkSteps,
        Self::CopyEngineSteps,
        Self::NcclSteps,
        Self::Fused,
        Self::NvlinkSignalled,
        Self::CopyEngineSignalled,
        Self::NcclSignalled,
        Self::NvlinkLinear,
        Self::CopyEngineLinear,
        Self::NcclLinear,
        Self::LibrarySums,
        Self::NvlinkRepeats,
        Self::CopyEngineRepeats,
        Self::NcclRepeats,
    ];

    /// What its checks' names begin with, and a part of what `--only` takes.
    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Cpu => "cpu",
            Self::CpuLinear => "cpu linear layers",
            Self::Tcp => "collectives through tcp",
            Self::Hostile => "ranks among hostile others",
            Self::Guard => "guard bytes",
            Self::Callers => "calls of other libraries",
            Self::Kernels => "all kernels",
            Self::PortableKernels => "all portable kernels",
            Self::Attention => "attention",
            Self::PortableAttention => "portable attention",
            Self::LongSequence => "long sequence",
            Self::Collectives => "collectives",
            Self::RmsNorm => "rms-norm",
            Self::Gemm => "gemm",
            Self::PortableGemm => "portable gemm",
            Self::Linear => "linear layers",
            Self::PortableLinear => "portable linear layers",
            Self::LibraryLinear => "linear layers with cuBLASLt",
            Self::Graphs => "graphs",
            Self::CompiledKernels => "compiled kernels",
            Self::Barriers => "device-side barriers",
            Self::Signals => "signals of products",
            Self::Neighbours => "kernels of a neighbour",
            Self::ProcessBits => "processes",
            Self::ProcessNodes => "processes on two nodes",
            Self::ProcessLayers => "processes with layers",
            Self::ProcessDisagreement => "processes that disagree",
            Self::ProcessDeaths => "processes that die",
            Self::ProcessLateDeaths => "processes that die late",
            Self::ProcessStops => "processes that stop",
            Self::ProcessMemory => "processes without memory",
            Self::ProcessBitsAfter => "processes after all that",
            Self::NvlinkFaults => "faults by nvlink",
            Self::CopyEngineFaults => "faults by copy-engine",
            Self::NcclFaults => "faults by nccl",
            Self::Isolation => "faults: isolated GPUs",
            Self::NvlinkExhaustion => "faults: memory by nvlink",
            Self::CopyEngineExhaustion => "faults: memory by copy-engine",
            Self::NcclExhaustion => "faults: memory by nccl",
            Self::GpusAttention => "attention on several GPUs",
            Self::NvlinkCollectives => "collectives by nvlink, a GPU each",
            Self::SharedCollectives => "collectives by nvlink, GPUs shared",
            Self::CopyEngineCollectives => "collectives by copy-engine",
            Self::NcclCollectives => "collectives by nccl",
            Self::EngineCollectives => "collectives by kernels and copy engines",
            Self::NvlinkSteps => "graphs of steps by nvlink",
            Self::CopyEngineSteps => "graphs of steps by copy-engine",
            Self::NcclSteps => "graphs of steps by nccl",
            Self::Fused => "fused GEMM + collective",
            Self::NvlinkSignalled => "signalled products by nvlink",
            Self::CopyEngineSignalled => "signalled products by copy-engine",
            Self::NcclSignalled => "signalled products by nccl",
            Self::NvlinkLinear => "linear layers by nvlink, a GPU each",
            Self::CopyEngineLinear => "linear layers by copy-engine",
            Self::NcclLinear => "linear layers by nccl",
            Self::LibrarySums => "sums by nccl itself",
            Self::NvlinkRepeats => "collectives again and again by nvlink",
            Self::CopyEngineRepeats => "collectives again and again by copy-engine",
            Self::NcclRepeats => "collectives again and again by nccl",
        }
    }

    /// The group of this very name.
    pub(crate) fn named(name: &str) -> Result<Self, UnknownGroup> {
        let group = Self::ALL.into_iter().find(|group| group.name() == name);
        group.ok_or_else(|| UnknownGroup { name: name.to_owned() })
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_group_is_listed_once_and_found_by_its_name() {
        assert!(Group::ALL.is_sorted_by(|a, b| a < b));
        for group in Group::ALL {
            assert_eq!(Group::named(group.name()), Ok(group));
        }
        assert!(Group::named("gem").is_err());
    }
}

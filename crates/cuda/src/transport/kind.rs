use std::fmt;

/// How rows travel between GPUs of one host.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum TransportKind {
    /// [`TransportKind::Nvlink`] where all GPUs reach each other's memory, else [`TransportKind::Nccl`].
    #[default]
    Auto,
    /// Kernels of a few multiprocessors read the other GPUs' memory. Where each rank has a GPU of its own, ranks meet inside
    /// these kernels; where they share one, on the host.
    Nvlink,
    /// The copy engines write into the other GPUs' memory; no multiprocessor takes part in a group-cast, and in a group-reduce
    /// only for the sum.
    CopyEngine,
    /// NCCL's sends and receives, with a pass that gathers what is sent before and one that scatters or sums after.
    Nccl,
}

impl TransportKind {
    /// All of them, by the names that users know.
    pub const NAMES: [(&'static str, Self); 4] = [
        ("auto", Self::Auto),
        ("nvlink", Self::Nvlink),
        ("copy-engine", Self::CopyEngine),
        ("nccl", Self::Nccl),
    ];
}

impl fmt::Display for TransportKind {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = Self::NAMES.into_iter().find(|(_, kind)| kind == self).map_or("", |(name, _)| name);
        formatter.write_str(name)
    }
}

//! GPUs as the subject of the selftest in `counterpoint-exec`: every run on guarded memory, with whichever kernels are examined.

use std::sync::Arc;

use counterpoint_exec::{
    AttentionInputs, AttentionOutputs, ExpertInputs, ExpertOptions, ExpertOutputs, HostTensor, LinearConfig,
    LinearInputs, LinearOutputs, Pass, RunConfig, WorldConfig, run_attention_on, run_experts_on,
    run_linear_on,
};
use counterpoint_plan::{AttentionSpec, DType, LinearPlan, Plan, Routing};
use counterpoint_reference::selftest::{SelfCheck, Subject, SubjectError, run_alone};
use counterpoint_schedule::{Mover, Program};

use counterpoint_cuda::kernel::{GemmLibrary, specialisations_for};
use counterpoint_cuda::{
    CudaError, CudaMachine, Device, GuardReport, KernelSource, MemoryGuard, PlainProducts, Timing,
    TransportKind,
};

/// The first GPU of this machine, on which all ranks of a run live, or all its GPUs.
#[derive(Clone, Debug)]
pub struct CudaSubject {
    machine: CudaMachine,
}

impl CudaSubject {
    /// The GPU with the kernels that its architecture picks.
    ///
    /// # Errors
    /// When there is no driver, GPU or compiler.
    pub fn open() -> Result<Self, CudaError> {
        Ok(Self { machine: CudaMachine::open(Timing::Off)? })
    }

    /// All GPUs with the kernels that the first one picks, and this transport between them. Where there is only one, all ranks
    /// share it.
    ///
    /// # Errors
    /// As [`CudaSubject::open`]; [`CudaError::NoPeerAccess`] when the transport needs it, or another when ranks that share a GPU
    /// cannot use it.
    pub fn over_gpus(transport: TransportKind) -> Result<Self, CudaError> {
        let machine = CudaMachine::for_ranks(Device::count()?, Timing::Off)?;
        Ok(Self { machine: machine.with_transport(transport)? })
    }

    /// The same GPU with the portable kernels; `None` where those are what it has anyway.
    ///
    /// # Errors
    /// As [`CudaSubject::open`].
    pub fn portable(&self) -> Result<Option<Self>, CudaError> {
        let portable = self.gpu().portable();
        if portable.arch() == self.gpu().arch() {
            return Ok(None);
        }
        Ok(Some(Self { machine: CudaMachine::new(vec![portable], Timing::Off)? }))
    }

    /// The same, whose plain products are cuBLASLt's.
    ///
    /// # Errors
    /// [`CudaError::NoCublasLt`] when there is none.
    pub fn with_cublaslt(self) -> Result<Self, CudaError> {
        GemmLibrary::open(self.gpu())?;
        Ok(Self { machine: self.machine.with_plain_products(PlainProducts::CublasLt) })
    }

    /// Compiles and loads every kernel that ships for this GPU, on all cores, so that the first problem of a kind does not wait
    /// for its kernel alone. A kernel that cannot be loaded is a failed check.
    pub fn load_all(&self) -> Vec<SelfCheck> {
        let arch = self.gpu().arch();
        let sources: Vec<KernelSource> =
            specialisations_for(arch).into_iter().map(|kernel| kernel.source).collect();
        // At the same time first; where that fails, one by one says which.
        let _ = self.gpu().functions(&sources);
        let load = |source: &KernelSource| {
            let name = format!("{} for {arch}, bytes of local memory", source.name());
            match self.gpu().function(source) {
                Ok(kernel) => SelfCheck::of(name, 0, kernel.attributes().local_bytes as f64, 0.0),
                Err(error) => SelfCheck::failed(name, 0, error.to_string()),
            }
        };
        sources.iter().map(load).collect()
    }

    /// The ranks' machine.
    pub fn machine(&self) -> &CudaMachine {
        &self.machine
    }

    /// Of so many ranks' GPUs: one without a rank has nothing to watch.
    fn guards(&self, ranks: usize) -> Vec<MemoryGuard> {
        self.machine.devices().iter().take(ranks).map(MemoryGuard::begin).collect()
    }

    /// The GPU.
    pub fn gpu(&self) -> &Device {
        &self.machine.devices()[0]
    }
}

impl Subject for CudaSubject {
    fn device(&self) -> String {
        self.gpu().properties().name.clone()
    }

    fn movers(&self) -> Vec<Mover> {
        self.machine.transport().transport().movers()
    }

    fn dtypes(&self) -> &[DType] {
        &[DType::Bf16, DType::F16]
    }

    fn same_in_any_stages(&self) -> Pass {
        // Portable kernels add a stage's share of dq as a whole.
        let portable = self.gpu().portable().arch() == self.gpu().arch();
        if portable { Pass::Forward } else { Pass::ForwardBackward }
    }

    fn run(
        &self,
        plan: &Plan,
        spec: &AttentionSpec,
        inputs: &AttentionInputs,
        config: &RunConfig,
    ) -> Result<AttentionOutputs, SubjectError> {
        let guards = self.guards(plan.cp_size());
        let run = run_attention_on(&self.machine, plan, spec, inputs, config)?;
        guards.iter().try_for_each(|guard| clean(&guard.report()))?;
        Ok(run.outputs)
    }

    fn run_linear(
        &self,
        plan: &LinearPlan,
        inputs: &LinearInputs,
        config: &LinearConfig,
    ) -> Result<LinearOutputs, SubjectError> {
        let guards = self.guards(plan.tp_size);
        let run = run_linear_on(&self.machine, plan, inputs, config)?;
        guards.iter().try_for_each(|guard| clean(&guard.report()))?;
        Ok(run.outputs)
    }

    fn run_experts(
        &self,
        options: ExpertOptions,
        routing: &Arc<Routing>,
        inputs: &ExpertInputs,
        config: WorldConfig,
    ) -> Result<ExpertOutputs, SubjectError> {
        let guards = self.guards(routing.ranks());
        let outputs = run_experts_on(&self.machine, options, routing, inputs, config)?;
        guards.iter().try_for_each(|guard| clean(&guard.report()))?;
        Ok(outputs)
    }

    fn run_alone(&self, program: &Program, inputs: &[&HostTensor]) -> Result<Vec<HostTensor>, SubjectError> {
        let guards = self.guards(1);
        let outputs = run_alone(&self.machine, program, inputs)?;
        // Nothing can be written next to buffers without bytes.
        let watched = program.buffers.iter().any(|buffer| buffer.bytes() > 0);
        guards.iter().filter(|_| watched).try_for_each(|guard| clean(&guard.report()))?;
        Ok(outputs)
    }
}

/// Fails unless guard bytes were looked at and found whole.
pub(super) fn clean(report: &GuardReport) -> Result<(), SubjectError> {
    if let Some(error) = &report.error {
        return Err(SubjectError::Overwrite(format!("guard bytes cannot be read: {error}")));
    }
    if report.buffers == 0 {
        return Err(SubjectError::Overwrite("unknown, for no buffer was watched".to_owned()));
    }
    if report.overwritten.is_empty() {
        return Ok(());
    }
    let words: Vec<String> = report.overwritten.iter().take(4).map(ToString::to_string).collect();
    Err(SubjectError::Overwrite(words.join("; ")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use counterpoint_cuda::Overwrite;

    #[test]
    fn only_guards_that_were_looked_at_and_are_whole_are_clean() {
        let whole = GuardReport { buffers: 3, ..GuardReport::default() };
        assert_eq!(clean(&whole), Ok(()));
        assert!(clean(&GuardReport::default()).is_err());
        let overwritten = vec![Overwrite { bytes: 64, offset: 64, count: 2 }];
        let error = clean(&GuardReport { overwritten, ..whole.clone() }).unwrap_err();
        assert!(error.to_string().contains("2 bytes next to a buffer of 64"), "{error}");
        let error = Some(CudaError::NoDevice { text: "gone".to_owned() });
        assert!(clean(&GuardReport { error, ..whole }).is_err());
    }
}

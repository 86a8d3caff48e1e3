//! Runs Programs: backends, transports and group collectives.
//!
//! [`run_attention`] goes from tensors to tensors. Below it, [`Prepared`] is the one interpreter of Programs; it knows a
//! machine only as a [`Backend`] (streams, events, memory, kernels) and a [`Transport`] (rows between ranks).
//! A [`Machine`] makes both for the ranks of a run. [`CpuBackend`] and [`CpuTransport`] are those of this process: ranks,
//! and the streams of each, are threads that share a [`World`], the place of the first error and of every wait's limit.
//! [`Communicator`] offers the group collectives alone.

// Not a workspace lint: tests may unwrap, their helpers too.
#![warn(clippy::unwrap_used)]

mod attention;
mod backend;
pub mod collective;
mod collective_fault;
mod communicator;
mod cpu;
mod cpu_transport;
mod described_device;
mod device_fault;
mod environment;
mod error;
mod experts;
mod fault;
mod frame;
mod global_buffer;
mod group;
mod group_rank;
mod identity;
mod interpreter;
mod layout;
mod linear;
mod machine;
mod memory;
mod monitor;
#[cfg(feature = "mpi")]
mod mpi;
mod network;
mod panics;
mod pass;
mod place;
mod planning_threads;
mod policy_fault;
mod profiler;
mod program_fault;
mod random;
mod recipient;
mod remote_ranks;
mod rendezvous;
mod rendezvous_error;
mod rendezvous_fault;
mod shared_rings;
mod slow_link;
mod tables_fault;
mod tcp;
mod tensor_fault;
mod transport;
mod wire_tensor;
mod world;

pub use attention::{
    AttentionCalls, AttentionInputs, AttentionOutputs, AttentionRank, AttentionRun, AttentionTask,
    BackwardTensors, ForwardTensors, Measurement, PreparedAttention, RankBuffer, RankProblem, RanksRun,
    RunConfig, StepTables, TablesOfRank, rank_outputs, run_attention, run_attention_on,
    run_attention_process, run_attention_ranks,
};
pub use backend::{Backend, BufferAccess, RunContext, RunTimes, TablesOf};
pub use collective_fault::{CaptureFault, CollectiveDifference, CollectiveFault};
pub use communicator::{Communicator, Handle};
pub use counterpoint_cpu_kernels::{
    Accumulator, HostData, HostElement, HostTensor, TensorMut, TensorRef, convert_element, random_stream,
    random_tensor, with_host_element,
};
pub use cpu::{
    CpuBackend, CpuBuffer, CpuEvent, CpuKernel, CpuSignal, CpuStream, CpuUserPart, HostView, KernelBarrier,
    MemoryKeeper,
};
pub use cpu_transport::{CpuCollective, CpuTransport};
pub use described_device::{DescribedCpu, DescribedDevice};
pub use device_fault::DeviceFault;
pub use environment::EnvironmentVariable;
pub use error::{ExecError, Stall};
pub use experts::{
    ExpertInputs, ExpertLayer, ExpertOptions, ExpertOutputs, ExpertOverlap, ExpertPass, ExpertPasses,
    run_experts_on,
};
pub use fault::{FaultInjection, FaultKind, FaultPoint};
pub use global_buffer::GlobalBuffer;
pub use group::{
    Attempt, CollectiveCalls, CollectiveRank, CollectiveSpec, CollectiveTensors, Group, GroupCollective,
    JoinConfig, PreparedRank, RankOf, Reduce, Store, TensorPair,
};
pub use group_rank::{GroupRank, Ticket};
pub use identity::{PlanDifference, PlanIdentity};
pub use interpreter::{Call, Prepared};
pub use layout::{dispatch, undispatch};
pub use linear::{
    ColumnParallelLinear, GemmCollectiveSpec, GemmOverlap, LayerCall, LayerGradient, LayerOverlap, LayerPass,
    LinearConfig, LinearInputs, LinearLayer, LinearOptions, LinearOutputs, LinearRun, LinearTensor,
    NamedBuffers, NormalisedBackward, NormalisedForward, PassesUpTo, PlannedPass, PlannedPasses, PreparedOn,
    RankBuffers, RowParallelLinear, RowParallelLinearRmsNorm, SharedInputForward, SharedInputLinear,
    all_gather_gemm, gemm_all_reduce, gemm_reduce_scatter, random_linear_inputs, run_linear, run_linear_on,
};
pub use machine::{CpuMachine, ElementTypes, Ends, Machine};
pub use memory::{address_space_left, available_memory, check_memory};
#[cfg(feature = "mpi")]
pub use mpi::MpiMachine;
pub use network::JobToken;
pub use pass::Pass;
pub use place::OpPlace;
pub use planning_threads::PlanningThreads;
pub use policy_fault::PolicyFault;
pub use profiler::Profiler;
pub use program_fault::{OperationFault, ProgramFault};
pub use random::{random_inputs, random_rows};
pub use recipient::Recipient;
pub use remote_ranks::RankActivity;
pub use rendezvous::{
    ENVIRONMENT, Facet, JOB_SECRET_VARIABLE, JobSecret, Launch, Launcher, LeavingAtTheEnd,
    RENDEZVOUS_VARIABLE, Rendezvous, RendezvousHost, RendezvousPoint, RunStart,
};
pub use rendezvous_error::RendezvousError;
pub use rendezvous_fault::{ConnectionFault, SeatFault, SeekFault, SeveralHosts, StoreFault, VariableFault};
pub use shared_rings::{RING_WORDS, SharedRings};
pub use slow_link::{SlowLink, SlowNetwork};
pub use tables_fault::TablesFault;
pub use tcp::{Mesh, TcpLoopback, TcpMachine};
pub use tensor_fault::TensorFault;
pub use transport::{CollectiveCall, CollectiveContext, Transport};
pub use wire_tensor::WireTensor;
pub use world::{Awaited, Blocker, StreamStatus, World, WorldConfig};

//! What lowerings, backends, predictions and choices ask of an overlap policy: the data that each policy's own file holds.

use super::rank_transport::{RankTransport, Workload};

/// Multiprocessors that products leave to sums. Two pairs: with 64 of 66 pairs of CTAs most shapes take as many rounds of tiles.
pub const SUMMING_WORKERS: usize = 4;

/// What an order of starts says.
#[derive(Debug)]
pub struct OrderRules {
    /// Its word on the command line.
    pub word: &'static str,
    /// Whether communication and computation have streams of their own. On one stream nothing overlaps.
    pub overlaps: bool,
    /// What a product waits for besides what it multiplies.
    pub starts: ProductStart,
    /// Whether attention is tried under it.
    pub for_attention: bool,
    /// The ways in which passes of linear layers are tried under it.
    pub layers: &'static [LayerRules],
}

/// What moves rows, and what that says.
#[derive(Debug)]
pub struct MoverRules {
    /// Its word on the command line; none where it is what moves rows without one.
    pub word: Option<&'static str>,
    /// Collectives that copy engines move, which take no worker.
    pub engines: EngineCollectives,
    /// Whether kernels send or take rows as they compute, where the transport has such kernels.
    pub in_kernels: bool,
    /// What becomes of it on a transport.
    pub on: fn(RankTransport) -> PolicySupport,
    /// Why a workload cannot be run so.
    pub refuses: fn(Workload) -> Option<&'static str>,
    /// The ways in which passes of linear layers are tried with it.
    pub layers: &'static [LayerRules],
}

/// What a product waits for besides what it multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum ProductStart {
    /// Nothing.
    Free,
    /// The start of the communication that it should hide, of the group before it.
    AfterCommunication,
    /// Nothing: one kernel computes all groups, so a group takes what it adds to the product of those before it. Where rows travel before
    /// they are multiplied, a group that comes later than the end of those before it begins anew.
    OneKernel,
}

/// Collectives that copy engines move.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineCollectives {
    /// None.
    Nothing,
    /// Group-casts that notify nobody of rows as they are delivered: who is notified may hold all workers while it waits for them.
    PlainCasts,
    /// All.
    Everything,
}

/// What becomes of a policy on a transport.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PolicySupport {
    /// It runs as it is predicted.
    Runs,
    /// It runs, and results are the same, but what it asks for is not done: why.
    WithoutEffect(&'static str),
    /// It is refused: why.
    Refused(&'static str),
}

/// A way in which passes of linear layers are tried under a policy.
#[derive(Debug)]
pub struct LayerRules {
    /// Whose ranks run layers so.
    pub ranks: LayerRanks,
    /// Of equally fast ways the one with the least is preferred.
    pub preference: u8,
    /// Workers that products leave to collectives all the time.
    pub margin: LayerMargin,
    /// How its seconds are counted.
    pub timing: PassTiming,
}

/// Ranks that run layers in some way.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerRanks {
    /// Threads of CPU ranks move rows, and take no workers from products.
    Cpu,
    /// GPUs.
    Gpus,
    /// Both.
    All,
}

/// Workers that products leave to collectives all the time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LayerMargin {
    /// None.
    Nothing,
    /// Those of the transport's kernels.
    Collectives,
    /// So many.
    Workers(usize),
}

/// How the seconds of a pass and its collectives are counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum PassTiming {
    /// One after the other.
    InSequence,
    /// Collectives of some groups of tokens run concurrently with the products of others.
    ByGroups(GroupTiming),
    /// One kernel makes or takes rows as they leave or arrive.
    OneKernelWithCollective,
    /// Copy engines move rows concurrently with the products.
    UnderCopyEngines,
}

/// What products of groups wait for and lack.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct GroupTiming {
    /// When they start.
    pub starts: ProductStart,
    /// Whether they lack the workers of collectives while one runs.
    pub yields_workers: bool,
}

//! Calls inside of graphs that somebody captured: their nodes take the parameters of other calls, as `cuGraphExecUpdate` does for whole
//! graphs.
//!
//! A call that is captured is a few nodes of a graph. The same call with another mask, captured by itself, is as many nodes of the same
//! kinds. So the graph is updated by giving each of the first nodes what the one at its place has: no kernel is slower for it, tiles have
//! the shape that is best for the mask, and nothing has a capacity.

use std::collections::HashSet;
use std::mem::MaybeUninit;
use std::ptr;

use cudarc::driver::sys::{
    CUgraph, CUgraphExec, CUgraphNode, CUgraphNodeType, CUlaunchAttributeID, CUstreamCaptureStatus,
};

use crate::graph::Captured;
use crate::library::{Driver, call};
use crate::{CudaError, Device, GraphFault, Stream};

/// What a call put into a graph that is captured.
#[derive(Debug)]
pub struct CapturedCall {
    nodes: Vec<Node>,
}

/// A call that was captured by itself, into a graph of its own that is never launched.
pub struct CallGraph {
    nodes: Vec<Node>,
    // Whose nodes they are.
    graph: Captured,
}

/// A graph that somebody captured, and what was instantiated of it.
#[derive(Clone, Copy, Debug)]
pub struct GraphHandles {
    graph: usize,
    executable: usize,
}

#[derive(Clone, Copy, Debug)]
struct Node {
    raw: usize,
    kind: NodeKind,
}

/// What an update cannot change about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum NodeKind {
    Kernel {
        cluster: [u32; 3],
    },
    Memset,
    Memcpy,
    /// It has no parameters.
    Empty,
}

impl CapturedCall {
    /// What `enqueue` adds to the graph that `stream` captures into, with its result. Nobody else adds to that graph meanwhile.
    ///
    /// # Errors
    /// Those of `enqueue`; [`CudaError::Capture`] when the stream does not capture, or a node is of a kind that is not updated.
    pub fn record<R, E: From<CudaError>>(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<R, E>,
    ) -> Result<(R, Self), E> {
        let graph = graph_of(stream)?;
        let driver = stream.device().bind()?;
        let before: HashSet<usize> = nodes_of(&driver, graph)?.into_iter().collect();
        let result = enqueue()?;
        let nodes = nodes_of(&driver, graph)?.into_iter().filter(|node| !before.contains(node));
        let nodes = nodes.map(|node| Node::new(&driver, node)).collect::<Result<_, CudaError>>()?;
        Ok((result, Self { nodes }))
    }

    /// Whether its nodes are those of this graph.
    ///
    /// # Errors
    /// When the driver refuses.
    pub fn is_in(&self, device: &Device, graph: GraphHandles) -> Result<bool, CudaError> {
        let all: HashSet<usize> = nodes_of(&*device.bind()?, graph.graph as CUgraph)?.into_iter().collect();
        Ok(!self.nodes.is_empty() && self.nodes.iter().all(|node| all.contains(&node.raw)))
    }

    /// Whether the two have a node in common, which only happens when one was of a graph that is gone.
    pub fn shares_nodes_with(&self, other: &Self) -> bool {
        self.nodes.iter().any(|node| other.nodes.iter().any(|one| one.raw == node.raw))
    }

    /// Why its nodes cannot take the parameters of `other`'s.
    ///
    /// # Errors
    /// [`CudaError::Capture`] with the reason.
    pub fn check(&self, other: &CallGraph) -> Result<(), CudaError> {
        let kinds = |nodes: &[Node]| nodes.iter().map(|node| node.kind).collect::<Vec<_>>();
        let (own, others) = (kinds(&self.nodes), kinds(&other.nodes));
        if own == others {
            return Ok(());
        }
        let reason = GraphFault::OtherCall { captured: described(&own), new: described(&others) };
        Err(CudaError::Capture { reason })
    }

    /// Launches of the graph, which has the call ([`CapturedCall::is_in`]), do what `other` does instead from now on. Those that are on their
    /// way do what they did. What `other` uses must live as long as the graph is launched, or until it is updated again.
    ///
    /// # Errors
    /// As [`CapturedCall::check`], and nothing has changed; the driver's refusal, after which the graph is of no use.
    pub fn update(&self, graph: GraphHandles, other: &CallGraph) -> Result<(), CudaError> {
        self.check(other)?;
        let device = other.graph.device();
        let driver = device.bind()?;
        let executable = graph.executable as CUgraphExec;
        for (own, from) in self.nodes.iter().zip(&other.nodes) {
            // SAFETY: both graphs are alive, by the promise of `GraphHandles` and as `other` has its own; both nodes are of one kind.
            unsafe { update_node(&driver, device, executable, own, from) }?;
        }
        Ok(())
    }
}

impl CallGraph {
    /// Captures what `enqueue` puts on `stream`, and on streams that fork from it and join it again; nothing of it runs.
    ///
    /// # Errors
    /// Those of `enqueue`; [`CudaError::Capture`], or the driver's refusal.
    pub fn capture<E: From<CudaError>>(
        stream: &Stream,
        enqueue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Self, E> {
        let graph = Captured::of(stream, enqueue)?;
        let driver = stream.device().bind()?;
        let nodes = nodes_of(&driver, graph.raw())?.into_iter();
        let nodes = nodes.map(|node| Node::new(&driver, node)).collect::<Result<_, CudaError>>()?;
        Ok(Self { nodes, graph })
    }
}

impl GraphHandles {
    /// A `CUgraph` (the runtime's `cudaGraph_t` is the same), and the `CUgraphExec` that was instantiated of it.
    ///
    /// # Safety
    /// Both live as long as this value and its copies are used; meanwhile no other thread changes or launches them. Whoever launches the
    /// graph knows what it uses, also after [`CapturedCall::update`].
    pub const unsafe fn new(graph: usize, executable: usize) -> Self {
        Self { graph, executable }
    }
}

impl Node {
    fn new(driver: &Driver, raw: usize) -> Result<Self, CudaError> {
        let mut kind = CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY;
        // SAFETY: the node is alive, the pointer is to a local.
        unsafe { call!(driver, cuGraphNodeGetType(raw as CUgraphNode, &mut kind)) }?;
        let kind = match kind {
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_KERNEL => NodeKind::Kernel { cluster: cluster(driver, raw)? },
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMSET => NodeKind::Memset,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_MEMCPY => NodeKind::Memcpy,
            CUgraphNodeType::CU_GRAPH_NODE_TYPE_EMPTY => NodeKind::Empty,
            other => {
                let reason = GraphFault::Node { kind: format!("{other:?}") };
                return Err(CudaError::Capture { reason });
            }
        };
        Ok(Self { raw, kind })
    }
}

/// Blocks of a cluster of a kernel's node, along each axis.
fn cluster(driver: &Driver, raw: usize) -> Result<[u32; 3], CudaError> {
    let mut value = MaybeUninit::zeroed();
    let attribute = CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
    // SAFETY: the node is alive, and the pointer is to a local of the right type, for which all zeros are valid.
    let value = unsafe {
        call!(driver, cuGraphKernelNodeGetAttribute(raw as CUgraphNode, attribute, value.as_mut_ptr()))?;
        value.assume_init().clusterDim
    };
    // A kernel without clusters says 0 or 1.
    Ok([value.x, value.y, value.z].map(|blocks| blocks.max(1)))
}

/// The graph that a stream captures into.
fn graph_of(stream: &Stream) -> Result<CUgraph, CudaError> {
    let driver = stream.device().bind()?;
    let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
    let (mut graph, nodes, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
    // SAFETY: the stream is alive, the pointers are to locals, or null for what is not asked.
    unsafe {
        call!(driver, cuStreamGetCaptureInfo_v2(stream.raw(), &mut status, &mut id, &mut graph, nodes, count))
    }?;
    if graph.is_null() {
        return Err(CudaError::Capture { reason: GraphFault::NoCapture });
    }
    Ok(graph)
}

/// Its nodes, in the order in which they were made.
fn nodes_of(driver: &Driver, graph: CUgraph) -> Result<Vec<usize>, CudaError> {
    let mut count = 0;
    // SAFETY: the graph is alive; without a place for nodes their number is given.
    unsafe { call!(driver, cuGraphGetNodes(graph, ptr::null_mut(), &mut count)) }?;
    let mut nodes: Vec<CUgraphNode> = vec![ptr::null_mut(); count];
    if count > 0 {
        // SAFETY: there is place for so many.
        unsafe { call!(driver, cuGraphGetNodes(graph, nodes.as_mut_ptr(), &mut count)) }?;
    }
    nodes.truncate(count);
    Ok(nodes.into_iter().map(|node| node as usize).collect())
}

/// # Safety
/// Both nodes are alive and of one kind, and `own` is one of the graph that `executable` was made of.
unsafe fn update_node(
    driver: &Driver,
    device: &Device,
    executable: CUgraphExec,
    own: &Node,
    from: &Node,
) -> Result<(), CudaError> {
    let (own, from, kind) = (own.raw as CUgraphNode, from.raw as CUgraphNode, own.kind);
    // SAFETY: the caller's promise; each pointer is to a local of the right type, which the driver fills, for which all zeros are valid.
    unsafe {
        match kind {
            NodeKind::Kernel { .. } => {
                let mut values = MaybeUninit::zeroed();
                call!(driver, cuGraphKernelNodeGetParams_v2(from, values.as_mut_ptr()))?;
                call!(driver, cuGraphExecKernelNodeSetParams_v2(executable, own, values.as_ptr()))
            }
            NodeKind::Memset => {
                let mut values = MaybeUninit::zeroed();
                call!(driver, cuGraphMemsetNodeGetParams(from, values.as_mut_ptr()))?;
                let context = device.context();
                call!(driver, cuGraphExecMemsetNodeSetParams(executable, own, values.as_ptr(), context))
            }
            NodeKind::Memcpy => {
                let mut values = MaybeUninit::zeroed();
                call!(driver, cuGraphMemcpyNodeGetParams(from, values.as_mut_ptr()))?;
                let context = device.context();
                call!(driver, cuGraphExecMemcpyNodeSetParams(executable, own, values.as_ptr(), context))
            }
            NodeKind::Empty => Ok(()),
        }
    }
}

/// Nodes in words, such as `2 kernels and 1 memset`.
fn described(nodes: &[NodeKind]) -> String {
    let count = |wanted: fn(&NodeKind) -> bool| nodes.iter().filter(|node| wanted(node)).count();
    let kernels = count(|node| matches!(node, NodeKind::Kernel { .. }));
    let (memsets, copies) =
        (count(|node| *node == NodeKind::Memset), count(|node| *node == NodeKind::Memcpy));
    let clusters: Vec<String> = nodes
        .iter()
        .filter_map(|node| match node {
            NodeKind::Kernel { cluster } => Some(cluster.iter().product::<u32>().to_string()),
            _ => None,
        })
        .collect();
    format!(
        "{kernels} kernels (clusters of {} blocks), {memsets} memsets and {copies} copies",
        if clusters.is_empty() { "no".to_owned() } else { clusters.join(", ") }
    )
}

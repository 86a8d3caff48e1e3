//! Why launches, tensor maps and captures are refused.

use std::any::Any;
use std::error::Error;
use std::fmt;
use std::sync::Arc;

use thiserror::Error;

/// Why a launch or a transport is refused: an error of the crate that refuses it, which [`Refusal::find`] gives back with its values. Two
/// of them are equal where their sentences are.
#[derive(Clone)]
pub struct Refusal(Arc<dyn Fault>);

/// An error that is its own `Any`.
trait Fault: Error + Any + Send + Sync {}

impl<E: Error + Any + Send + Sync> Fault for E {}

impl Refusal {
    /// The error, where it is one of this type.
    pub fn find<E: Error + 'static>(&self) -> Option<&E> {
        let fault: &dyn Any = &*self.0;
        fault.downcast_ref()
    }
}

impl<E: Error + Send + Sync + 'static> From<E> for Refusal {
    fn from(fault: E) -> Self {
        Self(Arc::new(fault))
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.fmt(f)
    }
}

impl fmt::Debug for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(&self.0, f)
    }
}

impl PartialEq for Refusal {
    fn eq(&self, other: &Self) -> bool {
        self.to_string() == other.to_string()
    }
}

impl Eq for Refusal {}

/// What a compiled kernel or the device does not take of a launch. The driver's own answer would be "invalid value".
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LaunchFault {
    /// The kernel is not there.
    #[error("it was not loaded")]
    NotLoaded,
    /// No kernel has such a name.
    #[error("its name holds a NUL")]
    NulInName,
    /// Nothing would run.
    #[error("grid {grid:?}, block {block:?} or cluster {cluster:?} is empty")]
    Empty {
        /// Blocks along each axis.
        grid: [u32; 3],
        /// Threads of a block along each axis.
        block: [u32; 3],
        /// Blocks of a cluster along each axis.
        cluster: [u32; 3],
    },
    /// More threads than the kernel was compiled for.
    #[error("a block of {block:?} threads, it was compiled for {most} at most")]
    Threads {
        /// Threads of a block along each axis.
        block: [u32; 3],
        /// The most of a block.
        most: u32,
    },
    /// More shared memory than the device has.
    #[error(
        "{bytes} bytes of dynamic shared memory, the device has {available} besides the kernel's {static_bytes}"
    )]
    SharedMemory {
        /// Bytes asked for.
        bytes: u32,
        /// Bytes that the device has for them.
        available: usize,
        /// Bytes that the kernel has taken already.
        static_bytes: usize,
    },
    /// Clusters that do not fill the grid.
    #[error("a grid of {grid:?} blocks is not a multiple of clusters of {cluster:?}")]
    Clusters {
        /// Blocks along each axis.
        grid: [u32; 3],
        /// Blocks of a cluster along each axis.
        cluster: [u32; 3],
    },
    /// Other arguments than the kernel's.
    #[error("arguments of {given:?} bytes, it takes {wanted:?}")]
    Arguments {
        /// Bytes of each that is given.
        given: Vec<usize>,
        /// Bytes of each that the kernel takes.
        wanted: Vec<usize>,
    },
}

/// Which restriction of `cuTensorMapEncodeTiled` a tensor map breaks. The driver's own answer would be "invalid value".
#[derive(Clone, Copy, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TensorMapFault {
    /// Of its first element.
    #[error("its address {address:#x} is not a multiple of 16")]
    Address {
        /// The address.
        address: u64,
    },
    /// Of strides.
    #[error("it has {strides} strides for {axes} axes; it takes one less than axes")]
    StrideCount {
        /// Strides given.
        strides: usize,
        /// Its axes.
        axes: usize,
    },
    /// Of elements along an axis.
    #[error("axis {axis} has {elements} elements; it takes 1 to 2^32")]
    Elements {
        /// The axis, the innermost first.
        axis: usize,
        /// Its elements.
        elements: u64,
    },
    /// Of its box.
    #[error("its box has {elements} elements along axis {axis}; it takes 1 to 256")]
    BoxElements {
        /// The axis, the innermost first.
        axis: usize,
        /// Elements of the box along it.
        elements: u32,
    },
    /// Of a stride.
    #[error("axis {axis} has a stride of {bytes} bytes; it takes multiples of 16 below 2^40 (pad the rows)")]
    Stride {
        /// The axis, the innermost first.
        axis: usize,
        /// From one of its elements to the next.
        bytes: u64,
    },
    /// Of the inner row of its box.
    #[error("the inner row of its box has {bytes} bytes; it takes multiples of 16")]
    BoxRow {
        /// Bytes of the row.
        bytes: u64,
    },
    /// Of its swizzle.
    #[error("the inner row of its box has {bytes} bytes, and this swizzle takes {most} at most")]
    Swizzle {
        /// Bytes of the row.
        bytes: u64,
        /// Bytes that the swizzle takes.
        most: u32,
    },
}

/// Why a graph cannot be captured or updated.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum GraphFault {
    /// A call of other operations than the one that was captured.
    #[error("the call that was captured is {captured}, and the new one {new}")]
    OtherCall {
        /// Nodes of the one that was captured, in order.
        captured: String,
        /// Those of the new one.
        new: String,
    },
    /// A node of a kind that the driver does not update.
    #[error("a call put a node into it that cannot be updated: {kind}")]
    Node {
        /// Its kind, as the driver's header names it.
        kind: String,
    },
    /// No capture goes on.
    #[error("the stream does not capture")]
    NoCapture,
    /// The capture gave nothing.
    #[error("the driver gave no graph; was every forked stream joined again?")]
    NoGraph,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_keeps_its_values_and_its_sentence() {
        let refusal = Refusal::from(TensorMapFault::Address { address: 8 });
        assert_eq!(refusal.to_string(), "its address 0x8 is not a multiple of 16");
        assert_eq!(refusal.find(), Some(&TensorMapFault::Address { address: 8 }));
        assert_eq!(refusal.find::<LaunchFault>(), None);
        assert_eq!(refusal, TensorMapFault::Address { address: 8 }.into());
        assert_ne!(refusal, LaunchFault::NotLoaded.into());
    }
}

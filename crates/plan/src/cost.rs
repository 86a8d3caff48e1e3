use serde::{Deserialize, Serialize};

/// A link: moving `b` bytes takes `alpha_seconds + b / bytes_per_second`.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Link {
    /// Cost of starting one collective, in seconds.
    pub alpha_seconds: f64,
    /// Bytes a second in one direction.
    pub bytes_per_second: f64,
}

impl Link {
    /// Seconds to move `bytes`; 0 when there is nothing to move.
    pub fn seconds(&self, bytes: u64) -> f64 {
        if bytes == 0 { 0.0 } else { self.alpha_seconds + bytes as f64 / self.bytes_per_second }
    }
}

/// What work costs on a machine, calibrated by measurement.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct CostModel {
    /// Attention forward, floating-point operations a second of one rank.
    pub forward_flops_per_second: f64,
    /// Attention backward, likewise.
    pub backward_flops_per_second: f64,
    /// Bytes a second that a pass over memory reads and writes, of one rank.
    pub memory_bytes_per_second: f64,
    /// Cost of one more compute launch, in seconds.
    pub launch_seconds: f64,
    /// Between ranks of one node.
    pub link: Link,
    /// Between nodes.
    pub network: Link,
}

//! The environment variables of the GPU's crates, in one list for help and documentation.

use counterpoint_driver::ENVIRONMENT as VARIABLES;
use counterpoint_exec::EnvironmentVariable;

/// All variables of our own that GPUs need. There are no others, and none of them switches something experimental.
pub const ENVIRONMENT: [EnvironmentVariable; VARIABLES.len()] =
    [variable(0), variable(1), variable(2), variable(3), variable(4)];

const fn variable(index: usize) -> EnvironmentVariable {
    let (name, purpose) = VARIABLES[index];
    EnvironmentVariable { name, purpose }
}

/// How many hardware queues the driver was given. The driver's own variable: set by whoever starts the program, only looked
/// at here.
pub(crate) fn max_connections() -> Option<String> {
    std::env::var("CUDA_DEVICE_MAX_CONNECTIONS").ok()
}

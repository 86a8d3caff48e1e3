//! Launchers: each has the stem of its kernel below `kernels/`, chooses what of it is compiled, and launches it.

mod attention;
mod specialisation;

pub use attention::{AttentionProblem, ElementType};
pub use specialisation::{MatrixUnit, Specialisation, specialisations};

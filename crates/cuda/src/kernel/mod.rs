//! Launchers: each has the stem of its kernel below `kernels/`, chooses what of it is compiled, and launches it.

mod attention;
mod layout;
mod specialisation;

pub use attention::{AttentionProblem, ElementType};
pub(crate) use layout::shared_layout;
pub use layout::{SharedLayout, shared_layouts};
pub use specialisation::{MatrixUnit, Specialisation, specialisations};

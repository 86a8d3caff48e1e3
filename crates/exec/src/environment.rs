//! How environment variables are described, for the lists that help and documentation print.

/// A variable of the environment that changes what the program does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct EnvironmentVariable {
    /// Its name.
    pub name: &'static str,
    /// What it does.
    pub purpose: &'static str,
}

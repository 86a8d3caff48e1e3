//! How errors and traces name an operation.

use std::fmt;
use std::sync::Arc;

use serde::{Deserialize, Serialize};

/// An operation's place in its Program, as traces and errors name it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpPlace {
    /// Index into the Program's operations; calls outside a Program count from 0.
    pub index: usize,
    /// The operation's label.
    pub label: Arc<str>,
    /// The stage.
    pub stage: Option<usize>,
}

impl OpPlace {
    /// A place without a stage.
    pub fn new(index: usize, label: &str) -> Self {
        Self { index, label: label.into(), stage: None }
    }
}

impl fmt::Display for OpPlace {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.stage {
            Some(stage) => write!(f, "`{}` (stage {stage})", self.label),
            None => write!(f, "`{}`", self.label),
        }
    }
}

/// Where the host itself touches a buffer.
pub(crate) fn host_place() -> OpPlace {
    OpPlace::new(0, "the host's access")
}

//! Passes over tiles that nobody waits for any more.

use std::sync::atomic::{AtomicBool, Ordering};

/// Whether a pass over tiles is to end early, because nobody wants what it finds. The default never comes.
#[derive(Clone, Copy, Debug, Default)]
pub struct Interruption<'a>(Option<&'a AtomicBool>);

impl<'a> Interruption<'a> {
    /// Comes when `flag` is set.
    pub const fn by(flag: &'a AtomicBool) -> Self {
        Self(Some(flag))
    }

    /// Whether it has come.
    pub fn has_come(self) -> bool {
        self.0.is_some_and(|flag| flag.load(Ordering::Relaxed))
    }
}

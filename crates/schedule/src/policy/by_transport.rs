//! What the transport uses by itself to move rows: kernels, a library, threads.

use super::rules::{EngineCollectives, MoverRules, PolicySupport};

pub(super) const RULES: MoverRules = MoverRules {
    word: None,
    engines: EngineCollectives::Nothing,
    in_kernels: false,
    on: |_| PolicySupport::Runs,
    refuses: |_| None,
    // Orders of starts say how layers are tried with it.
    layers: &[],
};

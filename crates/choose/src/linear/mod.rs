//! How the passes of a tensor-parallel linear layer overlap, and in which groups of tokens: by prediction, or as it was tuned.

mod compositions;
mod fastest;
mod gemm_exchange;
mod group_search;
mod groups;
mod machine;
mod pass;
mod simulated_clock;
mod wave_costs;

pub use compositions::compositions;
pub use counterpoint_schedule::ProductStart;
pub use gemm_exchange::{GemmExchange, GemmExchangeSeconds};
pub use group_search::{GroupSearcher, PassClock, SearchStep};
pub use groups::LayerGroups;
pub use machine::{LinearMachine, Offered};
pub use pass::LinearPass;
pub use simulated_clock::{ClockError, SimulatedClock};
pub use wave_costs::{LinkUse, PassCosts, PassCurves};

//! What a selftest examines on a GPU: attention and group collectives by the checks of `counterpoint-exec`, and what only this
//! crate has, matrix products and their signals, graphs, device-side barriers, ranks that fail, collectives called again
//! and again, the cache of compiled kernels, what libraries that call rely on, kernels of other libraries that run with calls, and the
//! guard bytes that the other checks rely on.

// Kernels take addresses.
#![allow(unsafe_code)]

mod arriving;
mod cache;
mod callers;
mod calls;
mod faults;
mod fused;
mod gemm;
mod graph;
mod grouped;
mod guard;
mod library_sums;
mod link_casts;
mod links;
mod long;
mod neighbours;
mod receivers;
mod refusals;
mod repeats;
mod signals;
mod soak;
mod staged;
mod subject;

pub use cache::selftest_cache;
pub use callers::selftest_callers;
pub use faults::{selftest_exhaustion, selftest_faults, selftest_isolation};
pub use fused::selftest_fused;
pub use gemm::selftest_gemm;
pub use graph::{selftest_graphs, selftest_step_graphs};
pub use grouped::selftest_grouped;
pub use guard::selftest_guard;
pub use library_sums::selftest_library_sums;
pub use links::selftest_links;
pub use long::selftest_long;
pub use neighbours::selftest_neighbours;
pub use repeats::selftest_repeats;
pub use signals::{
    selftest_normalised, selftest_signalled_products, selftest_signals, selftest_signals_in_graphs,
};
pub use subject::CudaSubject;

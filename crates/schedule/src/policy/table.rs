//! The table of overlap policies: a line and a file for each. What a policy is for lowerings, backends, predictions and choices stands in its
//! file; nobody else names it.

use serde::{Deserialize, Serialize};

use super::rules::{MoverRules, OrderRules};

macro_rules! table {
    ($(#[$about:meta])* $name:ident: $rules:ty { $($(#[$doc:meta])* $policy:ident = $file:ident,)+ }) => {
        $(#[$about])*
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
        #[serde(rename_all = "kebab-case")]
        #[non_exhaustive]
        pub enum $name { $($(#[$doc])* $policy,)+ }

        impl $name {
            /// All of them, in the order in which they are explained.
            pub const ALL: [Self; [$(stringify!($policy)),+].len()] = [$(Self::$policy),+];

            /// What it says.
            pub const fn rules(self) -> &'static $rules {
                match self { $(Self::$policy => &super::$file::RULES,)+ }
            }
        }
    };
}

table! {
    /// What decides when a communication and the computation that may run concurrently with it start.
    StartOrder: OrderRules {
        /// One stream.
        Sequential = sequential,
        /// A stream for each.
        #[default]
        Concurrent = concurrent,
        /// Computation starts once the communication that it should hide has started.
        KernelBarrier = kernel_barrier,
        /// One kernel, whose rows leave by signals.
        Signals = signals,
    }
}

table! {
    /// What moves rows between ranks.
    Mover: MoverRules {
        /// What the transport uses by itself.
        #[default]
        Transport = by_transport,
        /// The kernels that make or take the rows.
        Fused = fused,
        /// Copy engines.
        CopyEngine = copy_engine,
    }
}

/// Declares a table of a library's functions: every symbol is looked up once, when the library is opened, so that a
/// missing one is an error then. cudarc's own loading panics at the first call instead; we take its types only. Results are
/// plain `u32`: a newer library may return codes that an enum of ours would not have.
macro_rules! function_table {
    ($(#[$attribute:meta])* $table:ident { $($symbol:ident($($argument:ident: $kind:ty),* $(,)?);)* }) => {
        $(#[$attribute])*
        #[allow(non_snake_case)]
        pub(crate) struct $table {
            $(pub(crate) $symbol: unsafe extern "C" fn($($argument: $kind),*) -> u32,)*
        }

        impl $table {
            /// Looks every function up.
            fn resolve(library: &libloading::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $($symbol: {
                        // SAFETY: the signatures are those of the library's header, and whoever keeps the table keeps
                        // the library open.
                        let symbol = unsafe {
                            library.get::<unsafe extern "C" fn($($argument: $kind),*) -> u32>(
                                concat!(stringify!($symbol), "\0").as_bytes(),
                            )
                        };
                        *symbol.map_err(|_| stringify!($symbol))?
                    },)*
                })
            }
        }
    };
}

pub(super) use function_table;

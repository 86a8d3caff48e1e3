//! The macro behind every table of a library's functions.

/// Declares a table of a library's functions: every symbol is looked up once, when the library is opened, so that a
/// missing one is an error then. cudarc's own loading panics at the first call instead; we take its types only. Results are
/// plain `u32`: a newer library may return codes that an enum of ours would not have.
///
/// A table that is `counted` has a second form, whose functions are noted in [`super::driver_calls`] before they are called.
macro_rules! function_table {
    ($(#[$attribute:meta])* counted $table:ident {
        $($symbol:ident($($argument:ident: $kind:ty),* $(,)?);)*
    }) => {
        function_table! { $(#[$attribute])* pub(crate) $table { $($symbol($($argument: $kind),*);)* } }

        impl $table {
            /// The same functions, each noted before it is called.
            #[allow(non_snake_case)]
            fn counted(functions: &'static Self) -> Self {
                static FUNCTIONS: std::sync::atomic::AtomicPtr<$table> =
                    std::sync::atomic::AtomicPtr::new(std::ptr::null_mut());
                FUNCTIONS.store(std::ptr::from_ref(functions).cast_mut(), std::sync::atomic::Ordering::Release);
                $(
                    unsafe extern "C" fn $symbol($($argument: $kind),*) -> u32 {
                        $crate::library::driver_calls::note(stringify!($symbol));
                        // SAFETY: set above, before anyone has this function, to what lives as long as the process.
                        let functions = unsafe { &*FUNCTIONS.load(std::sync::atomic::Ordering::Acquire) };
                        // SAFETY: the caller's promise, about the same arguments.
                        unsafe { (functions.$symbol)($($argument),*) }
                    }
                )*
                Self { $($symbol,)* }
            }
        }
    };
    ($(#[$attribute:meta])* $visibility:vis $table:ident { $($symbol:ident($($argument:ident: $kind:ty),* $(,)?);)* }) => {
        $(#[$attribute])*
        #[allow(non_snake_case)]
        $visibility struct $table {
            $(
                #[doc = concat!("The library's own `", stringify!($symbol), "`.")]
                $visibility $symbol: unsafe extern "C" fn($($argument: $kind),*) -> u32,
            )*
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

//! Why a library that is opened at run time is of no use, and where it was looked for in vain.

use std::path::{Path, PathBuf};

use counterpoint_files::{ChildError, NoProgram, RelativeFolder};
use thiserror::Error;

/// Why a file or a name that the loader knows is of no use.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum LoadFault {
    /// It cannot be opened.
    #[error("{text}")]
    Loader {
        /// The loader's own words.
        text: String,
    },
    /// It has not the functions of the version that is needed.
    #[error("it has no function {symbol}; {needed} or newer is needed")]
    TooOld {
        /// The first that it lacks.
        symbol: &'static str,
        /// The library and its version that has them.
        needed: &'static str,
    },
    /// It lacks a function that every version has.
    #[error("it has no {symbol}")]
    NoFunction {
        /// The function.
        symbol: &'static str,
    },
    /// It says itself that it is older than what is needed.
    #[error("it is version {major}.{minor}; NVRTC 12.0 or newer is needed")]
    Version {
        /// Its major version.
        major: i32,
        /// Its minor version.
        minor: i32,
    },
    /// It does not say which version it is.
    #[error("{call} gave {code}")]
    NoVersion {
        /// The function that was asked.
        call: &'static str,
        /// Its result.
        code: u32,
    },
    /// NVRTC without the library that it opens itself.
    #[error("it does not find its libnvrtc-builtins.so.{major}.{minor}, which belongs next to it")]
    NoBuiltins {
        /// Its major version.
        major: u32,
        /// Its minor version.
        minor: u32,
    },
    /// It does not even compile an empty kernel.
    #[error("{call} failed: {text} ({code})")]
    Call {
        /// The function that failed.
        call: &'static str,
        /// Its result.
        code: u32,
        /// Its own words.
        text: String,
    },
}

/// Why `python3` does not say where its packages lie.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum PackagesFault {
    /// There is none.
    #[error(transparent)]
    NoPython(#[from] NoProgram),
    /// It gave no answer.
    #[error(transparent)]
    NoAnswer(#[from] ChildError),
}

/// A place where a library was looked for in vain.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[non_exhaustive]
pub enum TriedPlace {
    /// A file, or a name that the loader knows.
    #[error("{}", named(library, reason))]
    Library {
        /// Its path or name.
        library: PathBuf,
        /// Why it is of no use.
        reason: LoadFault,
    },
    /// The folder that a variable names, by a relative path.
    #[error(transparent)]
    Relative(#[from] RelativeFolder),
    /// The folder that a variable names, which has no such library.
    #[error("{variable}={}: no {prefix}.* in it", folder.display())]
    Folder {
        /// The variable.
        variable: &'static str,
        /// The folder.
        folder: PathBuf,
        /// How the library's name begins.
        prefix: &'static str,
    },
    /// The packages of `python3`.
    #[error("site-packages of python3: {reason}")]
    Packages {
        /// Why they are not known.
        reason: PackagesFault,
    },
}

/// The loader's own words mostly begin with the name.
fn named(library: &Path, reason: &LoadFault) -> String {
    let (name, reason) = (library.display().to_string(), reason.to_string());
    if reason.starts_with(&name) { reason } else { format!("{name}: {reason}") }
}

/// All of them, one behind the other.
pub(crate) fn list_places(tried: &[TriedPlace]) -> String {
    tried.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_library_is_named_once() {
        let place = |text: &str| TriedPlace::Library {
            library: PathBuf::from("libnccl.so"),
            reason: LoadFault::Loader { text: text.to_owned() },
        };
        let not_there = "libnccl.so: cannot open shared object file";
        assert_eq!(place(not_there).to_string(), not_there);
        assert_eq!(place("bad ELF header").to_string(), "libnccl.so: bad ELF header");
        let places = [place("a"), place("b")];
        assert_eq!(list_places(&places), "libnccl.so: a; libnccl.so: b");
    }
}

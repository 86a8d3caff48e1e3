//! Compiled kernels on disk: where they lie, which are trusted, and what goes wrong with them.

use std::collections::BTreeSet;
use std::fs;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::{Duration, SystemTime};

use counterpoint_files::{
    DistrustError, Owners, RelativeFolder, TrustedFolder, folder_in_home, folder_named,
};
use sha2::{Digest, Sha256};
use thiserror::Error;

use super::compiler::{CompilerVersion, compiler_version, remembered_version};
use super::parallel::map_parallel;
use super::translate::OPTIONS;
use super::{Cubin, KernelSource, compile, entry};
use crate::CudaError;

/// The variable that names the cache's folder.
pub const CACHE_VARIABLE: &str = "COUNTERPOINT_CACHE_DIR";

/// The variable that names whose cache is trusted besides this user's and root's, by number.
pub const CACHE_OWNER_VARIABLE: &str = "COUNTERPOINT_CACHE_OWNER";

/// Compiled kernels on disk, so that only the first process that needs one waits for the compiler.
///
/// An entry's name is a hash of all that it depends on: the source, the headers that it includes, the options, the architecture and
/// the compiler. Entries are written whole or not at all, carry a checksum, and may be used by many processes at once. Whoever can
/// write an entry decides what runs on the GPU, so the folder and its entries must belong to this user, to root or to the owner
/// that `COUNTERPOINT_CACHE_OWNER` names, and nobody else may write to them; any other is compiled again. Nothing that goes wrong with the cache is an error: it costs time, and a [`CacheWarning`] says so.
#[derive(Clone, Debug)]
pub struct CubinCache {
    folder: Option<PathBuf>,
    owners: Owners,
    /// What is wrong with its environment.
    warning: Option<CacheWarning>,
    /// What went wrong since this was last asked, by all that share it.
    warnings: Arc<Mutex<BTreeSet<CacheWarning>>>,
}

/// A compiled kernel and where it came from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CachedCubin {
    /// The kernel.
    pub cubin: Cubin,
    /// Whether it had to be compiled.
    pub origin: CubinOrigin,
    /// What went wrong with the cache on the way.
    pub warning: Option<CacheWarning>,
}

/// Where a compiled kernel came from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CubinOrigin {
    /// It was in the cache.
    Cache,
    /// It was compiled now.
    Compiled,
}

/// What keeps the cache from saving time.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
#[non_exhaustive]
pub enum CacheWarning {
    /// There is no folder for it.
    #[error(
        "kernels are compiled anew by every process: neither XDG_CACHE_HOME nor HOME is set; set {CACHE_VARIABLE}"
    )]
    NoFolder,
    /// Its folder is given by a path that depends on the current folder.
    #[error("kernels are compiled anew by every process: {reason}")]
    Relative {
        /// Which variable, and what to do.
        reason: RelativeFolder,
    },
    /// The owner who is to be trusted is no number.
    #[error(
        "{CACHE_OWNER_VARIABLE}={value} is no user's number, and nobody more is trusted; give what `id -u NAME` prints"
    )]
    Owner {
        /// The variable's value.
        value: String,
    },
    /// The folder or an entry could have been changed by someone else.
    #[error("the kernel cache does not use {}: {reason}; what it would hold was compiled again", path.display())]
    Distrusted {
        /// The folder or the entry.
        path: PathBuf,
        /// Why.
        reason: String,
    },
    /// An entry is there and cannot be read.
    #[error("the cached kernel {} cannot be read ({reason}) and was compiled again; remove it", path.display())]
    Unreadable {
        /// The entry.
        path: PathBuf,
        /// The system's words.
        reason: String,
    },
    /// An entry is not what was written.
    #[error("the cached kernel {} is damaged ({reason}) and was compiled again", path.display())]
    Damaged {
        /// The entry.
        path: PathBuf,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// A compiled kernel cannot be kept.
    #[error(
        "compiled kernels cannot be kept in {} ({reason}): every process compiles anew; mend it or set {CACHE_VARIABLE}",
        folder.display()
    )]
    Unwritable {
        /// The cache's folder.
        folder: PathBuf,
        /// The system's words.
        reason: String,
    },
}

/// What the cache holds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct CacheUse {
    /// Kernels.
    pub entries: usize,
    /// Their bytes.
    pub bytes: u64,
}

impl CubinCache {
    /// The cache in `COUNTERPOINT_CACHE_DIR`, else in `$XDG_CACHE_HOME/counterpoint`, else in `~/.cache/counterpoint`.
    pub fn from_environment() -> Self {
        let kept = || folder_in_home("XDG_CACHE_HOME", ".cache").map(|base| base.join("counterpoint"));
        let (folder, mut warning) = match folder_named(CACHE_VARIABLE) {
            Ok(named) => (named.or_else(kept), None),
            Err(reason) => (None, Some(CacheWarning::Relative { reason })),
        };
        if folder.is_none() {
            warning = warning.or(Some(CacheWarning::NoFolder));
        }
        let mut owners = Owners::default();
        if let Some(value) = std::env::var(CACHE_OWNER_VARIABLE).ok().filter(|value| !value.is_empty()) {
            owners.also = value.parse().ok();
            if owners.also.is_none() {
                warning = warning.or(Some(CacheWarning::Owner { value }));
            }
        }
        Self { folder, owners, warning, warnings: Arc::default() }
    }

    /// The cache in a folder, which is made when something is written.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        let (owners, warning) = (Owners::default(), None);
        Self { folder: Some(folder.into()), owners, warning, warnings: Arc::default() }
    }

    /// The process's, from its environment when it was first asked for.
    pub fn of_process() -> &'static Self {
        static CACHE: OnceLock<CubinCache> = OnceLock::new();
        CACHE.get_or_init(Self::from_environment)
    }

    /// What kept this cache from saving time since this was last asked, each thing once.
    pub fn take_warnings(&self) -> Vec<CacheWarning> {
        let mut warnings = self.warnings.lock().unwrap_or_else(PoisonError::into_inner);
        std::mem::take(&mut *warnings).into_iter().collect()
    }

    /// What will keep this cache from saving time, as far as its folder shows.
    pub fn look(&self) -> Option<CacheWarning> {
        self.warning.clone().or_else(|| self.open().err())
    }

    /// Its folder, open; `None` where there is none yet.
    fn open(&self) -> Result<Option<TrustedFolder>, CacheWarning> {
        let Some(path) = &self.folder else { return Ok(None) };
        match TrustedFolder::open(path, self.owners) {
            Ok(folder) => Ok(Some(folder)),
            Err(error) => refused(path, error).map(|()| None),
        }
    }

    /// Its folder, where it has one.
    pub fn folder(&self) -> Option<&Path> {
        self.folder.as_deref()
    }

    /// What it holds. Nothing where there is no folder.
    pub fn usage(&self) -> CacheUse {
        let entries = self.folder.iter().flat_map(|folder| files(folder, ENTRY_SUFFIX));
        entries.fold(CacheUse::default(), |sum, file| CacheUse {
            entries: sum.entries + 1,
            bytes: sum.bytes + file.bytes,
        })
    }

    /// The compiled form of each source, in their order: from the cache, or compiled at the same time.
    pub fn cubins(&self, sources: &[&KernelSource]) -> Vec<Result<CachedCubin, CudaError>> {
        let compiler = match self.open() {
            Ok(Some(folder)) => remembered_version(&folder),
            Ok(None) | Err(_) => compiler_version(),
        };
        let compiler = match compiler {
            Ok(compiler) => compiler,
            Err(error) => return sources.iter().map(|_| Err(error.clone())).collect(),
        };
        let mut distinct = sources.to_vec();
        distinct.sort_unstable();
        distinct.dedup();
        let found = map_parallel(&distinct, |source| self.cubin(source, &compiler));
        let compiled = |found: &Result<CachedCubin, _>| {
            found.as_ref().is_ok_and(|found| found.origin == CubinOrigin::Compiled)
        };
        if found.iter().any(compiled) {
            self.prune();
        }
        let warnings = found.iter().filter_map(|found| found.as_ref().ok()?.warning.clone());
        self.warnings.lock().unwrap_or_else(PoisonError::into_inner).extend(warnings);
        let index = |source: &KernelSource| distinct.partition_point(|other| *other < source);
        sources.iter().map(|source| found[index(source)].clone()).collect()
    }

    fn cubin(&self, source: &KernelSource, compiler: &CompilerVersion) -> Result<CachedCubin, CudaError> {
        let unread = match self.read(source, compiler) {
            Ok(Some(cubin)) => return Ok(CachedCubin { cubin, origin: CubinOrigin::Cache, warning: None }),
            Ok(None) => self.warning.clone(),
            Err(warning) => Some(warning),
        };
        let cubin = compile(source)?;
        let unwritten = self.write(source, compiler, &cubin).err();
        Ok(CachedCubin { cubin, origin: CubinOrigin::Compiled, warning: unwritten.or(unread) })
    }

    fn read(&self, source: &KernelSource, compiler: &CompilerVersion) -> Result<Option<Cubin>, CacheWarning> {
        let Some(folder) = self.open()? else { return Ok(None) };
        let name = key(source, compiler) + ENTRY_SUFFIX;
        let path = folder.path().join(&name);
        match folder.read(name.as_ref(), MOST_ENTRY_BYTES) {
            Ok(contents) => match entry::decode(&contents) {
                Ok(cubin) => Ok(Some(cubin)),
                Err(reason) => Err(CacheWarning::Damaged { path, reason }),
            },
            Err(error) => refused(&path, error).map(|()| None),
        }
    }

    fn write(
        &self,
        source: &KernelSource,
        compiler: &CompilerVersion,
        cubin: &Cubin,
    ) -> Result<(), CacheWarning> {
        let Some(path) = &self.folder else { return Ok(()) };
        let unwritable = |reason: String| CacheWarning::Unwritable { folder: path.clone(), reason };
        let folder = TrustedFolder::open_or_make(path, self.owners).map_err(|error| match error {
            DistrustError::Io(error) => unwritable(error.to_string()),
            other => CacheWarning::Distrusted { path: path.clone(), reason: other.to_string() },
        })?;
        let name = key(source, compiler) + ENTRY_SUFFIX;
        let written = folder.write(name.as_ref(), &entry::encode(cubin), PART_SUFFIX);
        written.map_err(|error| unwritable(error.to_string()))
    }

    /// Removes the oldest entries when there are too many, and what killed processes left half written.
    fn prune(&self) {
        let Some(folder) = &self.folder else { return };
        let now = SystemTime::now();
        let age = |file: &File| now.duration_since(file.modified).unwrap_or_default();
        for file in files(folder, PART_SUFFIX).filter(|file| age(file) > ABANDONED) {
            let _ = fs::remove_file(file.path);
        }
        let mut entries: Vec<_> = files(folder, ENTRY_SUFFIX).collect();
        let mut bytes: u64 = entries.iter().map(|file| file.bytes).sum();
        entries.sort_by_key(|file| file.modified);
        for file in entries {
            if bytes <= MOST_BYTES {
                break;
            }
            bytes -= file.bytes;
            let _ = fs::remove_file(file.path);
        }
    }
}

/// Why something that is there is not used. What is not there is no matter, nor is a path through what is no folder: writing will say so.
fn refused(path: &Path, error: DistrustError) -> Result<(), CacheWarning> {
    let path = path.to_owned();
    match error {
        DistrustError::Io(error)
            if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) =>
        {
            Ok(())
        }
        DistrustError::Io(error) => Err(CacheWarning::Unreadable { path, reason: error.to_string() }),
        other => Err(CacheWarning::Distrusted { path, reason: other.to_string() }),
    }
}

const ENTRY_SUFFIX: &str = ".cubin";
pub(super) const PART_SUFFIX: &str = ".part";

/// Ten times the largest kernel that ships.
const MOST_ENTRY_BYTES: u64 = 64 << 20;

/// All kernels that ship take a few tens of MB; this is room for many versions of them.
const MOST_BYTES: u64 = 1 << 30;

/// No write takes so long.
const ABANDONED: Duration = Duration::from_secs(3600);

struct File {
    path: PathBuf,
    bytes: u64,
    modified: SystemTime,
}

fn files(folder: &Path, suffix: &'static str) -> impl Iterator<Item = File> {
    fs::read_dir(folder).into_iter().flatten().filter_map(move |entry| {
        let path = entry.ok()?.path();
        let metadata = path.metadata().ok()?;
        let named = path.file_name()?.to_str()?.ends_with(suffix);
        (named && metadata.is_file()).then(|| File {
            bytes: metadata.len(),
            modified: metadata.modified().unwrap_or(SystemTime::UNIX_EPOCH),
            path,
        })
    })
}

/// All that a compiled kernel depends on, hashed.
fn key(source: &KernelSource, compiler: &CompilerVersion) -> String {
    let mut hash = Sha256::new();
    for (name, text) in source.headers() {
        part(&mut hash, name.as_bytes());
        part(&mut hash, text.as_bytes());
    }
    let (major, minor) = compiler.version;
    for text in [source.name(), source.text(), &source.arch().to_string(), &format!("{major}.{minor}")] {
        part(&mut hash, text.as_bytes());
    }
    hash.update(compiler.bytes.to_le_bytes());
    for option in OPTIONS {
        part(&mut hash, option.as_bytes());
    }
    hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect()
}

/// Hashes a part with its length, so that no two lists of parts are the same bytes.
fn part(hash: &mut Sha256, bytes: &[u8]) {
    hash.update((bytes.len() as u64).to_le_bytes());
    hash.update(bytes);
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Arch;

    #[test]
    fn the_key_depends_on_everything() {
        let compiler = CompilerVersion { version: (13, 0), path: PathBuf::from("a"), bytes: 5 };
        let source = KernelSource::new("f", Arch::SM_80).line("x");
        let mut keys = vec![
            key(&source, &compiler),
            key(&source, &CompilerVersion { version: (12, 9), ..compiler.clone() }),
            key(&source, &CompilerVersion { bytes: 6, ..compiler.clone() }),
            key(&source.clone().line("y"), &compiler),
            key(&source.clone().line("#include \"types.cuh\""), &compiler),
            key(&KernelSource::new("g", Arch::SM_80).line("x"), &compiler),
            key(&KernelSource::new("f", Arch::SM_90A).line("x"), &compiler),
        ];
        assert_eq!(keys[0], key(&source, &CompilerVersion { path: PathBuf::from("b"), ..compiler }));
        let count = keys.len();
        keys.sort();
        keys.dedup();
        assert_eq!(keys.len(), count);
    }

    #[test]
    fn old_entries_go_and_parts_of_the_killed_too() {
        let folder = tempfile::tempdir().unwrap();
        let file = |name: &str, bytes: u64, age: u64| {
            let file = fs::File::create(folder.path().join(name)).unwrap();
            file.set_len(bytes).unwrap();
            file.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
        };
        // Sparse files: nothing of this size is on the disk.
        file("old.cubin", MOST_BYTES / 2, 300);
        file("middle.cubin", MOST_BYTES / 2, 200);
        file("new.cubin", MOST_BYTES / 4, 100);
        file(".killed.part", 1, 7200);
        file(".working.part", 1, 5);
        file("compiler-0.txt", 1, 9000);
        let cache = CubinCache::at(folder.path());
        assert_eq!(cache.usage().entries, 3);
        cache.prune();
        let mut left: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        left.sort();
        assert_eq!(left, [".working.part", "compiler-0.txt", "middle.cubin", "new.cubin"]);
        assert_eq!(cache.usage(), CacheUse { entries: 2, bytes: MOST_BYTES / 4 * 3 });
    }
}

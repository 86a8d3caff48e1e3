use std::fs;
use std::io::{self, ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use sha2::{Digest, Sha256};
use thiserror::Error;

use super::compiler::{CompilerVersion, compiler_version, remembered_version};
use super::headers::HEADERS;
use super::parallel::map_parallel;
use super::translate::OPTIONS;
use super::{Cubin, KernelSource, compile, entry};
use crate::CudaError;

/// The variable that names the cache's folder.
pub const CACHE_VARIABLE: &str = "COUNTERPOINT_CACHE_DIR";

/// Compiled kernels on disk, so that only the first process that needs one waits for the compiler.
///
/// An entry's name is a hash of all that it depends on: the source, every header, the options, the architecture and the
/// compiler. Entries are written whole or not at all, carry a checksum, and may be used by many processes at once.
/// Nothing that goes wrong with the cache is an error: it costs time, and a [`CacheWarning`] says so.
#[derive(Clone, Debug)]
pub struct CubinCache {
    folder: Option<PathBuf>,
    /// Why there is no folder.
    warning: Option<CacheWarning>,
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
        let variable = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        // A relative XDG_CACHE_HOME is invalid by its specification.
        let base = variable("XDG_CACHE_HOME").filter(|path| path.is_absolute());
        let base = base.or_else(|| variable("HOME").map(|home| home.join(".cache")));
        let folder = variable(CACHE_VARIABLE).or_else(|| base.map(|base| base.join("counterpoint")));
        let warning = folder.is_none().then_some(CacheWarning::NoFolder);
        Self { folder, warning }
    }

    /// The cache in a folder, which is made when something is written.
    pub fn at(folder: impl Into<PathBuf>) -> Self {
        Self { folder: Some(folder.into()), warning: None }
    }

    /// The process's, from its environment when it was first asked for.
    pub(crate) fn of_process() -> &'static Self {
        static CACHE: OnceLock<CubinCache> = OnceLock::new();
        CACHE.get_or_init(Self::from_environment)
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
        let compiler = match &self.folder {
            Some(folder) => remembered_version(folder),
            None => compiler_version(),
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

    fn path(&self, source: &KernelSource, compiler: &CompilerVersion) -> Option<PathBuf> {
        Some(self.folder.as_ref()?.join(key(source, compiler) + ENTRY_SUFFIX))
    }

    fn read(&self, source: &KernelSource, compiler: &CompilerVersion) -> Result<Option<Cubin>, CacheWarning> {
        let Some(path) = self.path(source, compiler) else { return Ok(None) };
        match fs::read(&path) {
            Ok(contents) => match entry::decode(&contents) {
                Ok(cubin) => Ok(Some(cubin)),
                Err(reason) => Err(CacheWarning::Damaged { path, reason }),
            },
            // Not a directory: there cannot be an entry, and writing one will say why.
            Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(None),
            Err(error) => Err(CacheWarning::Unreadable { path, reason: error.to_string() }),
        }
    }

    fn write(
        &self,
        source: &KernelSource,
        compiler: &CompilerVersion,
        cubin: &Cubin,
    ) -> Result<(), CacheWarning> {
        let (Some(folder), Some(path)) = (&self.folder, self.path(source, compiler)) else { return Ok(()) };
        write_whole(folder, &path, &entry::encode(cubin)).map_err(|error| {
            let (folder, reason) = (folder.clone(), error.to_string());
            CacheWarning::Unwritable { folder, reason }
        })
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

const ENTRY_SUFFIX: &str = ".cubin";
const PART_SUFFIX: &str = ".part";

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

/// Writes a file whole or not at all, beside what other processes do. Not synchronised with the disk: a power failure leaves
/// an entry whose checksum is wrong, at worst.
pub(super) fn write_whole(folder: &Path, path: &Path, contents: &[u8]) -> io::Result<()> {
    fs::create_dir_all(folder)?;
    let mut part = tempfile::Builder::new().prefix(".").suffix(PART_SUFFIX).tempfile_in(folder)?;
    part.write_all(contents)?;
    part.persist(path)?;
    Ok(())
}

/// All that a compiled kernel depends on, hashed.
fn key(source: &KernelSource, compiler: &CompilerVersion) -> String {
    static HEADERS_HASH: OnceLock<[u8; 32]> = OnceLock::new();
    let headers = HEADERS_HASH.get_or_init(|| {
        let mut hash = Sha256::new();
        for header in HEADERS {
            part(&mut hash, header.name.as_bytes());
            part(&mut hash, header.text.as_bytes());
        }
        hash.finalize().into()
    });
    let mut hash = Sha256::new();
    hash.update(headers);
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

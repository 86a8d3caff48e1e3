//! The scripts of `benches/peers`, which the binary carries and unpacks into a temporary folder to run them.

use std::env;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use counterpoint_console::{CliError, FlagFault, PeersFault, TemporaryFolder};
use counterpoint_files::{absolute_entries, command, program};
use counterpoint_mask::PACKED_DOCUMENTS;

/// A script of `benches/peers` with the modules and data that it reads, in a temporary folder that goes with it.
pub(crate) struct Script {
    folder: TemporaryFolder,
    name: &'static str,
    python: PathBuf,
}

/// Embeds files of `benches/peers`, by their paths there.
macro_rules! embedded {
    ($($path:literal),* $(,)?) => {
        &[$(($path, include_str!(concat!("../../../../benches/peers/", $path)))),*]
    };
}

/// All scripts share modules, so they come together.
const FILES: &[(&str, &str)] = embedded![
    "attention.py",
    "common/command_line.py",
    "common/exact_attention.py",
    "common/interleaved.py",
    "common/pytorch.py",
    "common/ranks.py",
    "context_parallel.py",
    "experts/peers.py",
    "experts/problem.py",
    "gemm_collective.py",
    "grouped_gemm.py",
    "layers/check.py",
    "layers/layer.py",
    "layers/passes.py",
    "one_gpu/backends.py",
    "one_gpu/case.py",
    "one_gpu/clock.py",
    "one_gpu/cudnn_flex.py",
    "one_gpu/ffa.py",
    "one_gpu/masks.py",
    "one_gpu/reference.py",
    "one_gpu/tensors.py",
    "sharded/problem.py",
    "sharded/ring.py",
    "sharded/ways.py",
    "tensor_parallel.py",
];

impl Script {
    /// Writes all of them as they lie in `benches`, and takes the one with that name.
    pub(crate) fn unpack(name: &'static str) -> Result<Self, CliError> {
        let python = program("python3").map_err(CliError::no_peers)?;
        let write = || {
            let folder = TemporaryFolder::new()?;
            let (peers, data) = (folder.path().join("peers"), folder.path().join("data"));
            for (path, text) in FILES {
                write_with_folders(&peers.join(path), text)?;
            }
            for (seqlen, text) in PACKED_DOCUMENTS {
                write_with_folders(&data.join(format!("documents_{}k.txt", seqlen >> 10)), text)?;
            }
            Ok(folder)
        };
        let folder = write().map_err(|error: io::Error| CliError::no_peers(PeersFault::NoFolder(error)))?;
        Ok(Self { folder, name, python })
    }

    /// The folder of `benches/peers`.
    #[cfg(test)]
    pub(super) fn peers(&self) -> std::path::PathBuf {
        self.folder.path().join("peers")
    }

    /// `python3` with the script, to which the caller adds arguments.
    pub(crate) fn command(&self) -> Command {
        let mut command = command(&self.python);
        let peers = self.folder.path().join("peers");
        // Neither it nor a process of its own imports from the current folder; where PyTorch lies is still the user's to say.
        let mut packages = vec![peers.clone()];
        packages.extend(absolute_entries(&env::var_os("PYTHONPATH").unwrap_or_default()));
        // None of them holds a separator: the first is ours, the others were split where they are joined.
        env::join_paths(packages).map(|packages| command.env("PYTHONPATH", packages)).ok();
        command.env("PYTHONSAFEPATH", "1");
        // Without files of byte code: it runs once.
        command.arg("-B").arg(peers.join(self.name));
        command
    }
}

/// What `--peer-folder` names, by a path that holds wherever the script runs.
pub(crate) fn peer_folder(folder: &Path) -> Result<PathBuf, CliError> {
    let refused = |fault: FlagFault| CliError::flag("--peer-folder", folder.display().to_string(), fault);
    let unknown = |source: io::Error| refused(FlagFault::Path { source });
    let found = folder.canonicalize().map_err(unknown)?;
    match found.is_dir() {
        true => Ok(found),
        false => Err(refused(FlagFault::NoFolder)),
    }
}

fn write_with_folders(path: &Path, text: &str) -> io::Result<()> {
    path.parent().map_or(Ok(()), fs::create_dir_all)?;
    fs::write(path, text)
}

/// That one of the files has these strings: what both sides must know.
#[cfg(test)]
pub(crate) fn assert_strings<'a>(path: &str, strings: impl IntoIterator<Item = &'a str>) {
    for string in strings {
        assert!(text_of(path).contains(&format!("\"{string}\"")), "{string} in {path}");
    }
}

/// The text of one of the files, for tests of what both sides must know.
#[cfg(test)]
pub(crate) fn text_of(path: &str) -> &'static str {
    FILES.iter().find(|(name, _)| *name == path).unwrap().1
}

#[cfg(test)]
mod tests {
    use super::*;

    fn files_below(folder: &Path, prefix: &str, found: &mut Vec<String>) {
        for entry in fs::read_dir(folder).unwrap() {
            let entry = entry.unwrap();
            let name = format!("{prefix}{}", entry.file_name().to_str().unwrap());
            match entry.file_type().unwrap().is_dir() {
                true if name.ends_with("__pycache__") => {}
                true => files_below(&entry.path(), &format!("{name}/"), found),
                false => found.push(name),
            }
        }
    }

    #[test]
    fn every_file_of_the_peers_is_inside() {
        let mut found = Vec::new();
        files_below(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches/peers"), "", &mut found);
        found.sort();
        let inside: Vec<&str> = FILES.iter().map(|(path, _)| *path).collect();
        assert_eq!(inside, found);
    }

    #[test]
    fn what_is_unpacked_lies_as_it_does_here_and_goes_with_it() {
        let script = Script::unpack("attention.py").unwrap();
        let root = script.folder.path().to_owned();
        let mut found = Vec::new();
        files_below(&root, "", &mut found);
        assert_eq!(found.len(), FILES.len() + PACKED_DOCUMENTS.len());
        for path in ["peers/attention.py", "peers/common/pytorch.py", "data/documents_8k.txt"] {
            let here = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../benches").join(path);
            assert_eq!(fs::read(root.join(path)).unwrap(), fs::read(here).unwrap(), "{path}");
        }
        drop(script);
        assert!(!root.exists());
    }

    #[test]
    fn all_of_them_are_python() {
        let mut command = Command::new("python3");
        command
            .args(["-c", "import sys\nfor path in sys.argv[1:]: compile(open(path).read(), path, 'exec')"]);
        let script = Script::unpack("attention.py").unwrap();
        let scripts = FILES.iter().map(|(path, _)| *path).filter(|path| path.ends_with(".py"));
        command.args(scripts.map(|path| script.peers().join(path)));
        assert!(command.status().unwrap().success());
    }
}

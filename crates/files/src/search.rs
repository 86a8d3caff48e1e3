//! Where programs and folders are looked for: by absolute paths only, so that what lies in the current folder is never taken.

use std::env;
use std::ffi::{OsStr, OsString};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use thiserror::Error;

/// A variable that should name a folder has a path that means another one wherever the program is started.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Error)]
#[error("{variable}={} is not an absolute path, and nothing is looked for in the current folder; write it from / on", path.display())]
pub struct RelativeFolder {
    /// The variable.
    pub variable: &'static str,
    /// Its value.
    pub path: PathBuf,
}

/// No folder of `PATH` has a program.
#[derive(Clone, Debug, PartialEq, Eq, Error)]
#[error("no absolute folder of PATH has a program {name}")]
pub struct NoProgram {
    /// What it is called.
    pub name: String,
}

/// The folder that a variable names; `None` where it is not set or empty.
///
/// # Errors
/// A relative path.
pub fn folder_named(variable: &'static str) -> Result<Option<PathBuf>, RelativeFolder> {
    match env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from) {
        Some(path) if !path.is_absolute() => Err(RelativeFolder { variable, path }),
        folder => Ok(folder),
    }
}

/// The folder of a kind of files of the user: what the XDG variable names, else `below_home` in the home folder. A path that is not
/// absolute counts as not set, as the XDG specification demands.
pub fn folder_in_home(xdg_variable: &str, below_home: &str) -> Option<PathBuf> {
    let absolute =
        |variable: &str| env::var_os(variable).map(PathBuf::from).filter(|path| path.is_absolute());
    absolute(xdg_variable).or_else(|| Some(absolute("HOME")?.join(below_home)))
}

/// The folder of temporary files: `TMPDIR` where that is an absolute path, else `/tmp`.
pub fn temporary_folder() -> PathBuf {
    Some(env::temp_dir()).filter(|folder| folder.is_absolute()).unwrap_or_else(|| PathBuf::from("/tmp"))
}

/// The absolute paths of a list such as `PATH`. An empty or relative entry means the current folder to others, and nothing here.
pub fn absolute_entries(list: &OsStr) -> Vec<PathBuf> {
    env::split_paths(list).filter(|path| path.is_absolute()).collect()
}

/// The file that a program's name stands for: the first of that name that may be run in the absolute folders of `PATH`.
///
/// # Errors
/// None of them has one.
pub fn program(name: &str) -> Result<PathBuf, NoProgram> {
    let folders = absolute_entries(&env::var_os("PATH").unwrap_or_default());
    let files = folders.into_iter().map(|folder| folder.join(name));
    files.into_iter().find(|file| may_be_run(file)).ok_or_else(|| NoProgram { name: name.to_owned() })
}

fn may_be_run(file: &Path) -> bool {
    file.metadata().is_ok_and(|metadata| metadata.is_file() && metadata.permissions().mode() & 0o111 != 0)
}

/// Lists in which an empty or relative entry would have a child look into the current folder.
const LISTS: [&str; 3] = ["PATH", "LD_LIBRARY_PATH", "PYTHONPATH"];

/// A command that runs what [`program`] found, and that looks for nothing in the current folder either: of the lists of folders that
/// it inherits it gets the absolute entries.
pub fn command(program: &Path) -> Command {
    let mut command = Command::new(program);
    for list in LISTS {
        let Some(value) = env::var_os(list) else { continue };
        match cleaned(&value) {
            Some(value) => command.env(list, value),
            None => command.env_remove(list),
        };
    }
    command
}

/// The absolute entries of a list; `None` without any.
fn cleaned(list: &OsStr) -> Option<OsString> {
    let entries = absolute_entries(list);
    // They were split where they are joined, so none of them holds a separator.
    if entries.is_empty() { None } else { env::join_paths(entries).ok() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_means_the_current_folder_means_nothing() {
        let paths = |list: &str| absolute_entries(OsStr::new(list));
        assert_eq!(paths(":/bin::.:bin:./x:/usr/bin:"), [PathBuf::from("/bin"), PathBuf::from("/usr/bin")]);
        assert!(paths("").is_empty() && paths(":").is_empty() && paths("~/bin").is_empty());
        assert_eq!(cleaned(OsStr::new(":/a::b:/c")), Some(OsString::from("/a:/c")));
        assert_eq!(cleaned(OsStr::new(":.")), None);
    }

    #[test]
    fn programs_are_found_by_absolute_paths() {
        let shell = program("sh").unwrap();
        assert!(shell.is_absolute() && shell.ends_with("sh"));
        assert_eq!(command(&shell).get_program(), shell.as_os_str());
        let name = "no-such-program".to_owned();
        assert_eq!(program(&name), Err(NoProgram { name }));
    }
}

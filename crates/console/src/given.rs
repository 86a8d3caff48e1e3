//! What the ranks of a job must have been started with alike, before anything runs: every flag of the command but those that only say
//! where results go, and the contents of every file that it reads. A flag that is new is compared until it is named here.

use std::path::Path;

use counterpoint_exec::Facet;

use crate::command_line::{CommandLine, Flag};
use crate::digest::digest;
use crate::error::CliError;
use crate::files;
use crate::input::TensorFile;
use crate::profile;

/// Flags that change where results go and how they are printed, never what they are.
pub const RESULTS: [&str; 5] = ["output", "report", "trace", "json", "plans"];
/// The file of tensors: it is too large to be read by every rank, and is compared further when its rows are.
const TENSORS: &str = "input";
/// The machine's profile, which rank 0 plans with.
const PROFILE: &str = "profile";
/// Longest other file.
const MAX_BYTES: u64 = 16 << 20;

/// What is compared, what explains most first.
pub fn facets(line: &CommandLine) -> Vec<Facet> {
    let mut facets = vec![
        Facet::new("the version of counterpoint", env!("CARGO_PKG_VERSION")),
        Facet::new("the command", line.command()),
    ];
    let compared = |flag: &&Flag| !RESULTS.contains(&flag.name.as_str()) && !flag.values.is_empty();
    for flag in line.flags().iter().filter(compared) {
        let name = format!("--{}", flag.name);
        match flag.is_file {
            true => facets.extend(flag.values.iter().flat_map(|path| of_file(flag, &name, Path::new(path)))),
            false => facets.push(Facet::new(&name, flag.value())),
        }
    }
    facets
}

/// A file by what it holds: its path may be another on another host.
fn of_file(flag: &Flag, name: &str, path: &Path) -> Vec<Facet> {
    // A rank that cannot read it says so to all.
    let text = |what: Result<String, _>| what.unwrap_or_else(|error: CliError| error.to_string());
    match flag.name.as_str() {
        TENSORS => match TensorFile::open(path) {
            Ok(mut file) => vec![
                Facet::new(&format!("what {name} holds"), file.describe()),
                Facet::new(&format!("the contents of {name}"), text(file.sample())),
            ],
            Err(error) => vec![Facet::new(&format!("what {name} holds"), error)],
        },
        PROFILE => {
            let read = profile::read(path).map(|profile| digest(profile.to_json().as_bytes()));
            vec![Facet::new(&format!("the profile of {name}"), text(read))]
        }
        _ => {
            let read = files::read_text("file", path, MAX_BYTES).map(|text| digest(text.as_bytes()));
            vec![Facet::new(&format!("the contents of {name}"), text(read))]
        }
    }
}

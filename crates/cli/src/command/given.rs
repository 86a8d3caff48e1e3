//! What the ranks of a job must have been started with alike, before anything runs: every flag of the command but those that only say
//! where results go, and the contents of every file that it reads. A flag that is new is compared until it is named here.

use std::path::Path;

use counterpoint_exec::Facet;

use crate::command_line::{CommandLine, Flag};
use crate::digest::digest;
use crate::error::CliError;
use crate::input::TensorFile;
use crate::{files, profile};

/// Flags that change where results go and how they are printed, never what they are.
const RESULTS: [&str; 4] = ["output", "report", "trace", "json"];
/// The file of tensors: it is too large to be read by every rank, and is compared further when its rows are.
const TENSORS: &str = "input";
/// The machine's profile, which rank 0 plans with.
const PROFILE: &str = "profile";
/// Longest other file.
const MAX_BYTES: u64 = 16 << 20;

/// What is compared, what explains most first.
pub(crate) fn facets(line: &CommandLine) -> Vec<Facet> {
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments;

    fn line(text: &str) -> CommandLine {
        let command = arguments::command();
        let matches = command.clone().try_get_matches_from(text.split_whitespace()).unwrap();
        CommandLine::of(&command, &matches)
    }

    /// Whatever is added to a command that ranks run is compared, unless it is named above.
    #[test]
    fn every_flag_is_compared_but_those_of_results() {
        let folder = tempfile::tempdir().unwrap();
        for command in
            ["attention --mask full:8", "bench cp", "bench tp", "bench group-cast", "bench group-reduce"]
        {
            let path = folder.path().join("missing");
            let flags = line(&format!("counterpoint {command}")).flags().to_vec();
            for flag in &flags {
                let facets = |values: Vec<String>| {
                    let mut line = line(&format!("counterpoint {command}"));
                    line.set(&flag.name, values);
                    super::facets(&line)
                };
                let value =
                    if flag.is_file { path.display().to_string() } else { "something else".to_owned() };
                let is_compared = facets(vec![value]) != facets(Vec::new());
                assert_eq!(is_compared, !RESULTS.contains(&flag.name.as_str()), "{command} --{}", flag.name);
            }
        }
    }

    #[test]
    fn files_are_compared_by_what_they_hold() {
        let folder = tempfile::tempdir().unwrap();
        let of = |name: &str, contents: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, contents).unwrap();
            facets(&line(&format!("counterpoint attention --mask full:8 --profile {}", path.display())))
        };
        let profile = counterpoint_plan::MachineProfile::h200();
        let same = of("a", &profile.to_json());
        assert_eq!(same, of("b", &profile.to_json()));
        let mut other = profile;
        other.cost.link.alpha_seconds *= 2.0;
        assert_ne!(same, of("c", &other.to_json()));
        let broken = of("d", "{}");
        let facet = broken.iter().find(|facet| facet.what == "the profile of --profile").unwrap();
        assert!(facet.value.contains("machine profile"), "{}", facet.value);
    }
}

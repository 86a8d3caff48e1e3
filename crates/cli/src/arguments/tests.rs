//! The parser, and what a command line is taken apart into.

use counterpoint_console::{CommandLine, FLAGS_OF_RESULTS, facets};

use super::*;

#[test]
fn well_formed() {
    use clap::CommandFactory;
    Arguments::command().debug_assert();
    command().debug_assert();
}

fn parsed(line: &str) -> CommandLine {
    let command = command();
    let matches = command.clone().try_get_matches_from(line.split_whitespace()).unwrap();
    CommandLine::of(&command, &matches)
}

fn value(line: &CommandLine, name: &str) -> Option<String> {
    let flag = line.flags().iter().find(|flag| flag.name == name).unwrap();
    (!flag.values.is_empty()).then(|| flag.value())
}

#[test]
fn every_flag_is_there_with_what_was_written() {
    let line = parsed("counterpoint attention --mask causal:4k --stages 2 --backward --query-exchange auto");
    assert_eq!(line.command(), "attention");
    for (name, expected) in [
        ("mask", Some("causal:4k")),
        ("stages", Some("2")),
        ("backward", Some("true")),
        ("deterministic", Some("false")),
        ("query-exchange", Some("auto")),
        ("cp-size", Some("1")),
        ("chunk-size", None),
    ] {
        assert_eq!(value(&line, name).as_deref(), expected, "{name}");
    }
    let files: Vec<&str> =
        line.flags().iter().filter(|flag| flag.is_file).map(|flag| flag.name.as_str()).collect();
    for name in ["input", "output", "report", "trace", "profile"] {
        assert!(files.contains(&name), "{name} in {files:?}");
    }
}

#[test]
fn a_process_that_does_the_same_is_given_what_was_given() {
    let line = "counterpoint bench tp --kinds column,row --bias --connections 1,8 --iterations 5 --json";
    let again = parsed(line).again_without(&["connections", "json"]);
    assert_eq!(again, ["bench", "tp", "--kinds=column,row", "--bias", "--iterations=5"]);
    let second = format!("counterpoint {}", again.join(" "));
    assert_eq!(parsed(&second).again_without(&[]), again);
}

/// Whatever is added to a command that ranks run is compared, unless it is named above.
#[test]
fn every_flag_is_compared_but_those_of_results() {
    let folder = tempfile::tempdir().unwrap();
    for command in [
        "attention --mask full:8",
        "bench cp",
        "bench tp",
        "bench moe",
        "bench group-cast",
        "bench group-reduce",
        "tune gemm --m 8 --n 8 --k 8 --collective all-reduce",
        "tune moe",
    ] {
        let path = folder.path().join("missing");
        let line = parsed(&format!("counterpoint {command}"));
        for flag in line.flags() {
            let with = |values: Vec<String>| facets(&line.clone().with(&flag.name, values));
            let value = if flag.is_file { path.display().to_string() } else { "something else".to_owned() };
            let is_compared = with(vec![value]) != with(Vec::new());
            assert_eq!(
                is_compared,
                !FLAGS_OF_RESULTS.contains(&flag.name.as_str()),
                "{command} --{}",
                flag.name
            );
        }
    }
}

#[test]
fn files_are_compared_by_what_they_hold() {
    let folder = tempfile::tempdir().unwrap();
    let of = |name: &str, contents: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, contents).unwrap();
        facets(&parsed(&format!("counterpoint attention --mask full:8 --profile {}", path.display())))
    };
    let profile = counterpoint_cost::MachineProfile::h200();
    let same = of("a", &profile.to_json());
    assert_eq!(same, of("b", &profile.to_json()));
    let mut other = profile;
    other.cost.link.alpha_seconds *= 2.0;
    assert_ne!(same, of("c", &other.to_json()));
    let broken = of("d", "{}");
    let facet = broken.iter().find(|facet| facet.what == "the profile of --profile").unwrap();
    assert!(facet.value.contains("machine profile"), "{}", facet.value);
}

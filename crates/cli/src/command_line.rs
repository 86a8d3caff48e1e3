//! The command line as flags and values, as the argument parser found them: what ranks compare, and what a process that is to do the
//! same is started with. Nothing here names a flag.

use clap::{Arg, ArgAction, ArgMatches, Command};

/// What this process was asked to do.
#[derive(Clone, Debug, Default)]
pub(crate) struct CommandLine {
    /// The commands, the outermost first: `bench`, `tp`.
    commands: Vec<String>,
    flags: Vec<Flag>,
}

/// A flag of the command, given or left out.
#[derive(Clone, Debug)]
pub(crate) struct Flag {
    /// The flag's name without its hyphens.
    pub(crate) name: String,
    /// As they were written, or the default's; none where it was left out and has no default.
    pub(crate) values: Vec<String>,
    /// Whether its values are paths.
    pub(crate) is_file: bool,
    is_given: bool,
    is_switch: bool,
}

impl CommandLine {
    /// What `matches` found for `command`.
    pub(crate) fn of(command: &Command, matches: &ArgMatches) -> Self {
        let (mut commands, mut command, mut matches) = (Vec::new(), command, matches);
        while let Some((name, inner)) = matches.subcommand() {
            let Some(found) = command.find_subcommand(name) else { break };
            commands.push(name.to_owned());
            (command, matches) = (found, inner);
        }
        let flags = command.get_arguments().filter_map(|arg| Flag::of(arg, matches)).collect();
        Self { commands, flags }
    }

    /// The commands as one writes them.
    pub(crate) fn command(&self) -> String {
        self.commands.join(" ")
    }

    /// All flags of the command.
    pub(crate) fn flags(&self) -> &[Flag] {
        &self.flags
    }

    /// The same with other values of a flag.
    #[cfg(test)]
    pub(crate) fn set(&mut self, name: &str, values: Vec<String>) {
        let flag = self.flags.iter_mut().find(|flag| flag.name == name).unwrap();
        flag.values = values;
    }

    /// The arguments of a process that is to do the same, without these flags.
    pub(crate) fn again_without(&self, left_out: &[&str]) -> Vec<String> {
        let given = self.flags.iter().filter(|flag| flag.is_given && !left_out.contains(&flag.name.as_str()));
        let flags = given.map(|flag| match flag.is_switch {
            true => format!("--{}", flag.name),
            false => format!("--{}={}", flag.name, flag.value()),
        });
        self.commands.iter().cloned().chain(flags).collect()
    }
}

impl Flag {
    fn of(arg: &Arg, matches: &ArgMatches) -> Option<Self> {
        let (name, id) = (arg.get_long()?.to_owned(), arg.get_id().as_str());
        if matches!(
            arg.get_action(),
            ArgAction::Help | ArgAction::HelpShort | ArgAction::HelpLong | ArgAction::Version
        ) {
            return None;
        }
        let values = matches.try_get_raw(id).ok().flatten();
        let values = values.into_iter().flatten().map(|value| value.to_string_lossy().into_owned()).collect();
        let is_given = matches.value_source(id) == Some(clap::parser::ValueSource::CommandLine);
        let is_switch =
            matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse | ArgAction::Count);
        let is_file = arg.get_value_names().is_some_and(|names| names.iter().any(|name| name == "FILE"));
        Some(Self { name, values, is_file, is_given, is_switch })
    }

    /// All its values.
    pub(crate) fn value(&self) -> String {
        self.values.join(",")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments;

    fn parsed(line: &str) -> CommandLine {
        let command = arguments::command();
        let matches = command.clone().try_get_matches_from(line.split_whitespace()).unwrap();
        CommandLine::of(&command, &matches)
    }

    fn value(line: &CommandLine, name: &str) -> Option<String> {
        let flag = line.flags().iter().find(|flag| flag.name == name).unwrap();
        (!flag.values.is_empty()).then(|| flag.value())
    }

    #[test]
    fn every_flag_is_there_with_what_was_written() {
        let line =
            parsed("counterpoint attention --mask causal:4k --stages 2 --backward --query-exchange auto");
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
}

//! The command line as flags and values, as the argument parser found them: what ranks compare, and what a process that is to do the
//! same is started with. Nothing here names a flag.

use clap::{Arg, ArgAction, ArgMatches, Command};

/// What this process was asked to do.
#[derive(Clone, Debug, Default)]
pub struct CommandLine {
    /// The commands, the outermost first: `bench`, `tp`.
    commands: Vec<String>,
    flags: Vec<Flag>,
}

/// A flag of the command, given or left out.
#[derive(Clone, Debug)]
pub struct Flag {
    /// The flag's name without its hyphens.
    pub name: String,
    /// As they were written, or the default's; none where it was left out and has no default.
    pub values: Vec<String>,
    /// Whether its values are paths.
    pub is_file: bool,
    is_given: bool,
    is_switch: bool,
}

impl CommandLine {
    /// What `matches` found for `command`.
    pub fn of(command: &Command, matches: &ArgMatches) -> Self {
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
    pub fn command(&self) -> String {
        self.commands.join(" ")
    }

    /// All flags of the command.
    pub fn flags(&self) -> &[Flag] {
        &self.flags
    }

    /// The same with other values of a flag, if the command has it: what tests of comparisons compare with.
    pub fn with(mut self, name: &str, values: Vec<String>) -> Self {
        self.flags
            .iter_mut()
            .filter(|flag| flag.name == name)
            .for_each(|flag| flag.values.clone_from(&values));
        self
    }

    /// The arguments of a process that is to do the same, without these flags.
    pub fn again_without(&self, left_out: &[&str]) -> Vec<String> {
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
    pub fn value(&self) -> String {
        self.values.join(",")
    }
}

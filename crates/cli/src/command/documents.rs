//! `counterpoint completions` and `counterpoint man`.

use clap_mangen::Man;
use counterpoint_console::{self as console, CliError, UsageFault};

use crate::arguments::{CompletionsArguments, ManArguments, command, documented};

/// The name of this program.
const NAME: &str = "counterpoint";

/// `counterpoint completions`.
pub(crate) fn completions(arguments: &CompletionsArguments) -> Result<(), CliError> {
    let mut script = Vec::new();
    clap_complete::generate(arguments.shell, &mut command(), NAME, &mut script);
    console::print(&String::from_utf8_lossy(&script))
}

/// `counterpoint man`.
pub(crate) fn man(arguments: &ManArguments) -> Result<(), CliError> {
    let mut found = documented();
    found.build();
    let mut name = NAME.to_owned();
    for word in &arguments.command {
        let Some(next) = found.find_subcommand(word) else {
            let known: Vec<String> = found.get_subcommands().map(|one| one.get_name().to_owned()).collect();
            let (word, command) = (word.clone(), name);
            return Err(CliError::usage(match known.is_empty() {
                true => UsageFault::NoCommands { command, word },
                false => UsageFault::NoCommand { word, command, known },
            }));
        };
        name = format!("{name}-{}", next.get_name());
        found = next.clone();
    }
    let mut page = Vec::new();
    Man::new(found).render(&mut page).map_err(|source| CliError::Stdout { source })?;
    console::print(&String::from_utf8_lossy(&page))
}

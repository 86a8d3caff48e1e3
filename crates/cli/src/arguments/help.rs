//! The parser as it is used: what stands below the options of a help text is printed as it was written, because an example that is
//! wrapped cannot be pasted.

use clap::{Command, CommandFactory};

use super::Arguments;

/// Lines are wrapped at spaces; this looks like one and is not, until the text is printed.
const UNBROKEN: &str = "\u{a0}";

/// The parser.
pub(crate) fn command() -> Command {
    verbatim(Arguments::command())
}

/// The same with the texts that documents are made of.
pub(crate) fn documented() -> Command {
    Arguments::command()
}

/// Has the text below the options of this command, and of those below it, not wrapped.
fn verbatim(command: Command) -> Command {
    let command = command.mut_subcommands(verbatim);
    match command.get_after_help().map(|text| text.to_string().replace(' ', UNBROKEN)) {
        Some(text) => command.after_help(text),
        None => command,
    }
}

/// The help, or the version, that [`command`] gives in place of arguments.
pub(crate) fn help_text(help: &clap::Error) -> String {
    help.render().to_string().replace(UNBROKEN, " ")
}

//! `completions SHELL`: what makes a shell complete verbs, flags and their values.

use clap_complete::Shell;

use crate::failure::{Exit, Failure};
use crate::output;

/// Flags of `completions`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "Bash reads it from a file in ~/.local/share/bash-completion/completions, \
                        zsh from one in a directory of $fpath, fish from one in \
                        ~/.config/fish/completions.")]
pub struct Args {
    /// The shell
    #[arg(value_enum)]
    pub shell: Shell,
}

/// Answers for a program.
pub fn run(args: &Args, mut command: clap::Command) -> Result<Exit, Failure> {
    let mut text = Vec::new();
    let name = command.get_name().to_owned();
    clap_complete::generate(args.shell, &mut command, name, &mut text);
    output::answer(&String::from_utf8_lossy(&text));
    Ok(Exit::Success)
}

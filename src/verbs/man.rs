//! `man`: manual pages, of the program, of each verb and of what some verbs have below them.

use std::path::{Path, PathBuf};

use clap_mangen::Man;

use crate::failure::{Exit, Failure, usage};
use crate::output;

/// Flags of `man`.
#[derive(Clone, Debug, clap::Args)]
#[command(after_help = "`gantline man | man -l -` shows the page; `gantline man -o \
                        ~/.local/share/man/man1` installs all.")]
pub struct Args {
    /// A verb [default: the page of the program]
    pub verb: Option<String>,
    /// Write all pages into this directory
    #[arg(short, long, value_name = "DIR", conflicts_with = "verb")]
    pub output: Option<PathBuf>,
}

/// Answers for a program.
pub fn run(args: &Args, mut program: clap::Command) -> Result<Exit, Failure> {
    program.build();
    let wanted = match &args.verb {
        Some(verb) => program.find_subcommand(verb).cloned().ok_or_else(|| {
            let verbs = program.get_subcommands().map(clap::Command::get_name);
            let near =
                ir::import::nearest(verb, verbs).map(|near| format!("did you mean `{near}`?"));
            let help = near.unwrap_or_else(|| "`gantline help` lists the verbs".to_owned());
            usage("VERB", format!("there is no verb `{verb}`")).help(help)
        })?,
        None => program.clone(),
    };
    let Some(folder) = &args.output else {
        output::answer(&page(wanted)?);
        return Ok(Exit::Success);
    };
    std::fs::create_dir_all(folder).map_err(runtime::Error::io("create", folder))?;
    let mut all = vec![program];
    while let Some(command) = all.pop() {
        let below = command.get_subcommands().filter(|below| below.get_name() != "help");
        all.extend(below.cloned());
        let name = command.get_display_name().unwrap_or(command.get_name()).to_owned();
        let path = folder.join(format!("{name}.1"));
        write(&path, &page(command)?)?;
        output::answer(&path.display().to_string());
    }
    Ok(Exit::Success)
}

fn write(path: &Path, text: &str) -> Result<(), Failure> {
    Ok(std::fs::write(path, text).map_err(runtime::Error::io("write", path))?)
}

/// A page in roff.
fn page(command: clap::Command) -> Result<String, Failure> {
    let mut text = Vec::new();
    let rendered = Man::new(command).render(&mut text);
    rendered.map_err(runtime::Error::io("print", Path::new("a manual page")))?;
    Ok(String::from_utf8_lossy(&text).into_owned())
}

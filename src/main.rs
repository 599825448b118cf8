//! The program `gantline`.

use std::process::ExitCode;

fn main() -> ExitCode {
    gantline::cli::main()
}

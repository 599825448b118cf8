//! The program `gantline`.

use std::process::ExitCode;

use gantline::failure::Exit;
use runtime::local::memory::Memory;

/// A process that gets no memory ends as the outside world makes it end.
#[global_allocator]
static MEMORY: Memory = Memory { code: Exit::World.code() as i32 };

fn main() -> ExitCode {
    if MEMORY.take_stack().is_err() {
        return ExitCode::from(Exit::World.code());
    }
    gantline::cli::main()
}

//! Directories of tests, in which the program runs.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use runtime::processes::LAUNCHERS;
use serde_json::Value;

/// A directory of one test, removed when it ends.
pub(crate) struct Scratch(pub(crate) PathBuf);

impl Scratch {
    pub(crate) fn new(name: &str) -> Scratch {
        let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("cli-{name}"));
        let _ = fs::remove_dir_all(&path);
        fs::create_dir_all(&path).expect("the directory is made");
        Scratch(path)
    }

    pub(crate) fn write(&self, name: &str, text: &str) {
        let path = self.0.join(name);
        fs::create_dir_all(path.parent().expect("a file has a directory")).expect("it is made");
        fs::write(path, text).expect("the file is written");
    }

    /// The program with the words of a line; `wrapper` is what starts it, such as `taskset -c 0`.
    pub(crate) fn command(&self, wrapper: &[&str], line: &str) -> Command {
        let program = env!("CARGO_BIN_EXE_gantline");
        let mut all = wrapper.iter().copied().chain([program]);
        let mut command = Command::new(all.next().expect("there is the program"));
        command.args(all).args(words(line)).current_dir(&self.0);
        command.env("XDG_CACHE_HOME", self.0.join("cache"));
        // Plans of tests do not depend on how fast the machine is.
        command.env("GANTLINE_CALIBRATION", "none");
        for variable in ["GANTLINE_BACKTRACE", "TERM"] {
            command.env_remove(variable);
        }
        for launcher in LAUNCHERS {
            command.env_remove(launcher.process);
        }
        command
    }

    pub(crate) fn run(&self, line: &str) -> Output {
        self.command(&[], line).output().expect("the program starts")
    }

    /// Runs what must succeed, and returns its stdout.
    pub(crate) fn answer(&self, line: &str) -> String {
        let output = self.run(line);
        let errors = String::from_utf8_lossy(&output.stderr);
        assert!(output.status.success(), "gantline {line}\n{errors}");
        String::from_utf8(output.stdout).expect("answers are UTF-8")
    }

    pub(crate) fn json(&self, line: &str) -> Value {
        serde_json::from_str(&self.answer(line)).expect("the answer is one document")
    }
}

impl Drop for Scratch {
    fn drop(&mut self) {
        let _ = fs::remove_dir_all(&self.0);
    }
}

/// The words of a line; `''` is an empty one.
fn words(line: &str) -> Vec<String> {
    line.split(' ').map(|word| word.trim_matches('\'').to_owned()).collect()
}

/// A text to train on.
pub(crate) fn text() -> String {
    (0..400).map(|i| format!("line {i} says {} and no more\n", i * i % 97)).collect()
}

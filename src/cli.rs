//! The command line: which verb with which flags.
//!
//! Flags that mean what a flag of Megatron-LM means are also read under its name.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

use crate::failure::{Exit, Failure};
use crate::output;
use crate::verbs::{
    calibrate, checkpoint, cluster, compare, compile, completions, cost, doctor, export, flags,
    generate, inspect, man, models, plan, run as run_once, schema, score, sweep, train, validate,
    verify,
};

/// The command line.
#[derive(Debug, Parser)]
#[command(
    name = "gantline",
    version,
    about = "Plans, compiles and runs deep-learning models on the devices of a cluster",
    long_about = "Plans, compiles and runs deep-learning models on the devices of a cluster.\n\n\
                  MODEL is a directory with a `config.json`, a `config.json`, a `.graph` text, or \
                  a preset such as `gpt2` or `llama-3-70b`.",
    after_help = "Exit codes: 0 success or yes, 1 a defect of gantline, 2 usage, 3 infeasible or \
                  no, 4 unsupported, 5 verification failed, 6 bad file, 7 rank or disk failed, 75 \
                  interrupted after a checkpoint, 130 interrupted without.",
    disable_help_subcommand = false
)]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub verb: Verb,
}

/// What is said where CPUs, which are the default, have no answer.
const GPUS: &str = "Name the GPUs with --cluster: a preset such as h100, or a file.";

/// What to do.
#[derive(Debug, Subcommand)]
pub enum Verb {
    /// Say what a model is: functions, parameters, operations
    Inspect(inspect::Args),
    /// List the families and models that are known by name
    Models(models::Args),
    /// Find the fastest plan that fits a cluster
    Plan(flags::PlanArgs),
    /// Say whether a model fits a cluster, and what holds the memory
    Fit(flags::FitArgs),
    /// Say why the plan is as it is, and where a step goes
    Explain(flags::ExplainArgs),
    /// Write programs for all ranks into one file, for `run`
    Compile(Box<compile::Args>),
    /// Say what a data set costs: time, money, energy
    Cost(Box<flags::CostArgs>),
    /// Find the fewest GPUs that meet a deadline
    #[command(after_help = GPUS)]
    Size(Box<flags::CostArgs>),
    /// Compare configurations of GPUs with each other and with the best one
    #[command(after_help = GPUS)]
    Compare(Box<flags::CompareArgs>),
    /// Search for every combination of clusters, devices, batches and lengths: a heat map, or CSV
    #[command(after_help = GPUS)]
    Sweep(Box<sweep::Args>),
    /// Train a model on texts, or go on with a run
    Train(Box<train::Args>),
    /// List the checkpoints of a run, and say which are intact
    Checkpoint(checkpoint::Args),
    /// Continue a text with a model that was trained
    Generate(Box<generate::Args>),
    /// Run one batch through a model or a compiled file: loss, gradients, time
    Run(Box<run_once::Args>),
    /// Compare every mesh of some ranks with one device: loss and all gradients
    Verify(verify::Args),
    /// Measure this machine, for predictions
    Calibrate(calibrate::Args),
    /// Compare predictions with measured runs of training and inference
    Validate(validate::Args),
    /// Predict the step of a layout that you give
    Score(Box<score::Args>),
    /// List, show and check clusters
    Cluster(cluster::Args),
    /// Write a run for transformers, or a model as text or picture
    Export(export::Args),
    /// Say what this machine has, and what is missing for what
    Doctor(doctor::Args),
    /// Print what the documents of --json hold, as JSON Schema
    Schema(schema::Args),
    /// Print a completion script for a shell
    Completions(completions::Args),
    /// Print a manual page, or write all
    Man(man::Args),
}

/// Reads the command line and does what it says.
pub fn main() -> ExitCode {
    output::install_panic_hook();
    let cli = match Cli::try_parse() {
        Ok(cli) => cli,
        Err(error) => {
            // There is nobody to tell that the help cannot be written.
            let _ = error.print();
            let exit = if error.use_stderr() { Exit::Usage } else { Exit::Success };
            return ExitCode::from(exit.code());
        }
    };
    let exit = match catch_unwind(AssertUnwindSafe(|| run(&cli.verb))) {
        Ok(Ok(exit)) => exit,
        Ok(Err(failure)) => {
            output::note(&failure.message());
            failure.exit()
        }
        // The hook has told the user.
        Err(_) => Exit::Bug,
    };
    ExitCode::from(exit.code())
}

/// Does what a verb says.
///
/// # Errors
/// Those of the verb.
pub fn run(verb: &Verb) -> Result<Exit, Failure> {
    match verb {
        Verb::Inspect(args) => inspect::run(args),
        Verb::Models(args) => models::run(args),
        Verb::Plan(args) => plan::plan(args),
        Verb::Fit(args) => plan::fit(args),
        Verb::Explain(args) => plan::explain_plan(args),
        Verb::Compile(args) => compile::run(args),
        Verb::Cost(args) => cost::cost(args),
        Verb::Size(args) => cost::size(args),
        Verb::Compare(args) => compare::compare(args),
        Verb::Sweep(args) => sweep::run(args),
        Verb::Train(args) => train::run(args),
        Verb::Checkpoint(args) => checkpoint::run(args),
        Verb::Generate(args) => generate::run(args),
        Verb::Run(args) => run_once::run(args),
        Verb::Verify(args) => verify::run(args),
        Verb::Calibrate(args) => calibrate::run(args),
        Verb::Validate(args) => validate::run(args),
        Verb::Score(args) => score::run(args),
        Verb::Cluster(args) => cluster::run(args),
        Verb::Export(args) => export::run(args),
        Verb::Doctor(args) => doctor::run(args),
        Verb::Schema(args) => schema::run(args),
        Verb::Completions(args) => completions::run(args, Cli::command()),
        Verb::Man(args) => man::run(args, Cli::command()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn flags_do_not_contradict_each_other() {
        Cli::command().debug_assert();
    }

    #[test]
    fn every_flag_is_documented() {
        for verb in Cli::command().get_subcommands() {
            for argument in verb.get_arguments() {
                let has_help = argument.get_help().is_some();
                assert!(has_help, "{} {}", verb.get_name(), argument.get_id());
            }
        }
    }
}

//! The runtime: what a rank needs to execute a program, and nothing about how it was made.
//!
//! **In:** files of the user (weights, arrays, text, checkpoints) and a world of ranks.
//! **Out:** tensors, batches of tokens, collectives, files.
//!
//! **Invariants.** `runtime` knows neither `planner` nor `codegen`. A file may hold anything:
//! its sizes and offsets are checked before memory is reserved for them. Wrong input is a
//! [`Diagnostic`](ir::Diagnostic), a failing world is an [`Error`]; [`Failure`] is either.
//! What depends on random numbers is a pure function of a seed and a position.
//!
//! # Codes
//!
//! | code | what is wrong | what to do |
//! |---|---|---|
//! | E4001 | no such file, not a file, or a directory without weights | correct the path |
//! | E4002 | not a safetensors header: its length, or its JSON | download the file again |
//! | E4003 | a tensor is not where its header says, or has another size | download the file again |
//! | E4004 | a tensor's element type is not known | store it in a known one |
//! | E4005 | the index of shards is damaged or does not fit the shards | download the model again |
//! | E4006 | a tensor is missing | check that the weights belong to the model |
//! | E4007 | a tensor has other dims than needed | check that the weights belong to the model |
//! | E4008 | tensors that the model does not have | check that the weights belong to the model |
//! | E4009 | tensors that differ, and would be one | correct the `config.json`, or remove one |
//! | E4010 | not a `.npy` file, or a damaged one | write it again with `np.save` |
//! | E4011 | an array of a type or order that is not read or written | convert it |
//! | E4020 | not a tokeniser | give a Hugging Face `tokenizer.json` |
//! | E4021 | no tokeniser, and fewer than 256 tokens | name the model's tokeniser |
//! | E4022 | no text, or not UTF-8 where the tokeniser takes text | convert or leave out the file |
//! | E4023 | a token that the model does not have | use the model's own tokeniser |
//! | W4024 | a tokeniser that is perhaps another model's | check that it belongs to the model |
//! | E4030 | no files under this name or pattern | correct the argument |
//! | E4031 | the data has no tokens | give files with text |
//! | E4032 | too few tokens for one step | smaller `--seq` or `--gbs`, or more data |
//! | E4033 | a file of tokens is damaged or unknown | give text, llm.c or Megatron files |
//! | E4034 | a file has a token that the model does not have | use tokens made for this model |
//! | E4035 | a batch has an id that the model does not have | use the model's own tokeniser |
//! | E4040 | no checkpoint in this directory, or of this step | correct the directory or step |
//! | E4041 | a checkpoint is damaged | resume: the run goes on from the newest intact one |
//! | E4042 | a checkpoint of another format | use the version of the program that wrote it |
//! | E4043 | a checkpoint of another model or optimizer | resume with those it was begun with |
//! | E4050 | a learning-rate schedule that makes no sense | correct the flag that is named |
//! | E4051 | a checkpoint of another run | resume with what the run was begun with |
//! | E4052 | the loss or its gradient is not finite any more | a smaller learning rate |
//! | E4053 | the loss leaps, and the run is to stop then | a smaller learning rate |
//! | E4054 | weights or optimizer are not finite any more | a smaller learning rate |
//! | E4055 | more steps in a row are not finite than are skipped | a smaller learning rate |
//! | E4060 | the prompt has no tokens, or more than the model reads | change the prompt |
//! | E4061 | a model gives no finite logits | check its weights |
//! | E4070 | not an artefact | give a file that `gantline compile` wrote |
//! | E4071 | an artefact of another version | compile it again |
//! | E4072 | an artefact is damaged | copy or compile it again |
//! | E4073 | an artefact's manifest contradicts its plan or programs | compile it again |
//! | E4074 | an artefact needs what this machine lacks | compile it for this machine |
//! | E4075 | a file is too large for an artefact | give an artefact |

#![deny(unsafe_code)]
// A diagnostic is built at most a few times in a run.
#![allow(clippy::result_large_err)]

pub mod artefact;
pub mod beams;
pub mod block;
pub mod checkpoint;
pub mod communicator;
pub mod convert;
#[allow(unsafe_code)]
pub mod cuda;
pub mod data;
pub mod decode;
pub mod device;
pub mod disk;
pub mod error;
pub mod evaluate;
pub mod execute;
pub mod generate;
pub mod in_flight;
pub mod init;
pub mod load;
#[allow(unsafe_code)]
pub mod local;
pub mod lock;
#[allow(unsafe_code)]
pub mod map;
pub mod metrics;
pub mod npy;
mod patience;
pub mod processes;
pub mod rate;
pub mod signal;
pub mod tokens;
pub mod trace;
pub mod train;
pub mod weights;

#[cfg(test)]
mod scratch;

pub use communicator::{Blocks, Combiner, CommError, Communicator, Counters, Group};
pub use error::{Error, Failure};

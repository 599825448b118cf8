//! `plan --for-tool TOOL -o DIR`: a directory with what starts the tool on the plan.

use std::path::Path;

use ir::DType;
use planner::configuration::Configuration;
use planner::estimate::described::decoder;
use planner::search::interop::Use;
use planner::search::interop::launch::{Launch, files};
use planner::tools::Target;

use super::Subject;
use crate::failure::{Failure, usage};
use crate::job::Precision;
use crate::output;
use crate::verbs::flags::RequestFlags;

/// Writes the files of a plan into a directory, which is made.
pub(super) fn write(
    subject: &Subject,
    asked: &RequestFlags,
    (target, folder): (Target, &Path),
    configuration: &Configuration,
) -> Result<(), Failure> {
    if subject.dtype != Precision::Of(DType::BF16) {
        let headline = format!("files for {target} are written in bf16, not {}", subject.dtype);
        return Err(usage("--dtype", headline).help("leave it out").into());
    }
    if let Some(fact) = subject.stated.configured().first() {
        let headline =
            format!("files for {target} say what its release does, and `{fact}` is stated");
        let help = "leave the fact out, or write the plan with `-o FILE.plan`";
        return Err(usage("--assume", headline).help(help).into());
    }
    if asked.lora.is_some() {
        let headline =
            format!("the files for {target} pretrain all weights, and adapters are asked for");
        let help = "write the plan with `-o FILE.plan`, and its layout into the fine-tuning recipe";
        return Err(usage("--lora", headline).help(help).into());
    }
    let decoder = decoder(asked.model.path());
    let per_node = subject.cluster.devices_per_node.unwrap_or(1).max(1);
    let per_node = u32::try_from(per_node).unwrap_or(1).min(subject.devices);
    let launch = Launch {
        target,
        configuration,
        purpose: Use {
            global_batch: subject.global_batch,
            seq: subject.seq,
            layers: subject.work.depth(),
        },
        decoder: decoder.as_ref(),
        nodes: subject.devices.div_ceil(per_node),
        per_node,
    };
    let written = files(&launch).map_err(|why| {
        let headline = format!("nothing is written for {target}: {why}");
        let help = "write the plan with `-o FILE.plan`, and `gantline export FILE.plan --to TOOL`";
        usage("--output", headline).help(help)
    })?;
    if folder.is_file() {
        let headline = format!("`{}` is a file, and several are written", folder.display());
        return Err(usage("--output", headline).help("name a directory: `-o DIR`").into());
    }
    std::fs::create_dir_all(folder).map_err(runtime::Error::io("write", folder))?;
    for file in written {
        let path = folder.join(file.name);
        std::fs::write(&path, file.text).map_err(runtime::Error::io("write", &path))?;
        output::note(&format!("wrote {}", path.display()));
    }
    Ok(())
}

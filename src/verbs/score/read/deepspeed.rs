//! JSON of DeepSpeed.

use ir::{Diagnostic, Span};
use planner::configuration::{Configuration, Place};

use super::said::Said;
use super::{Known, Layout, data_parallel, data_parallel_ranks};
use crate::job::Precision;

/// What names begin with of which no step's time or memory depends.
pub(super) const IDLE: &[&str] = &[
    "comms_logger.",
    "csv_monitor.",
    "dump_state",
    "flops_profiler.",
    "gradient_clipping",
    "memory_breakdown",
    "optimizer.params.",
    "scheduler.",
    "steps_per_print",
    "tensorboard.",
    "wall_clock_breakdown",
    "wandb.",
];

/// Names of the batch: of a step, and of a rank at once; and how often that is.
const BATCH: &str = "train_batch_size";
pub(super) const MICRO: &str = "train_micro_batch_size_per_gpu";
pub(super) const STEPS: &str = "gradient_accumulation_steps";
/// Arguments of transformers' Trainer that say the last two.
pub(super) const ARGUMENTS: [&str; 2] =
    ["--per_device_train_batch_size", "--gradient_accumulation_steps"];

pub(super) fn layout(mut said: Said, known: Known) -> Result<Layout, Vec<Diagnostic>> {
    // What transformers fills in from its own arguments.
    let autos = said.take_auto();
    let mut c = Configuration {
        tp: said.count("tensor_parallel.autotp_size"),
        cp: said.count("sequence_parallel_size"),
        ..Configuration::default()
    };
    c.zero.stage = said.number_in("zero_optimization.stage", 0..4).unwrap_or(0) as u8;
    let places = [("none", Place::Device), ("cpu", Place::Host), ("nvme", Place::Disk)];
    let mut place = |what: &str| said.choice(&format!("zero_optimization.{what}.device"), &places);
    c.offload.optimizer = place("offload_optimizer").unwrap_or_default();
    c.offload.parameters = place("offload_param").unwrap_or_default();
    if said.is("activation_checkpointing.cpu_checkpointing") {
        c.offload.activations = Place::Host;
    }
    let dtype = element_type(&mut said, &autos);
    let facts = facts(&mut said, c.zero.stage);
    let batch = batch(&mut said, known, &autos, &mut c);
    let layout = said.layout("deepspeed", c, [batch, None])?;
    Ok(Layout { dtype, facts, ..layout })
}

/// The type of products.
fn element_type(said: &mut Said, autos: &[String]) -> Option<Precision> {
    let names = ["bf16.enabled", "fp16.enabled"].map(|name| (name, said.is(name)));
    let found = said.half_precision(names);
    if found.is_none() && !autos.iter().any(|name| name.ends_with("16.enabled")) {
        let note = "neither `bf16` nor `fp16` is enabled: priced as if one were";
        said.notes.push(note.to_owned());
    }
    found
}

/// What it says of the executor: when gradients are reduced, and which optimizer there is.
fn facts(said: &mut Said, stage: u8) -> Vec<String> {
    let mut facts = Vec::new();
    // Where nothing is said, stage 3 alone overlaps: `overlap_comm_valid` of
    // deepspeed/runtime/zero/config.py.
    let name = "zero_optimization.overlap_comm";
    let overlaps = if said.text(name).is_some() { said.is(name) } else { stage == 3 };
    let word = if overlaps { "yes" } else { "no" };
    facts.push(format!("overlap-gradients={word}"));
    let Some(written) = said.text("optimizer.type") else { return facts };
    // Names are compared without their case: those of DeepSpeed's engine, and of torch.optim.
    match written.to_ascii_lowercase().as_str() {
        "adam" | "adamw" | "fusedadam" | "cpuadam" | "torch_adam" => {}
        "muon" => facts.push("optimizer=muon".to_owned()),
        "adafactor" => facts.push("optimizer=adafactor".to_owned()),
        "sgd" => facts.push("optimizer=sgd-momentum".to_owned()),
        _ => said.notes.push(format!("`optimizer.type` is `{written}`, and is priced as AdamW")),
    }
    facts
}

/// Samples of a step, if that is known. Two of batch, micro-batch and accumulation give the third,
/// and all three the ranks; what flags say counts in the place of the file.
fn batch(said: &mut Said, known: Known, autos: &[String], c: &mut Configuration) -> Option<u32> {
    let mut in_file = [BATCH, MICRO, STEPS].map(|name| said.size(name));
    let [own, steps] = known.script;
    in_file[2] = in_file[2].or(steps);
    let micro = match known.microbatch {
        None => (MICRO, ARGUMENTS[0], own),
        flag => (MICRO, "--mbs", flag),
    };
    let flags = [(BATCH, "--gbs", known.global_batch), micro];
    for (name, flag, value) in flags {
        if let (true, Some(value)) = (autos.iter().any(|auto| auto == name), value) {
            said.notes.push(format!("`{name}` is `auto`: `{flag} {value}` is taken"));
        }
    }
    let batch = known.global_batch.or(in_file[0]);
    let micro = known.microbatch.or(own).or(in_file[1]);
    let there = match (data_parallel(said, known, c), batch, micro, in_file[2]) {
        (None, Some(batch), Some(micro), Some(steps)) => {
            let at_once = micro.saturating_mul(steps);
            whole(said, known, batch, at_once, "micro-batch × accumulation")
        }
        (Some(ranks), ..) => ranks,
        (None, ..) => data_parallel_ranks(said, known, c),
    };
    c.dp = there;
    if let (None, None, [Some(batch), Some(micro), Some(steps)]) =
        (known.global_batch, known.microbatch, [in_file[0], own.or(in_file[1]), in_file[2]])
    {
        let product = [micro, steps, c.dp].map(u128::from).iter().product::<u128>();
        // Ranks that were found from the batch are those that it takes, or it was refused.
        if product != u128::from(batch) && (known.devices.is_some() || known.dp.is_some()) {
            let headline = format!(
                "`{BATCH}` is {batch}, and micro-batch {micro} × accumulation {steps} × {} ranks \
                 are {product}",
                c.dp
            );
            said.refuse(BATCH, headline, format!("write {product}, or leave one of them out"));
        }
    }
    c.microbatch = match (micro, batch, in_file[2]) {
        (Some(micro), ..) => micro,
        (None, Some(batch), steps)
            if steps.is_some() || !autos.iter().any(|auto| auto == MICRO) =>
        {
            let at_once = c.dp.saturating_mul(steps.unwrap_or(1));
            whole(said, known, batch, at_once, "ranks × accumulation")
        }
        (None, Some(_), _) => {
            let headline = format!("`{MICRO}` is `auto`, and no flag says what it is");
            let help = "write --mbs N: what `per_device_train_batch_size` is";
            said.wrong.push(Diagnostic::error("E5001", Span::of("--mbs"), headline).help(help));
            1
        }
        (None, None, _) => 1,
    };
    // Without a number of steps there is one, unless that is left open.
    let is_open = [BATCH, STEPS].iter().all(|name| autos.iter().any(|auto| auto == name));
    let steps = in_file[2].or((!is_open).then_some(1));
    batch.or_else(|| Some(micro?.saturating_mul(c.dp).saturating_mul(steps?)))
}

/// How often `at_once` samples make a batch; refused where they make none.
fn whole(said: &mut Said, known: Known, batch: u32, at_once: u32, what: &str) -> u32 {
    if !batch.is_multiple_of(at_once) {
        let headline = format!("{batch} samples are not a multiple of {what} = {at_once}");
        match known.global_batch {
            None => said.refuse(BATCH, headline, "write a multiple of it"),
            Some(_) => {
                let wrong = Diagnostic::error("E5001", Span::of("--gbs"), headline);
                said.wrong.push(wrong.help("write a multiple of it"));
            }
        }
    }
    (batch / at_once).max(1)
}

//! `generate RUN|DIR --prompt …`: a text continued.

mod beams;
mod prompts;

use std::io::{IsTerminal, Read};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::time::Instant;

use ir::import::{Description, Model};
use ir::plan::Purpose;
use ir::precision::Precision;
use ir::{DType, Diagnostic, Mesh, Plan, Span};
use planner::check::{check, check_decisions, check_memory};
use planner::cluster::Cluster;
use runtime::checkpoint::Checkpoint;
use runtime::execute::Session;
use runtime::generate::{Ending, Sampling};
use runtime::load::load_weights;
use runtime::processes::Bootstrap;
use runtime::tokens::Tokenizer;
use runtime::train::{RunState, restore_weights};
use runtime::weights::Weights;

use crate::adapters::Adapters;
use crate::argument::{PathArg, amount, positive};
use crate::documents::{self, Document};
use crate::failure::{self, Exit, Failure, usage};
use crate::generation::{DECODE, Generator, Options, Others, Pieces};
use crate::job::{self, positions_max};
use crate::run::Run;
use crate::{output, processes};
use beams::Asked;

/// Headings of the help.
const SAMPLING: &str = "How tokens are drawn";
const BEAMS: &str = "Beam search";
const MANY: &str = "Many prompts";
const WHERE: &str = "Where it runs";

/// Flags of `generate`.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// The directory of a run, or of a model with weights
    #[arg(value_name = "RUN|DIR")]
    pub source: PathArg,
    /// The text to continue; read from stdin where it is left out
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// New tokens at most
    #[arg(long, value_name = "N", default_value = "128", value_parser = positive)]
    pub max_tokens: usize,
    /// Divides the logits: below 1 for likelier texts, 0 for the likeliest token always
    #[arg(
        long,
        value_name = "T",
        default_value = "0.8",
        value_parser = amount,
        help_heading = SAMPLING
    )]
    pub temperature: f64,
    /// Draw only from the N likeliest tokens
    #[arg(long, value_name = "N", value_parser = positive, help_heading = SAMPLING)]
    pub top_k: Option<usize>,
    /// Draw only from the likeliest tokens whose probabilities together reach P
    #[arg(long, value_name = "P", value_parser = amount, help_heading = SAMPLING)]
    pub top_p: Option<f64>,
    /// Seed of the draws
    #[arg(long, value_name = "N", default_value = "1", help_heading = SAMPLING)]
    pub seed: u32,
    /// Take the likeliest of N texts that are continued side by side, and draw nothing
    #[arg(
        long,
        value_name = "N",
        value_parser = beams,
        conflicts_with_all = ["temperature", "top_k", "top_p", "seed"],
        help_heading = BEAMS
    )]
    pub beams: Option<usize>,
    /// Divide the logarithm of a text's probability by its new tokens to this power: more for
    /// longer texts
    #[arg(
        long,
        value_name = "A",
        default_value = "1",
        value_parser = power,
        allow_negative_numbers = true,
        requires = "beams",
        help_heading = BEAMS
    )]
    pub length_penalty: f64,
    /// The prompts to continue with in-flight batching: a file of JSON lines, each a string or
    /// {"prompt": "…", "max_tokens": 64}
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["prompt", "beams"],
        help_heading = MANY
    )]
    pub prompts: Option<PathBuf>,
    /// Slots: concurrent sequences of a replica, at most [default: 8]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = MANY)]
    pub slots: Option<usize>,
    /// Data-parallel replicas, which share the queue of prompts [default: 1]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = MANY)]
    pub dp: Option<usize>,
    /// The plan of inference, as `plan --for inference -o FILE` writes it
    #[arg(
        long,
        value_name = "FILE",
        conflicts_with_all = ["slots", "dp", "tp", "pp", "dtype"],
        help_heading = MANY
    )]
    pub plan: Option<PathArg>,
    /// The cluster: cpu-local for the cores of this machine, or GPUs like its own
    #[arg(long, value_name = "PRESET|FILE", default_value = "cpu-local", help_heading = WHERE)]
    pub cluster: PathArg,
    /// Tensor-parallel ranks
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        value_parser = positive,
        help_heading = WHERE
    )]
    pub tp: usize,
    /// Pipeline stages
    #[arg(
        long,
        value_name = "N",
        default_value = "1",
        value_parser = positive,
        help_heading = WHERE
    )]
    pub pp: usize,
    /// The element type: f32, bf16, f16 or f64 [default: f32, or that of the files of a directory]
    #[arg(long, value_name = "TYPE", value_parser = job::dtype, help_heading = WHERE)]
    pub dtype: Option<DType>,
    /// The model's tokenizer.json [default: beside the model, else bytes]
    #[arg(long, value_name = "FILE")]
    pub tokenizer: Option<PathBuf>,
    /// Threads of a rank [default: its share of the cores]
    #[arg(long, value_name = "N", value_parser = positive, help_heading = WHERE)]
    pub threads: Option<usize>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// Sequences that are searched side by side, at most. Chosen: far above any use; caches grow with
/// them.
const BEAMS_MAX: usize = 1024;
/// The largest power of a length. Chosen: of any length it is finite.
const POWER_MAX: f64 = 10.0;

fn beams(text: &str) -> Result<usize, String> {
    let beams = positive(text)?;
    if beams > BEAMS_MAX { Err(format!("at most {BEAMS_MAX} are searched")) } else { Ok(beams) }
}

fn power(text: &str) -> Result<f64, String> {
    let power = text.parse::<f64>().map_err(|_| "not a number".to_owned())?;
    match power.abs() <= POWER_MAX {
        true => Ok(power),
        false => Err(format!("a number from -{POWER_MAX} to {POWER_MAX} is needed")),
    }
}

/// Tokens that end a text, as tokenisers name them.
const STOPS: [&str; 4] = ["<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "</s>"];

/// Where weights come from.
pub(super) enum Origin {
    /// A checkpoint, and the adapters that it has beside the model's weights.
    Run(Box<Checkpoint>, Option<Adapters>),
    Directory(Weights),
}

impl Origin {
    /// What tells the tokeniser of a run apart from others.
    fn tokenizer(&self) -> Option<String> {
        let Origin::Run(checkpoint, _) = self else { return None };
        let state = RunState::read(checkpoint).ok()?;
        Some(state.identity.tokenizer)
    }

    /// The element type of inference where none is asked for: the weights' own, if kernels compute
    /// with it.
    pub(super) fn usual_dtype(&self) -> DType {
        let stored = match self {
            Origin::Run(..) => None,
            Origin::Directory(weights) => weights.usual_dtype(),
        };
        stored.filter(|dtype| job::check_executable(*dtype).is_ok()).unwrap_or(DType::F32)
    }

    pub(super) fn fill(&self, session: &mut Session, model: &Model) -> Result<(), Failure> {
        match self {
            Origin::Run(checkpoint, adapters) => {
                restore_weights(session, checkpoint)?;
                adapters
                    .as_ref()
                    .map_or(Ok(()), |adapters| adapters.merge_into(session, checkpoint))
            }
            Origin::Directory(weights) => {
                load_weights(session, &model.weights, weights)?;
                Ok(())
            }
        }
    }
}

/// Answers.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    if let Some(exit) = processes::follow()? {
        return Ok(exit);
    }
    // The port is open while this process reads and compiles, so that the others end with it if it
    // fails.
    answer(args, processes::open()?)
}

/// Answers, with ranks in the processes that come to an open port too.
fn answer(args: &Args, bootstrap: Option<Bootstrap>) -> Result<Exit, Failure> {
    args.dtype.map_or(Ok(()), job::check_executable)?;
    let sampling = sampling(args)?;
    refuse_of_many(args)?;
    let (description, folder, origin) = open(&args.source)?;
    let vocab = job::vocab(&description)?;
    let tokenizer = Tokenizer::choose(args.tokenizer.as_deref(), Some(&folder), vocab)?;
    let trained_with = origin.tokenizer();
    let doubts = match &trained_with {
        Some(trained_with) => tokenizer.doubt_of_other(trained_with),
        None => tokenizer.doubt(),
    };
    doubts.iter().for_each(|doubt| output::note(&failure::draw(doubt)));
    let stops = stops(&folder, &tokenizer, vocab)?;
    let trained = Trained { description, origin, tokenizer, stops };
    if let Some(file) = &args.prompts {
        return prompts::answer((args, bootstrap), &trained, file, &sampling);
    }
    let prompt_text = prompt(args)?;
    let prompt = trained.tokenizer.encode(prompt_text.as_bytes(), "--prompt")?;
    let capacity = trained.capacity(&[(prompt.len(), args.max_tokens)]);
    let sizes = [1, args.beams.unwrap_or(1)];
    let mut generator = trained.generator((args, bootstrap), capacity, sizes)?;
    let Trained { tokenizer, stops, .. } = trained;
    let ending = Ending { tokens_max: args.max_tokens, stops };
    if args.beams.is_some() {
        let asked = Asked { text: &prompt_text, tokens: &prompt };
        return beams::search(args, &mut generator, &asked, (&ending, &tokenizer));
    }
    let mut decoder = tokenizer.decoder();
    let mut text = prompt_text.clone();
    if !args.json {
        output::stream(&prompt_text);
    }
    let start = Instant::now();
    let mut first = None;
    let tokens = generator.generate(&prompt, &sampling, &ending, &mut |token| {
        first.get_or_insert_with(|| start.elapsed().as_secs_f64());
        let piece = decoder.push(token);
        if !args.json {
            output::stream(&piece);
        }
        text += &piece;
        ControlFlow::Continue(())
    })?;
    let rest = decoder.finish();
    text += &rest;
    let total = start.elapsed().as_secs_f64();
    let first = first.unwrap_or(total);
    let length = prompt.len() + tokens.len();
    let told = Told {
        text,
        prompt: prompt.len(),
        first_s: first,
        rest_s: total - first,
        is_cut: tokens.len() == args.max_tokens || length > capacity,
        tokens,
        beams: Vec::new(),
    };
    if !args.json {
        output::stream(&format!("{rest}\n"));
    }
    told.tell(args);
    generator.end_with(Exit::Success.code());
    Ok(Exit::Success)
}

/// Waits for the other processes.
fn others(args: &Args, bootstrap: Option<Bootstrap>) -> Result<Option<Others>, Failure> {
    let peers = bootstrap.map(processes::connect).transpose()?;
    Ok(peers.map(|peers| Others { peers, threads: args.threads }))
}

impl Args {
    /// The cluster, whose devices programs run on.
    fn cluster(&self) -> Result<Cluster, Failure> {
        let cluster = Cluster::load(&self.cluster)?;
        crate::training::check_runs_on(&cluster)?;
        Ok(cluster)
    }
}

/// A model with weights and what is beside it.
struct Trained {
    description: Description,
    origin: Origin,
    tokenizer: Tokenizer,
    /// Tokens that end a text.
    stops: Vec<u32>,
}

impl Trained {
    /// Tokens of the longest sequence, prompt and output, bounded by the model's positions. `texts`
    /// are the tokens of each prompt and of its output at most.
    fn capacity(&self, texts: &[(usize, usize)]) -> usize {
        let longest = texts.iter().map(|(prompt, new)| prompt.saturating_add(*new)).max();
        longest.unwrap_or(1).min(positions_max(&self.description)).max(1)
    }

    /// Starts `dp` replicas with `sequences` slots each.
    fn generator(
        &self,
        (args, bootstrap): (&Args, Option<Bootstrap>),
        capacity: usize,
        [dp, sequences]: [usize; 2],
    ) -> Result<Generator, Failure> {
        let mesh = Mesh { pp: args.pp, dp, tp: args.tp, ..Mesh::ONE };
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let cluster = args.cluster()?;
        let options = Options {
            capacity,
            sequences,
            mesh,
            dtype: args.dtype.unwrap_or_else(|| self.origin.usual_dtype()),
            threads_per_rank: args.threads.unwrap_or((cores / mesh.ranks()).max(1)),
            target: cluster.target().filter(|target| target.arch().is_some()),
        };
        let mut fill = |session: &mut Session, model: &Model| self.origin.fill(session, model);
        let others = others(args, bootstrap)?;
        Generator::among(&self.description, &options, others, &mut fill)
    }
}

impl Trained {
    /// Starts the replicas of a plan of inference, which was read from a file.
    fn planned(
        &self,
        (args, bootstrap): (&Args, Option<Bootstrap>),
        (shown, plan): (String, Plan),
    ) -> Result<Generator, Failure> {
        let cluster = args.cluster()?;
        job::check_local(&cluster, plan.mesh.ranks())?;
        let wrong = check_decisions(&plan.replica());
        if !wrong.is_empty() {
            return Err(wrong.into());
        }
        let Precision { compute: dtype, .. } = plan.precision;
        let refuse = |headline: String| {
            let help = "plan again, for this model";
            Err(Diagnostic::error("E5006", Span::of(&shown), headline).help(help).into())
        };
        if plan.precision != Precision::uniform(dtype) || job::check_executable(dtype).is_err() {
            return refuse(format!("inference is not executed in {}", plan.precision));
        }
        let most = positions_max(&self.description);
        if plan.seq > most {
            let seq = plan.seq;
            return refuse(format!(
                "the plan has KV caches of {seq} tokens, and the model has {most} positions"
            ));
        }
        let Purpose::Inference { buckets } = &plan.purpose else {
            unreachable!("it is a plan of inference");
        };
        let pieces = Pieces::of(&self.description, buckets, plan.seq, &plan.precision)?;
        let model = &pieces.model.name;
        if *model != plan.model {
            return refuse(format!("the plan is for `{}`, and this is `{model}`", plan.model));
        }
        let plan = Plan { target: cluster.target(), ..plan };
        let wrong = check(&pieces.modules[0].1, DECODE, &plan.replica(), &cluster);
        if !wrong.is_empty() {
            return Err(wrong.into());
        }
        let cores = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = args.threads.unwrap_or((cores / plan.mesh.ranks()).max(1));
        let programs = pieces.compile(&plan)?;
        let footprints = programs.footprints(&cluster, plan.mesh.ranks());
        if let Some(wrong) = check_memory(&plan, &footprints, &cluster) {
            return Err(wrong.into());
        }
        let mut fill = |session: &mut Session, model: &Model| self.origin.fill(session, model);
        let others = others(args, bootstrap)?;
        Generator::start(pieces, plan, programs, (threads, others), &mut fill)
    }
}

/// Tokens that end a text: those of the tokeniser, and those that the first file beside the model
/// names that names some.
fn stops(folder: &Path, tokenizer: &Tokenizer, vocab: usize) -> Result<Vec<u32>, Failure> {
    let mut stops: Vec<u32> = STOPS.iter().filter_map(|stop| tokenizer.token(stop)).collect();
    for name in ["generation_config.json", "config.json"] {
        let path = folder.join(name);
        let Ok(text) = std::fs::read_to_string(&path) else { continue };
        let config: serde_json::Value = serde_json::from_str(&text).map_err(|why| {
            let headline = format!("not JSON: {why}");
            Diagnostic::error("E5021", Span::of(path.display().to_string()), headline)
                .help("mend the file, or take it away: it names the tokens that end a text")
        })?;
        let named = &config["eos_token_id"];
        if named.is_null() {
            continue;
        }
        let all = named.as_array().map_or(std::slice::from_ref(named), Vec::as_slice);
        let known = all.iter().map(|token| u32::try_from(token.as_u64()?).ok());
        let Some(known) = known.collect::<Option<Vec<u32>>>() else {
            let headline = format!("`eos_token_id` is {named}, and no token");
            let wrong = Diagnostic::error("E5021", Span::of(path.display().to_string()), headline);
            return Err(wrong.help("write a number, or a list of numbers").into());
        };
        stops.extend(known.into_iter().filter(|token| (*token as usize) < vocab));
        break;
    }
    stops.sort_unstable();
    stops.dedup();
    Ok(stops)
}

/// What was generated, and how fast.
struct Told {
    text: String,
    tokens: Vec<u32>,
    prompt: usize,
    first_s: f64,
    rest_s: f64,
    /// Whether it ends because there are as many tokens as wanted, or as the model reads.
    is_cut: bool,
    /// What was looked for, the likeliest first; empty where tokens were drawn.
    beams: Vec<documents::BeamRow>,
}

impl Told {
    fn tell(&self, args: &Args) {
        let after_first = self.tokens.len().saturating_sub(1) as f64;
        let rate = if self.rest_s > 0.0 { after_first / self.rest_s } else { 0.0 };
        if args.json {
            let document = documents::Generate {
                text: self.text.clone(),
                tokens: self.tokens.clone(),
                prompt_tokens: self.prompt as u64,
                prefill_s: self.first_s,
                decode_tokens_per_s: rate,
                finish_reason: if self.is_cut { "length" } else { "stop" }.to_owned(),
                beams: self.beams.clone(),
            };
            return output::answer_json(&document.to_json());
        }
        if let Some(best) = self.beams.first() {
            let (beams, tokens) = (self.beams.len(), self.tokens.len());
            let (score, took) = (best.score, output::seconds(self.first_s));
            return output::note(&format!(
                "{tokens} tokens in {took}: the best of {beams} texts, score {score:.4}",
            ));
        }
        output::note(&format!(
            "{} tokens: the prompt's {} in {}, then {rate:.0} tokens/s",
            self.tokens.len(),
            self.prompt,
            output::seconds(self.first_s),
        ));
    }
}

/// Refuses flags about batches where there is one prompt.
fn refuse_of_many(args: &Args) -> Result<(), Failure> {
    let Args { prompts, slots, dp, plan, .. } = args;
    let given = [("--slots", slots.is_some()), ("--dp", dp.is_some()), ("--plan", plan.is_some())];
    match given.into_iter().find(|(_, is_given)| *is_given && prompts.is_none()) {
        Some((flag, _)) => {
            let headline = "a single prompt runs on one replica, without batching";
            Err(usage(flag, headline).help("write `--prompts FILE`").into())
        }
        None => Ok(()),
    }
}

fn sampling(args: &Args) -> Result<Sampling, Failure> {
    if let Some(top_p) = args.top_p.filter(|p| !(*p > 0.0 && *p <= 1.0)) {
        let headline = format!("a sum of probabilities of {top_p} is not in 0 < p ≤ 1");
        return Err(usage("--top-p", headline).help("write --top-p 0.9").into());
    }
    let Args { temperature, top_k, top_p, seed, .. } = *args;
    Ok(Sampling { temperature, top_k, top_p, seed })
}

/// The description, the directory of the tokeniser, the weights.
pub(super) fn open(source: &PathArg) -> Result<(Description, PathBuf, Origin), Failure> {
    let (description, trained) = described(source)?;
    let Some((folder, origin)) = trained else {
        let headline = format!("the preset `{source}` has no weights");
        let help = "name the directory of a run, or of a model with weights";
        return Err(usage("RUN|DIR", headline).help(help).into());
    };
    Ok((description, folder, origin))
}

/// The description; of what has weights, the directory of the tokeniser, and the weights.
pub(super) fn described(
    source: &PathArg,
) -> Result<(Description, Option<(PathBuf, Origin)>), Failure> {
    let path = source.path();
    if Run::is_at(path) {
        let (run, settings) = Run::open(path)?;
        let checkpoint = run.latest()?;
        let description = run.description(&settings)?;
        let lora = settings.lora.as_ref();
        let adapters = lora.map(|lora| Adapters::of(&description, lora, settings.seq));
        let origin = Origin::Run(Box::new(checkpoint), adapters.transpose()?);
        return Ok((description, Some((run.model_folder(), origin))));
    }
    let resolved = crate::resolve(source)?;
    let Some(directory) = resolved.directory else { return Ok((resolved.description, None)) };
    let weights = Weights::open(&directory)?;
    Ok((resolved.description, Some((directory, Origin::Directory(weights)))))
}

/// The prompt of the flag, or of stdin without its last line break.
fn prompt(args: &Args) -> Result<String, Failure> {
    if let Some(prompt) = &args.prompt {
        return Ok(prompt.clone());
    }
    let mut stdin = std::io::stdin();
    if stdin.is_terminal() {
        return Err(usage("--prompt", "there is no prompt").help("write --prompt TEXT").into());
    }
    let mut text = String::new();
    let path = Path::new("stdin");
    stdin.read_to_string(&mut text).map_err(runtime::Error::io("read", path))?;
    Ok(text.strip_suffix('\n').map_or(text.clone(), str::to_owned))
}

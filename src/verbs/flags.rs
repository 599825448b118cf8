//! Flags that several verbs share: the model, the cluster, the batch, the objective, prices.

use std::fmt::Debug;

use ir::import::{Model, Options};
use ir::lora::{Lora, adapt};
use ir::plan::Optimizer;
use ir::{DType, Diagnostic, Plan};
use planner::cluster::{Cluster, Kind, Power};
use planner::estimate::profile::{ENGINES, Profile};
use planner::estimate::serving::storage::{CacheFormat, WeightFormat};
use planner::estimate::serving::{Lengths, Speculation, Storage};
use planner::goodput::Interruptions;
use planner::limits::Limits;
use planner::origin::Origin;
use planner::tools::Target;

use crate::argument::{Money, PathArg, duration, length, many, positive, price, share, watts};
use crate::cache::Key;
use crate::failure::{Failure, usage};
use crate::job::{self, Limited, PlanRequest, Precision, Where, positions_max};
use crate::run::{Settings, model_argument};
use crate::verbs::assume::Assumed;
use crate::verbs::hardware::Change;

/// Joules of a kilowatt hour.
pub(super) const JOULES_PER_KWH: f64 = 3.6e6;

/// Devices that `size` tries at most.
pub(super) const DEVICES_MAX: u64 = 1 << 17;

/// Flags of a question about a model on a cluster.
#[derive(Clone, Debug, clap::Args)]
pub struct RequestFlags {
    /// The model: a directory, that of a run too, a config.json, a .graph text or a preset
    #[arg(value_parser = model_argument())]
    pub model: PathArg,
    /// Where it is trained
    #[command(flatten)]
    pub place: Where,
    /// What may be chosen
    #[command(flatten)]
    pub limited: Limited,
    /// Tokens of a sample [default: the longest the model was made for]
    #[arg(long, alias = "seq-length", value_name = "N", value_parser = length)]
    pub seq: Option<usize>,
    /// Samples of a step, over all ranks [default: 8, or the number of ranks if that is more; 1024
    /// for `size`]
    #[arg(long, alias = "global-batch-size", value_name = "N", value_parser = positive)]
    pub gbs: Option<usize>,
    /// The element type [default: f32 on CPUs, bf16 on GPUs]
    #[arg(long, value_name = "TYPE", value_parser = job::precision)]
    pub dtype: Option<Precision>,
    /// Types of single roles, on CPUs: parameters, compute, accumulate, master (or none),
    /// gradients, reduce, states, saved (activations), logits; products (own, tf32, f8e4m3,
    /// f8-hybrid)
    #[arg(long, value_name = "ROLE=TYPE", value_delimiter = ',')]
    pub precision: Vec<String>,
    /// Freeze the model and train low-rank adapters, as `train --lora`; on GPUs frozen weights may
    /// be stored in few bits (QLoRA): weights=nf4-dq, nf4 or int8
    #[arg(long, value_name = "rank=N,alpha=X,targets=NAME,…")]
    pub lora: Option<Lora>,
    /// Keep packed documents apart, on CPUs: as `train --document-mask`
    #[arg(long, visible_alias = "reset-attention-mask")]
    pub document_mask: bool,
    /// Expert load imbalance, on GPUs: the busiest rank's tokens over the mean [default: 1]
    #[arg(long, value_name = "TIMES", value_parser = job::imbalance)]
    pub imbalance: Option<f64>,
    /// What is stated of the executor
    #[command(flatten)]
    pub assumed: Assumed,
    /// The optimizer; on GPUs it is stated with --assume optimizer=NAME
    #[arg(long, value_name = "NAME", default_value = "adamw")]
    #[arg(value_parser = ["adamw", "sgd", "none"])]
    pub optimizer: String,
    /// Plan for a tool, on GPUs: megatron, deepspeed or torchtitan, with a release as in
    /// megatron@core-0.13. The search stays within what it can express, priced as it executes
    #[arg(long, value_name = "TOOL[@RELEASE]", value_parser = job::tool)]
    pub for_tool: Option<Target>,
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
    /// Search again, also where the answer about GPUs was found before
    #[arg(long)]
    pub no_cache: bool,
}

impl RequestFlags {
    /// The question which plan a run is to have.
    ///
    /// # Errors
    /// Roles of types, which no search on GPUs chooses.
    pub(super) fn of_run(settings: &Settings) -> Result<RequestFlags, Diagnostic> {
        if !settings.precision.is_empty() {
            let headline = "plans for GPUs are searched for with the usual types of each role";
            let help = "leave --precision out, or give a plan with --plan";
            return Err(usage("--precision", headline).help(help));
        }
        let place = Where {
            cluster: settings.cluster.clone(),
            ranks: Some(settings.ranks),
            nodes: None,
            calibration: settings.calibration.clone(),
        };
        Ok(RequestFlags {
            model: settings.model.clone(),
            place,
            limited: settings.limits.clone(),
            seq: Some(settings.seq),
            gbs: Some(settings.gbs),
            dtype: Some(settings.dtype.into()),
            precision: Vec::new(),
            lora: settings.lora.clone(),
            document_mask: settings.document_mask,
            imbalance: None,
            assumed: Assumed::default(),
            optimizer: "adamw".to_owned(),
            for_tool: None,
            json: false,
            no_cache: false,
        })
    }

    /// The same question about a plan: what no flag says is as the plan has it.
    pub fn about(&self, plan: &Plan) -> RequestFlags {
        let mut asked = self.clone();
        asked.place.ranks.get_or_insert(plan.mesh.ranks());
        asked.seq.get_or_insert(plan.seq);
        asked.gbs.get_or_insert(plan.global_batch_size());
        asked.lora = asked.lora.or_else(|| plan.lora.clone());
        if asked.dtype.is_none() && asked.precision.is_empty() {
            let roles = plan.precision.to_string();
            asked.precision = roles.split_whitespace().map(str::to_owned).collect();
        }
        asked
    }

    /// The key of an answer that may be kept; `asked` is all that it depends on.
    pub fn key(&self, verb: &str, asked: &dyn Debug) -> Option<Key> {
        if self.no_cache { None } else { Key::new(verb, asked) }
    }

    /// What may be chosen on GPUs: what the flags say, of what the tool can express.
    pub fn all_limits(&self) -> Result<Limits, Vec<Diagnostic>> {
        Ok(self.limited.all_limits()?.for_tool(self.for_tool))
    }

    /// Refuses a tool where nothing is planned for it; `why` says what does not go together.
    pub fn refuse_tool(&self, why: &str) -> Result<(), Failure> {
        let Some(target) = self.for_tool else { return Ok(()) };
        let headline = format!("`{target}` {why}");
        Err(usage("--for-tool", headline).help("leave it out").into())
    }

    /// The cluster, if its ranks are GPUs.
    pub(super) fn gpus(&self) -> Result<Option<Cluster>, Failure> {
        let cluster = self.place.cluster()?;
        let is_gpu = cluster.device.kind == Kind::Gpu;
        if is_gpu && !self.precision.is_empty() {
            let headline = "plans for GPUs are searched for with the usual types of each role";
            return Err(usage("--precision", headline.to_owned()).help("leave it out").into());
        }
        if is_gpu {
            self.refuse_documents()?;
        }
        Ok(is_gpu.then_some(cluster))
    }

    /// Refuses to keep documents apart on GPUs.
    pub(super) fn refuse_documents(&self) -> Result<(), Failure> {
        if !self.document_mask {
            return Ok(());
        }
        let headline = "plans for GPUs are searched for with one document a sample";
        let help = "leave it out; `--cluster cpu-local` keeps documents apart on cores";
        Err(usage("--document-mask", headline).help(help).into())
    }

    /// The model, and the question in the planner's form.
    pub fn question(&self) -> Result<(Model, PlanRequest), Failure> {
        self.question_on(self.place.measured_cluster()?, None)
    }

    /// The model and the planner's request on `cluster`, whose rates are known; `dropout` replaces
    /// the model's probability.
    pub fn question_on(
        &self,
        cluster: Cluster,
        dropout: Option<f64>,
    ) -> Result<(Model, PlanRequest), Failure> {
        self.refuse_tool("trains on GPUs, and the cluster has CPUs")?;
        self.assumed.refuse("the cluster has CPUs")?;
        let description = crate::resolve(&self.model)?.description;
        if self.imbalance.is_some() {
            let headline = "ranks of CPUs share no experts".to_owned();
            return Err(usage("--imbalance", headline).help("leave it out, or name GPUs").into());
        }
        let seq = self.seq.unwrap_or_else(|| positions_max(&description));
        let usual = match cluster.device.kind {
            Kind::Cpu => DType::F32,
            Kind::Gpu => DType::BF16,
        };
        let own = || job::graph_dtype(&description).unwrap_or(usual).into();
        let precision = job::training_precision(self.dtype.unwrap_or_else(own), &self.precision)?;
        job::check_graph(&description, precision.accumulate)?;
        let options =
            Options { seq, dtype: precision.accumulate, dropout, documents: self.document_mask };
        let mut model = crate::import(&description, &options)?;
        if let Some(lora) = &self.lora {
            adapt(&mut model, lora)?;
        }
        crate::choose_layout(&mut model, cluster.target(), &precision);
        let ranks = self.place.ranks(&cluster);
        let question = PlanRequest {
            cluster,
            module: crate::prepare_as(&model, &precision)?,
            model: model.name.clone(),
            ranks,
            global_batch_size: self.gbs.unwrap_or(ranks.max(8)),
            seq,
            precision,
            optimizer: match self.optimizer.as_str() {
                "none" => Optimizer::None,
                "sgd" => Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 },
                _ => job::ADAMW,
            },
            clip: Some(1.0),
            lora: self.lora.clone(),
            limits: self.limited.limits()?,
        };
        Ok((model, question))
    }
}

/// What devices are for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, clap::ValueEnum)]
pub enum Purpose {
    /// Steps of training
    #[default]
    Training,
    /// Both passes of inference, the most new tokens per second first
    Inference,
    /// The pass of a prompt, the most tokens of prompts per second first
    Prefill,
    /// Passes of one token more, the most new tokens per second first
    Decode,
}

/// What devices are for, how soon they answer, and what they answer.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct Served {
    /// What devices are for: training, or inference by copies of the model on tp · pp devices each
    #[arg(long = "for", value_enum, default_value = "training", value_name = "WHAT")]
    pub purpose: Purpose,
    /// The requests
    #[command(flatten)]
    pub requests: Requests,
}

/// The heading of flags about inference.
const INFERENCE: &str = "Inference";

/// What requests are, how they are worked on, and how soon.
#[derive(Clone, Debug, Default, PartialEq, clap::Args)]
pub struct Requests {
    /// The engine that answers: fastertransformer, tensorrt-llm, gpt-fast, litgpt-generate
    /// [default: gantline]
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "NAME", value_parser = engine)]
    pub engine: Option<Profile>,
    /// Upper limit of the time per output token (TPOT): 50ms
    #[arg(help_heading = INFERENCE)]
    #[arg(long, alias = "tpot", value_name = "TIME", value_parser = duration)]
    pub token_time: Option<f64>,
    /// Upper limit of the time to first token (TTFT) of a prompt that does not queue: 500ms
    #[arg(help_heading = INFERENCE)]
    #[arg(long, alias = "ttft", value_name = "TIME", value_parser = duration)]
    pub first_token_time: Option<f64>,
    /// Tokens of a prompt [default: those of --seq]
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "N", value_parser = length)]
    #[arg(requires = "output_len", conflicts_with = "seq")]
    pub input_len: Option<usize>,
    /// Output tokens of a request: answers are then about in-flight batching of requests
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "N", value_parser = length, requires = "input_len")]
    pub output_len: Option<usize>,
    /// Tokens of a prefix that all prompts share, cached once (prefix caching)
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "N", value_parser = length, requires = "input_len")]
    pub shared_prefix: Option<usize>,
    /// Token budget of a pass: longer prompts are chunked, shorter ones are batched [default: 8192]
    #[arg(help_heading = INFERENCE)]
    #[arg(long, alias = "max-num-batched-tokens", value_name = "N", value_parser = length)]
    pub pass_tokens: Option<usize>,
    /// Storage format of weights: bf16, f16, f8, int8, int4, int4-g32, nf4, nf4-dq
    /// [default: --dtype]
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "FORMAT")]
    pub weight_dtype: Option<WeightFormat>,
    /// Storage format of the KV cache: bf16, f16, f8, int8, int4 [default: bf16]
    #[arg(help_heading = INFERENCE)]
    #[arg(long, alias = "kv-cache-dtype", value_name = "FORMAT")]
    pub kv_dtype: Option<CacheFormat>,
    /// Speculative decoding: tokens that are drafted before each pass
    #[arg(help_heading = INFERENCE)]
    #[arg(long, alias = "num-speculative-tokens", value_name = "N", requires = "acceptance")]
    #[arg(value_parser = clap::value_parser!(u32).range(1..=DRAFTED_MAX))]
    pub draft_tokens: Option<u32>,
    /// Speculative decoding: probability that a drafted token is accepted, 0 to 1
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "P", value_parser = share, requires = "draft_tokens")]
    #[arg(allow_negative_numbers = true)]
    pub acceptance: Option<f64>,
    /// Speculative decoding: draft model, on the same devices [default: drafts take no time, as
    /// n-grams]
    #[arg(help_heading = INFERENCE)]
    #[arg(long, value_name = "MODEL", requires = "draft_tokens")]
    pub draft: Option<PathArg>,
}

/// Reads the engine of inference.
fn engine(name: &str) -> Result<Profile, String> {
    let known = || ENGINES.map(|engine| engine.name).join(", ");
    let found = ENGINES.into_iter().find(|engine| engine.name == name);
    found.ok_or_else(|| format!("those with published runs are {}", known()))
}

/// Tokens that are drafted at most. Chosen: more are accepted nowhere.
const DRAFTED_MAX: i64 = 64;

impl Served {
    /// Whether it is about inference; flags of that are refused where it is not.
    pub fn is_inference(&self) -> Result<bool, Failure> {
        if self.purpose != Purpose::Training {
            return Ok(true);
        }
        let requests = &self.requests;
        let given = [
            ("--engine", requests.engine.is_some()),
            ("--token-time", requests.token_time.is_some()),
            ("--first-token-time", requests.first_token_time.is_some()),
            ("--input-len", requests.input_len.is_some()),
            ("--pass-tokens", requests.pass_tokens.is_some()),
            ("--weight-dtype", requests.weight_dtype.is_some()),
            ("--kv-dtype", requests.kv_dtype.is_some()),
            ("--draft-tokens", requests.draft_tokens.is_some()),
        ];
        let given = given.into_iter().filter(|(_, is_given)| *is_given);
        let refused = given.map(|(flag, _)| {
            let headline = "steps of training answer no requests".to_owned();
            usage(flag, headline).help("write `--for inference`")
        });
        let refused: Vec<_> = refused.collect();
        if refused.is_empty() { Ok(false) } else { Err(refused.into()) }
    }
}

impl Requests {
    /// Tokens of a request, where they are given.
    pub fn lengths(&self) -> Result<Option<Lengths>, Failure> {
        let (Some(prompt), Some(output)) = (self.input_len, self.output_len) else {
            return Ok(None);
        };
        let shared = self.shared_prefix.unwrap_or(0);
        if shared >= prompt {
            let headline = format!("prompts of {prompt} tokens share {shared} and have no own one");
            return Err(usage("--shared-prefix", headline).help("write fewer").into());
        }
        let count = |flag: &str, tokens: usize| {
            let headline = || format!("{tokens} tokens are more than a sequence can have");
            u32::try_from(tokens).map_err(|_| Failure::from(usage(flag, headline())))
        };
        count("--output-len", prompt + output)?;
        Ok(Some(Lengths {
            prompt: count("--input-len", prompt)?,
            output: count("--output-len", output)?,
            shared: count("--shared-prefix", shared)?,
        }))
    }

    /// Tokens that a request has when it is done, where its lengths are given.
    pub fn context(&self) -> Result<Option<usize>, Failure> {
        Ok(self.lengths()?.map(|lengths| lengths.context() as usize))
    }

    /// How weights and caches are stored.
    pub fn storage(&self) -> Storage {
        let usual = Storage::default();
        Storage {
            weights: self.weight_dtype.map(|WeightFormat(format)| format),
            cache: self.kv_dtype.map_or(usual.cache, |CacheFormat(format)| format),
        }
    }

    /// How many tokens are drafted, and how many of them are accepted.
    pub fn speculation(&self) -> Option<Speculation> {
        Some(Speculation { drafted: self.draft_tokens?, acceptance: self.acceptance? })
    }
}

/// What is to be small.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Aim {
    /// Seconds of a step
    Time,
    /// Bytes of the fullest device
    Memory,
    /// Device time of a step, on all devices or fewer; money where groups have prices
    Cost,
    /// Joules of a step, on all devices or fewer
    Energy,
    /// The Pareto frontier of time and memory
    Pareto,
}

/// Flags of `plan`.
#[derive(Clone, Debug, clap::Args)]
pub struct PlanArgs {
    /// The question
    #[command(flatten)]
    pub asked: RequestFlags,
    /// What devices are for
    #[command(flatten)]
    pub served: Served,
    /// Print the plan itself, as `--plan FILE` takes it
    #[arg(long)]
    pub plan: bool,
    /// Print the plan's name alone, as `score --config` takes it
    #[arg(long, conflicts_with = "plan")]
    pub name: bool,
    /// Objective to minimise, on GPUs
    #[arg(long, value_enum, value_name = "WHAT", default_value = "time")]
    pub objective: Aim,
    /// Watts of a device with its share of the node, for energy [default: what the cluster says]
    #[arg(long, value_name = "WATTS", value_parser = watts, allow_negative_numbers = true)]
    pub watts: Option<f64>,
    /// Stop the search after this time: the answer then depends on the machine
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub budget: Option<f64>,
    /// Write the plan to this file; for GPUs as JSON where the name ends in .json, with its costs.
    /// With --for-tool a directory, unless the name ends in .json or .plan: the tool's flags or
    /// files, with the model's, and the script that starts it
    #[arg(short, long, value_name = "PATH")]
    pub output: Option<PathArg>,
}

/// What is as large as it can be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, clap::ValueEnum)]
pub enum Largest {
    /// Tokens of a sample; in inference tokens of context
    Seq,
    /// Samples of a micro-batch on one data-parallel rank; in inference slots of a replica
    Mbs,
    /// In inference, sequences at once over all replicas
    Gbs,
}

/// Flags of `fit`.
#[derive(Clone, Debug, clap::Args)]
pub struct FitArgs {
    /// The question
    #[command(flatten)]
    pub asked: RequestFlags,
    /// Find the longest sequence, or the largest micro-batch, for which any plan fits, on GPUs; in
    /// inference the longest context of --gbs sequences, or the most sequences at once
    #[arg(long, value_enum, value_name = "WHAT")]
    pub largest: Option<Largest>,
    /// What fits on other hardware, on GPUs: as `explain --what-if`
    #[arg(long, value_name = "CHANGE,…", value_delimiter = ',', conflicts_with = "largest")]
    pub what_if: Vec<Change>,
    /// What devices are for
    #[command(flatten)]
    pub served: Served,
}

/// Flags of `explain`.
#[derive(Clone, Debug, clap::Args)]
pub struct ExplainArgs {
    /// The question
    #[command(flatten)]
    pub asked: RequestFlags,
    /// Explain the plan in this file, beside the one that is found; its ranks, sequence, batch and
    /// type are those asked for, unless flags say others
    #[arg(long = "plan", value_name = "FILE")]
    pub file: Option<PathArg>,
    /// What other hardware would give, on GPUs: nics=2 (twice the bandwidth between nodes),
    /// memory=141GB, device=b200 (a preset), devices=128; each alone, and all of them
    #[arg(long, value_name = "CHANGE,…", value_delimiter = ',', conflicts_with = "file")]
    pub what_if: Vec<Change>,
    /// What devices are for
    #[command(flatten)]
    pub served: Served,
}

/// Flags of `compare`.
#[derive(Clone, Debug, clap::Args)]
pub struct CompareArgs {
    /// The question
    #[command(flatten)]
    pub asked: RequestFlags,
    /// A configuration, as `plan` prints it: "tp=8 pp=8 dp=16 mbs=1 sp zero=1"; may be repeated
    #[arg(long, value_name = "PLAN", required_unless_present = "beside")]
    #[arg(allow_hyphen_values = true)]
    pub with: Vec<String>,
    /// Another cluster to compare with, by its best layout, in inference: a preset or a file; may
    /// be repeated
    #[arg(long, value_name = "PRESET|FILE")]
    pub beside: Vec<PathArg>,
    /// What devices are for
    #[command(flatten)]
    pub served: Served,
}

/// What is asked of inference.
#[derive(Clone, Copy, Debug, Default, PartialEq, clap::Args)]
pub struct Demand {
    /// Tokens of prompts, in inference; `--tokens` are the new ones
    #[arg(long, value_name = "N", value_parser = many, allow_negative_numbers = true)]
    pub prompt_tokens: Option<f64>,
    /// New tokens per second to generate, in inference; `--prompt-tokens` over `--tokens` is then
    /// the number of prompt tokens for each new one
    #[arg(long, value_name = "N", value_parser = many, allow_negative_numbers = true)]
    pub rate: Option<f64>,
}

/// What is trained or answered, and what devices cost.
#[derive(Clone, Debug, clap::Args)]
pub struct Bill {
    /// Tokens to train on, or new tokens to generate in inference: 300B, 15T, …
    #[arg(long, value_name = "N", value_parser = many, allow_negative_numbers = true)]
    pub tokens: Option<f64>,
    /// Deadline: 12h, 30d
    #[arg(long, value_name = "TIME", value_parser = duration)]
    pub deadline: Option<f64>,
    /// Money for an hour of a device, with its currency: 2.5EUR; a number alone is in USD
    /// [default: what the cluster says]
    #[arg(long, value_name = "PRICE", value_parser = price, allow_negative_numbers = true)]
    pub price: Option<Money>,
    /// Watts of a device with its share of the node [default: what the cluster says]
    #[arg(long, value_name = "WATTS", value_parser = watts, allow_negative_numbers = true)]
    pub watts: Option<f64>,
    /// Mean time between failures of one device, in training: 50000h, as of Llama 3's runs
    #[arg(long, value_name = "TIME", value_parser = duration, requires = "save")]
    pub mtbf: Option<f64>,
    /// Time in which a checkpoint is saved and no step is computed: 30s
    #[arg(long, value_name = "TIME", value_parser = duration, requires = "mtbf")]
    pub save: Option<f64>,
    /// Time from a failure to the first step after it
    #[arg(long, value_name = "TIME", value_parser = duration, default_value = "10m")]
    pub restart: f64,
}

impl Bill {
    /// What interrupts a job on `devices` devices, where the user says.
    pub fn interruptions(&self, devices: u32) -> Option<Interruptions> {
        let (mtbf_s, save_s) = (self.mtbf?, self.save?);
        Some(Interruptions::of_devices(devices.into(), mtbf_s, save_s, self.restart))
    }

    /// Money for an hour of a device, as the user says: here, or in the file of the cluster.
    pub fn hourly(&self, cluster: &Cluster) -> Option<f64> {
        let said = cluster.price.as_ref().map(|price| price.per_device_hour.value);
        self.price.as_ref().map(|money| money.value).or(said)
    }

    /// The currency of that money.
    pub fn currency(&self, cluster: &Cluster) -> Option<String> {
        let kinds =
            if cluster.groups.is_empty() { std::slice::from_ref(cluster) } else { &cluster.groups };
        let said = kinds.iter().find_map(|kind| Some(&kind.price.as_ref()?.currency));
        self.price.as_ref().map(|money| &money.currency).or(said).cloned()
    }

    /// What energy is computed from, where no flag says it.
    pub fn energy_basis(cluster: &Cluster, is_known: bool) -> String {
        let of_board = |power: &&Power| power.busy_w.origin == Origin::Datasheet;
        match cluster.device.power.as_ref().filter(of_board) {
            Some(power) => format!(
                "\nenergy at {} W per device all the time, the limit of its board: `--watts N` \
                 says another\n",
                power.busy_w.value
            ),
            None if is_known => String::new(),
            None => "\nenergy is not known: write `--watts N`, or `[device.power]` in a cluster \
                     file\n"
                .to_owned(),
        }
    }

    /// The name of a row of money.
    pub fn money_name(&self, cluster: &Cluster) -> String {
        let currency = self.currency(cluster);
        currency.map_or("money".to_owned(), |currency| format!("money, {currency}"))
    }

    /// The prices that a bill was made with: that of the flag, or those of a file.
    pub fn said(&self, cluster: &Cluster) -> String {
        if let Some(money) = &self.price {
            return format!("an hour of a device: {money}\n");
        }
        let kinds =
            if cluster.groups.is_empty() { std::slice::from_ref(cluster) } else { &cluster.groups };
        let said = kinds.iter().filter_map(|kind| Some((&kind.name, kind.price.as_ref()?)));
        said.map(|(name, price)| format!("an hour of a device of {name}: {price}\n")).collect()
    }
}

/// Flags of `cost`.
#[derive(Clone, Debug, clap::Args)]
pub struct CostArgs {
    /// The question
    #[command(flatten)]
    pub asked: RequestFlags,
    /// The bill
    #[command(flatten)]
    pub bill: Bill,
    /// What devices are for
    #[command(flatten)]
    pub served: Served,
    /// What is asked of inference
    #[command(flatten)]
    pub demand: Demand,
}

/// Refuses other hardware where it is not asked about training on GPUs.
pub fn refuse_changes(
    changes: &[Change],
    cluster: &Cluster,
    served: &Served,
) -> Result<(), Failure> {
    if !changes.is_empty() && served.is_inference()? {
        let headline = "other hardware is asked about for training".to_owned();
        return Err(usage("--what-if", headline)
            .help("use `compare --beside` for inference")
            .into());
    }
    match changes.first() {
        Some(change) if cluster.device.kind == Kind::Cpu => {
            let headline = format!("`{change}` is a change of GPUs, and the cluster has CPUs");
            Err(usage("--what-if", headline).help("name GPUs: `--cluster h100`").into())
        }
        Some(_) | None => Ok(()),
    }
}

/// Refuses clusters of CPUs; `other` is what their ranks are asked about with.
pub fn refuse_cpus(cluster: &Cluster, other: &str) -> Result<(), Failure> {
    if cluster.device.kind == Kind::Gpu {
        return Ok(());
    }
    let headline = format!("`{}` has CPUs, and this is answered for GPUs", cluster.name);
    let help = format!("name GPUs: `--cluster h100`, another preset, or a file; {other}");
    Err(usage("--cluster", headline).help(help).into())
}

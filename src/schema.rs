//! What the documents of `--json` hold: one table, which `gantline schema` prints as JSON Schema.
//!
//! A document may have further keys in a later version of this program; those that are listed here
//! stay, under the same version of the document. Names end in their unit: `_s` seconds, `_bytes`,
//! `_per_s`; numbers without one are counts or shares.

use serde_json::{Map, Value, json};

/// The JSON type of a value.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// A text.
    Text,
    /// A number.
    Number,
    /// A whole number of at least zero.
    Count,
    /// True or false.
    Flag,
    /// An object: names to values.
    Object,
    /// A list.
    List,
}

impl Kind {
    fn name(self) -> &'static str {
        match self {
            Kind::Text => "string",
            Kind::Number => "number",
            Kind::Count => "integer",
            Kind::Flag => "boolean",
            Kind::Object => "object",
            Kind::List => "array",
        }
    }
}

/// A key of a document.
#[derive(Clone, Copy, Debug)]
pub struct Field {
    /// The key.
    pub key: &'static str,
    /// The type of its value.
    pub kind: Kind,
    /// Whether the value may be null: where there is none.
    pub is_optional: bool,
    /// What the value is.
    pub about: &'static str,
}

/// A document: what a verb prints with `--json`, or stores.
#[derive(Clone, Copy, Debug)]
pub struct Document {
    /// Its `schema`: a name and a version.
    pub name: &'static str,
    /// What it answers.
    pub about: &'static str,
    /// Its keys besides `schema`.
    pub fields: &'static [Field],
}

const fn is(key: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { key, kind, is_optional: false, about }
}

const fn may(key: &'static str, kind: Kind, about: &'static str) -> Field {
    Field { key, kind, is_optional: true, about }
}

const MODEL: Field = is("model", Kind::Text, "the model's name");
const PARAMS: Field = is("params", Kind::Count, "numbers that the weights are");
const CLUSTER: Field = is("cluster", Kind::Text, "the cluster, with what was read from it");
const RANKS: Field = is("ranks", Kind::Count, "ranks");
const GBS: Field = is("gbs", Kind::Count, "samples of a step over all ranks");
const SEQ: Field = is("seq", Kind::Count, "tokens of a sample");
const DTYPE: Field = is("dtype", Kind::Text, "the element type");
const ASSUMPTIONS: Field =
    may("assumptions", Kind::List, "on GPUs: what is computed and not priced, in words");
const PADDING: Field = may(
    "vocabulary_padding",
    Kind::Object,
    "on GPUs: words, padded_words, and the parameters and bytes that are added",
);
const DEVICES: Field = is("devices", Kind::Count, "devices");
const TOKENS: Field = is("tokens", Kind::Number, "tokens that are trained on");
const STEP: Field = is("step_time_s", Kind::Number, "seconds of a step");
const STEP_LOW: Field =
    is("step_time_low_s", Kind::Number, "seconds of a step at least, as far as prices are known");
const STEP_HIGH: Field = is("step_time_high_s", Kind::Number, "seconds of a step at most");
const REASON: Field = may("reason", Kind::Text, "why nothing fits");
const SMALLEST: Field = may(
    "smallest",
    Kind::Object,
    "where nothing fits, the plan that needs the least: text, rank, need_bytes, memory",
);
const NEAREST: Field = is(
    "nearest",
    Kind::List,
    "where nothing fits, what does: change, devices, and the plan as in smallest",
);
const ORIGIN: Field = is("origin", Kind::Text, "how times are known: measured, fitted, datasheet");
const BREAKDOWN: Field =
    is("breakdown", Kind::Object, "parts of a step in seconds, which sum to it");
const GAP: Field =
    may("gap", Kind::Number, "by which share the best possible plan may be better, at most");
const PREDICTED: Field = may("predicted_step_time_s", Kind::Number, "what the plan predicted");
const RATE: Field = may("tokens_per_s", Kind::Number, "tokens of all ranks per second");
const NEED: Field = is("need_bytes", Kind::Count, "bytes of the fullest place");
const HAVE: Field = is("have_bytes", Kind::Count, "bytes that it has");

/// All documents.
pub const DOCUMENTS: &[Document] = &[
    Document {
        name: "gantline.checkpoints/1",
        about: "the checkpoints of a run",
        fields: &[
            is("run", Kind::Text, "the directory of the run"),
            is(
                "checkpoints",
                Kind::List,
                "step, latest, bytes, saved_s, intact where it was verified, damage: texts",
            ),
        ],
    },
    Document {
        name: "gantline.cluster/1",
        about: "a cluster, each value with where it comes from",
        fields: &[
            is("name", Kind::Text, "its name"),
            is("device", Kind::Object, "what a rank computes on"),
            is("levels", Kind::List, "links, the nearest first"),
            is("nodes", Kind::Count, "nodes"),
            may("devices_per_node", Kind::Count, "devices of a node, where it says so"),
            is("groups", Kind::List, "groups of other devices each, where it has some"),
            may("price", Kind::Object, "what an hour of a device costs, where the user says so"),
            is("links", Kind::List, "links between groups: groups, bandwidth, latency"),
            is("host", Kind::Object, "memory of a node beside its devices: bytes, bandwidth"),
            may("calibration", Kind::Object, "rates that were measured"),
        ],
    },
    Document {
        name: "gantline.clusters/1",
        about: "the clusters that need no file",
        fields: &[is("presets", Kind::List, "presets: preset, device")],
    },
    Document {
        name: "gantline.models/1",
        about: "the families and models that are known by name",
        fields: &[
            is("families", Kind::List, "families: model_type, title, classes"),
            is("models", Kind::List, "models: name, model_type, parameters, what it can do"),
        ],
    },
    Document {
        name: "gantline.compile/1",
        about: "a file that `compile` wrote",
        fields: &[
            is("file", Kind::Text, "its path"),
            is("bytes", Kind::Count, "its size"),
            is("blake3", Kind::Text, "its hash"),
            is("programs", Kind::Count, "programs: one for each class of ranks"),
            is("kernels", Kind::Count, "kernels that they launch"),
            is("report", Kind::Object, "the document gantline.report/1"),
        ],
    },
    Document {
        name: "gantline.compare/1",
        about: "configurations side by side",
        fields: &[
            MODEL,
            is("have_bytes", Kind::Number, "bytes of a device for a job"),
            is("plans", Kind::List, "the configurations, each with times and bytes"),
            is("last_is_best", Kind::Flag, "whether the last one is the best there is"),
        ],
    },
    Document {
        name: "gantline.compare-inference/1",
        about: "layouts of copies that answer prompts, side by side",
        fields: &[
            MODEL,
            SEQ,
            is("plans", Kind::List, "the layouts, each with its cluster, bytes, rates and parts"),
            is("bests", Kind::Count, "how many of the last ones are the best of their clusters"),
        ],
    },
    Document {
        name: "gantline.cost/1",
        about: "what training on a data set takes",
        fields: &[
            MODEL,
            CLUSTER,
            DEVICES,
            TOKENS,
            is("steps", Kind::Number, "steps"),
            is("plan", Kind::Text, "the configuration"),
            STEP,
            is("low", Kind::Object, "time, device hours, money and energy of the shortest steps"),
            is("expected", Kind::Object, "the same of the expected ones"),
            is("high", Kind::Object, "the same of the longest ones"),
            may("deadline_s", Kind::Number, "seconds that there are"),
            is("meets_deadline", Kind::Flag, "whether the expected time is not longer"),
        ],
    },
    Document {
        name: "gantline.cost-inference/1",
        about: "what tokens of inference take, or an hour of a rate of them",
        fields: &[
            MODEL,
            CLUSTER,
            is("devices", Kind::Number, "devices"),
            SEQ,
            is("plan", Kind::Text, "how a copy lies"),
            is("copies", Kind::Count, "copies"),
            is("prompt_tokens", Kind::Number, "tokens of prompts"),
            is("tokens", Kind::Number, "new tokens"),
            may("rate", Kind::Number, "new tokens per second that are asked for"),
            is("low", Kind::Object, "time, device hours, money and energy where passes are short"),
            is("expected", Kind::Object, "the same of the expected ones"),
            is("high", Kind::Object, "the same of the longest ones"),
            may("deadline_s", Kind::Number, "seconds that there are"),
            is("meets", Kind::Flag, "whether devices are enough for the rate or the deadline"),
        ],
    },
    Document {
        name: "gantline.detect/1",
        about: "what this machine is, as a cluster",
        fields: &[
            is("cores", Kind::Count, "threads that run at once"),
            is("memory_bytes", Kind::Count, "memory that this process may use"),
            is("instruction_set", Kind::Text, "the widest that kernels are made for"),
            is("gpus", Kind::List, "GPUs: name, memory_bytes, preset with their rates"),
            may("absent", Kind::Text, "why no GPU is listed"),
            is("file", Kind::Text, "the text of a cluster file"),
        ],
    },
    Document {
        name: "gantline.doctor/1",
        about: "what this machine has",
        fields: &[
            is("version", Kind::Text, "the version of this program"),
            is("cores", Kind::Count, "threads that run at once"),
            is("memory_bytes", Kind::Count, "memory that this process may use"),
            is("instruction_set", Kind::Text, "the widest that kernels are made for"),
            is("executes_on", Kind::List, "kinds of devices that programs run on"),
            is("libraries", Kind::List, "libraries: name, gives, file, looked_for, way_out"),
            may("launcher", Kind::Object, "who started this process: name, rank, ranks"),
        ],
    },
    Document {
        name: "gantline.explain/1",
        about: "why the plan is as it is",
        fields: &[
            is("plan", Kind::Text, "its decisions in a few words"),
            is("kinds", Kind::List, "kinds of parallelism, each with what it is"),
            STEP,
            STEP_LOW,
            STEP_HIGH,
            ORIGIN,
            BREAKDOWN,
            is("rank", Kind::Count, "the rank that holds the most bytes"),
            is("footprint", Kind::Object, "its bytes by what holds them"),
            NEED,
            HAVE,
            may("decided", Kind::Text, "the number that made this plan the best one"),
            is("alternatives", Kind::List, "plans that were not chosen: plan, step_time_s, reason"),
            is("candidate_count", Kind::Count, "candidates of the search"),
            is("bounded_out", Kind::Count, "candidates that could not be better"),
            GAP,
        ],
    },
    Document {
        name: "gantline.explain-inference/1",
        about: "where the time of a token and of a prompt goes",
        fields: &[
            MODEL,
            CLUSTER,
            DEVICES,
            SEQ,
            DTYPE,
            is("have_bytes", Kind::Number, "bytes of a device for a job"),
            is("row", Kind::Object, "the way to lie that is explained"),
            is("token", Kind::Object, "time_s, low_s, high_s and breakdown of a token of each"),
            is("prompt", Kind::Object, "the same of a prompt"),
            is("memory", Kind::Object, "bytes of the fullest device, by what holds them"),
            is("neighbours", Kind::List, "ways that differ in one decision, each with a reason"),
            is("other_memory", Kind::List, "what the same way gives with other memory_bytes"),
            is("tokens_per_gib", Kind::Number, "tokens of context that a GiB more holds"),
            is("sequences_per_gib", Kind::Number, "sequences of so many tokens that it holds"),
        ],
    },
    Document {
        name: "gantline.fit/1",
        about: "whether a model fits a cluster",
        fields: &[
            MODEL,
            CLUSTER,
            is("fits", Kind::Flag, "whether any strategy fits"),
            is(
                "rows",
                Kind::List,
                "strategies: strategy, footprint, need_bytes, have_bytes, is_shared",
            ),
        ],
    },
    Document {
        name: "gantline.fusions/1",
        about: "what rewriting made of a model",
        fields: &[
            is("passes", Kind::List, "passes in order, each with its functions"),
            is(
                "launched",
                Kind::List,
                "for each half of a layer, its launches on one rank and how good that choice is",
            ),
        ],
    },
    Document {
        name: "gantline.generate/1",
        about: "a text that was continued",
        fields: &[
            is("text", Kind::Text, "prompt and continuation"),
            is("tokens", Kind::List, "the new tokens"),
            is("prompt_tokens", Kind::Count, "tokens of the prompt"),
            is("prefill_s", Kind::Number, "seconds to the first new token"),
            is("decode_tokens_per_s", Kind::Number, "tokens per second after it"),
            is(
                "finish_reason",
                Kind::Text,
                "length at the limit or the end of the context, stop at a token that ends texts",
            ),
        ],
    },
    Document {
        name: "gantline.infeasible/1",
        about: "why the answer is no: what a verb prints in the place of its own document",
        fields: &[
            is("fits", Kind::Flag, "false"),
            is("code", Kind::Text, "the code of the diagnostic"),
            is("reason", Kind::Text, "its headline"),
            is("notes", Kind::List, "how that is known"),
            may("help", Kind::Text, "what to ask instead"),
            may("have_bytes", Kind::Number, "bytes of a device for a job"),
            SMALLEST,
            NEAREST,
        ],
    },
    Document {
        name: "gantline.inference/1",
        about: "how copies of a model answer prompts",
        fields: &[
            MODEL,
            CLUSTER,
            DEVICES,
            SEQ,
            DTYPE,
            ASSUMPTIONS,
            is("have_bytes", Kind::Number, "bytes of a device for a job"),
            is("fits", Kind::Flag, "whether any copy answers one prompt of so many tokens"),
            may("recommended", Kind::Object, "the row to take, with its reason"),
            may("missing_bytes", Kind::Number, "what the smallest copy lacks, where none fits"),
            is(
                "rows",
                Kind::List,
                "ways to lie, the best first: tp, pp, ep, what they hold and give",
            ),
        ],
    },
    Document {
        name: "gantline.inspect/1",
        about: "what a model is",
        fields: &[
            MODEL,
            PARAMS,
            is("weight_bytes", Kind::Count, "bytes of the weights in this element type"),
            DTYPE,
            is("vocab", Kind::Count, "different tokens; 0 where a graph does not say"),
            is("positions_max", Kind::Count, "the longest sequence it was made for"),
            is("layer_count", Kind::Count, "layers"),
            SEQ,
            is("entries", Kind::List, "functions that can be asked for"),
            is("layers", Kind::List, "layers: name, count, params, weight_bytes, flops"),
            is("functions", Kind::List, "functions with how often each op occurs"),
        ],
    },
    Document {
        name: "gantline.plan/1",
        about: "the fastest plan that fits",
        fields: &[
            MODEL,
            PARAMS,
            CLUSTER,
            RANKS,
            GBS,
            SEQ,
            DTYPE,
            may("flops_per_step", Kind::Number, "operations of a step, forward and backward"),
            ASSUMPTIONS,
            PADDING,
            STEP,
            STEP_LOW,
            STEP_HIGH,
            ORIGIN,
            BREAKDOWN,
            may("energy_j", Kind::Number, "joules of a step on all devices, where watts are known"),
            GAP,
            is("complete", Kind::Flag, "whether no candidate was left out unseen"),
            is("candidates", Kind::Count, "candidates of the search"),
            is("plans", Kind::List, "the best of each kind, the fastest first"),
            is("plan", Kind::Object, "the plan: every decision"),
        ],
    },
    Document {
        name: "gantline.plan-groups/1",
        about: "a job on groups of other devices each: a shared batch, or stages on each",
        fields: &[
            is("kind", Kind::Text, "shares: each group has copies; stages: each has stages"),
            MODEL,
            PARAMS,
            CLUSTER,
            DEVICES,
            is("used_devices", Kind::Count, "devices that take part"),
            GBS,
            SEQ,
            DTYPE,
            STEP,
            RATE,
            may("energy_j", Kind::Number, "joules of a step on these, where watts are known"),
            may("money", Kind::Number, "money for a step on these, where prices are known"),
            may("exchange_s", Kind::Number, "of shares: seconds to exchange gradients"),
            may("piece", Kind::Count, "of shares: samples that they are multiples of"),
            may("searched", Kind::Count, "of shares: groups with so many samples, searched"),
            may("microbatch_count", Kind::Count, "of stages: micro-batches of a step"),
            may(
                "cuts",
                Kind::Text,
                "of stages: cuts it is no slower than: given, all, moves, next-moves, balanced",
            ),
            is("complete", Kind::Flag, "whether no candidate was left out unseen"),
            is("groups", Kind::List, "groups: device, first_rank, ranks, samples, layers, plan"),
        ],
    },
    Document {
        name: "gantline.explain-groups/1",
        about: "where a step on groups goes, and what other ways take; with what their plan has",
        fields: &[
            is("kind", Kind::Text, "shares or stages"),
            MODEL,
            STEP,
            is("breakdown", Kind::Object, "seconds of the step, or of the slowest group, by part"),
            is("others", Kind::List, "other ways: kind, groups, devices, step_time_s"),
            is("fits", Kind::Flag, "whether it fits"),
            may("fastest", Kind::Object, "the fastest plan, where one in a file is explained"),
            may("infeasible", Kind::Text, "why there is no fastest plan, where one is explained"),
        ],
    },
    Document {
        name: "gantline.compare-groups/1",
        about: "layouts of groups of devices beside the best plan over them",
        fields: &[
            MODEL,
            is("plans", Kind::List, "documents as of `plan` on groups, with whether each fits"),
            is("last_is_best", Kind::Flag, "whether the last of them is what the search found"),
        ],
    },
    Document {
        name: "gantline.fit-groups/1",
        about: "what devices of each group hold, and whether a job fits on groups",
        fields: &[
            MODEL,
            CLUSTER,
            DEVICES,
            is("fits", Kind::Flag, "whether anything fits"),
            REASON,
            may("step_time_s", Kind::Number, "seconds of the fastest way that fits"),
            is("rows", Kind::List, "groups: plan, peak_mem_bytes, have_bytes"),
        ],
    },
    Document {
        name: "gantline.report/1",
        about: "what was predicted when a file was compiled; `report.json` in it",
        fields: &[
            MODEL,
            PARAMS,
            CLUSTER,
            RANKS,
            is("mesh", Kind::Object, "ranks along each axis"),
            GBS,
            SEQ,
            DTYPE,
            is("peak_mem_bytes", Kind::Count, "bytes of the fullest rank"),
            NEED,
            is("arena_bytes", Kind::List, "bytes of the arena of each class of ranks"),
            is("predictions", Kind::Object, "numbers by name, each with value and origin"),
        ],
    },
    Document {
        name: "gantline.run_batch/1",
        about: "one batch through a model",
        fields: &[
            may("loss", Kind::Number, "mean loss of a label in nats"),
            may("labels", Kind::Number, "labels that count"),
            may("logits", Kind::List, "dims of the logits"),
            may("step_time_s", Kind::Number, "median of the repetitions"),
            may("step_time_low_s", Kind::Number, "the fastest of them"),
            may("step_time_high_s", Kind::Number, "the slowest of them"),
            PREDICTED,
            RATE,
        ],
    },
    Document {
        name: "gantline.score/1",
        about: "what a layout costs",
        fields: &[
            MODEL,
            is("cluster", Kind::Text, "the cluster's name"),
            is("configuration", Kind::Text, "the layout, with what was open decided"),
            is("style", Kind::Text, "how the program executes"),
            RANKS,
            ASSUMPTIONS,
            PADDING,
            STEP,
            STEP_LOW,
            STEP_HIGH,
            RATE,
            is("tokens_per_s_per_device", Kind::Number, "tokens of one device per second"),
            is("mfu", Kind::Number, "share of the peak that the model's operations take"),
            BREAKDOWN,
            is("peak_mem_bytes", Kind::Number, "bytes of the fullest device"),
            is("have_bytes", Kind::Number, "bytes of a device for a job"),
            is("fits", Kind::Flag, "whether it fits"),
            is("memory", Kind::Object, "bytes by what holds them"),
            is("left_out", Kind::List, "names in the file that were not used"),
            is("notes", Kind::List, "how the file was read, where that is not plain"),
        ],
    },
    Document {
        name: "gantline.size/1",
        about: "the fewest and the cheapest devices that meet a deadline",
        fields: &[
            MODEL,
            TOKENS,
            GBS,
            is("deadline_s", Kind::Number, "seconds that there are"),
            may("devices", Kind::Count, "the fewest devices that are enough"),
            may("cheapest_devices", Kind::Count, "the cheapest of those that are"),
            is("tried", Kind::List, "what was tried: devices, plan, times"),
            may("reason", Kind::Text, "why no number of devices is enough"),
        ],
    },
    Document {
        name: "gantline.size-inference/1",
        about: "how few devices give tokens soon enough, or enough of them",
        fields: &[
            MODEL,
            may("token_time_s", Kind::Number, "seconds from one token to the next, at most"),
            may("rate", Kind::Number, "new tokens per second that are asked for"),
            may("prompt_rate", Kind::Number, "tokens of prompts per second that are"),
            may("sequences", Kind::Count, "sequences at once that are"),
            may("devices", Kind::Count, "the fewest or cheapest devices that are enough"),
            may("cluster", Kind::Text, "of which kind"),
            is("rows", Kind::List, "ways that are enough, each with devices, nodes, money"),
        ],
    },
    Document {
        name: "gantline.space-explain/1",
        about: "why the plan for GPUs is as it is: gantline.plan/1, and beside it",
        fields: &[
            is(
                "neighbours",
                Kind::List,
                "the plan with one decision changed, the reason, and best: all others searched",
            ),
            is("seconds_saved_per_gib", Kind::Number, "what one GiB more on each device saves"),
            is("other_memory", Kind::List, "sizes of memory: memory_bytes, best (a plan or null)"),
            may("fastest", Kind::Object, "the fastest plan, where one in a file is explained"),
            may(
                "simulated_step_time_s",
                Kind::Number,
                "seconds of a step whose passes are replayed one by one",
            ),
            may("infeasible", Kind::Text, "why there is no fastest plan, where one is explained"),
        ],
    },
    Document {
        name: "gantline.space-fit/1",
        about: "what usual strategies need on GPUs",
        fields: &[
            MODEL,
            CLUSTER,
            DEVICES,
            is("have_bytes", Kind::Number, "bytes of a device for a job"),
            is("fits", Kind::Flag, "whether any configuration fits"),
            REASON,
            is("rows", Kind::List, "strategies: strategy, plan, memory, need_bytes, fits"),
            may(
                "fastest",
                Kind::Object,
                "the fastest strategy that fits, or else any plan that does",
            ),
            SMALLEST,
            NEAREST,
        ],
    },
    Document {
        name: "gantline.train/1",
        about: "how a training ended",
        fields: &[
            is("steps", Kind::Count, "steps done, over all resumptions"),
            is("complete", Kind::Flag, "whether all are done"),
            may("loss_first", Kind::Number, "mean loss of a token in the first step, in nats"),
            may("loss", Kind::Number, "the same in the last step"),
            may("validation_loss", Kind::Number, "the same over validation data"),
            may("step_time_s", Kind::Number, "the median step"),
            PREDICTED,
            RATE,
            is("goodput", Kind::Number, "share of the time that went into steps"),
            may("checkpoint", Kind::Text, "the directory of the last one"),
        ],
    },
    Document {
        name: "gantline.validate/1",
        about: "predictions beside measured runs",
        fields: &[
            is("predicted", Kind::Count, "rows that were predicted"),
            is("all", Kind::Object, "errors over all rows"),
            is("sources", Kind::Object, "errors by source"),
            is("rows", Kind::List, "rows, each with what was predicted"),
            is("unexpressed", Kind::List, "rows that cannot be predicted, and why"),
        ],
    },
    Document {
        name: "gantline.verify/1",
        about: "whether meshes compute what one device does",
        fields: &[
            MODEL,
            DTYPE,
            is("ok", Kind::Flag, "whether all do"),
            may("loss", Kind::Number, "the loss of one rank; null where it is no number"),
            is("meshes", Kind::List, "meshes: pp, dp, tp, sequence, error_max, worst, ok"),
        ],
    },
];

impl Document {
    /// The document of a name, with or without its version and `gantline.`.
    pub fn find(name: &str) -> Option<&'static Document> {
        let wanted = name.strip_prefix("gantline.").unwrap_or(name);
        DOCUMENTS.iter().find(|document| {
            let own = document.name.trim_start_matches("gantline.");
            own == wanted || own.split_once('/').is_some_and(|(name, _)| name == wanted)
        })
    }

    /// The JSON Schema, in the draft 2020-12.
    pub fn json_schema(&self) -> Value {
        let mut properties = Map::new();
        let schema = json!({"const": self.name, "description": "name and version of this form"});
        properties.insert("schema".to_owned(), schema);
        for Field { key, kind, is_optional, about } in self.fields {
            let name = kind.name();
            let kinds = if *is_optional { json!([name, "null"]) } else { json!(name) };
            let mut property = json!({"type": kinds, "description": about});
            if *kind == Kind::Count {
                property["minimum"] = json!(0);
            }
            properties.insert((*key).to_owned(), property);
        }
        let keys: Vec<&String> = properties.keys().collect();
        json!({
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": format!("urn:{}", self.name.replace('/', ":")),
            "title": self.name,
            "description": self.about,
            "type": "object",
            "required": keys,
            "properties": properties,
        })
    }
}

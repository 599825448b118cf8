//! Plans that searches print, for models, clusters, batches and limits drawn from a seed: each
//! parses, prints back to equal bytes, passes the check that shares no code with the search, and
//! has the name that it was printed under. The same plan with one field changed is refused.

use std::path::Path;

use gantline::LOSS;
use gantline::job::Precision;
use gantline::planned::{Built, Wanted};
use ir::import::{Options, import, resolve};
use ir::plan::Zero;
use ir::text::parse_plan;
use ir::{DType, Module, Plan};
use planner::check::check;
use planner::cluster::Cluster;
use planner::configuration::Configuration;
use planner::elaborate::{elaborate, name_of};
use planner::estimate::described::described;
use planner::estimate::profile::GANTLINE;
use planner::estimate::rates::Arithmetic;
use planner::estimate::{Estimator, Job};
use planner::limits::Limits;
use planner::search::branch_and_bound::{Budget, Objective};
use planner::search::request::{SearchRequest, search};

use crate::draws::{Draws, seeds};

/// Presets of models, of all kinds of layers that decoders have.
const MODELS: [&str; 14] = [
    "gpt2",
    "gpt2-xl",
    "gpt-22b",
    "gpt3-175b",
    "opt-66b",
    "llama-2-13b",
    "llama-3-8b",
    "llama-3-70b",
    "mistral-7b",
    "qwen2.5-7b",
    "falcon-40b",
    "mixtral-8x7b",
    "qwen3-30b-a3b",
    "deepseek-v2-lite",
];

/// Presets of clusters whose devices have products in bf16.
const CLUSTERS: [&str; 12] = [
    "h100",
    "a100",
    "a100-40gb",
    "h200",
    "b200",
    "gb200-nvl72",
    "l40s",
    "mi300x",
    "h100-pcie",
    "a10g",
    "h20",
    "rtx4090",
];

/// What a user may fix and forbid, one of which is drawn.
const LIMITS: [(&[&str], &[&str]); 14] = [
    (&[], &[]),
    (&[], &[]),
    (&["tp=2"], &[]),
    (&["pp=2"], &[]),
    (&["pp=4"], &[]),
    (&["zero=1"], &[]),
    (&["zero=3"], &[]),
    (&["cp=2"], &[]),
    (&["recompute=full"], &[]),
    (&["schedule=zb-h1", "pp=2"], &[]),
    (&["schedule=gpipe", "pp=2"], &[]),
    (&["vpp=2", "pp=2"], &[]),
    (&["ep=2"], &[]),
    (&[], &["offload", "recompute"]),
];

/// Candidates that are priced at most. Chosen: a second, so that some searches are cut off.
const EVALUATIONS_MAX: u64 = 40_000;

/// A request of a seed, as a user writes it.
struct Request {
    model: &'static str,
    cluster: &'static str,
    devices: u32,
    global_batch: u32,
    seq: u32,
    limits: (&'static [&'static str], &'static [&'static str]),
}

impl Request {
    fn draw(seed: u64) -> Request {
        let mut draws = Draws::new(seed);
        let devices = pick(&mut draws, &[1, 2, 4, 6, 8, 8, 12, 16, 24, 32, 64, 128, 256]);
        Request {
            model: pick(&mut draws, &MODELS),
            cluster: pick(&mut draws, &CLUSTERS),
            devices,
            global_batch: devices * pick(&mut draws, &[1, 2, 3, 4, 8]),
            seq: pick(&mut draws, &[256, 512, 1024]),
            limits: pick(&mut draws, &LIMITS),
        }
    }

    /// The command that asks it.
    fn command(&self) -> String {
        let Request { model, cluster, devices, global_batch, seq, limits: (fix, forbid) } = self;
        let flags = |name: &str, all: &[&str]| -> String {
            all.iter().map(|one| format!(" --{name} {one}")).collect()
        };
        format!(
            "plan {model} --cluster {cluster} --devices {devices} --gbs {global_batch} --seq \
             {seq}{}{}",
            flags("fix", fix),
            flags("forbid", forbid)
        )
    }

    /// The plans that are printed: the best, and others; none where nothing fits.
    fn answers(&self, cluster: &Cluster) -> Vec<Configuration> {
        let work = described(Path::new(self.model), Some(self.seq)).expect("a preset").work;
        let global_batch = u64::from(self.global_batch);
        let job = Job { global_batch, arithmetic: Arithmetic::Half };
        let devices = u64::from(self.devices);
        let estimator = Estimator::over(devices, &work, cluster, GANTLINE, job).expect("priced");
        let (fix, forbid) = self.limits;
        let texts = |all: &[&str]| -> Vec<String> { all.iter().map(|t| (*t).to_owned()).collect() };
        let limits = Limits::parse(&texts(fix), &texts(forbid), &[]).expect("limits");
        let request = SearchRequest {
            estimator: &estimator,
            devices: self.devices,
            global_batch: self.global_batch,
            limits,
            objective: Objective::Time,
            power: None,
            budget: Budget { evaluations_max: EVALUATIONS_MAX, stop: &|| false },
        };
        let Ok(found) = search(&request) else { return Vec::new() };
        let all = found.best.into_iter().chain(found.others).chain(found.misses);
        all.map(|chosen| chosen.configuration).collect()
    }
}

fn pick<T: Copy>(draws: &mut Draws, all: &[T]) -> T {
    all[draws.below(all.len())]
}

/// The module of a plan's model, made from the plan alone.
fn module(plan: &Plan) -> Module {
    let description = resolve(&plan.model).expect("it is a preset").description;
    let dtype = plan.precision.accumulate;
    let options = Options { seq: plan.seq, dtype, dropout: None, documents: false };
    let model = import(&description, &options).expect("it is imported");
    let module = codegen::prepare::prepare_training_as(model.module, LOSS, &plan.precision);
    module.expect("it is prepared")
}

/// Checks `each` of the plans that a seed's search prints, and one of their plants; how many there
/// were.
pub(crate) fn case(seed: u64, each: usize) -> usize {
    let request = Request::draw(seed);
    let about = format!("SEED={seed}: {}", request.command());
    let mut cluster = Cluster::load(request.cluster).expect("a preset");
    cluster.nodes = request.devices as usize;
    let answers = request.answers(&cluster);
    if answers.is_empty() {
        return 0;
    }
    let wanted = Wanted {
        model: Path::new(request.model),
        cluster: cluster.describe(),
        target: cluster.target(),
        global_batch_size: request.global_batch as usize,
        seq: request.seq as usize,
        dtype: Precision::Of(DType::BF16),
        lora: None,
        predictions: Default::default(),
    };
    let built = Built::of(&wanted).unwrap_or_else(|failure| panic!("{about}: {failure:?}"));
    let purpose = built.purpose(&wanted);
    let mut own = None;
    let first = seed as usize % answers.len();
    let chosen = std::iter::once(0).chain(first..answers.len()).take(each);
    let mut count = 0;
    for at in chosen {
        let name = &answers[at];
        let about = format!("{about}: {name}");
        let read: Configuration = name.to_string().parse().expect("a name is read");
        assert_eq!(read, *name, "{about}");
        let plan = elaborate(name, &purpose).unwrap_or_else(|wrong| panic!("{about}: {wrong:?}"));
        let text = plan.to_string();
        let back = parse_plan("x", &text).unwrap_or_else(|wrong| panic!("{about}: {wrong:?}"));
        assert_eq!(back.to_string(), text, "{about}");
        let module = own.get_or_insert_with(|| module(&plan));
        let wrong = check(module, LOSS, &back, &cluster);
        assert!(wrong.is_empty(), "{about}: {wrong:?}\n{text}");
        let found = name_of(module, LOSS, &back).expect("it has a name");
        assert_eq!((found.differences, &found.configuration), (0, name), "{about}\n{text}");
        assert_eq!(back.global_batch_size(), request.global_batch as usize, "{about}");
        refuse_plants(module, &back, &cluster, &about);
        count += 1;
    }
    count
}

/// A change of one field.
type Plant = fn(&mut Plan);

/// Changes of one field that make any plan illegal, with what the diagnostic names.
const PLANTS: [(&str, Plant, &str); 7] = [
    ("stages", |plan| *plan.stage_ends.last_mut().expect("a stage") -= 1, "stage"),
    ("stages", |plan| plan.stage_ends.push(plan.stage_ends[0]), "stage"),
    ("mesh", |plan| plan.mesh.dp = 0, "mesh"),
    ("mesh", |plan| plan.mesh.tp *= 4096, "mesh"),
    ("micro-batch", |plan| plan.microbatch_count = 0, "micro-batch"),
    // Divides no number of ranks that is drawn.
    ("zero", |plan| plan.zero = Zero { stage: 1, shard: 7919 }, "ZeRO"),
    ("experts", |plan| plan.experts.ep = plan.mesh.ranks() + 1, "experts"),
];

/// Each plant is refused, with its field named.
fn refuse_plants(module: &Module, plan: &Plan, cluster: &Cluster, about: &str) {
    for (field, plant, said) in PLANTS {
        let mut other = plan.clone();
        plant(&mut other);
        let wrong = check(module, LOSS, &other, cluster);
        let is_named = wrong.iter().any(|one| one.headline.contains(said));
        assert!(is_named, "{about}: another {field} is not refused: {wrong:?}\n{other}");
    }
}

/// Two plans of each of 200 searches; `cargo bench --bench plans` checks all of them.
#[test]
fn printed_plans_are_legal() {
    let seeds = seeds(200);
    let answered = seeds.iter().filter(|seed| case(**seed, 2) > 0).count();
    assert!(seeds.len() == 1 || answered >= 100, "{answered} searches found something");
}

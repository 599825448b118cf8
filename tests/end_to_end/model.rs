//! Models, plans and sessions for tests.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use codegen::calls::Calls;
use codegen::compile::Compiled;
use codegen::prepare::prepare_training_as;
use ir::ids::Ids;
use ir::import::{self, Description, Model, read_config};
use ir::plan::{FunctionPlan, Keep, Optimizer, Schedule};
use ir::precision::Precision;
use ir::{DType, ExpertParallel, Mesh, Module, Plan, Target};
use planner::link::Link;
use planner::shard::{Rates, Request, shard};
use runtime::execute::{Classes, Options, Part, Session};
use runtime::trace::Tracing;

/// What is asked of a plan in a test.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    pub(crate) mesh: Mesh,
    pub(crate) microbatch_size: usize,
    pub(crate) microbatch_count: usize,
    pub(crate) keep: Keep,
    pub(crate) sequence: bool,
}

/// Experts of which each token visits some.
pub(crate) fn mixtral(experts: usize, visited: usize) -> Description {
    let config = format!(
        r#"{{"model_type": "mixtral", "vocab_size": 259, "max_position_embeddings": 64,
        "num_hidden_layers": 3, "hidden_size": 24, "intermediate_size": 20,
        "num_attention_heads": 6, "num_key_value_heads": 3, "num_local_experts": {experts},
        "num_experts_per_tok": {visited}}}"#
    );
    read_config("config.json", &config, "mixtral").expect("the config is read")
}

/// A training module, ready to be planned.
pub(crate) fn prepared(
    description: &Description,
    seq: usize,
    dtype: DType,
    dropout: f64,
) -> (Model, Module) {
    let options = import::Options { seq, dtype, dropout: Some(dropout), documents: false };
    let model = import::import(description, &options).expect("the model is imported");
    let module = codegen::prepare::prepare_training(model.module.clone(), "loss");
    let module = module.expect("the module is prepared");
    (model, module)
}

/// The same, with the element types of a precision.
pub(crate) fn prepared_as(
    description: &Description,
    seq: usize,
    precision: &Precision,
) -> (Model, Module) {
    prepared_for(None, description, seq, precision)
}

/// The same, laid out for a target.
pub(crate) fn prepared_for(
    target: Option<Target>,
    description: &Description,
    seq: usize,
    precision: &Precision,
) -> (Model, Module) {
    let options =
        import::Options { seq, dtype: precision.accumulate, dropout: Some(0.0), documents: false };
    let mut model = import::import(description, &options).expect("the model is imported");
    gantline::choose_layout(&mut model, target, precision);
    let module = prepare_training_as(model.module.clone(), "loss", precision);
    (model, module.expect("the module is prepared"))
}

/// A plan as asked for; an error where the mesh does not fit the model.
pub(crate) fn plan(
    module: &Module,
    seq: usize,
    dtype: DType,
    wanted: Wanted,
) -> Result<Plan, String> {
    let link = Link { latency_s: 1e-6, bandwidth_bytes_per_s: 1e9 };
    plan_over(module, seq, dtype, wanted, link)
}

/// The same where ranks along `tp` exchange over given links.
pub(crate) fn plan_over(
    module: &Module,
    seq: usize,
    dtype: DType,
    wanted: Wanted,
    link: Link,
) -> Result<Plan, String> {
    plan_sharing(module, (seq, dtype), wanted, (link, ExpertParallel::NONE))
}

/// The same where ranks share experts.
pub(crate) fn plan_sharing(
    module: &Module,
    (seq, dtype): (usize, DType),
    wanted: Wanted,
    (link, experts): (Link, ExpertParallel),
) -> Result<Plan, String> {
    let calls = Calls::of(module, "loss")?;
    let request = Request {
        module,
        entry: "loss",
        dp: wanted.mesh.dp,
        tp: wanted.mesh.tp,
        cp: wanted.mesh.cp,
        experts,
        microbatch_size: wanted.microbatch_size,
        sequence: wanted.sequence,
        rates: Rates { flops_per_s: 1e11, memory_bytes_per_s: 1e10, link },
    };
    let sharded = shard(&request).map_err(|d| d.headline)?;
    let functions: BTreeMap<String, FunctionPlan> = sharded
        .functions
        .into_iter()
        .map(|(name, shardings)| (name, FunctionPlan::new(wanted.keep, shardings)))
        .collect();
    let stages =
        ir::sharding::pieces(calls.calls.len(), 1, wanted.mesh.pp).ok_or("too many stages")?;
    Ok(Plan {
        target: None,
        model: module.name.clone(),
        cluster: "test".to_owned(),
        mesh: wanted.mesh,
        microbatch_size: wanted.microbatch_size,
        microbatch_count: wanted.microbatch_count,
        seq,
        purpose: ir::plan::Purpose::Training,
        precision: Precision::uniform(dtype),
        schedule: Schedule::OneForwardOneBackward,
        stage_ends: stages.iter().map(|p| p.start + p.size).collect(),
        context: ir::plan::ContextForm::default(),
        experts,
        zero: ir::plan::Zero::default(),
        offload: ir::plan::Offload::default(),
        optimizer: Optimizer::AdamW {
            beta1: 0.9,
            beta2: 0.999,
            eps: 1e-4,
            decay: 0.1,
            decay_biases: 0.1,
        },
        clip: None,
        lora: None,
        functions,
        predictions: BTreeMap::new(),
    })
}

/// Starts the ranks of a plan.
pub(crate) fn session(module: &Module, plan: &Plan) -> Session {
    session_with(module, plan, 1)
}

/// Starts the ranks of a plan, each with some threads.
pub(crate) fn session_with(module: &Module, plan: &Plan, threads_per_rank: usize) -> Session {
    let compiled = codegen::compile::compile(module, "loss", plan);
    let compiled = compiled.unwrap_or_else(|d| panic!("{}", ir::diagnostic::render(&d, None)));
    let Compiled { programs, kernels } = compiled;
    let ids = Ids::of(module, "loss");
    let classes = Classes { programs, kernels, mesh: plan.mesh, ids };
    let options = Options {
        threads_per_rank,
        deadline: Duration::from_secs(60),
        tracing: Tracing::None,
        disk: None,
    };
    Session::start(Arc::new(classes), &options).expect("the ranks start")
}

/// Writes weights given as f64 into all ranks.
pub(crate) fn load(session: &mut Session, weights: &BTreeMap<String, (Vec<usize>, Vec<f64>)>) {
    for (name, (dims, values)) in weights {
        let mut block =
            |ranges: &[std::ops::Range<usize>], dtype: DType| -> Result<Vec<u8>, String> {
                let mut bytes = Vec::new();
                let sizes: Vec<usize> = ranges.iter().map(|r| r.end - r.start).collect();
                for flat in 0..sizes.iter().product::<usize>() {
                    let (mut rest, mut index, mut stride) = (flat, 0, 1);
                    for dim in (0..dims.len()).rev() {
                        index += (rest % sizes[dim] + ranges[dim].start) * stride;
                        rest /= sizes[dim];
                        stride *= dims[dim];
                    }
                    if dtype == DType::F64 {
                        bytes.extend(values[index].to_le_bytes());
                    } else {
                        bytes.extend((values[index] as f32).to_le_bytes());
                    }
                }
                Ok(bytes)
            };
        let there =
            session.write_weight(name, Part::Weight, &mut block).expect("the weight is written");
        assert!(there, "no rank holds `{name}`");
    }
}

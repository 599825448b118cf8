//! Plans for GPU clusters as files: a name is elaborated with the module of its model, and the name
//! of a plan in a file is read off again.

use std::collections::BTreeMap;
use std::path::Path;

use ir::import::{Description, Model, Options};
use ir::lora::{Lora, adapt};
use ir::plan::Prediction;
use ir::text::parse_plan;
use ir::{Diagnostic, Module, Plan, Span, Target};
use planner::check::check_anywhere;
use planner::cluster::PRESETS;
use planner::configuration::Configuration;
use planner::elaborate::{Name, Purpose, elaborate, name_of};

use crate::LOSS;
use crate::failure::{Failure, usage};
use crate::job::{self, Precision};

/// Whether a text is that of a plan, rather than JSON or the layout of another tool.
pub fn is_plan(text: &str) -> bool {
    let mut lines = text.lines().map(str::trim);
    lines.find(|line| !line.is_empty() && !line.starts_with('#')).is_some_and(|line| {
        line.starts_with("plan ") && line.contains(" on [") && line.contains(" of ")
    })
}

/// The preset that the plan in a file is for, as text or as JSON; none for a text that is no plan.
///
/// # Errors
/// `E5001` for a cluster of the user's own, which `--cluster` has to name.
pub fn cluster_of(text: &str) -> Result<Option<&'static str>, Diagnostic> {
    let of_json = || {
        let json: serde_json::Value = serde_json::from_str(text).ok()?;
        let is_one = json["schema"] == "gantline.plan/1";
        json["cluster"].as_str().filter(|_| is_one).map(str::to_owned)
    };
    let of_text = || parse_plan("plan", text).ok().map(|plan| plan.cluster);
    let found = if is_plan(text) { of_text() } else { of_json() };
    let Some(cluster) = found else { return Ok(None) };
    let name = cluster.split(' ').next().unwrap_or_default();
    let preset = PRESETS.iter().map(|(preset, _)| *preset).find(|preset| *preset == name);
    if preset.is_none() {
        let headline = format!("the plan is for `{cluster}`, which is no preset");
        return Err(usage("--cluster", headline).help("name its file: `--cluster FILE`"));
    }
    Ok(preset)
}

/// What a plan of a name is for, beside the name.
#[derive(Clone, Debug)]
pub struct Wanted<'a> {
    /// The MODEL argument.
    pub model: &'a Path,
    /// The cluster, for people.
    pub cluster: String,
    /// What kernels are compiled for there.
    pub target: Option<Target>,
    /// Samples of a step.
    pub global_batch_size: usize,
    /// Tokens of a sample.
    pub seq: usize,
    /// The element type.
    pub dtype: Precision,
    /// The adapters that are trained, where not all is.
    pub lora: Option<Lora>,
    /// What is predicted.
    pub predictions: BTreeMap<String, Prediction>,
}

/// The plan that a name means.
///
/// # Errors
/// Those of the model, which has to be one that can be built; `E5010` for a type that plans do not
/// hold; those of [`elaborate`].
pub fn plan(name: &Configuration, wanted: &Wanted<'_>) -> Result<Plan, Failure> {
    let built = Built::of(wanted)?;
    Ok(elaborate(name, &built.purpose(wanted))?)
}

/// A model, and its module as plans of it are compiled.
#[derive(Clone, Debug)]
pub struct Built {
    model: Model,
    module: Module,
    precision: ir::precision::Precision,
}

impl Built {
    /// Builds the model that is wanted. What its description warns of is not repeated.
    ///
    /// # Errors
    /// Those of [`plan`], but for its name's.
    pub fn of(wanted: &Wanted<'_>) -> Result<Built, Failure> {
        let precision = types(wanted.dtype)?;
        let description = crate::resolve_quietly(wanted.model)?.description;
        let (model, module) =
            build(&description, wanted.seq, precision, (wanted.target, wanted.lora.as_ref()))?;
        Ok(Built { model, module, precision })
    }

    /// What plans of the model are for.
    pub fn purpose(&self, wanted: &Wanted<'_>) -> Purpose<'_> {
        Purpose {
            module: &self.module,
            entry: LOSS,
            model: self.model.name.clone(),
            cluster: wanted.cluster.clone(),
            target: wanted.target,
            global_batch_size: wanted.global_batch_size,
            seq: wanted.seq,
            precision: self.precision,
            optimizer: job::ADAMW,
            clip: Some(1.0),
            lora: wanted.lora.clone(),
            predictions: wanted.predictions.clone(),
        }
    }
}

/// The roles of training in a type, as on GPUs where nothing else is said.
fn types(dtype: Precision) -> Result<ir::precision::Precision, Diagnostic> {
    let refuse = || {
        let headline = format!("the text of a plan has no roles for {dtype} yet");
        let help = "write the plan as JSON: `-o plan.json`";
        Diagnostic::error("E5010", Span::of("--dtype"), headline).help(help)
    };
    job::training_precision(dtype, &[]).map_err(|_| refuse())
}

/// A model, and its module as it is compiled.
fn build(
    description: &Description,
    seq: usize,
    precision: ir::precision::Precision,
    (target, lora): (Option<Target>, Option<&Lora>),
) -> Result<(Model, Module), Failure> {
    let (dtype, dropout) = (precision.accumulate, None);
    if let Some(own) = job::graph_dtype(description).filter(|own| *own != dtype) {
        let headline = format!("the graph is written in {own}, and sums are of {dtype}");
        let help = format!("write it in {dtype}: its element types by role are the plan's");
        return Err(Diagnostic::error("E5010", Span::of("graph"), headline).help(help).into());
    }
    let options = Options { seq, dtype, dropout, documents: false };
    let mut model = crate::import(description, &options)?;
    if let Some(lora) = lora {
        adapt(&mut model, lora)?;
    }
    crate::choose_layout(&mut model, target, &precision);
    let module = codegen::prepare::prepare_training_as(model.module.clone(), LOSS, &precision)?;
    Ok((model, module))
}

/// A plan in a file, with its name and the model that it is of.
#[derive(Clone, Debug)]
pub struct Read {
    /// The plan.
    pub plan: Plan,
    /// Its name.
    pub name: Name,
    /// The model.
    pub model: Model,
}

/// Reads the text of a plan. Without a MODEL argument the model is the one that the plan names.
///
/// # Errors
/// Those of the text and of the model; `E5006` for a plan of another model.
pub fn read(path: &str, text: &str, model: Option<&Path>) -> Result<Read, Failure> {
    let plan = crate::training::training_plan(path, text)?;
    let named = Path::new(&plan.model);
    let found = crate::resolve(model.unwrap_or(named)).map_err(Failure::from);
    let found = found.and_then(|found| {
        let of = (plan.target, plan.lora.as_ref());
        build(&found.description, plan.seq, plan.precision, of)
    });
    let (built, module) = match (found, model) {
        (Ok(built), _) => built,
        (Err(failure), Some(_)) => return Err(failure),
        (Err(_), None) => {
            let headline = format!("`{}`, the model of the plan, is no preset", plan.model);
            return Err(usage("--model", headline).help("write `--model MODEL`").into());
        }
    };
    if built.name != plan.model {
        let headline =
            format!("the plan is for `{}`, and `{}` is asked about", plan.model, built.name);
        let help = format!("name `{}`, or plan again", plan.model);
        return Err(Diagnostic::error("E5006", Span::of(path), headline).help(help).into());
    }
    let wrong = check_anywhere(&module, LOSS, &plan);
    if !wrong.is_empty() {
        let help = "mend that in the file, or plan again: `gantline plan … -o FILE.plan`";
        let place = |one: Diagnostic| Diagnostic { span: Span::of(path), ..one }.help(help);
        return Err(wrong.into_iter().map(place).collect::<Vec<_>>().into());
    }
    let name = name_of(&module, LOSS, &plan)?;
    Ok(Read { plan, name, model: built })
}

impl Read {
    /// What users are told where the plan decides more than its name.
    pub fn remark(&self) -> Option<String> {
        let Name { configuration, differences } = &self.name;
        (*differences > 0).then(|| {
            format!("{differences} decisions of the plan are priced as `{configuration}` has them")
        })
    }
}

//! `models`: which families and models are known by name, and what can be done with each.

use ir::import::{Family, families};
use planner::estimate::described::described;
use planner::search::models;
use serde_json::Value;

use crate::documents::{Document, FamilyRow, ModelRow, Models};
use crate::failure::{Exit, Failure};
use crate::output::{self, Table};

/// What is listed.
#[derive(Clone, Debug, clap::Args)]
pub struct Args {
    /// Print one JSON document
    #[arg(long)]
    pub json: bool,
}

/// What can be done with a model that is built, and with one of which only the shape is known.
const BUILT: [&str; 7] = ["plan", "inspect", "verify", "train", "run", "generate", "export"];
const PLANNED: [&str; 1] = ["plan"];

/// A model with a name.
struct Named {
    name: String,
    /// The family; none for a shape.
    family: Option<&'static Family>,
    parameters: u64,
}

impl Named {
    fn can(&self) -> &'static [&'static str] {
        if self.family.is_some() { &BUILT } else { &PLANNED }
    }
}

/// Answers.
///
/// # Errors
/// Those of [`described`], for a shape of the program itself.
pub fn run(args: &Args) -> Result<Exit, Failure> {
    let named = named()?;
    if args.json {
        output::answer_json(&document(&named));
    } else {
        output::answer(&page(&named));
    }
    Ok(Exit::Success)
}

/// All models with names: presets of families, then the shapes that no preset has the name of.
fn named() -> Result<Vec<Named>, Failure> {
    let mut all = Vec::new();
    for family in families() {
        all.extend(family.presets.iter().map(|preset| Named {
            name: preset.name.to_owned(),
            family: Some(family),
            parameters: preset.count,
        }));
    }
    for name in models::first_names() {
        if all.iter().all(|known: &Named| known.name != name) {
            let parameters = described(name, None)?.work.parameters();
            all.push(Named { name: name.to_owned(), family: None, parameters });
        }
    }
    Ok(all)
}

fn page(named: &[Named]) -> String {
    let mut text = "Families: a `config.json` of such a model_type is planned, trained, generated \
                    from and exported again.\n\n"
        .to_owned();
    let mut table = Table::new(["model_type", "family"]);
    for family in families() {
        table.row([family.name.to_owned(), family.title.to_owned()]);
    }
    text += &table.text();
    text += "\nModels that need no file:\n\n";
    let mut table = Table::new(["name", "model_type", "parameters", "plan", "train", "generate"]);
    for model in named {
        let has = |what: &str| if model.can().contains(&what) { "yes" } else { "no" };
        table.row([
            model.name.clone(),
            model.family.map_or("shape", |family| family.name).to_owned(),
            output::count(model.parameters),
            has("plan").to_owned(),
            has("train").to_owned(),
            has("generate").to_owned(),
        ]);
    }
    text += &table.text();
    text
}

fn document(named: &[Named]) -> Value {
    let owned = |text: &&str| (*text).to_owned();
    let family = |family: &Family| FamilyRow {
        model_type: family.name.to_owned(),
        title: family.title.to_owned(),
        classes: family.classes.iter().map(owned).collect(),
    };
    let model = |model: &Named| ModelRow {
        name: model.name.to_owned(),
        model_type: model.family.map(|family| family.name.to_owned()),
        parameters: model.parameters,
        can: model.can().iter().map(owned).collect(),
    };
    let families = families().iter().map(family).collect();
    Models { families, models: named.iter().map(model).collect() }.to_json()
}

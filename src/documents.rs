//! The documents of `--json`: what each verb prints, as types. `gantline schema` prints their JSON
//! Schemas, which are derived from these types and their comments.
//!
//! A document may have further keys in a later version of this program; those that are here stay,
//! under the same version of the document. Names end in their unit: `_s` seconds, `_bytes`,
//! `_per_s`; numbers without one are counts or shares.

pub mod models;
pub mod machines;
pub mod plans;
pub mod groups;
pub mod inference;
pub mod runs;

use schemars::generate::SchemaSettings;
use schemars::{JsonSchema, Schema};
use serde::Serialize;
use serde_json::{Map, Value, json};

pub use self::groups::*;
pub use self::inference::*;
pub use self::machines::*;
pub use self::models::*;
pub use self::plans::*;
pub use self::runs::*;

/// What a verb prints with `--json`, or stores.
pub trait Document: Serialize + JsonSchema {
    /// Its `schema`: a name and a version.
    const NAME: &'static str;

    /// The document, with its name.
    fn to_json(&self) -> Value {
        let mut document = json!(self);
        document["schema"] = json!(Self::NAME);
        document
    }
}

/// A document as `gantline schema` lists it.
#[derive(Clone, Copy, Debug)]
pub struct Listed {
    /// Its name and version.
    pub name: &'static str,
    schema: fn() -> Schema,
}

impl Listed {
    /// The document of a name, with or without its version and `gantline.`.
    pub fn find(name: &str) -> Option<&'static Listed> {
        let wanted = name.strip_prefix("gantline.").unwrap_or(name);
        DOCUMENTS.iter().find(|document| {
            let own = document.name.trim_start_matches("gantline.");
            own == wanted || own.split_once('/').is_some_and(|(name, _)| name == wanted)
        })
    }

    /// What it answers.
    pub fn about(&self) -> String {
        (self.schema)().get("description").and_then(Value::as_str).unwrap_or_default().to_owned()
    }

    /// The JSON Schema, in the draft 2020-12.
    pub fn json_schema(&self) -> Schema {
        let mut schema = (self.schema)();
        schema.insert("$id".to_owned(), json!(format!("urn:{}", self.name.replace('/', ":"))));
        schema.insert("title".to_owned(), json!(self.name));
        let own = json!({"const": self.name, "description": "Name and version of this form."});
        if let Some(Value::Object(properties)) = schema.get_mut("properties") {
            properties.insert("schema".to_owned(), own);
        }
        if let Some(Value::Array(required)) = schema.get_mut("required") {
            required.push(json!("schema"));
        }
        schema
    }
}

const fn listed<D: Document>() -> Listed {
    // What is printed: a key whose value may be null is there all the same.
    fn schema<D: JsonSchema>() -> Schema {
        let settings = SchemaSettings::draft2020_12().for_serialize();
        settings.with(|s| s.inline_subschemas = true).into_generator().into_root_schema_for::<D>()
    }
    Listed { name: D::NAME, schema: schema::<D> }
}

/// Names the documents, and lists them.
macro_rules! documents {
    ($($document:ident $name:literal,)*) => {
        $(impl Document for $document {
            const NAME: &'static str = concat!("gantline.", $name, "/1");
        })*

        /// All documents.
        pub const DOCUMENTS: &[Listed] = &[$(listed::<$document>()),*];
    };
}

documents! {
    Checkpoints "checkpoints",
    Cluster "cluster",
    Clusters "clusters",
    Models "models",
    Compile "compile",
    Compare "compare",
    CompareInference "compare-inference",
    Cost "cost",
    CostInference "cost-inference",
    Detect "detect",
    Doctor "doctor",
    Explain "explain",
    ExplainInference "explain-inference",
    Fit "fit",
    Fusions "fusions",
    Generate "generate",
    Continued "continued",
    Infeasible "infeasible",
    Inference "inference",
    Inspect "inspect",
    InspectOnnx "inspect_onnx",
    Kernels "kernels",
    Largest "largest",
    LargestInference "largest-inference",
    Plan "plan",
    PlanGroups "plan-groups",
    ExplainGroups "explain-groups",
    CompareGroups "compare-groups",
    FitGroups "fit-groups",
    Report "report",
    RunBatch "run_batch",
    RunOnnx "run_onnx",
    Score "score",
    Size "size",
    SizeInference "size-inference",
    SpaceExplain "space-explain",
    SpaceFit "space-fit",
    Sweep "sweep",
    Train "train",
    Validate "validate",
    Verify "verify",
    VerifyRules "verify_rules",
    WhatIf "what-if",
}

/// Names to values.
pub type Object = Map<String, Value>;

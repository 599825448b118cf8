//! Models, and what is built of them.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::Serialize;
use serde_json::Value;

/// The families and models that are known by name.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Models {
    /// The families.
    pub families: Vec<FamilyRow>,
    /// The models.
    pub models: Vec<ModelRow>,
}

/// A family of models.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FamilyRow {
    /// Its name.
    pub model_type: String,
    /// What it is called.
    pub title: String,
    /// Architectures in `config.json` that belong to it.
    pub classes: Vec<String>,
}

/// A model that is known by name.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct ModelRow {
    /// Its name.
    pub name: String,
    /// Its family, where it can be built.
    pub model_type: Option<String>,
    /// Its parameters.
    pub parameters: u64,
    /// What it can do.
    pub can: Vec<String>,
}

/// What a model is.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Inspect {
    /// The model's name.
    pub model: String,
    /// Numbers in the weights.
    pub params: u64,
    /// Bytes of the weights in this element type.
    pub weight_bytes: u64,
    /// The element type.
    pub dtype: String,
    /// Different tokens; 0 where a graph does not say.
    pub vocab: u64,
    /// The longest sequence it was made for.
    pub positions_max: u64,
    /// Layers.
    pub layer_count: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// Functions that can be asked for.
    pub entries: Vec<String>,
    /// Layers.
    pub layers: Vec<LayerRow>,
    /// Functions with how often each op occurs.
    pub functions: Vec<FunctionRow>,
    /// Operations of the products: flops_forward_per_token and flops_backward_per_token, or the
    /// same per sample where the model reads no tokens.
    #[serde(flatten)]
    pub flops: BTreeMap<String, Option<f64>>,
}

/// Layers of one kind.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct LayerRow {
    /// Their name.
    pub name: String,
    /// How many.
    pub count: u64,
    /// Parameters of all.
    pub params: u64,
    /// Their bytes.
    pub weight_bytes: u64,
    /// Operations of the forward pass for a token.
    pub flops_forward_per_token: Option<f64>,
}

/// A function of a module.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct FunctionRow {
    /// Its name.
    pub name: String,
    /// How often each op occurs.
    pub ops: BTreeMap<String, usize>,
}

/// What an ONNX model is.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct InspectOnnx {
    /// The model's name.
    pub model: String,
    /// The version of its operators.
    pub opset: i64,
    /// What wrote it.
    pub producer: String,
    /// Numbers in the weights.
    pub params: u64,
    /// Bytes of the weights.
    pub weight_bytes: u64,
    /// Operations of its products, forward.
    pub product_flops: u64,
    /// What it takes.
    pub inputs: Vec<PortRow>,
    /// What it yields.
    pub outputs: Vec<PortRow>,
    /// How often each operator occurs.
    pub operators: BTreeMap<String, usize>,
    /// Functions of its module with how often each op occurs.
    pub functions: Vec<FunctionRow>,
}

/// An input or output of an ONNX model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct PortRow {
    /// Its name.
    pub name: String,
    /// Its element type and dims.
    #[serde(rename = "type")]
    pub kind: String,
}

/// What rewriting made of a model.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Fusions {
    /// Passes in order, each with its functions.
    pub passes: Vec<Value>,
    /// For each half of a layer, its launches on one rank and how good that choice is.
    pub launched: Vec<Value>,
}

/// A file that `compile` wrote.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Compile {
    /// Its path.
    pub file: String,
    /// Its size.
    pub bytes: u64,
    /// Its hash.
    pub blake3: String,
    /// Programs: one for each class of ranks.
    pub programs: u64,
    /// Kernels that they launch.
    pub kernels: u64,
    /// Architectures of GPUs that it has the text of kernels for, such as `sm_80`.
    pub archs: Vec<String>,
    /// The document gantline.report/1.
    pub report: Value,
}

/// What was predicted when a file was compiled; `report.json` in it.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Report {
    /// The model's name.
    pub model: String,
    /// Numbers in the weights.
    pub params: u64,
    /// The cluster, with what was read from it.
    pub cluster: String,
    /// Ranks.
    pub ranks: u64,
    /// Ranks along each axis.
    pub mesh: BTreeMap<String, u64>,
    /// Samples of a step over all ranks.
    pub gbs: u64,
    /// Tokens of a sample.
    pub seq: u64,
    /// The element type.
    pub dtype: String,
    /// Bytes of the fullest rank.
    pub peak_mem_bytes: u64,
    /// Bytes of the fullest place.
    pub need_bytes: u64,
    /// Bytes of the arena of each class of ranks.
    pub arena_bytes: Vec<u64>,
    /// Numbers by name, each with value and origin.
    pub predictions: Value,
}

/// What kernels a compiled file launches.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Kernels {
    /// Architectures that it has the text of kernels for, as `gantline.compile` names them.
    pub archs: Vec<String>,
    /// The compiler by which `resources` are known, such as `NVRTC 12.9`; null where they are not.
    pub compiler: Option<String>,
    /// Why they are not known.
    pub why_not_compiled: Option<String>,
    /// Kernels: text, launches, bytes, flops, least seconds by device; functions, each with sectors
    /// of device memory and turns of the banks of shared memory over the least that their bytes
    /// take, null where they are not known or nothing is accessed, and the data that these are of
    /// where data decide; `resources` of each architecture: of each function its registers, spilled
    /// bytes, shared memory and occupancy, which are null where they are not known.
    pub kernels: Vec<Value>,
}

/// Whether meshes compute what one device does.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct Verify {
    /// The model's name.
    pub model: String,
    /// The element type.
    pub dtype: String,
    /// Whether all do.
    pub ok: bool,
    /// The loss of one rank; null where it is no number.
    pub loss: Option<f64>,
    /// The meshes.
    pub meshes: Vec<MeshRow>,
}

/// A mesh beside one device.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct MeshRow {
    /// Stages.
    pub pp: u64,
    /// Replicas.
    pub dp: u64,
    /// Ranks that share the tokens of a sample.
    pub cp: u64,
    /// Ranks that share a layer.
    pub tp: u64,
    /// Ranks that share experts.
    pub ep: u64,
    /// Ranks of `tp` that slice each expert.
    pub etp: u64,
    /// Whether they share the sequence.
    pub sequence: bool,
    /// The largest relative error.
    pub error_max: f64,
    /// How far off the step is from what is computed in f64.
    pub distance: f64,
    /// The value with that error.
    pub worst: String,
    /// Whether it is small enough.
    pub ok: bool,
}

/// Whether rewriting rules keep what a model computes.
#[derive(Clone, Debug, Serialize, JsonSchema)]
pub struct VerifyRules {
    /// The model's name.
    pub model: String,
    /// Whether all do.
    pub ok: bool,
    /// Rules that were used.
    pub rules: Vec<String>,
    /// The largest relative error.
    pub error_max: f64,
    /// The rule without which the step is right.
    pub culprit: Option<String>,
    /// Who is at fault: the rule or the kernels.
    pub at_fault: Option<String>,
}

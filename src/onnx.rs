//! ONNX files on the command line: `inspect X.onnx`, `run X.onnx --input NAME=FILE`.
//!
//! A file is mapped, and so are those beside it, so that weights that nobody asks for are not read.
//! It runs as kernels on this device, or, where an operator has none, on the reference interpreter,
//! which is exact and slow.

use std::collections::BTreeMap;
use std::path::{Component, Path, PathBuf};
use std::time::Instant;

use bytes::Bytes;
use codegen::function::{Compiled, compile_within};
use codegen::ranges::Range;
use ir::cost::function_cost;
use ir::eval::{eval, memory_bytes};
use ir::import::onnx::{Array, Check, ENTRY, Element, Given, Held, Numbers, Onnx, Port, read_onnx};
use ir::{DType, Diagnostic, Span, Tensor};
use runtime::convert::{Stored, convert};
use runtime::evaluate::Evaluation;
use runtime::map::Map;
use runtime::npy;
use serde_json::{Value, json};

use crate::argument::PathArg;
use crate::documents::{Document, InspectOnnx, PortRow, RunOnnx};
use crate::failure::{Exit, Failure, usage};
use crate::ops::{function_row, op_table};
use crate::output;

/// Whether a MODEL argument names an ONNX file.
pub fn is_onnx(model: &Path) -> bool {
    model.extension().is_some_and(|e| e.eq_ignore_ascii_case("onnx"))
}

/// Reads `NAME=N`.
pub fn dim(text: &str) -> Result<(String, usize), String> {
    let (name, size) = text.rsplit_once('=').ok_or("not of the form NAME=N")?;
    let size = size.parse().map_err(|_| "not of the form NAME=N".to_owned())?;
    Ok((name.to_owned(), size))
}

/// Reads a model, with sizes for its open dims; idioms in it become composites.
pub fn load(model: &Path, dims: &[(String, usize)]) -> Result<Onnx, Failure> {
    let mut onnx = read(model, Given { dims: sizes(dims)?, ..Given::default() })?;
    onnx.recognise();
    ir::outline::outline(&mut onnx.module, ENTRY, onnx.weights.len());
    ir::rewrite::simplify(&mut onnx.module, &ir::rewrite::Options::default());
    Ok(onnx)
}

/// Reads a model, with its repeated layers as functions.
pub fn outlined(model: &Path, dims: &[(String, usize)]) -> Result<Onnx, Failure> {
    let mut onnx = read(model, Given { dims: sizes(dims)?, ..Given::default() })?;
    // What is checked when it runs is none of its layers.
    if let Some(entry) = onnx.module.functions.iter_mut().find(|f| f.name == ENTRY) {
        entry.results.truncate(onnx.outputs.len());
        ir::pass::remove_dead_nodes(entry);
    }
    onnx.checks.clear();
    ir::outline::outline(&mut onnx.module, ENTRY, onnx.weights.len());
    Ok(onnx)
}

/// The sizes of dims, each given once.
fn sizes(dims: &[(String, usize)]) -> Result<BTreeMap<String, usize>, Diagnostic> {
    let mut sizes = BTreeMap::new();
    for (name, size) in dims {
        if let Some(first) = sizes.insert(name.clone(), *size).filter(|first| first != size) {
            let headline = format!("the dim `{name}` is {first} and {size}");
            return Err(usage("--dim", headline).help("give it once"));
        }
    }
    Ok(sizes)
}

/// Reads a model as one flat function.
fn read(path: &Path, given: Given) -> Result<Onnx, Failure> {
    let model = path.display().to_string();
    if !path.is_file() {
        let headline = format!("there is no file `{model}`");
        return Err(Diagnostic::error("E1101", Span::of(model), headline).into());
    }
    let name = path.file_stem().map_or_else(String::new, |s| s.to_string_lossy().into_owned());
    let mut beside = Beside { model: path.to_owned(), files: BTreeMap::new() };
    let bytes = mapped(path)?;
    let mut open = |location: &str| beside.open(location);
    Ok(read_onnx(&model, &name, bytes, &given, &mut open)?)
}

fn mapped(path: &Path) -> Result<Bytes, Failure> {
    Ok(Bytes::from_owner(Map::open(path)?))
}

/// Files that hold weights of a model, each mapped once.
struct Beside {
    model: PathBuf,
    files: BTreeMap<String, Bytes>,
}

impl Beside {
    fn open(&mut self, location: &str) -> Result<Bytes, String> {
        if let Some(there) = self.files.get(location) {
            return Ok(there.clone());
        }
        let inside = Path::new(location).components().all(|c| matches!(c, Component::Normal(_)));
        if !inside {
            return Err(format!("`{location}` is not beside the model"));
        }
        let path = self.model.parent().unwrap_or(Path::new("")).join(location);
        if !self.holds(&path) {
            return Err(format!("`{location}` is a link that leads away from the model"));
        }
        let bytes = mapped(&path).map_err(|_| format!("cannot read `{}`", path.display()))?;
        self.files.insert(location.to_owned(), bytes.clone());
        Ok(bytes)
    }

    /// Whether a file lies below the directory of the model, or below the one that the model itself
    /// is linked from, as in a cache of downloads. What is not there is nowhere else either.
    fn holds(&self, path: &Path) -> bool {
        let Ok(file) = path.canonicalize() else { return true };
        let beside = self.model.parent().map(|folder| match folder.as_os_str().is_empty() {
            true => Path::new("."),
            false => folder,
        });
        let linked = self.model.canonicalize().ok();
        let homes = [
            beside.and_then(|folder| folder.canonicalize().ok()),
            linked.and_then(|model| model.parent().map(Path::to_owned)),
        ];
        homes.iter().flatten().any(|home| file.starts_with(home))
    }
}

/// Says what a model is.
pub fn inspect(model: &Path, dims: &[(String, usize)], as_json: bool) -> Result<Exit, Failure> {
    let onnx = load(model, dims)?;
    if as_json {
        output::answer_json(&document(&onnx));
    } else {
        output::answer(&page(&onnx));
    }
    Ok(Exit::Success)
}

/// How many numbers the weights are, and their bytes.
fn weights(onnx: &Onnx) -> (u64, u64) {
    let types = onnx.module.function(ENTRY).map(|f| f.param_types()).unwrap_or_default();
    let weights = types.iter().take(onnx.weights.len());
    weights.fold((0, 0), |(count, bytes), ty| {
        (count + ty.count().unwrap_or(0) as u64, bytes + ty.bytes().unwrap_or(0))
    })
}

fn flops(onnx: &Onnx) -> u64 {
    let flops = function_cost(&onnx.module, ENTRY).product_flops.as_constant();
    flops.and_then(|flops| u64::try_from(flops).ok()).unwrap_or(0)
}

fn page(onnx: &Onnx) -> String {
    let (count, bytes) = weights(onnx);
    let producer = if onnx.producer.is_empty() { "an unknown exporter" } else { &onnx.producer };
    let mut text = format!("{}\n", onnx.name);
    text += &format!("  format      ONNX, opset {}, by {producer}\n", onnx.opset);
    text += &format!("  parameters  {}", output::count(count));
    text += &format!(" ({} in {} tensors)\n", output::bytes(bytes), onnx.weights.len());
    for (kind, ports) in [("input", &onnx.inputs), ("output", &onnx.outputs)] {
        for port in ports {
            text += &format!("  {kind:<11} {}: {}\n", port.name, port.type_text());
        }
    }
    text += &format!("  products    {} forward\n", output::flops(flops(onnx)));
    let operators: Vec<String> =
        onnx.operators.iter().map(|(name, count)| format!("{count} {name}")).collect();
    text += &format!("  operators   {}\n", operators.join(", "));
    text += &format!("\n{}", op_table(&onnx.module).text());
    text
}

fn document(onnx: &Onnx) -> Value {
    let (count, bytes) = weights(onnx);
    let port = |p: &Port| PortRow { name: p.name.clone(), kind: p.type_text() };
    let layers = onnx.module.functions.iter().filter(|f| f.kind == ir::Kind::Layer);
    let document = InspectOnnx {
        model: onnx.name.clone(),
        opset: onnx.opset,
        producer: onnx.producer.clone(),
        params: count,
        weight_bytes: bytes,
        product_flops: flops(onnx),
        inputs: onnx.inputs.iter().map(port).collect(),
        outputs: onnx.outputs.iter().map(port).collect(),
        operators: onnx.operators.clone(),
        functions: layers.map(|f| function_row(&onnx.module, f)).collect(),
    };
    document.to_json()
}

/// The file of each output: its name, with `_` for what file names cannot hold, each file once.
fn files(outputs: &[Port]) -> Vec<String> {
    let allowed = |c: char| if c.is_alphanumeric() || "._-".contains(c) { c } else { '_' };
    let mut files: Vec<String> = Vec::new();
    for (index, port) in outputs.iter().enumerate() {
        let stem: String = port.name.chars().map(allowed).collect();
        let file = format!("{stem}.npy");
        let is_taken = files.contains(&file);
        files.push(if is_taken { format!("{stem}.{index}.npy") } else { file });
    }
    files
}

/// How a model is run.
#[derive(Clone, Copy, Debug)]
pub struct Running<'a> {
    /// Sizes of open dims.
    pub dims: &'a [(String, usize)],
    /// Inputs, each as NAME=FILE.
    pub inputs: &'a [PathArg],
    /// Where the outputs are written.
    pub folder: Option<&'a Path>,
    /// How often it is run again to say how long that takes.
    pub bench: Option<usize>,
    /// Whether the answer is a JSON document.
    pub as_json: bool,
}

/// Evaluates a model on arrays, and writes what it yields.
pub fn run(model: &Path, running: Running<'_>) -> Result<Exit, Failure> {
    let Running { dims, inputs, folder, bench, as_json } = running;
    let given = Given { dims: sizes(dims)?, inputs: arrays(inputs) };
    let onnx = read(model, given)?;
    notes(&onnx).iter().for_each(|note| output::note(note));
    let arrays = read_inputs(&onnx, inputs)?;
    let (mut results, times) = evaluate(&onnx, arrays, bench.unwrap_or(0))?;
    let numbers = results.split_off(onnx.outputs.len());
    check(&model.display().to_string(), &onnx.checks, &numbers)?;
    if let Some(folder) = folder {
        std::fs::create_dir_all(folder).map_err(runtime::Error::io("create", folder))?;
        for ((file, tensor), port) in files(&onnx.outputs).iter().zip(&results).zip(&onnx.outputs) {
            write(&folder.join(file), port.element, tensor)?;
        }
        output::note(&format!("wrote {}", folder.display()));
    }
    if as_json {
        let files = files(&onnx.outputs);
        let outputs =
            onnx.outputs.iter().zip(&results).zip(&files).map(|((port, tensor), file)| {
                let dtype = port.element.name();
                json!({"name": port.name, "dims": tensor.dims, "dtype": dtype, "file": file})
            });
        let document = RunOnnx { outputs: outputs.collect(), seconds: times };
        output::answer_json(&document.to_json());
    } else {
        let line = |(port, tensor): (&Port, &Tensor)| {
            let as_other = match folder.is_some() && descr(port.element).is_none() {
                true => format!(", written as {}", tensor.dtype),
                false => String::new(),
            };
            format!("{}  {}{as_other}", port.name, port.type_text())
        };
        let lines: Vec<String> = onnx.outputs.iter().zip(&results).map(line).collect();
        output::answer(&lines.join("\n"));
        if let (Some(low), Some(high)) = (times.first(), times.last()) {
            let middle = times[times.len() / 2];
            let text = format!("{middle:.6} s, from {low:.6} to {high:.6} in {}", times.len());
            output::answer(&text);
        }
    }
    Ok(Exit::Success)
}

/// Refuses inputs whose numbers the model has no meaning for.
fn check(model: &str, checks: &[Check], numbers: &[Tensor]) -> Result<(), Failure> {
    let wrong = checks.iter().zip(numbers).filter_map(|(check, number)| {
        let headline = check.wrong(number.scalar())?;
        Some(Diagnostic::error("E5009", Span::of(model), headline))
    });
    let wrong: Vec<Diagnostic> = wrong.collect();
    if wrong.is_empty() { Ok(()) } else { Err(wrong.into()) }
}

/// Refuses what takes more memory than is left: `E5020`.
fn check_memory(name: &str, need: u64) -> Result<(), Diagnostic> {
    let Some(limit) = planner::machine::tightest().filter(|limit| limit.left() < need) else {
        return Ok(());
    };
    let (need, left) = (output::bytes(need), output::bytes(limit.left()));
    let headline = format!("the values of the model need {need} of memory, and {left} are left");
    Err(Diagnostic::error("E5020", Span::of(name), headline)
        .note(limit.describe())
        .help("end other programs, or run it on smaller inputs"))
}

/// The results, and the sorted times of `repeats` more runs.
fn evaluate(
    onnx: &Onnx,
    inputs: Vec<Tensor>,
    repeats: usize,
) -> Result<(Vec<Tensor>, Vec<f64>), Failure> {
    let mut recognised = onnx.clone();
    recognised.recognise();
    let mut module = recognised.module;
    ir::rewrite::simplify(&mut module, &ir::rewrite::Options::default());
    // The numbers of the weights are known, those of the inputs may be any.
    let weights = || onnx.weights.iter().map(|(_, held)| held.tensor());
    let types = onnx.module.function(ENTRY).map(ir::Function::param_types).unwrap_or_default();
    let of = |((_, held), ty): (&(String, Held), &ir::TensorType)| {
        if ty.dtype.is_float() { None } else { range(&held.tensor()) }
    };
    let ranges: Vec<Option<Range>> = onnx.weights.iter().zip(&types).map(of).collect();
    let given = |param: ir::ValueId| ranges.get(param.index()).copied().flatten();
    let compiled = compile_within(&module, ENTRY, given).map_err(|diagnostic| diagnostic.headline);
    if let Ok(compiled) = &compiled {
        let slots = compiled.routine.slots.iter().map(|(_, bytes)| *bytes);
        let needed = slots.fold(compiled.routine.frame_bytes, u64::saturating_add);
        check_memory(&onnx.name, needed)?;
    }
    let start = |compiled: Compiled| {
        let threads = std::thread::available_parallelism().map_or(1, usize::from);
        let Compiled { routine, kernels, params, results } = compiled;
        let evaluation = Evaluation::new(routine, &kernels, threads);
        let evaluation = evaluation.ok_or("there is not enough memory for its programs")?;
        Ok::<_, String>((evaluation, params, results))
    };
    let mut times = Vec::new();
    let results: Vec<Tensor> = match compiled.and_then(start) {
        Ok((mut evaluation, params, types)) => {
            // A weight after the other, as integers of all types are longer than their bytes.
            for (slot, (arg, ty)) in weights().chain(inputs).zip(&params).enumerate() {
                evaluation.write(slot, &elements(&arg, ty.dtype));
            }
            evaluation.run();
            times.extend((0..repeats).map(|_| timed(|| evaluation.run())));
            let wanted = onnx.module.function(ENTRY).map(ir::Function::result_types);
            let wanted = wanted.unwrap_or_default();
            let of = |(at, ty): (usize, &ir::TensorType)| {
                from_elements(ty, wanted[at].dtype, evaluation.read(params.len() + at))
            };
            types.iter().enumerate().map(of).collect()
        }
        Err(why) => {
            output::note(&format!("note: run by the interpreter: {why}"));
            check_memory(&onnx.name, memory_bytes(&onnx.module, ENTRY))?;
            let args: Vec<Tensor> = weights().chain(inputs).collect();
            let results = eval(&onnx.module, ENTRY, &args)?;
            let again = || drop(eval(&onnx.module, ENTRY, &args));
            times.extend((0..repeats).map(|_| timed(again)));
            results
        }
    };
    times.sort_by(f64::total_cmp);
    Ok((results, times))
}

/// Between which integers the elements lie.
fn range(x: &Tensor) -> Option<Range> {
    match &x.data {
        ir::tensor::Data::Int(x) => Some(Range::new(*x.iter().min()?, *x.iter().max()?)),
        ir::tensor::Data::F64(_) | ir::tensor::Data::F32(_) | ir::tensor::Data::Bool(_) => None,
    }
}

fn timed(run: impl FnOnce()) -> f64 {
    let start = Instant::now();
    run();
    start.elapsed().as_secs_f64()
}

/// The elements as kernels hold them.
fn elements(x: &Tensor, dtype: DType) -> Vec<u8> {
    match (&x.data, dtype) {
        (ir::tensor::Data::Int(x), DType::U32) => {
            x.iter().flat_map(|x| (*x as u32).to_le_bytes()).collect()
        }
        (ir::tensor::Data::Int(x), DType::I64) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (ir::tensor::Data::Int(x), DType::I8) => {
            x.iter().map(|x| (*x as i8).cast_unsigned()).collect()
        }
        // Proved to fit where they had 64 bits.
        (ir::tensor::Data::Int(x), _) => x.iter().flat_map(|x| (*x as i32).to_le_bytes()).collect(),
        (ir::tensor::Data::Bool(x), _) => x.iter().map(|x| u8::from(*x)).collect(),
        (ir::tensor::Data::F32(x), _) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
        (ir::tensor::Data::F64(x), _) => x.iter().flat_map(|x| x.to_le_bytes()).collect(),
    }
}

/// The elements that kernels hold, whose integers are as long as those of the model again.
fn from_elements(ty: &ir::TensorType, wanted: DType, bytes: &[u8]) -> Tensor {
    let dims = ty.sizes().expect("bound when the model is read");
    let int = |numbers: Vec<i64>| Tensor::int(wanted, &dims, numbers);
    let words = bytes.as_chunks::<4>().0;
    match ty.dtype {
        DType::I32 => int(words.iter().map(|b| i32::from_le_bytes(*b).into()).collect()),
        DType::U32 => int(words.iter().map(|b| u32::from_le_bytes(*b).into()).collect()),
        DType::Bool => Tensor::bool(&dims, bytes.iter().map(|b| *b != 0).collect()),
        DType::F64 => {
            let numbers = bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b));
            Tensor::f64(&dims, numbers.collect())
        }
        DType::I64 => int(bytes.as_chunks().0.iter().map(|b| i64::from_le_bytes(*b)).collect()),
        DType::F32 | DType::BF16 | DType::F16 | DType::F8E4M3 | DType::F8E5M2 | DType::I8 => {
            Tensor::f32(&dims, words.iter().map(|b| f32::from_le_bytes(*b)).collect())
        }
    }
}

/// What is said of how a model is computed: types that it has and kernels do not, and operators
/// that need the numbers of the inputs.
fn notes(onnx: &Onnx) -> Vec<String> {
    let mut wide: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for element in &onnx.carried {
        wide.entry(element.carrier().name()).or_default().push(element.name());
    }
    let computed = |(carrier, names): (&str, Vec<&str>)| {
        format!("note: computed in {carrier}, and rounded or wrapped: {}", names.join(", "))
    };
    let mut notes: Vec<String> = wide.into_iter().map(computed).collect();
    if !onnx.forced.is_empty() {
        let names: Vec<&str> = onnx.forced.iter().map(String::as_str).collect();
        let names = names.join(", ");
        notes.push(format!("note: for these inputs only, since it needs their numbers: {names}"));
    }
    notes
}

/// The inputs that can be read; what cannot be read is said later.
fn arrays(inputs: &[PathArg]) -> BTreeMap<String, Array> {
    let array = |input: &PathArg| {
        let (name, file) = input.pair()?;
        let (array, is_unsigned) = npy::read_bits(file.path()).ok()?;
        Some((name, numbers(&array, is_unsigned)))
    };
    inputs.iter().filter_map(array).collect()
}

/// The array of every input, in their order; what is wrong with any of them at once.
fn read_inputs(onnx: &Onnx, inputs: &[PathArg]) -> Result<Vec<Tensor>, Failure> {
    let mut given: BTreeMap<String, PathArg> = BTreeMap::new();
    let mut wrong = Vec::new();
    for input in inputs {
        match input.pair() {
            Some((name, file)) if onnx.inputs.iter().any(|port| port.name == name) => {
                if let Some(first) = given.get(&name) {
                    let headline = format!("the input `{name}` is `{first}` and `{file}`");
                    return Err(usage("--input", headline).help("give it once").into());
                }
                given.insert(name, file);
            }
            Some((name, _)) => {
                let names: Vec<&str> = onnx.inputs.iter().map(|p| p.name.as_str()).collect();
                let headline = format!("the model has no input `{name}`");
                let note = format!("it takes {}", names.join(", "));
                wrong.push(usage("--input", headline).note(note));
            }
            None => wrong.push(usage("--input", format!("`{input}` is not of the form NAME=FILE"))),
        }
    }
    let mut tensors = Vec::new();
    for port in &onnx.inputs {
        let Some(file) = given.get(&port.name) else {
            let headline = format!("the input `{}` is not given", port.name);
            let ty = port.type_text();
            let help = format!("write --input {}=FILE, {ty} as a .npy file", port.name);
            wrong.push(usage("--input", headline).help(help));
            continue;
        };
        let (array, is_unsigned) = npy::read_bits(file.path())?;
        let sizes = port.ty.sizes().unwrap_or_default();
        if array.dims != sizes {
            let headline =
                format!("the input `{}` is {}, the array is {:?}", port.name, port.ty, array.dims);
            wrong.push(Diagnostic::error("E5009", Span::of(file), headline));
            continue;
        }
        match port.element.tensor_of(&numbers(&array, is_unsigned)) {
            Ok(tensor) => tensors.push(tensor),
            Err(number) => {
                let own = port.element.name();
                let headline = format!("the input `{}` is {own}, and has {number}", port.name);
                wrong.push(Diagnostic::error("E5009", Span::of(file), headline));
            }
        }
    }
    if wrong.is_empty() { Ok(tensors) } else { Err(wrong.into()) }
}

/// The numbers of an array.
fn numbers(array: &npy::Array, is_unsigned: bool) -> Array {
    let (wide, words) = (array.bytes.as_chunks::<8>().0, array.bytes.as_chunks::<4>().0);
    let numbers = match array.dtype {
        DType::I64 if is_unsigned => {
            Numbers::Whole(wide.iter().map(|b| u64::from_le_bytes(*b).into()).collect())
        }
        DType::I64 => Numbers::Whole(wide.iter().map(|b| i64::from_le_bytes(*b).into()).collect()),
        DType::I32 => Numbers::Whole(words.iter().map(|b| i32::from_le_bytes(*b).into()).collect()),
        DType::F64
        | DType::F32
        | DType::BF16
        | DType::F16
        | DType::F8E4M3
        | DType::F8E5M2
        | DType::I8
        | DType::U32
        | DType::Bool => {
            let bytes = convert(Stored::DType(array.dtype), &array.bytes, DType::F64);
            let numbers = bytes.as_chunks().0.iter().map(|b| f64::from_le_bytes(*b));
            Numbers::Real(numbers.collect())
        }
    };
    Array { dims: array.dims.clone(), numbers }
}

/// How `.npy` files name a type; none where they have none, and the type is written as the one that
/// it is computed in.
fn descr(element: Element) -> Option<&'static str> {
    match element {
        Element::F32 => Some("<f4"),
        Element::F64 => Some("<f8"),
        Element::F16 => Some("<f2"),
        Element::U8 => Some("|u1"),
        Element::I8 => Some("|i1"),
        Element::U16 => Some("<u2"),
        Element::I16 => Some("<i2"),
        Element::I32 => Some("<i4"),
        Element::U32 => Some("<u4"),
        Element::I64 => Some("<i8"),
        Element::U64 => Some("<u8"),
        Element::Bool => Some("|b1"),
        Element::BF16
        | Element::F8E4M3
        | Element::F8E4M3Z
        | Element::F8E5M2
        | Element::F8E5M2Z
        | Element::U4
        | Element::I4
        | Element::F4E2M1
        | Element::F8E8M0
        | Element::U2
        | Element::I2 => None,
    }
}

fn write(path: &Path, element: Element, tensor: &Tensor) -> Result<(), Failure> {
    let wide = if tensor.dtype == DType::F32 { "<f4" } else { "<i4" };
    let name = descr(element).unwrap_or(wide);
    let bytes: Vec<u8> = match &tensor.data {
        ir::tensor::Data::Int(numbers) => {
            let width = name[2..].parse().unwrap_or(4);
            numbers.iter().flat_map(|x| x.to_le_bytes().into_iter().take(width)).collect()
        }
        ir::tensor::Data::Bool(truths) => truths.iter().map(|x| u8::from(*x)).collect(),
        ir::tensor::Data::F64(numbers) => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
        ir::tensor::Data::F32(numbers) if element == Element::F16 => {
            let wide: Vec<u8> = numbers.iter().flat_map(|x| f64::from(*x).to_le_bytes()).collect();
            convert(Stored::DType(DType::F64), &wide, DType::F16)
        }
        ir::tensor::Data::F32(numbers) => numbers.iter().flat_map(|x| x.to_le_bytes()).collect(),
    };
    Ok(npy::write_as(path, name, &tensor.dims, &bytes)?)
}

//! Rewriting keeps what functions compute; every rule is executed on random instances of its left
//! side.

use std::collections::BTreeMap;
use std::path::Path;

use gantline_ir::autodiff::training_step;
use gantline_ir::build::Builder;
use gantline_ir::eval::eval;
use gantline_ir::import::{Model, Options, import, resolve};
use gantline_ir::infer::infer;
use gantline_ir::module::{Node, Value};
use gantline_ir::op::{Binary, Combiner, Comparison, Einsum, Unary};
use gantline_ir::pass::renumber_values;
use gantline_ir::rewrite::pattern::{Part, Pattern};
use gantline_ir::rewrite::region::Region;
use gantline_ir::rewrite::rules::{Keeps, Rule, rules};
use gantline_ir::rewrite::saturate::Selection;
use gantline_ir::rewrite::{self, apply_once};
use gantline_ir::verify::verify;
use gantline_ir::{DType, Dim, Function, Kind, Module, Op, Tensor, TensorType, ValueId};

use crate::draws::{Draws, seeds};
use crate::generate;
use crate::passes::bits;

/// How many instances of each rule are executed.
const INSTANCES: usize = 200;

/// How many attempts there are to make them, for each.
const ATTEMPTS: u64 = 200;

#[test]
fn rules_hold() {
    for rule in rules() {
        let mut fired = 0;
        for seed in seeds(ATTEMPTS * INSTANCES as u64) {
            fired += usize::from(rule_holds(rule, seed));
            if fired == INSTANCES {
                break;
            }
        }
        let is_enough = fired == INSTANCES || std::env::var("SEED").is_ok();
        assert!(is_enough, "`{}` fired only {fired} times", rule.name);
    }
}

#[test]
fn rules_have_names_of_their_own_and_reasons() {
    let mut names: Vec<&str> = rules().map(|rule| rule.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
    for rule in rules() {
        assert!(!rule.why.is_empty() && !rule.root_is_open(), "{}", rule.name);
    }
}

trait Rooted {
    /// Whether the left side would fit everything.
    fn root_is_open(&self) -> bool;
}

impl Rooted for Rule {
    fn root_is_open(&self) -> bool {
        Pattern::parse(self.left).root_names().is_empty()
    }
}

/// Whether a random instance of the left side could be made and fires; both sides are equal then.
fn rule_holds(rule: &Rule, seed: u64) -> bool {
    let mut r = Draws::new(seed);
    let pattern = Pattern::parse(rule.left);
    let mut module = Module::new("m");
    let builder = Builder::new(&mut module, "f", Kind::Layer);
    let mut instance =
        Instance { b: builder, r: &mut r, classes: BTreeMap::new(), last: BTreeMap::new() };
    let parts = pattern.parts();
    instance.params(parts);
    let Some(root) = instance.part(parts, parts.len() - 1, None) else { return false };
    instance.b.finish(&[root]);
    // Constants may have a dim that no parameter has.
    if !verify(&module).is_empty() {
        return false;
    }
    let function = module.function("f").unwrap().clone();
    let Some(rewritten) = apply_once(&function, &module, rule) else { return false };
    let after = Module { name: "m".to_owned(), functions: vec![rewritten] };
    assert_eq!(verify(&after), [], "{} SEED={seed}\n{module}{after}", rule.name);
    // Where sums may be in any order, one infinity hides all else: half of the arguments have none.
    let is_special = rule.keeps == Keeps::Bits || rule.keeps == Keeps::Rounding && r.coin();
    let args: Vec<Tensor> =
        function.param_types().iter().map(|ty| argument(ty, is_special, &mut r)).collect();
    let before = eval(&module, "f", &args).unwrap();
    let found = eval(&after, "f", &args).unwrap();
    let is_same = match rule.keeps {
        Keeps::Bits => same_bits(&before[0], &found[0]),
        Keeps::Rounding | Keeps::Nearly => {
            let is_f32 = before[0].dtype == DType::F32;
            found[0].max_relative_difference(&before[0]) < if is_f32 { 1e-4 } else { 1e-9 }
        }
    };
    assert!(is_same, "{} SEED={seed}\n{module}{after}{args:?}\n{before:?}\n{found:?}", rule.name);
    true
}

/// Equal bits, but that one NaN is as good as another.
fn same_bits(a: &Tensor, b: &Tensor) -> bool {
    let same = |(a, b): (f64, f64)| a.to_bits() == b.to_bits() || (a.is_nan() && b.is_nan());
    a.dtype == b.dtype && a.dims == b.dims && a.to_f64().into_iter().zip(b.to_f64()).all(same)
}

/// Random numbers, among them what is special.
fn argument(ty: &TensorType, is_special: bool, r: &mut Draws) -> Tensor {
    let dims = ty.bind(&[(Dim::BATCH.to_owned(), 3)].into()).sizes().unwrap();
    // Integers of every type that are next to wrap; to others they are numbers like any.
    let ends = [127.0, -128.0, 2_147_483_647.0, -2_147_483_648.0, 4_294_967_295.0, 1.0];
    let special = [0.0, -0.0, 1.0, -2.0, f64::INFINITY, f64::NEG_INFINITY, f64::NAN];
    let count = dims.iter().product();
    let mut draw = |_| {
        let is_integer = !ty.dtype.is_float() && ty.dtype != DType::Bool;
        if is_special && is_integer && r.below(3) == 0 {
            ends[r.below(ends.len())]
        } else if is_special && r.below(3) == 0 {
            special[r.below(special.len())]
        } else if r.below(12) == 0 {
            0.0
        } else if ty.dtype == DType::Bool {
            f64::from(r.below(2) as u32)
        } else if ty.dtype.is_float() {
            r.number(-2.0, 2.0)
        } else {
            r.number(-9.0, 9.0)
        }
    };
    Tensor::from_f64(ty.dtype, &dims, (0..count).map(&mut draw).collect())
}

/// A random instance of a left side.
struct Instance<'b> {
    b: Builder<'b>,
    r: &'b mut Draws,
    /// The values that stand for the names.
    classes: BTreeMap<String, ValueId>,
    /// The last op of each name: two ops of a rule often have to agree.
    last: BTreeMap<String, Op>,
}

impl Instance<'_> {
    /// Parameters are made before nodes: as many as could be needed, of random types.
    fn params(&mut self, parts: &[Part]) {
        let base = self.ty();
        for (at, part) in parts.iter().enumerate() {
            if let Part::Any(_) = part {
                let same = base.clone();
                let other = self.ty();
                let dims = base.dims.clone();
                self.b.param(&format!("same{at}"), same);
                self.b.param(&format!("other{at}"), other);
                self.b.param(&format!("mask{at}"), TensorType { dtype: DType::Bool, dims });
            }
        }
    }

    fn ty(&mut self) -> TensorType {
        let dtypes =
            [DType::F64, DType::F64, DType::F64, DType::F32, DType::I32, DType::I8, DType::U32];
        let dtype = dtypes[self.r.below(dtypes.len())];
        let ndim = 1 + self.r.below(3);
        let batch = self.r.below(4) == 0;
        let size = |at: usize, r: &mut Draws| match at {
            0 if batch => Dim::symbol(Dim::BATCH),
            _ if r.below(16) == 0 => Dim::from(0),
            _ => Dim::from(1 + r.below(4)),
        };
        TensorType::new(dtype, (0..ndim).map(|at| size(at, self.r)).collect::<Vec<_>>())
    }

    /// A value of the wanted type, or of any: a parameter, or now and then a constant or a table.
    fn leaf(&mut self, wanted: Option<&TensorType>) -> Option<ValueId> {
        let params: Vec<ValueId> = self.b.function().params().collect();
        let fits = |id: &ValueId, b: &Builder<'_>| wanted.is_none_or(|ty| b.ty(*id) == ty);
        let fitting: Vec<ValueId> = params.iter().copied().filter(|id| fits(id, &self.b)).collect();
        let ty = match wanted {
            Some(ty) => ty.clone(),
            None => self.b.ty(fitting[self.r.below(fitting.len())]).clone(),
        };
        if self.r.below(3) == 0 || fitting.is_empty() {
            let numbers = [0.0, -0.0, 1.0, 2.0, 0.5, -4.0, 3.0, -7.0];
            let value = numbers[self.r.below(numbers.len())];
            let dim = self.r.below(ty.ndim().max(1));
            if !ty.dtype.is_float() && ty.dtype != DType::Bool && ty.ndim() > 0 && self.r.coin() {
                let start = self.r.below(9) as i64 - 4;
                let (dtype, dims) = (ty.dtype, ty.dims);
                return Some(self.b.push("t", Op::Iota { dim, start, dtype, dims }, &[]));
            }
            let value = if ty.dtype == DType::Bool { f64::from(value != 0.0) } else { value };
            return Some(self.b.constant("c", value, ty));
        }
        Some(fitting[self.r.below(fitting.len())])
    }

    fn part(&mut self, parts: &[Part], at: usize, wanted: Option<&TensorType>) -> Option<ValueId> {
        match &parts[at] {
            Part::Any(name) => {
                if let Some(there) = self.classes.get(name) {
                    return Some(*there);
                }
                let leaf = self.leaf(wanted)?;
                self.classes.insert(name.clone(), leaf);
                Some(leaf)
            }
            Part::Number(value) => {
                let ty = wanted.cloned().unwrap_or_else(|| self.ty());
                Some(self.b.constant("n", *value, ty))
            }
            Part::Op { name, operands, .. } => self.op(parts, name, operands, wanted),
        }
    }

    fn op(
        &mut self,
        parts: &[Part],
        name: &str,
        operands: &[usize],
        wanted: Option<&TensorType>,
    ) -> Option<ValueId> {
        let is_op = |at: &usize| matches!(parts[*at], Part::Op { .. });
        let is_select = name == "select";
        let is_alike = operands.len() > 1 && !["concat", "contract", "gather"].contains(&name);
        let mut values: BTreeMap<usize, ValueId> = BTreeMap::new();
        // What is computed decides the type that the rest has to have.
        let mut order: Vec<usize> = (0..operands.len()).collect();
        order.sort_by_key(|at| (!is_op(&operands[*at]), is_select && *at == 0));
        let mut shared: Option<TensorType> = match name {
            "compare" | "eq" | "lt" | "le" => None,
            _ if is_alike || operands.len() == 1 => wanted.cloned(),
            _ => None,
        };
        for at in order {
            let ask = match (is_select && at == 0, &shared) {
                (true, Some(ty)) => Some(ty.with_dtype(DType::Bool)),
                (true, None) => None,
                (false, ty) => ty.clone(),
            };
            let is_view = !is_alike && operands.len() == 1 && plain(name).is_none();
            let value = self.part(parts, operands[at], ask.as_ref().filter(|_| !is_view))?;
            let ty = self.b.ty(value).clone();
            if name == "gather" && at == 0 {
                // Ids for one of the dims.
                let size = ty.dims[self.r.below(ty.ndim())].clone();
                shared = Some(TensorType::new(DType::I32, [size]));
            } else if is_alike && !(is_select && at == 0) {
                shared = Some(ty);
            }
            values.insert(at, value);
        }
        let values: Vec<ValueId> = values.into_values().collect();
        let op = self.draw(name, &values)?;
        self.last.insert(name.to_owned(), op.clone());
        let types: Vec<&TensorType> = values.iter().map(|v| self.b.ty(*v)).collect();
        infer(&op, &types, self.b.module()).ok()?;
        Some(self.b.push("v", op, &values))
    }

    /// An op of a name or kind that may take the operands.
    fn draw(&mut self, name: &str, operands: &[ValueId]) -> Option<Op> {
        if let Some(op) = plain(name) {
            return Some(op);
        }
        if let Some(last) = self.last.get(name).filter(|_| self.r.coin()) {
            if let Op::Slice { dim, start, size } = last
                && self.r.coin()
            {
                return Some(Op::Slice { dim: *dim, start: start + size, size: 1 });
            }
            return Some(last.clone());
        }
        let ty = operands.first().map(|o| self.b.ty(*o).clone())?;
        let r = &mut *self.r;
        let dim = r.below(ty.ndim().max(1));
        let size = ty.dims.get(dim).and_then(Dim::as_constant).map_or(2, |n| n as usize);
        let is_plain = r.below(3) == 0;
        Some(match name {
            "unary" => Op::Unary(Unary::ALL[r.below(Unary::ALL.len())]),
            "binary" => Op::Binary(Binary::ALL[r.below(Binary::ALL.len())]),
            "compare" => Op::Compare(Comparison::ALL[r.below(3)]),
            "cast" => {
                let dtypes = [DType::F64, DType::F32, DType::I32, DType::I64, ty.dtype];
                Op::Cast { dtype: dtypes[r.below(5)] }
            }
            "transpose" => {
                let mut perm: Vec<usize> = (0..ty.ndim()).collect();
                for at in (1..if is_plain { 0 } else { perm.len() }).rev() {
                    perm.swap(at, r.below(at + 1));
                }
                Op::Transpose { perm }
            }
            "reshape" if is_plain => Op::Reshape { dims: ty.dims },
            "reshape" => Op::Reshape { dims: vec![ty.elements(), Dim::from(1)] },
            "broadcast" if is_plain => Op::Broadcast { new: vec![], dims: ty.dims },
            "broadcast" => {
                let mut dims = ty.dims;
                dims.insert(dim, Dim::from(1 + r.below(3)));
                Op::Broadcast { new: vec![dim], dims }
            }
            "slice" if is_plain => Op::Slice { dim, start: 0, size },
            "slice" => {
                let start = r.below(size.max(1));
                Op::Slice { dim, start, size: 1 + r.below(size.max(1) - start) }
            }
            "pad" if is_plain => Op::Pad { dim, before: 0, after: 0 },
            "pad" => Op::Pad { dim, before: r.below(3), after: r.below(3) },
            "concat" => Op::Concat { dim },
            "gather" => Op::Gather { dim, start: r.below(5) as i64 - 2 },
            "reduce" if is_plain => {
                Op::Reduce { combiner: Combiner::ALL[r.below(3)], dims: vec![] }
            }
            "reduce" => {
                let dims = (0..ty.ndim()).filter(|_| r.coin()).collect();
                Op::Reduce { combiner: Combiner::ALL[r.below(3)], dims }
            }
            "contract" => {
                let other = self.b.ty(operands[1]).clone();
                let einsum: Einsum = generate::einsum(&ty, &other, r);
                Op::Contract(einsum)
            }
            _ => panic!("instances of `{name}` are made here"),
        })
    }
}

/// The op of a name that has no attributes.
fn plain(name: &str) -> Option<Op> {
    let unary = Unary::ALL.into_iter().find(|op| op.name() == name).map(Op::Unary);
    let binary = Binary::ALL.into_iter().find(|op| op.name() == name).map(Op::Binary);
    let select = (name == "select").then_some(Op::Select);
    unary.or(binary).or(select)
}

/// Into the e-graph and out again.
fn round_trip(module: &Module) -> Module {
    let pass = |f: &Function| {
        let region = Region::of(f, module);
        region.emit(&region.as_it_is())
    };
    let functions = module.functions.iter().map(pass).collect();
    Module { name: module.name.clone(), functions }
}

#[test]
fn random_modules_survive_the_round_trip_bit_for_bit() {
    for seed in seeds(200) {
        let mut r = Draws::new(seed);
        let module = generate::module(&mut r);
        let args = generate::arguments(&module, "main", &mut r);
        let after = round_trip(&module);
        assert_eq!(verify(&after), [], "SEED={seed}\n{module}{after}");
        let (before, found) = (eval(&module, "main", &args), eval(&after, "main", &args));
        let same = before.unwrap().iter().zip(&found.unwrap()).all(|(a, b)| same_bits(a, b));
        assert!(same, "SEED={seed}\n{module}{after}");
    }
}

#[test]
fn models_survive_the_round_trip_bit_for_bit() {
    for name in ["gpt2-tiny", "llama-tiny"] {
        let mut model = model(name);
        training_step(&mut model.module, "loss").unwrap();
        let after = round_trip(&model.module);
        assert_eq!(verify(&after), [], "{after}");
        let args = model_arguments(&model.module, "loss");
        let of = |module: &Module| bits(&eval(module, "loss", &args).unwrap());
        assert_eq!(of(&model.module), of(&after), "{name}");
    }
}

/// A model of `tests/reference`, for sequences of 4 tokens.
fn model(name: &str) -> Model {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/reference").join(name);
    let description = resolve(path.to_str().unwrap()).unwrap().description;
    let options = Options { seq: 4, dtype: DType::F64, dropout: Some(0.0), documents: false };
    import(&description, &options).unwrap()
}

/// Small random weights, and ids that every model knows.
fn model_arguments(module: &Module, entry: &str) -> Vec<Tensor> {
    let mut r = Draws::new(7);
    generate::bound_types(module, entry, 1)
        .iter()
        .map(|ty| {
            let dims = ty.sizes().unwrap();
            if ty.dtype == DType::U32 {
                return r.key();
            }
            if !ty.dtype.is_float() {
                return r.ids(&dims, 0, 9);
            }
            let count = dims.iter().product();
            Tensor::from_f64(ty.dtype, &dims, (0..count).map(|_| r.number(-0.3, 0.3)).collect())
        })
        .collect()
}

/// The function with some operands computed in a roundabout way, each of which a rule undoes.
fn made_longer(function: &Function, module: &Module, r: &mut Draws) -> Function {
    let mut longer = function.clone();
    longer.nodes.clear();
    for node in &function.nodes {
        let mut node = node.clone();
        for operand in &mut node.operands {
            let ty = function.ty(*operand).clone();
            if ty.dtype == DType::F64 && r.below(3) == 0 {
                *operand = roundabout(&mut longer, module, *operand, &ty, r);
            }
        }
        longer.nodes.push(node);
    }
    renumber_values(&mut longer);
    longer
}

/// The same value again, through ops that cancel.
fn roundabout(
    function: &mut Function,
    module: &Module,
    value: ValueId,
    ty: &TensorType,
    r: &mut Draws,
) -> ValueId {
    let mut push = |op: Op, operands: &[ValueId]| {
        let types: Vec<&TensorType> = operands.iter().map(|o| function.ty(*o)).collect();
        let ty = infer(&op, &types, module).unwrap().remove(0);
        let name = format!("long{}", function.values.len());
        function.values.push(Value::new(name, ty));
        let result = ValueId(function.values.len() as u32 - 1);
        function.nodes.push(Node { op, operands: operands.to_vec(), results: vec![result] });
        result
    };
    let (dtype, dims) = (ty.dtype, ty.dims.clone());
    let constant = |value: f64| Op::Constant { value, dtype, dims: dims.clone() };
    let sized = dims.iter().position(|dim| dim.as_constant().is_some_and(|size| size > 0));
    let size = |dim: usize| dims[dim].as_constant().unwrap() as usize;
    match (r.below(9), sized) {
        (0, _) => {
            let one = push(constant(1.0), &[]);
            push(Op::Binary([Binary::Mul, Binary::Div][r.below(2)]), &[value, one])
        }
        (1, _) => {
            let zero = push(constant([0.0, -0.0][r.below(2)]), &[]);
            let how = if r.coin() { Binary::Sub } else { Binary::Add };
            // Adding zero is not neutral for negative zeros: no rule may take it for that.
            push(Op::Binary(how), &[value, zero])
        }
        (2, Some(dim)) => push(Op::Slice { dim, start: 0, size: size(dim) }, &[value]),
        (3, _) if dims.len() > 1 => {
            let back = push(Op::Transpose { perm: (0..dims.len()).rev().collect() }, &[value]);
            push(Op::Transpose { perm: (0..dims.len()).rev().collect() }, &[back])
        }
        (4, _) => {
            let flat = push(Op::Reshape { dims: vec![ty.elements()] }, &[value]);
            push(Op::Reshape { dims: dims.clone() }, &[flat])
        }
        (5, Some(dim)) => {
            let padded = push(Op::Pad { dim, before: 1, after: 2 }, &[value]);
            push(Op::Slice { dim, start: 1, size: size(dim) }, &[padded])
        }
        (6, Some(dim)) => {
            let other = push(Op::Unary(Unary::Neg), &[value]);
            let both = push(Op::Concat { dim }, &[value, other]);
            push(Op::Slice { dim, start: 0, size: size(dim) }, &[both])
        }
        (7, Some(dim)) => {
            // A count from zero is never less than zero.
            let dtype = DType::I32;
            let count = push(Op::Iota { dim, start: 0, dtype, dims: dims.clone() }, &[]);
            let zero = push(Op::Constant { value: 0.0, dtype, dims: dims.clone() }, &[]);
            let never = push(Op::Compare(Comparison::Lt), &[count, zero]);
            let other = push(Op::Unary(Unary::Exp), &[value]);
            push(Op::Select, &[never, other, value])
        }
        _ => push(Op::Broadcast { new: vec![], dims: dims.clone() }, &[value]),
    }
}

/// How many random modules are simplified.
const MODULES: u64 = 200;

#[test]
fn random_modules_compute_the_same_bits_when_simplified_by_exact_rules() {
    let options = rewrite::Options { selection: Selection::exact(), ..Default::default() };
    let (mut steps, mut fired) = (0, BTreeMap::<&str, usize>::new());
    let (mut nodes, mut simpler_nodes) = (0, 0);
    for seed in seeds(MODULES) {
        let mut r = Draws::new(seed);
        let mut module = generate::module(&mut r);
        let args = generate::arguments(&module, "main", &mut r);
        for at in 0..module.functions.len() {
            if module.functions[at].kind == Kind::Layer {
                module.functions[at] = made_longer(&module.functions[at], &module, &mut r);
            }
        }
        assert_eq!(verify(&module), [], "SEED={seed}\n{module}");
        let mut after = module.clone();
        let report = rewrite::simplify(&mut after, &options);
        for function in &report.functions {
            steps += function.saturation.steps.len();
            function
                .saturation
                .uses
                .iter()
                .for_each(|(name, n)| *fired.entry(name).or_default() += n);
        }
        let count = |module: &Module| module.functions.iter().map(|f| f.nodes.len()).sum::<usize>();
        nodes += count(&module);
        simpler_nodes += count(&after);
        assert_eq!(verify(&after), [], "SEED={seed}\n{module}{after}");
        let (before, found) = (eval(&module, "main", &args), eval(&after, "main", &args));
        let same = before.unwrap().iter().zip(&found.unwrap()).all(|(a, b)| same_bits(a, b));
        assert!(same, "SEED={seed}\n{module}{after}");
        let mut again = module.clone();
        rewrite::simplify(&mut again, &options);
        assert_eq!(again.to_string(), after.to_string(), "SEED={seed}");
    }
    if std::env::var("SEED").is_err() {
        // Five rules a module, a third of all exact rules, and a quarter of the nodes is gone.
        let exact = rules().filter(|rule| rule.keeps == Keeps::Bits);
        let wanted = (5 * MODULES as usize, exact.count() / 3);
        assert!(steps >= wanted.0 && fired.len() >= wanted.1, "{steps} by {fired:?}");
        assert!(simpler_nodes * 4 < nodes * 3, "{nodes} nodes became {simpler_nodes}");
    }
}

#[test]
fn models_and_their_gradients_are_cheaper_and_equal() {
    for name in ["gpt2-tiny", "llama-tiny"] {
        let mut model = model(name);
        let entry = training_step(&mut model.module, "loss").unwrap();
        let args = model_arguments(&model.module, &entry);
        let before = eval(&model.module, &entry, &args).unwrap();
        let mut after = model.module.clone();
        let report = rewrite::simplify(&mut after, &rewrite::Options::default());
        assert_eq!(verify(&after), [], "{after}");
        let found = eval(&after, &entry, &args).unwrap();
        for (a, b) in before.iter().zip(&found) {
            assert!(b.max_relative_difference(a) < 1e-9, "{name}");
        }
        for function in &report.functions {
            assert!(function.after.price() <= function.before.price(), "{}", function.name);
            assert_eq!(function.saturation.limits_hit, [""; 0], "{}", function.name);
            assert_eq!(function.gap, 0.0, "{}", function.name);
        }
    }
}

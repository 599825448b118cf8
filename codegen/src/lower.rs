//! Lowering: fused local function → routine: launches, collectives, and where locals lie.

mod expand;
mod group;
pub(crate) mod padded;
mod parts;
mod pieces;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

use ir::op::Collective;
use ir::program::{Exchange, Group, Instruction, LocalBuffer, Ref, Routed, Routine};
use ir::sharding::Layout;
use ir::target::{Arch, Target};
use ir::{Axis, DType, Function, Kind, Module, Node, Op, TensorType, ValueId};
use kernels::kernel::Line;
use kernels::pitch::Pitch;
use kernels::rows::{Access, Instr, Output, RowInput, Rows};
use kernels::{Kernel, Pointwise, Product, ProductPart, Products, Source, Tiling, price};

use crate::catalogue::{self, kernel_of_composite};
use crate::chunk::Chunks;
use crate::optimizer::Update;
use crate::partition::EXPERTS_WITH_TP;
use crate::pool::pools;
use crate::refusal::Refusal;
use crate::scalars::Scalars;
use crate::tile::lower_kernel;
use crate::unsharded::Unsharded;
use group::{Member, Turn, turns};
use padded::padded_bytes;

/// The kernels of an artefact, each once.
#[derive(Clone, Debug, Default)]
pub struct KernelTable {
    /// The kernels.
    pub kernels: Vec<Kernel>,
    /// By all their bits.
    by_bytes: HashMap<Vec<u8>, usize>,
    /// Updates by what they depend on.
    pub(crate) updates: BTreeMap<String, Arc<Update>>,
    /// Bytes of the workspaces of kernels on GPUs.
    workspaces: HashMap<(usize, Arch), u64>,
}

/// What a workspace is called in listings.
pub(crate) const WORKSPACE: &str = "workspace";

impl KernelTable {
    /// The index of a kernel, which is added where it is not there yet.
    pub fn add(&mut self, kernel: Kernel) -> usize {
        let bytes = postcard::to_stdvec(&kernel).expect("a kernel holds numbers and lists");
        *self.by_bytes.entry(bytes).or_insert_with(|| {
            self.kernels.push(kernel);
            self.kernels.len() - 1
        })
    }

    /// The bytes of the local that a kernel passes its workspaces in: none on CPUs, where what it
    /// needs depends on threads and lies beside the arena.
    pub(crate) fn workspace(&mut self, kernel: usize, target: Option<Target>) -> u64 {
        let Some(arch) = target.and_then(Target::arch) else { return 0 };
        let of = || price::workspace(&self.kernels[kernel], target, 1).0;
        *self.workspaces.entry((kernel, arch)).or_insert_with(of)
    }
}

/// What becomes of a function's results: by result, and of those that are left out nothing special.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Slots<'a> {
    /// Whether it is added to what its slot holds.
    pub(crate) adds: &'a [bool],
    /// The type of its slot, where that is not the result's own.
    pub(crate) rounded: &'a [Option<DType>],
    /// The parameter that it updates: both slots are one buffer.
    pub(crate) in_place: &'a [Option<usize>],
    /// Of all slots, parameters first, the pitch of rows that are to be padded.
    pub(crate) padded: &'a [Option<Pitch>],
}

/// What a function becomes.
pub(crate) struct Lowered {
    pub(crate) routine: Routine,
    /// Slots whose rows were to be padded and cannot be.
    pub(crate) unpadded: Vec<usize>,
}

impl Slots<'_> {
    fn rounded(&self, result: usize) -> Option<DType> {
        self.rounded.get(result).copied().flatten()
    }
}

/// Lowers a fused function. Its slots are the parameters, then the results, which go where `slots`
/// says. What one of `chunks` is called for runs in pieces.
///
/// # Errors
/// All that has no kernel, with the nodes that need one.
pub(crate) fn lower_routine(
    (function, module): (&Function, &Module),
    (chunks, unsharded): (&[Chunks], &Unsharded),
    slots: Slots<'_>,
    table: &mut KernelTable,
) -> Result<Lowered, Refusal> {
    let mut lower = Lower::new((function, module), unsharded, slots, table);
    lower.chunks = chunks;
    lower.assign_slots();
    // All that has no kernel is said at once, with the nodes that each sentence is about.
    let mut wrong: BTreeMap<Refusal, Vec<String>> = BTreeMap::new();
    let pools = pools(function);
    let windows: BTreeSet<usize> = pools.values().map(|pool| pool.from).collect();
    for (at, (node, turn)) in function.nodes.iter().zip(turns(function, module)).enumerate() {
        let done = match turn {
            Turn::Alone if windows.contains(&at) => Ok(()),
            Turn::Alone if pools.contains_key(&at) => lower.pool(node, pools[&at]),
            Turn::Alone => lower.node(node),
            Turn::Together(members) => lower.products(&members),
            Turn::Done => Ok(()),
        };
        if let Err(why) = done {
            let name = &function.value(node.results[0]).name;
            wrong.entry(why).or_default().push(format!("`%{name}`"));
        }
        lower.round_results(node);
    }
    let sentence = |(why, nodes): (Refusal, Vec<String>)| {
        why.map(|why| format!("{why}, which {} need", nodes.join(", ")))
    };
    if let Some(all) = wrong.into_iter().map(sentence).reduce(|first, next| first.and(&next)) {
        return Err(all);
    }
    lower.finish_results();
    Ok(lower.into_lowered())
}

/// Where a value lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Home {
    Slot(u32),
    Local(u32),
}

struct Lower<'a> {
    function: &'a Function,
    module: &'a Module,
    table: &'a mut KernelTable,
    chunks: &'a [Chunks],
    unsharded: &'a Unsharded,
    home: Vec<Option<Home>>,
    slots: Slots<'a>,
    /// Values whose producer adds to their slot.
    adds: Vec<bool>,
    /// Results that are not written by their producer: which, the value, whether it is added.
    copies: Vec<(usize, ValueId, bool)>,
    /// The locals, the offsets of parts from the start of what they are parts of.
    locals: Vec<LocalBuffer>,
    instructions: Vec<Instruction>,
}

impl<'a> Lower<'a> {
    fn new(
        (function, module): (&'a Function, &'a Module),
        unsharded: &'a Unsharded,
        slots: Slots<'a>,
        table: &'a mut KernelTable,
    ) -> Lower<'a> {
        let count = function.values.len();
        let mut home = vec![None; count];
        for param in function.params() {
            home[param.index()] = Some(Home::Slot(param.0));
        }
        Lower {
            function,
            module,
            table,
            chunks: &[],
            unsharded,
            home,
            slots,
            adds: vec![false; count],
            copies: Vec::new(),
            locals: Vec::new(),
            instructions: Vec::new(),
        }
    }

    /// Gives results their slots, where the producer can write there.
    fn assign_slots(&mut self) {
        let producers = self.function.producers();
        let mut uses = vec![0_usize; self.function.values.len()];
        for operand in self.function.nodes.iter().flat_map(|n| &n.operands) {
            uses[operand.index()] += 1;
        }
        // What is several results is computed aside: one of the slots may be a sum.
        let mut times = vec![0_usize; self.function.values.len()];
        self.function.results.iter().for_each(|result| times[result.index()] += 1);
        for (at, result) in self.function.results.iter().enumerate() {
            let slot = (self.function.param_count + at) as u32;
            let add = self.slots.adds.get(at).copied().unwrap_or(false);
            let node = producers[result.index()].map(|p| &self.function.nodes[p]);
            let direct = self.slots.rounded(at).is_none()
                && self.home[result.index()].is_none()
                && times[result.index()] == 1
                && node.is_some_and(|n| !matches!(n.op, Op::Reshape { .. }))
                && (!add
                    || uses[result.index()] == 0 && node.is_some_and(|n| self.can_add(n, *result)));
            if direct {
                self.home[result.index()] = Some(Home::Slot(slot));
                self.adds[result.index()] = add;
            } else {
                self.copies.push((at, *result, add));
            }
        }
    }

    /// What a node calls in pieces.
    fn chunks_of(&self, node: &Node) -> Option<&'a Chunks> {
        self.chunks.iter().find(|chunks| chunks.is_call(node))
    }

    /// Whether what computes a result of a node can add it to what its output holds.
    fn can_add(&self, node: &Node, result: ValueId) -> bool {
        if let Some(chunks) = self.chunks_of(node) {
            let mut layouts = node.results.iter().zip(&chunks.results);
            return layouts.any(|(r, layout)| *r == result && matches!(layout, Layout::Partial(_)));
        }
        if let Op::Call { function } = &node.op {
            let at = node.results.iter().position(|of| *of == result);
            return match self.module.function(function).map(|callee| &callee.kind) {
                Some(Kind::Kernel) => true,
                Some(Kind::Composite { name, .. }) => {
                    at.is_some_and(|at| catalogue::can_add(name, at))
                }
                Some(Kind::Layer) | None => false,
            };
        }
        matches!(node.op, Op::Contract(_) | Op::ScaledContract { .. } | Op::ScatterAdd { .. })
    }

    fn ty(&self, value: ValueId) -> &'a TensorType {
        self.function.ty(value)
    }

    fn home(&mut self, value: ValueId) -> Ref {
        let home = match self.home[value.index()] {
            Some(home) => home,
            None => {
                let bytes = self.ty(value).bytes().expect("local sizes are bound");
                let name = self.function.value(value).name.clone();
                let home = Home::Local(self.local(name, bytes));
                self.home[value.index()] = Some(home);
                home
            }
        };
        match home {
            Home::Slot(at) => Ref::Slot(at),
            Home::Local(at) => Ref::Local(at),
        }
    }

    fn launch(&mut self, kernel: Kernel, inputs: Vec<Ref>, outputs: Vec<Ref>) {
        self.launch_with(kernel, Scalars::default(), inputs, outputs);
    }

    fn launch_with(
        &mut self,
        kernel: Kernel,
        scalars: Scalars,
        inputs: Vec<Ref>,
        outputs: Vec<Ref>,
    ) {
        if kernel.outputs().iter().all(|output| output.len == 0) {
            return;
        }
        let kernel = self.table.add(kernel);
        let (scalars, workspace) = (scalars.into_values(), None);
        self.instructions.push(Instruction::Launch { kernel, scalars, inputs, outputs, workspace });
    }

    fn node(&mut self, node: &Node) -> Result<(), Refusal> {
        #[expect(clippy::wildcard_enum_match_arm, reason = "the catalogue knows the other ops")]
        match &node.op {
            // A reshape shares the bytes of its operand.
            Op::Reshape { .. } => {
                self.home(node.operands[0]);
                self.home[node.result().index()] = self.home[node.operands[0].index()];
                Ok(())
            }
            Op::Collective { kind, axis } => {
                self.collective(node, kind, axis);
                Ok(())
            }
            Op::DynamicUpdateSlice { dim } => self.place(node, *dim),
            Op::Conv(convolution) => self.convolve(node, convolution),
            Op::Concat { dim } => self.concatenate(node, *dim),
            Op::Scatter { dim, start } => self.replace(node, *dim, *start),
            Op::Prod { dims } => self.along(node, dims, Line::Prod),
            Op::Reverse { dims } => self.along(node, dims, Line::Reverse),
            Op::Call { function } => match self.chunks_of(node) {
                Some(chunks) => self.pieces(node, chunks),
                None => self.call(node, function),
            },
            _ => {
                let operands: Vec<&TensorType> =
                    node.operands.iter().map(|o| self.ty(*o)).collect();
                let result = self.ty(node.result());
                let add = self.adds[node.result().index()];
                let mut scalars = Scalars::default();
                let mut kernel =
                    catalogue::kernel_of_op(&node.op, &operands, result, add, &mut scalars)?;
                if let Kernel::Product(product) = &mut kernel {
                    product.tiling = self.tiling(node, product);
                }
                self.launch_node(node, kernel, scalars);
                Ok(())
            }
        }
    }

    fn launch_node(&mut self, node: &Node, kernel: Kernel, scalars: Scalars) {
        let inputs = node.operands.iter().map(|o| self.home(*o)).collect();
        let outputs = node.results.iter().map(|r| self.home(*r)).collect();
        self.launch_with(kernel, scalars, inputs, outputs);
    }

    /// Several products in one launch, with what is added to them and computed of them.
    fn products(&mut self, members: &[Member]) -> Result<(), Refusal> {
        let function = self.function;
        let result = |member: &Member| function.nodes[member.sum.last()].result();
        let results: Vec<ValueId> = members.iter().map(result).collect();
        let (mut inputs, mut outputs, mut parts) = (Vec::new(), Vec::new(), Vec::new());
        let mut scalars = Scalars::default();
        for (member, result) in members.iter().zip(&results) {
            let (product, operands) = self.product(&function.nodes[member.sum.product], *result)?;
            let mut number = |at: Ref| {
                inputs.iter().position(|input| *input == at).unwrap_or_else(|| {
                    inputs.push(at);
                    inputs.len() - 1
                })
            };
            let [a, b] = [operands[0], operands[1]].map(&mut number);
            let scales = operands.get(2).zip(operands.get(3));
            let scales = scales.map(|(a, b)| [*a, *b].map(&mut number));
            let mut operand = |value: ValueId| number(self.home(value));
            let bias = member.sum.bias.map(&mut operand);
            let addend = member.sum.addend.map(&mut operand);
            let then = member.then.as_ref().map(|(node, tile)| {
                let source = |param: &ValueId| {
                    let value = function.nodes[*node].operands[param.index()];
                    let at = results.iter().position(|result| *result == value);
                    at.map_or_else(|| Source::Operand(operand(value)), Source::Result)
                };
                let inputs = tile.inputs.iter().map(source).collect();
                let mut rows = tile.rows.clone();
                rows.shift_scalars(scalars.count());
                scalars.append(&tile.scalars);
                Pointwise { rows, inputs }
            });
            let in_place = self.is_in_place(member, *result, then.as_ref());
            parts.push(ProductPart { a, b, scales, bias, addend, product, then, in_place });
            let place = member.then.as_ref().filter(|_| in_place);
            let place = place.map_or(*result, |(node, _)| function.nodes[*node].results[0]);
            outputs.push(self.home(place));
        }
        for (part, member) in parts.iter_mut().zip(members) {
            if let (Some(then), Some((node, _))) = (&mut part.then, &member.then) {
                let made = function.nodes[*node].results.iter();
                for (at, (output, result)) in then.rows.outputs.iter_mut().zip(made).enumerate() {
                    set_accumulate(output, self.adds[result.index()]);
                    if at > 0 || !part.in_place {
                        outputs.push(self.home(*result));
                    }
                }
            }
        }
        self.launch_with(Kernel::Products(Products { parts }), scalars, inputs, outputs);
        Ok(())
    }

    /// Whether the result of a product is read by nothing but the program on it, whose first
    /// output is as large: that takes its place.
    fn is_in_place(&self, member: &Member, result: ValueId, then: Option<&Pointwise>) -> bool {
        let (Some((node, _)), Some(then)) = (&member.then, then) else { return false };
        let function = self.function;
        let readers = function.nodes.iter().enumerate().filter(|(at, _)| at != node);
        let is_read = readers.flat_map(|(_, node)| &node.operands).any(|o| *o == result);
        let first = function.nodes[*node].results[0];
        let whole = Access::full(then.rows.rows, then.rows.cols);
        let is_whole = matches!(then.rows.outputs.first(),
            Some(Output::Store { access, dtype, .. })
                if *access == whole && *dtype == self.ty(result).dtype);
        let is_kept = is_read || function.results.contains(&result);
        is_whole && !is_kept && !self.adds[first.index()]
    }

    /// The product that a node is, and its operands, scales last; it is added to what the result's
    /// slot holds where the result is.
    fn product(&mut self, node: &Node, result: ValueId) -> Result<(Product, Vec<Ref>), Refusal> {
        if let Op::Conv(convolution) = &node.op {
            let (product, operands) = self.convolution(node, convolution)?;
            return Ok((product, operands.to_vec()));
        }
        let types: Vec<&TensorType> = node.operands.iter().map(|o| self.ty(*o)).collect();
        let add = self.adds[result.index()];
        let mut scalars = Scalars::default();
        let ty = self.ty(result);
        let kernel = catalogue::kernel_of_op(&node.op, &types, ty, add, &mut scalars)?;
        let Kernel::Product(mut product) = kernel else {
            return Err("a contraction is no product".into());
        };
        product.tiling = self.tiling(node, &product);
        Ok((product, node.operands.iter().map(|operand| self.home(*operand)).collect()))
    }

    /// How tensor cores sum the product that a node is.
    fn tiling(&self, node: &Node, product: &Product) -> Tiling {
        self.unsharded.tilings.tiling(&self.function.value(node.result()).name, product)
    }

    /// Writes a window of a value: in place, or into a copy of it.
    fn place(&mut self, node: &Node, dim: usize) -> Result<(), Refusal> {
        let [x, update, position] = node.operands[..] else {
            return Err("an update has three operands".into());
        };
        let window = catalogue::window(self.ty(x), self.ty(update), self.ty(position), dim)?;
        let (from, to) = (self.home(x), self.home(node.result()));
        let reads = self.function.nodes.iter().flat_map(|n| &n.operands).filter(|o| **o == x);
        if !self.is_same_buffer(from, to) {
            self.copy(x, to, from);
        } else if reads.count() > 1 {
            let name = &self.function.value(x).name;
            return Err(format!("`%{name}` is read besides its update").into());
        }
        let inputs = vec![self.home(update), self.home(position)];
        self.launch(Kernel::Place(window), inputs, vec![to]);
        Ok(())
    }

    /// Whether two slots are a parameter and the result that updates it in place.
    fn is_same_buffer(&self, param: Ref, result: Ref) -> bool {
        let (Ref::Slot(param), Ref::Slot(result)) = (param, result) else { return false };
        let result = (result as usize).checked_sub(self.function.param_count);
        let updated = result.and_then(|at| *self.slots.in_place.get(at)?);
        updated == Some(param as usize)
    }

    fn call(&mut self, node: &Node, callee: &str) -> Result<(), Refusal> {
        let function = self.module.function(callee).ok_or_else(|| format!("no `@{callee}`"))?;
        match &function.kind {
            Kind::Kernel => {
                let mut tile = lower_kernel(function, self.module);
                for (output, result) in tile.rows.outputs.iter_mut().zip(&node.results) {
                    set_accumulate(output, self.adds[result.index()]);
                }
                let passed: Vec<ValueId> =
                    tile.inputs.iter().map(|p| node.operands[p.index()]).collect();
                let inputs = passed.into_iter().map(|o| self.home(o)).collect();
                let outputs = node.results.iter().map(|r| self.home(*r)).collect();
                self.launch_with(Kernel::Rows(tile.rows), tile.scalars, inputs, outputs);
                Ok(())
            }
            Kind::Composite { name, attributes } => {
                let mut scalars = Scalars::default();
                let adds: Vec<bool> = node.results.iter().map(|r| self.adds[r.index()]).collect();
                let kernel = kernel_of_composite(name, attributes, function, &adds, &mut scalars)?;
                self.launch_node(node, kernel, scalars);
                Ok(())
            }
            Kind::Layer => Err(format!("`@{callee}` is a layer inside of a layer").into()),
        }
    }

    fn collective(&mut self, node: &Node, kind: &Collective, axis: &str) {
        let (operand, result) = (node.operands[0], node.result());
        let ty = self.ty(operand);
        let sizes = ty.sizes().expect("local sizes are bound");
        let around =
            |dim: usize| (sizes[..dim].iter().product(), sizes[dim + 1..].iter().product());
        let input = self.home(operand);
        let output = self.home(result);
        let (exchange, input) = match kind {
            Collective::AllReduce(combiner) => {
                // In place: first the value goes where the result will be.
                self.copy(operand, output, input);
                (Exchange::AllReduce(*combiner), output)
            }
            Collective::AllGather { dim, counts, order } => {
                let (outer, inner) = around(*dim);
                let (counts, order) = (counts.clone(), *order);
                (Exchange::AllGather { outer, inner, counts, order }, input)
            }
            Collective::ReduceScatter { dim, counts, order, .. } => {
                let (outer, inner) = around(*dim);
                let (counts, order) = (counts.clone(), *order);
                (Exchange::ReduceScatter { outer, inner, counts, order }, input)
            }
            Collective::AllToAll { pieces } => (Exchange::AllToAll { pieces: *pieces }, input),
            Collective::Dispatch { pieces, top_k } => {
                let routed = self.routed(node, (*pieces, *top_k), 1);
                (Exchange::Dispatch(routed), input)
            }
            Collective::Combine { pieces, top_k } => {
                let routed = self.routed(node, (*pieces, *top_k), *pieces);
                (Exchange::Combine(routed), input)
            }
        };
        let gates = node.operands.get(1).map(|gates| self.home(*gates));
        self.instructions.push(Instruction::Collective {
            group: group(axis, &exchange),
            exchange,
            dtype: ty.dtype,
            exchanged: ty.dtype,
            elements: sizes.iter().product(),
            input,
            output,
            gates,
        });
    }

    /// How tokens are routed by gates, the second operand: operands have the tokens of `of`
    /// members, and the gates for the experts of as many.
    fn routed(&self, node: &Node, (pieces, top_k): (usize, usize), of: usize) -> Routed {
        let sizes = |at: usize| self.ty(node.operands[at]).sizes().expect("local sizes are bound");
        let (tokens, gates) = (sizes(0), sizes(1));
        let (width, rows) = tokens.split_last().expect("tokens have numbers");
        let rows = rows.iter().product::<usize>() / of;
        let experts = gates.last().map_or(0, |all| all / of);
        Routed { pieces, rows, width: *width, experts, top_k }
    }

    /// Copies a value, as it is.
    fn copy(&mut self, value: ValueId, to: Ref, from: Ref) {
        self.store(value, [from, to], (self.ty(value).dtype, false));
    }

    /// Stores or adds a value in or to a buffer of a type, to which the number or the sum is
    /// rounded once.
    fn store(&mut self, value: ValueId, [from, to]: [Ref; 2], (dtype, add): (DType, bool)) {
        let ty = self.ty(value);
        let count = ty.count().expect("local sizes are bound");
        let access = Access::full(1, count);
        let rows = Rows {
            rows: 1,
            cols: count,
            dtype: catalogue::stored_in(ty.dtype),
            inputs: vec![RowInput { dtype: ty.dtype, access: access.clone() }],
            instrs: vec![Instr::Load { input: 0 }],
            outputs: vec![Output::Store { value: 0, access, dtype, accumulate: add }],
        };
        self.launch(Kernel::Rows(rows), vec![from], vec![to]);
    }

    /// Writes the results that their producers could not write.
    fn finish_results(&mut self) {
        for copy in std::mem::take(&mut self.copies) {
            self.write_result(copy);
        }
    }

    /// Writes the results of a node that their slots round, so that what they were computed in is
    /// free for the next node.
    fn round_results(&mut self, node: &Node) {
        let is_here = |(at, value, _): &(usize, ValueId, bool)| {
            self.slots.rounded(*at).is_some() && node.results.contains(value)
        };
        let (here, later) = self.copies.iter().copied().partition(is_here);
        self.copies = later;
        let here: Vec<_> = here;
        here.into_iter().for_each(|copy| self.write_result(copy));
    }

    fn write_result(&mut self, (at, value, add): (usize, ValueId, bool)) {
        let from = self.home(value);
        let to = Ref::Slot((self.function.param_count + at) as u32);
        let dtype = self.slots.rounded(at).unwrap_or(self.ty(value).dtype);
        self.store(value, [from, to], (dtype, add));
    }

    /// Gives launches that need one a workspace.
    fn add_workspaces(&mut self) {
        for at in 0..self.instructions.len() {
            let Instruction::Launch { kernel, workspace: None, .. } = self.instructions[at] else {
                continue;
            };
            let bytes = self.table.workspace(kernel, self.unsharded.target);
            let local = (bytes > 0).then(|| self.local(WORKSPACE.to_owned(), bytes));
            if let Instruction::Launch { workspace, .. } = &mut self.instructions[at] {
                *workspace = local.map(Ref::Local);
            }
        }
    }

    fn into_lowered(mut self) -> Lowered {
        let unpadded = self.pad_rows();
        self.add_workspaces();
        let function = self.function;
        let mut locals = self.locals;
        let frame_bytes = parts::place(&mut locals, &self.instructions);
        let slot = |(at, (value, rounded)): (usize, (ValueId, Option<DType>))| {
            let ty = function.ty(value);
            let ty = rounded.map_or_else(|| ty.clone(), |dtype| ty.with_dtype(dtype));
            let pitch = self.slots.padded.get(at).copied().flatten();
            let padded = pitch.filter(|_| !unpadded.contains(&at));
            let bytes = padded.map_or_else(|| ty.bytes(), |pitch| padded_bytes(&ty, pitch));
            (function.value(value).name.clone(), bytes.expect("local sizes are bound"))
        };
        let results = function.results.iter().enumerate();
        let results = results.map(|(at, result)| (*result, self.slots.rounded(at)));
        let slots = function.params().map(|param| (param, None)).chain(results);
        let routine = Routine {
            name: function.name.clone(),
            slots: slots.enumerate().map(slot).collect(),
            locals,
            frame_bytes,
            instructions: self.instructions,
        };
        Lowered { routine, unpadded }
    }
}

/// What an instruction reads and writes.
pub fn touched(instruction: &Instruction) -> Vec<Ref> {
    match instruction {
        Instruction::Launch { inputs, outputs, workspace, .. } => {
            inputs.iter().chain(outputs).chain(workspace).copied().collect()
        }
        Instruction::Collective { input, output, gates, .. } => {
            [*input, *output].into_iter().chain(*gates).collect()
        }
    }
}

fn set_accumulate(output: &mut Output, add: bool) {
    match output {
        Output::Store { accumulate, .. }
        | Output::ColSum { accumulate, .. }
        | Output::TotalSum { accumulate, .. } => *accumulate = add,
    }
}

/// The ranks of an exchange along an axis. An expert-parallel group has a member for each piece.
fn group(axis: &str, exchange: &Exchange) -> Group {
    let experts = |pieces: usize| match axis {
        EXPERTS_WITH_TP => Group::Experts(pieces),
        _ => Group::Shards(pieces),
    };
    match exchange {
        Exchange::AllGather { counts, .. } | Exchange::ReduceScatter { counts, .. }
            if axis == Axis::Ep.name() =>
        {
            Group::Shards(counts.len())
        }
        Exchange::AllToAll { pieces } if axis == Axis::Ep.name() || axis == EXPERTS_WITH_TP => {
            experts(*pieces)
        }
        Exchange::Dispatch(routed) | Exchange::Combine(routed) => experts(routed.pieces),
        Exchange::AllReduce(_)
        | Exchange::AllGather { .. }
        | Exchange::ReduceScatter { .. }
        | Exchange::AllToAll { .. } => {
            Group::Axis(Axis::parse(axis).expect("partition names axes of the mesh"))
        }
    }
}

#[cfg(test)]
mod tests {
    use ir::DType;
    use ir::build::Builder;

    use super::*;

    /// For the launches of `g = x y, h = g y`: whether each adds to what its output holds.
    fn adding(accumulate: &[bool]) -> Vec<bool> {
        let mut module = Module::default();
        let mut b = Builder::new(&mut module, "f", Kind::Layer);
        let [x, y] = ["x", "y"].map(|name| b.param(name, TensorType::of(DType::F32, &[8, 8])));
        let g = b.contract("g", "ij,jk->ik", x, y);
        let h = b.contract("h", "ij,jk->ik", g, y);
        let function = b.into_function(&[g, h]);
        let mut table = KernelTable::default();
        let slots = Slots { adds: accumulate, ..Slots::default() };
        let (own, decisions) = ((&function, &Module::default()), (&[][..], &Unsharded::default()));
        let routine = lower_routine(own, decisions, slots, &mut table);
        let adds = |instruction: &Instruction| {
            let Instruction::Launch { kernel, .. } = instruction else {
                panic!("one rank exchanges nothing");
            };
            let kernel = &table.kernels[*kernel];
            if let Kernel::Product(product) = kernel {
                return product.accumulate;
            }
            let Kernel::Rows(rows) = kernel else { panic!("{kernel} is no copy") };
            matches!(rows.outputs[..], [Output::Store { accumulate: true, .. }])
        };
        routine.expect("it is lowered").routine.instructions.iter().map(adds).collect()
    }

    /// Who reads a result wants what was computed now, not what its slot held before.
    #[test]
    fn a_result_that_is_read_is_added_after_it_was() {
        assert_eq!(adding(&[false, false]), [false, false]);
        assert_eq!(adding(&[false, true]), [false, true]);
        assert_eq!(adding(&[true, false]), [false, false, true]);
    }
}

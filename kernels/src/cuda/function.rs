//! Device functions: what one is launched with, what it computes, and its text.

use std::fmt;
use std::ops::Range;

use ir::program::aligned;

use super::parameter::{Buffer, Named, Parameter};
use super::slices;
use super::text::{Text, line, whole};
use super::tile::Tile;
use crate::offset::Offset;
use crate::units::Bytes;

/// The device functions of a kernel.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Functions {
    /// In the order of execution: each starts when the one before has ended.
    pub functions: Vec<Function>,
    /// Bytes of each workspace that values are passed in from one function to the next.
    pub workspaces: Vec<u64>,
    /// Counters that are zero when a function starts, and when it has ended: numbers of U32 in a
    /// memory that nothing else writes.
    pub tickets: u64,
}

impl Functions {
    /// Bytes of the memory that holds all workspaces.
    pub fn workspace(&self) -> Bytes {
        Bytes(self.workspace_ranges().last().map_or(0, |last| aligned(last.end)))
    }

    /// Which bytes of that memory each workspace is: one after the other, each aligned.
    pub fn workspace_ranges(&self) -> Vec<Range<u64>> {
        let mut end = 0;
        let range = |bytes: &u64| {
            let start = aligned(end);
            end = start + bytes;
            start..end
        };
        self.workspaces.iter().map(range).collect()
    }
}

/// One device function.
#[derive(Clone, Debug, PartialEq)]
pub struct Function {
    /// For people: the kernel, and which part of its work this is.
    pub what: String,
    /// What it is passed, in order, before the scalars.
    pub parameters: Vec<Parameter>,
    /// The offsets that it adds, in order; it is passed those that are scalars of the launch.
    pub offsets: Vec<Named>,
    /// Blocks: of a persistent function as many as there are tiles, of which a launch starts those
    /// that run at once.
    pub grid: u64,
    /// Threads of a block.
    pub threads: u32,
    /// What it computes, with every decision taken.
    pub tile: Tile,
}

impl Function {
    /// Whether threads of a block synchronise.
    pub fn synchronizes(&self) -> bool {
        self.tile.synchronizes()
    }

    /// Whether fewer blocks compute the same, each several tiles.
    pub fn is_persistent(&self) -> bool {
        self.tile.is_persistent()
    }

    /// What it is passed of the scalars of a launch, in order.
    pub fn scalars(&self, launch: &[i64]) -> Vec<i64> {
        let passed = self.offsets.iter().filter(|named| named.is_scalar());
        passed.map(|named| named.offset.of(launch)).collect()
    }

    /// What blocks write for each other, and its bytes, where barriers of blocks order them.
    fn shared_between_blocks(&self) -> Option<(Buffer, u64)> {
        if let Some((number, bytes)) = self.tile.shared_sums() {
            return Some((Buffer::Workspace(number), bytes));
        }
        let Tile::Tensor(tile) = &self.tile else { return None };
        let at = tile.workspace.filter(|_| tile.tickets.is_some())?;
        Some((self.parameters[at].buffer, slices::bytes(&tile.product)))
    }

    /// What the text passes: types and names.
    fn declared(&self) -> Vec<(String, String)> {
        let buffer = |parameter: &Parameter| {
            let constant = matches!(parameter.buffer, Buffer::Input(_));
            let kind = if constant { "const " } else { "" };
            (format!("{kind}{}*", self.tile.pointer(parameter)), parameter.name())
        };
        let mut all: Vec<(String, String)> = Vec::new();
        for parameter in &self.parameters {
            let declared = buffer(parameter);
            // An operand that is read twice is passed once.
            if !all.contains(&declared) {
                all.push(declared);
            }
        }
        all.extend(self.passed_offsets().map(|named| ("i64".to_owned(), named.name.clone())));
        all
    }

    fn passed_offsets(&self) -> impl Iterator<Item = &Named> {
        self.offsets.iter().filter(|named| named.is_scalar())
    }

    /// The parameters as the text passes them: each buffer once.
    pub fn passed(&self) -> Vec<Buffer> {
        let mut all = Vec::new();
        for parameter in &self.parameters {
            if !all.contains(&parameter.buffer) {
                all.push(parameter.buffer);
            }
        }
        all
    }

    /// The text of the function under a name.
    pub fn text(&self, name: &str) -> String {
        let mut text = Text::default();
        let mut parameters: Vec<String> =
            self.declared().iter().map(|(kind, name)| format!("{kind} {name}")).collect();
        let maps = self.tile.maps().into_iter();
        parameters.extend(maps.map(|map| format!("TENSOR_MAP {}", map.name)));
        line!(text, "// {self}");
        let (threads, parameters) = (self.threads, parameters.join(", "));
        match self.tile.cluster() {
            1 => line!(text, "KERNEL({threads}) {name}({parameters}) {{"),
            blocks => {
                line!(text, "KERNEL_OF_CLUSTERS({threads}, {blocks}) {name}({parameters}) {{");
            }
        }
        // Whoever launches it may let it start while the launch before it ends: until that has, it
        // accesses no memory, but for what it lets the GPU fetch early.
        line!(text, "griddep_launch();");
        self.tile.print_prefetch(&mut text);
        line!(text, "griddep_wait();");
        for Named { name, offset } in &self.offsets {
            if let Offset::Fixed(value) = offset {
                line!(text, "const i64 {name} = {};", whole(*value));
            }
        }
        self.tile.print(&self.parameters, &mut text);
        text.end();
        text.into_text()
    }

    /// The text that launches the function on a CPU: `NAME_launch` takes buffers in the order of
    /// [`Function::passed`], scalars, and a seed of the order of threads.
    pub fn launcher(&self, name: &str) -> String {
        let mut text = Text::default();
        let count = self.declared().len() - self.passed_offsets().count();
        let argument = |(at, (kind, _)): (usize, &(String, String))| match at {
            at if at < count => format!("({kind})buffers[{at}]"),
            at => format!("scalars[{}]", at - count),
        };
        let mut arguments: Vec<String> = self.declared().iter().enumerate().map(argument).collect();
        arguments.extend(self.tile.maps().into_iter().map(|map| {
            let buffer = self.parameters[map.parameter].buffer;
            let at = self.passed().iter().position(|passed| *passed == buffer);
            map.host(&format!("buffers[{}]", at.expect("every buffer is passed")))
        }));
        let signature = "void* const* buffers, const i64* scalars, u64 seed";
        line!(text, "extern \"C\" void {name}_launch({signature}) {{");
        line!(text, "(void)buffers, (void)scalars;");
        let call = format!("[&] {{ {name}({}); }}", arguments.join(", "));
        let (threads, synchronizes) = (self.threads, self.synchronizes());
        let grid = match self.is_persistent() {
            true => format!("shim::resident({}, seed)", self.grid),
            false => self.grid.to_string(),
        };
        let launched = format!("{grid}, {threads}");
        let call = format!("seed, {call}");
        match self.tile.cluster() {
            1 if self.tile.passes() => {
                if let Some((buffer, bytes)) = self.shared_between_blocks() {
                    let at = self.passed().iter().position(|passed| *passed == buffer);
                    let at = at.expect("the workspace is passed");
                    line!(text, "shim::share(buffers[{at}], {bytes});");
                }
                let by = if self.tile.shared_sums().is_some() { "turns" } else { "tickets" };
                line!(text, "shim::launch_{by}({launched}, {call});");
            }
            1 => line!(text, "shim::launch({launched}, {synchronizes}, {call});"),
            blocks => line!(text, "shim::launch_clusters({launched}, {blocks}, {call});"),
        }
        text.end();
        text.into_text()
    }
}

impl fmt::Display for Function {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Function { what, grid, threads, tile, .. } = self;
        write!(f, "{what}: {grid} blocks of {threads} threads, {tile}")
    }
}

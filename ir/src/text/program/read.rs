//! Reading the text of a program, line by line.

use std::ops::Range;
use std::str::FromStr;

use crate::op::Combiner;
use crate::pieces::PieceOrder;
use crate::program::{
    Buffer, BufferId, Contents, Entry, Exchange, Experts, Feed, Group, Instruction, LocalBuffer,
    Program, Ref, Routed, Routine, ShardRole, Step, WeightShard,
};
use crate::sharding::Axis;
use crate::{DType, Diagnostic, Span};

/// The most diagnostics that one reading reports.
const DIAGNOSTICS_MAX: usize = 20;

/// Reads the text of a program. `source` names the text in diagnostics.
///
/// # Errors
/// `E1031` and `E1032`, at most twenty, in text order.
pub fn parse_program(source: &str, text: &str) -> Result<Program, Vec<Diagnostic>> {
    let mut reader = Reader {
        source,
        diagnostics: Vec::new(),
        program: empty(),
        has_head: false,
        part: Part::Head,
    };
    let mut start = 0;
    for line in text.split_inclusive('\n') {
        let words = words(line, start);
        if !words.is_empty() {
            reader.line(Line { words, next: 0 }, start..start + line.trim_end().len());
        }
        start += line.len();
    }
    if reader.diagnostics.is_empty() && !reader.has_head {
        let head = "program NAME class stage 0 tensor 0";
        reader.report("E1032", 0..0, "the text has no `program`", head);
    }
    if reader.diagnostics.is_empty() { Ok(reader.program) } else { Err(reader.diagnostics) }
}

fn empty() -> Program {
    Program {
        name: String::new(),
        stage: 0,
        context: 0,
        tensor: 0,
        weights: Vec::new(),
        buffers: Vec::new(),
        arena_bytes: 0,
        host_bytes: 0,
        disk_bytes: 0,
        live_bytes_max: 0,
        routines: Vec::new(),
        steps: Vec::new(),
        evaluate: Vec::new(),
        entries: Vec::new(),
    }
}

/// A word and its bytes in the text.
struct Word<'t> {
    text: &'t str,
    bytes: Range<usize>,
}

/// Cuts a line at spaces and around brackets and commas; what is in quotes is one word.
fn words(line: &str, start: usize) -> Vec<Word<'_>> {
    let bytes = line.as_bytes();
    let mut words = Vec::new();
    let mut at = 0;
    while let Some(first) = bytes.get(at) {
        let from = at;
        match first {
            b'#' => break,
            b if b.is_ascii_whitespace() => {
                at += 1;
                continue;
            }
            b'[' | b']' | b',' => at += 1,
            b'"' => {
                at += 1;
                while at < bytes.len() && bytes[at] != b'"' {
                    at += if bytes[at] == b'\\' { 2 } else { 1 };
                }
                at = (at + 1).min(bytes.len());
                while !line.is_char_boundary(at) {
                    at += 1;
                }
            }
            _ => {
                let ends = |b: &u8| b.is_ascii_whitespace() || b"[],\"#".contains(b);
                at += bytes[at..].iter().position(ends).unwrap_or(bytes.len() - at);
            }
        }
        words.push(Word { text: &line[from..at], bytes: start + from..start + at });
    }
    words
}

/// What the lines that follow belong to.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Part {
    Head,
    Routine,
    Step,
    Evaluate,
    Entry,
}

struct Reader<'a> {
    source: &'a str,
    diagnostics: Vec<Diagnostic>,
    program: Program,
    has_head: bool,
    part: Part,
}

/// Why a line is refused.
enum Refusal {
    /// At the word that was being read.
    Unread,
    /// At the word before it: a number that is not the next one, or a line in another part.
    Misplaced,
}

type Read<T> = Result<T, Refusal>;

impl Reader<'_> {
    fn report(&mut self, code: &'static str, bytes: Range<usize>, headline: &str, form: &str) {
        if self.diagnostics.len() < DIAGNOSTICS_MAX {
            let span = Span { source: self.source.to_owned(), bytes };
            let found = Diagnostic::error(code, span, headline);
            self.diagnostics.push(found.help(format!("write it as `{form}`")));
        }
    }

    fn line(&mut self, mut line: Line<'_>, whole: Range<usize>) {
        let keyword = line.words[0].text.to_owned();
        let Some(form) = form_of(&keyword) else {
            let headline = format!("a program has no `{keyword}`");
            let at = line.words[0].bytes.clone();
            return self.report("E1031", at, &headline, "routine r0 NAME frame 0");
        };
        line.next = 1;
        let taken = self.take(&keyword, &mut line).and_then(|()| line.end());
        if taken.is_err() {
            self.stand_in(&keyword);
        }
        let last = line.words.len() - 1;
        let word = |at: usize| line.words[at.min(last)].bytes.clone();
        match taken {
            Ok(()) => {}
            Err(Refusal::Unread) => {
                let headline = format!("cannot read this line of `{keyword}`");
                self.report("E1031", word(line.next), &headline, form);
            }
            Err(Refusal::Misplaced) => {
                let headline = format!("`{keyword}` is out of its order");
                let at = if line.next == 1 { whole } else { word(line.next - 1) };
                self.report("E1032", at, &headline, form);
            }
        }
    }

    /// Puts something in the place of what a refused line counts, so that the next is in order.
    fn stand_in(&mut self, keyword: &str) {
        let name = String::new;
        let routine = self.program.routines.last_mut();
        match (keyword, routine) {
            ("buffer", _) => self.program.buffers.push(Buffer {
                name: name(),
                contents: Contents::View,
                dtype: DType::I8,
                sizes: Vec::new(),
                bytes: 0,
                offset: 0,
            }),
            ("routine", _) => self.program.routines.push(Routine {
                name: name(),
                slots: Vec::new(),
                locals: Vec::new(),
                frame_bytes: 0,
                instructions: Vec::new(),
            }),
            ("slot", Some(routine)) => routine.slots.push((name(), 0)),
            ("local", Some(routine)) => {
                let local = LocalBuffer { name: name(), bytes: 0, offset: 0, within: None };
                routine.locals.push(local);
            }
            _ => {}
        }
    }

    /// The steps that the next one follows.
    fn steps(&mut self) -> &mut Vec<Step> {
        let Program { steps, evaluate, entries, .. } = &mut self.program;
        match (self.part, entries.last_mut()) {
            (Part::Entry, Some(entry)) => &mut entry.steps,
            (Part::Evaluate | Part::Entry, _) => evaluate,
            (Part::Head | Part::Routine | Part::Step, _) => steps,
        }
    }

    fn take(&mut self, keyword: &str, line: &mut Line<'_>) -> Read<()> {
        // Parts follow each other; instructions are those of the last routine.
        let (needs, becomes) = match keyword {
            "program" | "arena" | "weight" | "buffer" => (Part::Head, Part::Head),
            "routine" => (self.part.min(Part::Routine), Part::Routine),
            "slot" | "local" | "launch" | "all-reduce" | "all-gather" | "reduce-scatter"
            | "all-to-all" | "dispatch" | "combine" => (Part::Routine, Part::Routine),
            "step" => (self.part.min(Part::Routine), Part::Step),
            "evaluate" => (Part::Step, Part::Evaluate),
            "entry" => (self.part.max(Part::Step), Part::Entry),
            _ => (self.part.max(Part::Step), self.part),
        };
        if self.part != needs || self.has_head == (keyword == "program") {
            return Err(Refusal::Misplaced);
        }
        self.part = becomes;
        match keyword {
            "program" => {
                self.has_head = true;
                self.program.name = line.name()?;
                line.word("class")?;
                line.word("stage")?;
                self.program.stage = line.number()?;
                self.program.context = if line.eat("context") { line.number()? } else { 0 };
                line.word("tensor")?;
                self.program.tensor = line.number()?;
            }
            "arena" => {
                self.program.arena_bytes = line.number()?;
                line.word("live")?;
                self.program.live_bytes_max = line.number()?;
                self.program.host_bytes = if line.eat("host") { line.number()? } else { 0 };
                self.program.disk_bytes = if line.eat("disk") { line.number()? } else { 0 };
            }
            "weight" => self.program.weights.push(line.weight()?),
            "buffer" => {
                line.count('b', self.program.buffers.len())?;
                self.program.buffers.push(line.buffer()?);
            }
            "routine" => {
                line.count('r', self.program.routines.len())?;
                self.program.routines.push(line.routine()?);
            }
            "step" | "evaluate" => {}
            "entry" => self.program.entries.push(line.entry()?),
            "feed" | "call" | "send" | "receive" | "move" | "await" => {
                let step = line.step(keyword)?;
                self.steps().push(step);
            }
            _ => {
                let routine = self.program.routines.last_mut().ok_or(Refusal::Misplaced)?;
                line.routine_line(keyword, routine)?;
            }
        }
        Ok(())
    }
}

/// How a line is written that begins with a keyword.
fn form_of(keyword: &str) -> Option<&'static str> {
    Some(match keyword {
        "program" => "program NAME class stage 0 tensor 0",
        "arena" => "arena 4096 live 4096",
        "weight" => "weight NAME [64, 8] has [32+32, 0+8] owned",
        "buffer" => "buffer b0 NAME f32[32, 8] activation bytes 1024 at 0x40",
        "routine" => "routine r0 NAME frame 0",
        "slot" => "slot s0 NAME 1024",
        "local" => "local l0 NAME 1024 at 0x40",
        "launch" => "launch k0 [32] s0 s1 -> l0",
        "all-reduce" => "all-reduce sum tp f32 32 s0",
        "all-to-all" => "all-to-all shards 2 f32 32 s0 -> s1 pieces 2",
        "dispatch" => {
            "dispatch shards 2 f32 32 s0 -> s1 by s2 pieces 2 rows 8 width 4 experts 2 top_k 1"
        }
        "combine" => {
            "combine shards 2 f32 64 s0 -> s1 by s2 pieces 2 rows 8 width 4 experts 2 top_k 1"
        }
        "all-gather" => "all-gather tp f32 32 s0 -> s1 outer 1 inner 1 counts [32, 32]",
        "reduce-scatter" => "reduce-scatter tp f32 64 s0 -> s1 outer 1 inner 1 counts [32, 32]",
        "step" => "step",
        "evaluate" => "evaluate",
        "entry" => "entry NAME gives b0",
        "feed" => "feed tokens 0 b0",
        "call" => "call r0 b0 b1 frame b2",
        "send" => "send b0 to 1",
        "receive" => "receive b0 from 1",
        "move" => "move b0 to b1",
        "await" => "await b0",
        _ => return None,
    })
}

fn number<T: FromStr>(word: &str) -> Option<T> {
    word.parse().ok()
}

/// The words of a line, read one after the other.
struct Line<'t> {
    words: Vec<Word<'t>>,
    next: usize,
}

impl<'t> Line<'t> {
    fn peek(&self) -> Option<&'t str> {
        self.words.get(self.next).map(|word| word.text)
    }

    /// Takes a word if a reading of it succeeds.
    fn read<T>(&mut self, reading: impl FnOnce(&'t str) -> Option<T>) -> Read<T> {
        let read = self.peek().and_then(reading).ok_or(Refusal::Unread)?;
        self.next += 1;
        Ok(read)
    }

    fn word(&mut self, wanted: &str) -> Read<()> {
        self.read(|word| (word == wanted).then_some(()))
    }

    /// Takes a word if it is there.
    fn eat(&mut self, wanted: &str) -> bool {
        self.word(wanted).is_ok()
    }

    fn end(&mut self) -> Read<()> {
        if self.next == self.words.len() { Ok(()) } else { Err(Refusal::Unread) }
    }

    fn number<T: FromStr>(&mut self) -> Read<T> {
        self.read(|word| word.parse().ok())
    }

    fn offset(&mut self) -> Read<u64> {
        self.word("at")?;
        self.read(|word| u64::from_str_radix(word.strip_prefix("0x")?, 16).ok())
    }

    fn index<T: FromStr>(&mut self, prefix: char) -> Read<T> {
        self.read(|word| word.strip_prefix(prefix)?.parse().ok())
    }

    /// The number of something that is counted: the next one.
    fn count(&mut self, prefix: char, there: usize) -> Read<()> {
        let index: usize = self.index(prefix)?;
        if index == there { Ok(()) } else { Err(Refusal::Misplaced) }
    }

    fn buffer_id(&mut self) -> Read<BufferId> {
        self.index('b').map(BufferId)
    }

    fn name(&mut self) -> Read<String> {
        self.read(|word| match word.strip_prefix('"') {
            Some(quoted) => unescape(quoted.strip_suffix('"')?),
            None => super::is_plain(word).then(|| word.to_owned()),
        })
    }

    /// `[a, b, c]`
    fn list<T>(&mut self, reading: impl Fn(&str) -> Option<T>) -> Read<Vec<T>> {
        self.word("[")?;
        let mut items = Vec::new();
        while !self.eat("]") {
            if !items.is_empty() {
                self.word(",")?;
            }
            items.push(self.read(&reading)?);
        }
        Ok(items)
    }

    fn numbers(&mut self) -> Read<Vec<usize>> {
        self.list(number)
    }

    fn dtype(&mut self) -> Read<DType> {
        self.read(|word| word.parse().ok())
    }

    fn weight(&mut self) -> Read<WeightShard> {
        let name = self.name()?;
        let global = self.numbers()?;
        self.word("has")?;
        let ranges = self.list(|word| {
            let (start, size) = word.split_once('+')?;
            Some((start.parse().ok()?, size.parse().ok()?))
        })?;
        let experts = match self.eat("experts") {
            true => {
                self.word("dim")?;
                let dim = self.number()?;
                self.word("over")?;
                Some(Experts { dim, ranks: self.number()? })
            }
            false => None,
        };
        Ok(WeightShard { name, global, ranges, experts, owned: self.eat("owned") })
    }

    fn buffer(&mut self) -> Read<Buffer> {
        let name = self.name()?;
        let dtype = self.dtype()?;
        let sizes = self.numbers()?;
        let contents = self.contents()?;
        self.word("bytes")?;
        let bytes = self.number()?;
        Ok(Buffer { name, contents, dtype, sizes, bytes, offset: self.offset()? })
    }

    fn contents(&mut self) -> Read<Contents> {
        let kind = self.read(Some)?;
        Ok(match kind {
            "param" => Contents::Param(self.number()?),
            "master" => Contents::Master(self.number()?),
            "grad" => Contents::Grad(self.number()?),
            "state" => Contents::State { weight: self.number()?, index: self.number()? },
            "scale" => Contents::Scale { weight: self.number()?, index: self.number()? },
            "feed" => Contents::Feed(self.feed()?),
            "stats" => Contents::Stats,
            "cache" => Contents::Cache(self.number()?),
            "output" => Contents::Output,
            "view" => Contents::View,
            "part" => Contents::Part { of: self.buffer_id()? },
            "activation" => Contents::Activation,
            "frame" => Contents::Frame,
            "gathered" => {
                let bucket = self.buffer_id()?;
                Contents::Gathered { weight: self.number()?, bucket }
            }
            "term" => {
                let bucket = self.buffer_id()?;
                Contents::Term { weight: self.number()?, bucket }
            }
            "shard" => {
                let bucket = self.buffer_id()?;
                Contents::Shard { role: self.shard_role()?, bucket }
            }
            _ => {
                self.next -= 1;
                return Err(Refusal::Unread);
            }
        })
    }

    fn shard_role(&mut self) -> Read<ShardRole> {
        let role = self.read(Some)?;
        Ok(match role {
            "grad" => ShardRole::Grad,
            "term" => ShardRole::Term,
            "master" => ShardRole::Master,
            "param" => ShardRole::Param,
            "rounded" => ShardRole::Rounded,
            "state" => ShardRole::State(self.number()?),
            "scale" => ShardRole::Scale(self.number()?),
            _ => {
                self.next -= 1;
                return Err(Refusal::Unread);
            }
        })
    }

    fn feed(&mut self) -> Read<Feed> {
        let kind = self.read(Some)?;
        Ok(match kind {
            "tokens" => Feed::Tokens,
            "labels" => Feed::Labels,
            "key" => Feed::Key { path: self.number()? },
            "scalars" => Feed::Scalars,
            "position" => Feed::Position,
            "last" => Feed::Last,
            "documents" => Feed::Documents,
            _ => {
                self.next -= 1;
                return Err(Refusal::Unread);
            }
        })
    }

    fn routine(&mut self) -> Read<Routine> {
        let name = self.name()?;
        self.word("frame")?;
        let frame_bytes = self.number()?;
        let (slots, locals, instructions) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Routine { name, slots, locals, frame_bytes, instructions })
    }

    fn routine_line(&mut self, keyword: &str, routine: &mut Routine) -> Read<()> {
        match keyword {
            "slot" => {
                self.count('s', routine.slots.len())?;
                routine.slots.push((self.name()?, self.number()?));
            }
            "local" => {
                self.count('l', routine.locals.len())?;
                let (name, bytes) = (self.name()?, self.number()?);
                let offset = self.offset()?;
                let within = if self.eat("in") { Some(self.index('l')?) } else { None };
                routine.locals.push(LocalBuffer { name, bytes, offset, within });
            }
            "launch" => {
                let kernel = self.index('k')?;
                let has_scalars = self.peek() == Some("[");
                let scalars = if has_scalars { self.list(number)? } else { Vec::new() };
                let mut inputs = Vec::new();
                while !self.eat("->") {
                    inputs.push(self.value()?);
                }
                let mut outputs = Vec::new();
                let mut workspace = None;
                while self.peek().is_some() {
                    if self.eat("workspace") {
                        workspace = Some(self.value()?);
                        break;
                    }
                    outputs.push(self.value()?);
                }
                let launch = Instruction::Launch { kernel, scalars, inputs, outputs, workspace };
                routine.instructions.push(launch);
            }
            _ => routine.instructions.push(self.collective(keyword)?),
        }
        Ok(())
    }

    fn value(&mut self) -> Read<Ref> {
        self.read(|word| match word.strip_prefix('s') {
            Some(slot) => slot.parse().ok().map(Ref::Slot),
            None => word.strip_prefix('l')?.parse().ok().map(Ref::Local),
        })
    }

    fn collective(&mut self, keyword: &str) -> Read<Instruction> {
        let combiner = match keyword {
            "all-reduce" => {
                Some(self.read(|word| Combiner::ALL.into_iter().find(|c| c.name() == word))?)
            }
            _ => None,
        };
        let group = self.group()?;
        let dtype = self.dtype()?;
        let exchanged = if self.eat("as") { self.dtype()? } else { dtype };
        let (elements, input) = (self.number()?, self.value()?);
        // An all-reduce is in place.
        let output = match combiner.is_some() && self.peek() != Some("->") {
            true => input,
            false => {
                self.word("->")?;
                self.value()?
            }
        };
        let gates = if self.eat("by") { Some(self.value()?) } else { None };
        let exchange = match (combiner, keyword) {
            (Some(combiner), _) => Exchange::AllReduce(combiner),
            (None, "all-to-all") => {
                self.word("pieces")?;
                Exchange::AllToAll { pieces: self.number()? }
            }
            (None, "dispatch") => Exchange::Dispatch(self.routed()?),
            (None, "combine") => Exchange::Combine(self.routed()?),
            (None, _) => self.pieces(keyword == "all-gather")?,
        };
        Ok(Instruction::Collective {
            exchange,
            group,
            dtype,
            exchanged,
            elements,
            input,
            output,
            gates,
        })
    }

    fn routed(&mut self) -> Read<Routed> {
        let mut numbers = [0; 5];
        let words = ["pieces", "rows", "width", "experts", "top_k"];
        for (word, number) in words.into_iter().zip(&mut numbers) {
            self.word(word)?;
            *number = self.number()?;
        }
        let [pieces, rows, width, experts, top_k] = numbers;
        Ok(Routed { pieces, rows, width, experts, top_k })
    }

    /// The pieces of a gather or a scatter.
    fn pieces(&mut self, gathers: bool) -> Read<Exchange> {
        self.word("outer")?;
        let outer = self.number()?;
        self.word("inner")?;
        let inner = self.number()?;
        self.word("counts")?;
        let counts = self.numbers()?;
        let order = if self.eat("order") {
            self.read(|word| PieceOrder::ALL.into_iter().find(|order| order.name() == word))?
        } else {
            PieceOrder::default()
        };
        Ok(match gathers {
            true => Exchange::AllGather { outer, inner, counts, order },
            false => Exchange::ReduceScatter { outer, inner, counts, order },
        })
    }

    fn group(&mut self) -> Read<Group> {
        if self.eat("world") {
            return Ok(Group::World);
        }
        if self.eat("stages") {
            return self.numbers().map(Group::Stages);
        }
        if self.eat("data") {
            return Ok(Group::Data);
        }
        if self.eat("shards") {
            return self.number().map(Group::Shards);
        }
        if self.eat("copies") {
            return self.number().map(Group::Copies);
        }
        if self.eat("experts") {
            return self.number().map(Group::Experts);
        }
        if self.eat("strided") {
            return Ok(Group::Strided { count: self.number()?, stride: self.number()? });
        }
        self.read(Axis::parse).map(Group::Axis)
    }

    /// An entry without its steps.
    fn entry(&mut self) -> Read<Entry> {
        let name = self.name()?;
        self.word("gives")?;
        let mut outputs = Vec::new();
        while self.peek().is_some() {
            outputs.push(self.buffer_id()?);
        }
        Ok(Entry { name, steps: Vec::new(), outputs })
    }

    fn step(&mut self, keyword: &str) -> Read<Step> {
        match keyword {
            "feed" => {
                let (feed, microbatch) = (self.feed()?, self.number()?);
                Ok(Step::Feed { feed, microbatch, buffer: self.buffer_id()? })
            }
            "call" => {
                let routine = self.index('r')?;
                let mut slots = Vec::new();
                while self.peek().is_some_and(|word| word != "frame") {
                    slots.push(self.buffer_id()?);
                }
                let frame = if self.eat("frame") { Some(self.buffer_id()?) } else { None };
                Ok(Step::Call { routine, slots, frame })
            }
            "send" => {
                let buffer = self.buffer_id()?;
                self.word("to")?;
                Ok(Step::Send { to: self.number()?, buffer })
            }
            "move" => {
                let from = self.buffer_id()?;
                self.word("to")?;
                Ok(Step::Move { from, to: self.buffer_id()? })
            }
            "await" => Ok(Step::Await { buffer: self.buffer_id()? }),
            _ => {
                let buffer = self.buffer_id()?;
                self.word("from")?;
                Ok(Step::Receive { from: self.number()?, buffer })
            }
        }
    }
}

/// Reverses [`str::escape_default`].
pub(crate) fn unescape(text: &str) -> Option<String> {
    let mut out = String::new();
    let mut chars = text.chars();
    while let Some(c) = chars.next() {
        if c != '\\' {
            out.push(c);
            continue;
        }
        out.push(match chars.next()? {
            't' => '\t',
            'r' => '\r',
            'n' => '\n',
            c @ ('\'' | '"' | '\\') => c,
            'u' => {
                let (hex, rest) = chars.as_str().strip_prefix('{')?.split_once('}')?;
                chars = rest.chars();
                char::from_u32(u32::from_str_radix(hex, 16).ok()?)?
            }
            _ => return None,
        });
    }
    Some(out)
}

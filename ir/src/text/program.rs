//! The text form of programs: one buffer, instruction or step per line, canonical, and read back to
//! the same program.
//!
//! ```text
//! program gpt2 class stage 0 tensor 1
//!   arena 4096 live 3968
//!   weight wte [64, 8] has [32+32, 0+8] owned
//!   buffer b0 params.wte f32[32, 8] param 0 bytes 1024 at 0x0
//!   buffer b1 tokens i32[1, 4] feed tokens bytes 16 at 0x400
//!   routine r0 embed frame 0
//!     slot s0 wte 1024
//!     slot s1 ids 16
//!     slot s2 x 128
//!     launch k0 [32] s0 s1 -> s2
//!     all-reduce sum tp f32 32 s2
//!   step
//!     feed tokens 0 b1
//!     call r0 b0 b1 b2
//!     send b2 to 1
//!   evaluate
//! ```
//! Where values lie elsewhere than on the device, the line of the arena ends with the bytes there,
//! `host 1024 disk 4096`, and steps `move b2 to b3` and `await b2` begin copies and wait for them.
//!
//! A program for inference goes on with `entry decode.1 gives b4`, each followed by its steps.
//!
//! In brackets after a kernel stand the scalars of the launch, where it has some.
//!
//! Names of other characters than letters, digits and `_.-/@` stand in quotes. Comments start with
//! `#`. Kernels are numbered as in the kernel table of the artefact.
//!
//! `E1031` is a line that is not understood, `E1032` one out of its order, or one that is missing.

mod read;

use std::fmt;

use crate::pieces::PieceOrder;
use crate::program::{
    Buffer, BufferId, Contents, Entry, Exchange, Experts, Feed, Group, Instruction, Program, Ref,
    Routed, Routine, ShardRole, Step,
};

pub use read::parse_program;
pub(crate) use read::unescape;

impl fmt::Display for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Program { stage, context, tensor, arena_bytes, live_bytes_max, .. } = self;
        let away = [(" host", self.host_bytes), (" disk", self.disk_bytes)];
        write!(f, "program {} class stage {stage}", Name(&self.name))?;
        if *context > 0 {
            write!(f, " context {context}")?;
        }
        writeln!(f, " tensor {tensor}")?;
        write!(f, "  arena {arena_bytes} live {live_bytes_max}")?;
        for (name, bytes) in away.into_iter().filter(|(_, bytes)| *bytes > 0) {
            write!(f, "{name} {bytes}")?;
        }
        writeln!(f)?;
        for weight in &self.weights {
            let ranges: Vec<String> =
                weight.ranges.iter().map(|(start, size)| format!("{start}+{size}")).collect();
            let (name, global) = (Name(&weight.name), list(&weight.global));
            let experts = weight
                .experts
                .map(|Experts { dim, ranks }| format!(" experts dim {dim} over {ranks}"));
            let experts = experts.unwrap_or_default();
            let owned = if weight.owned { " owned" } else { "" };
            writeln!(f, "  weight {name} [{global}] has [{}]{experts}{owned}", ranges.join(", "))?;
        }
        for (at, buffer) in self.buffers.iter().enumerate() {
            let Buffer { name, contents, dtype, sizes, bytes, offset } = buffer;
            let (name, sizes) = (Name(name), list(sizes));
            write!(f, "  buffer b{at} {name} {dtype}[{sizes}] {} ", ContentsText(contents))?;
            writeln!(f, "bytes {bytes} at {offset:#x}")?;
        }
        for (at, routine) in self.routines.iter().enumerate() {
            print_routine(f, at, routine)?;
        }
        for (name, steps) in [("step", &self.steps), ("evaluate", &self.evaluate)] {
            writeln!(f, "  {name}")?;
            for step in steps {
                print_step(f, step)?;
            }
        }
        for Entry { name, steps, outputs } in &self.entries {
            write!(f, "  entry {} gives", Name(name))?;
            outputs.iter().try_for_each(|BufferId(id)| write!(f, " b{id}"))?;
            writeln!(f)?;
            steps.iter().try_for_each(|step| print_step(f, step))?;
        }
        Ok(())
    }
}

fn print_routine(f: &mut fmt::Formatter<'_>, at: usize, routine: &Routine) -> fmt::Result {
    writeln!(f, "  routine r{at} {} frame {}", Name(&routine.name), routine.frame_bytes)?;
    for (at, (name, bytes)) in routine.slots.iter().enumerate() {
        writeln!(f, "    slot s{at} {} {bytes}", Name(name))?;
    }
    for (at, local) in routine.locals.iter().enumerate() {
        let (name, bytes, offset) = (Name(&local.name), local.bytes, local.offset);
        write!(f, "    local l{at} {name} {bytes} at {offset:#x}")?;
        match local.within {
            Some(whole) => writeln!(f, " in l{whole}")?,
            None => writeln!(f)?,
        }
    }
    for instruction in &routine.instructions {
        print_instruction(f, instruction)?;
    }
    Ok(())
}

fn print_instruction(f: &mut fmt::Formatter<'_>, instruction: &Instruction) -> fmt::Result {
    match instruction {
        Instruction::Launch { kernel, scalars, inputs, outputs, workspace } => {
            write!(f, "    launch k{kernel}")?;
            if !scalars.is_empty() {
                write!(f, " [{}]", list(scalars))?;
            }
            inputs.iter().try_for_each(|input| write!(f, " {}", RefText(*input)))?;
            f.write_str(" ->")?;
            outputs.iter().try_for_each(|output| write!(f, " {}", RefText(*output)))?;
            workspace.iter().try_for_each(|local| write!(f, " workspace {}", RefText(*local)))?;
            writeln!(f)
        }
        Instruction::Collective {
            exchange,
            group,
            dtype,
            exchanged,
            elements,
            input,
            output,
            gates,
        } => {
            let (kind, cut) = match exchange {
                Exchange::AllReduce(combiner) => {
                    (format!("all-reduce {}", combiner.name()), String::new())
                }
                Exchange::AllGather { outer, inner, counts, order } => {
                    ("all-gather".to_owned(), cut_text([*outer, *inner], counts, *order))
                }
                Exchange::ReduceScatter { outer, inner, counts, order } => {
                    ("reduce-scatter".to_owned(), cut_text([*outer, *inner], counts, *order))
                }
                Exchange::AllToAll { pieces } => {
                    ("all-to-all".to_owned(), format!(" pieces {pieces}"))
                }
                Exchange::Dispatch(routed) => ("dispatch".to_owned(), routed_text(routed)),
                Exchange::Combine(routed) => ("combine".to_owned(), routed_text(routed)),
            };
            write!(f, "    {kind} {} {dtype}", GroupText(group))?;
            if exchanged != dtype {
                write!(f, " as {exchanged}")?;
            }
            write!(f, " {elements} {}", RefText(*input))?;
            // An all-reduce is in place.
            if !matches!(exchange, Exchange::AllReduce(_)) || input != output {
                write!(f, " -> {}", RefText(*output))?;
            }
            gates.iter().try_for_each(|gates| write!(f, " by {}", RefText(*gates)))?;
            writeln!(f, "{cut}")
        }
    }
}

fn routed_text(routed: &Routed) -> String {
    let Routed { pieces, rows, width, experts, top_k } = routed;
    format!(" pieces {pieces} rows {rows} width {width} experts {experts} top_k {top_k}")
}

fn cut_text([outer, inner]: [usize; 2], counts: &[usize], order: PieceOrder) -> String {
    let text = format!(" outer {outer} inner {inner} counts [{}]", list(counts));
    if order == PieceOrder::default() { text } else { format!("{text} order {}", order.name()) }
}

fn print_step(f: &mut fmt::Formatter<'_>, step: &Step) -> fmt::Result {
    match step {
        Step::Feed { feed, microbatch, buffer } => {
            writeln!(f, "    feed {} {microbatch} b{}", FeedText(*feed), buffer.0)
        }
        Step::Call { routine, slots, frame } => {
            write!(f, "    call r{routine}")?;
            slots.iter().try_for_each(|BufferId(id)| write!(f, " b{id}"))?;
            if let Some(BufferId(id)) = frame {
                write!(f, " frame b{id}")?;
            }
            writeln!(f)
        }
        Step::Send { to, buffer } => writeln!(f, "    send b{} to {to}", buffer.0),
        Step::Receive { from, buffer } => writeln!(f, "    receive b{} from {from}", buffer.0),
        Step::Move { from, to } => writeln!(f, "    move b{} to b{}", from.0, to.0),
        Step::Await { buffer } => writeln!(f, "    await b{}", buffer.0),
    }
}

fn list<N: ToString>(numbers: &[N]) -> String {
    numbers.iter().map(N::to_string).collect::<Vec<_>>().join(", ")
}

fn is_plain(name: &str) -> bool {
    let plain = |b: u8| b.is_ascii_alphanumeric() || b"_.-/@".contains(&b);
    !name.is_empty() && name.bytes().all(plain)
}

struct Name<'a>(&'a str);

impl fmt::Display for Name<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if is_plain(self.0) {
            f.write_str(self.0)
        } else {
            write!(f, "\"{}\"", self.0.escape_default())
        }
    }
}

struct RefText(Ref);

impl fmt::Display for RefText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Ref::Slot(at) => write!(f, "s{at}"),
            Ref::Local(at) => write!(f, "l{at}"),
        }
    }
}

struct GroupText<'a>(&'a Group);

impl fmt::Display for GroupText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Group::Axis(axis) => write!(f, "{axis}"),
            Group::Data => f.write_str("data"),
            Group::Shards(count) => write!(f, "shards {count}"),
            Group::Copies(count) => write!(f, "copies {count}"),
            Group::Strided { count, stride } => write!(f, "strided {count} {stride}"),
            Group::Experts(count) => write!(f, "experts {count}"),
            Group::Stages(stages) => write!(f, "stages [{}]", list(stages)),
            Group::World => f.write_str("world"),
        }
    }
}

struct FeedText(Feed);

impl fmt::Display for FeedText {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Feed::Tokens => f.write_str("tokens"),
            Feed::Labels => f.write_str("labels"),
            Feed::Key { path } => write!(f, "key {path}"),
            Feed::Scalars => f.write_str("scalars"),
            Feed::Position => f.write_str("position"),
            Feed::Last => f.write_str("last"),
            Feed::Documents => f.write_str("documents"),
        }
    }
}

struct ContentsText<'a>(&'a Contents);

impl fmt::Display for ContentsText<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            Contents::Param(weight) => write!(f, "param {weight}"),
            Contents::Master(weight) => write!(f, "master {weight}"),
            Contents::Grad(weight) => write!(f, "grad {weight}"),
            Contents::State { weight, index } => write!(f, "state {weight} {index}"),
            Contents::Scale { weight, index } => write!(f, "scale {weight} {index}"),
            Contents::Feed(feed) => write!(f, "feed {}", FeedText(*feed)),
            Contents::Stats => f.write_str("stats"),
            Contents::Cache(cache) => write!(f, "cache {cache}"),
            Contents::Output => f.write_str("output"),
            Contents::View => f.write_str("view"),
            Contents::Part { of: BufferId(of) } => write!(f, "part b{of}"),
            Contents::Activation => f.write_str("activation"),
            Contents::Frame => f.write_str("frame"),
            Contents::Gathered { weight, bucket: BufferId(bucket) } => {
                write!(f, "gathered b{bucket} {weight}")
            }
            Contents::Term { weight, bucket: BufferId(bucket) } => {
                write!(f, "term b{bucket} {weight}")
            }
            Contents::Shard { role, bucket: BufferId(bucket) } => {
                write!(f, "shard b{bucket} ")?;
                match role {
                    ShardRole::Grad => f.write_str("grad"),
                    ShardRole::Term => f.write_str("term"),
                    ShardRole::Master => f.write_str("master"),
                    ShardRole::Param => f.write_str("param"),
                    ShardRole::Rounded => f.write_str("rounded"),
                    ShardRole::State(index) => write!(f, "state {index}"),
                    ShardRole::Scale(index) => write!(f, "scale {index}"),
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::diagnostic::render;
    use crate::random::mix;

    const TEXT: &str = r#"program "tiny model" class stage 1 context 1 tensor 0
  arena 4096 live 3968
  weight wte [64, 8] has [32+32, 0+8] owned
  weight bias [8] has [0+8]
  buffer b0 params.wte f32[32, 8] param 0 bytes 1024 at 0x0
  buffer b1 "" f32[32, 8] grad 0 bytes 1024 at 0x400
  buffer b2 "m \"0\"\u{e9}" f32[32, 8] state 0 1 bytes 1024 at 0x800
  buffer b3 tokens i32[1, 4] feed tokens bytes 16 at 0xc00
  buffer b4 key.7 u32[4] feed key 7 bytes 16 at 0xc40
  buffer b5 stats f32[3] stats bytes 12 at 0xc80
  buffer b6 one f32[] activation bytes 4 at 0xcc0
  buffer b7 loss f32[2] view bytes 8 at 0xc80
  buffer b8 frame i8[64] frame bytes 64 at 0xd00
  buffer b9 keys f32[1, 4, 2] cache 3 bytes 32 at 0xd40
  buffer b10 logits f32[1, 2] output bytes 8 at 0xd80
  buffer b11 last i32[] feed last bytes 4 at 0xdc0
  routine r0 embed/fwd frame 64
    slot s0 wte 1024
    slot s1 ids 16
    local l0 h 64 at 0x0
    launch k0 s0 s1 -> l0
    launch k3 [32, -1] ->
    all-reduce sum tp f32 32 l0
    all-gather stages [0, 1] bf16 12 s0 -> l0 outer 2 inner 3 counts [2, 1]
    all-gather cp bf16 12 s0 -> l0 outer 2 inner 3 counts [2, 2] order zigzag
    all-reduce sum data f32 32 l0
    reduce-scatter shards 2 f32 32 s0 -> s1 outer 1 inner 1 counts [16, 16]
    all-reduce sum copies 2 f32 16 l0
    reduce-scatter world f32 32 s0 -> s1 outer 1 inner 1 counts [16, 16]
  routine r1 nothing frame 0
  step
    feed tokens 0 b3
    feed key 7 2 b4
    feed scalars 0 b6
    call r0 b0 b3 frame b8
    call r1
    send b6 to 0
    receive b6 from 0
  evaluate
    feed labels 1 b3
  entry decode.1 gives b10
    feed last 0 b11
    call r1
  entry "of nothing" gives
"#;

    #[test]
    fn text_reads_back() {
        let program = parse_program("test", TEXT).unwrap_or_else(|found| {
            panic!("{}", render(&found[0], Some(TEXT)));
        });
        assert_eq!(program.to_string(), TEXT);
        assert_eq!(program.buffers[2].name, "m \"0\"é");
        let spaced = TEXT.replace("  step\n", "  step   # of training\n\n  # the first\n");
        assert_eq!(parse_program("test", &spaced), Ok(program));
    }

    #[test]
    fn what_is_wrong_is_said_in_place() {
        let wrong = TEXT
            .replace("arena 4096", "arena much")
            .replace("buffer b1 ", "buffer b2 ")
            .replace("launch k0 s0", "launch k0 b0")
            .replace("all-reduce sum tp", "all-reduce best tp")
            .replace("send b6 to 0", "send b6 to")
            .replace("  evaluate", "  evaluates");
        let found = parse_program("test", &wrong).unwrap_err();
        let marked: Vec<_> = found.iter().map(|d| (d.code, &wrong[d.span.bytes.clone()])).collect();
        assert_eq!(
            marked,
            [
                ("E1031", "much"),
                ("E1032", "b2"),
                ("E1031", "b0"),
                ("E1031", "best"),
                ("E1031", "to"),
                ("E1031", "evaluates"),
            ]
        );
        let found = parse_program("test", "  arena 4096 live 1\n").unwrap_err();
        assert_eq!(found.iter().map(|d| d.code).collect::<Vec<_>>(), ["E1032"]);
        assert!(parse_program("test", "").is_err());
    }

    #[test]
    fn mutated_texts_never_panic() {
        let bytes = b"bslkr[],+x\"\\#u{} \n019fF->\xff\xc3";
        let mut accepted = 0;
        for seed in 0..4000_u64 {
            let draw = |i: u64, n: usize| (mix(seed * 64 + i) % n as u64) as usize;
            let mut text = TEXT.as_bytes().to_vec();
            for i in 0..1 + draw(0, 4) as u64 {
                let (at, from) = (draw(8 * i + 1, text.len()), draw(8 * i + 2, text.len()));
                let length = draw(8 * i + 3, 12).min(text.len() - from);
                match draw(8 * i + 4, 4) {
                    0 => text[at] = bytes[draw(8 * i + 5, bytes.len())],
                    1 => text.insert(at, bytes[draw(8 * i + 5, bytes.len())]),
                    2 => drop(text.drain(from..from + length)),
                    _ => {
                        let piece = text[from..from + length].to_vec();
                        text.splice(at..at, piece);
                    }
                }
            }
            let text = String::from_utf8_lossy(&text);
            match std::panic::catch_unwind(|| parse_program("text", &text)) {
                Ok(Ok(program)) => {
                    accepted += 1;
                    let printed = program.to_string();
                    assert_eq!(parse_program("text", &printed), Ok(program), "seed {seed}\n{text}");
                }
                Ok(Err(found)) => {
                    assert!((1..=20).contains(&found.len()), "seed {seed}");
                    found.iter().for_each(|d| drop(render(d, Some(&text))));
                }
                Err(_) => panic!("seed {seed} panics on\n{text}"),
            }
        }
        assert!(accepted > 0, "no mutation was harmless");
    }
}

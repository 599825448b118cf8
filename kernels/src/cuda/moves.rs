//! Copies, fills, windows, look-ups, scatters and rotary embedding: one thread per element, or per
//! vector of a copy whose rows are contiguous; transpositions by tiles (`transpose`).

use std::fmt;

use ir::DType;

use super::index::nest;
use super::parameter::{Buffer, Named, Parameter};
use super::text::{Text, element, line, moved};
use super::transpose::{self, Transposition};
use crate::kernel::{Copy, CopyLoop, Gather, Positions, Rope, Window};

/// Threads of a block.
pub(super) const THREADS: u32 = 256;

/// What a thread does with its element.
#[derive(Clone, Debug, PartialEq)]
pub enum Move {
    /// Fills a buffer with the bits of one value.
    Fill {
        /// Elements.
        len: usize,
        /// Their type; only its size matters.
        dtype: DType,
        /// The bits.
        bits: u64,
    },
    /// Copies an element of a strided array.
    Copy(Copy),
    /// Copies up to 16 bytes of a row.
    CopyRows(RowCopy),
    /// Copies a tile through shared memory.
    Transpose(Transposition),
    /// Stores an element of a window into the whole.
    Place(Window),
    /// Loads an element of a window from the whole.
    Take(Window),
    /// Looks up an element of the row of an id.
    Gather(Gather),
    /// Finds, for each position, whether it is the first of its id, and the next position of the
    /// same id.
    Links(Gather),
    /// Adds the rows of equal ids, in ascending order of positions, to an element of the table.
    Scatter(Gather),
    /// Replaces an element of the table by that of the last row with its id.
    Replace(Gather),
    /// Rotates a pair of elements in all heads of a token.
    Rope(Rope),
}

/// A copy of rows that are contiguous in the source and in the target, by vectors.
#[derive(Clone, Debug, PartialEq)]
pub struct RowCopy {
    /// What is copied; its last loop is over a row.
    pub copy: Copy,
    /// Elements of a vector, of which a row may end in fewer.
    pub width: usize,
    /// Whether all vectors of the source are aligned, and those of the target.
    pub is_aligned: [bool; 2],
}

impl RowCopy {
    /// Elements of a row.
    fn row(&self) -> usize {
        self.copy.loops.last().map_or(0, |l| l.size)
    }

    pub(super) fn vectors(&self) -> usize {
        let rows: usize = self.copy.loops.iter().rev().skip(1).map(|l| l.size).product();
        rows * self.row().div_ceil(self.width)
    }

    /// The loops of the copy, the last one over the vectors of a row.
    pub(super) fn loops_of_vectors(&self) -> Vec<CopyLoop> {
        let mut loops = self.copy.loops.clone();
        if let Some(last) = loops.last_mut() {
            *last = CopyLoop {
                size: last.size.div_ceil(self.width),
                source: self.width,
                target: self.width,
            };
        }
        loops
    }

    fn print(&self, [source, target]: [&String; 2], text: &mut Text) {
        let (row, width, kind) = (self.row(), self.width, moved(self.copy.dtype));
        let parts = row.div_ceil(width);
        line!(text, "const u64 row = at / {parts}, first = at % {parts} * {width};");
        let outer = &self.copy.loops[..self.copy.loops.len() - 1];
        let of = |stride: fn(&CopyLoop) -> usize| {
            let loops: Vec<[usize; 2]> = outer.iter().map(|l| [l.size, stride(l)]).collect();
            nest(&loops, "row")
        };
        let (from, to) = (of(|l| l.source), of(|l| l.target));
        line!(text, "const {kind}* const from = {source} + (u64)start + ({from}) + first;");
        let offset = self.copy.target_offset;
        line!(text, "{kind}* const to = {target} + {offset} + ({to}) + first;");
        if row % width > 0 {
            line!(text, "if (first + {width} > {row}) {{");
            line!(text, "for (u32 e = 0; e < {}; e += 1) to[e] = from[e];", row % width);
            line!(text, "return;");
            text.end();
        }
        let [is_loaded, is_stored] = self.is_aligned;
        if is_loaded {
            line!(text, "const Vector<{kind}, {width}> x = load_vector<{kind}, {width}>(from);");
        } else {
            line!(text, "Vector<{kind}, {width}> x;");
            line!(text, "UNROLL");
            line!(text, "for (u32 e = 0; e < {width}; e += 1) x.x[e] = from[e];");
        }
        if is_stored {
            line!(text, "store_vector(to, x);");
        } else {
            line!(text, "UNROLL");
            line!(text, "for (u32 e = 0; e < {width}; e += 1) to[e] = x.x[e];");
        }
    }
}

impl Move {
    /// The offsets that are added.
    pub(super) fn offsets(&self) -> Vec<Named> {
        match self {
            Move::Gather(g) | Move::Links(g) | Move::Scatter(g) | Move::Replace(g) => {
                vec![Named::new("base", g.base)]
            }
            Move::Rope(r) => match r.positions {
                Positions::From(offset)
                | Positions::FromInput(offset)
                | Positions::FromInputs(offset) => {
                    vec![Named::fixed("offset", offset.cast_signed())]
                }
                Positions::Table => Vec::new(),
            },
            Move::Copy(c)
            | Move::CopyRows(RowCopy { copy: c, .. })
            | Move::Transpose(Transposition { copy: c, .. }) => {
                vec![Named::new("start", c.source_offset)]
            }
            Move::Fill { .. } | Move::Place(_) | Move::Take(_) => Vec::new(),
        }
    }

    /// Whether threads of a block synchronise.
    pub(super) fn synchronizes(&self) -> bool {
        matches!(self, Move::Transpose(_))
    }

    /// Threads that are needed.
    pub(super) fn elements(&self) -> usize {
        match self {
            Move::Fill { len, .. } => *len,
            Move::Copy(c) => c.loops.iter().map(|l| l.size).product(),
            Move::CopyRows(c) => c.vectors(),
            Move::Transpose(t) => t.tiles() * transpose::THREADS as usize,
            Move::Place(w) | Move::Take(w) => w.outer * w.len * w.inner,
            Move::Gather(g) | Move::Scatter(g) | Move::Replace(g) => g.outer * g.count * g.width,
            Move::Links(g) => g.count,
            Move::Rope(r) => r.batch * r.seq * (r.dim / 2),
        }
    }

    /// The element type of a parameter in the text: what is only moved is an integer of its size.
    pub(super) fn pointer(&self, parameter: &Parameter) -> &'static str {
        match self {
            Move::Fill { .. } | Move::Copy(_) | Move::CopyRows(_) | Move::Transpose(_) => {
                moved(parameter.dtype)
            }
            Move::Place(w) | Move::Take(w)
                if parameter.dtype == w.dtype && parameter.buffer != Buffer::Input(1) =>
            {
                moved(parameter.dtype)
            }
            Move::Gather(g) | Move::Replace(g) if is_row(g, parameter) => moved(parameter.dtype),
            Move::Place(_)
            | Move::Take(_)
            | Move::Gather(_)
            | Move::Replace(_)
            | Move::Links(_)
            | Move::Scatter(_)
            | Move::Rope(_) => element(parameter.dtype),
        }
    }

    pub(super) fn print(&self, parameters: &[Parameter], text: &mut Text) {
        let names: Vec<String> = parameters.iter().map(Parameter::name).collect();
        if !self.synchronizes() {
            line!(text, "const u64 at = (u64)blockIdx.x * {THREADS} + threadIdx.x;");
            line!(text, "if (at >= {}) return;", self.elements());
        }
        match self {
            Move::Fill { bits, .. } => line!(text, "{}[at] = {bits}ULL;", names[0]),
            Move::Copy(c) => print_copy(c, [&names[0], &names[1]], text),
            Move::CopyRows(c) => c.print([&names[0], &names[1]], text),
            Move::Transpose(t) => t.print([&names[0], &names[1]], text),
            Move::Place(w) => {
                print_window(w, &names[1], text);
                line!(text, "{}[place] = {}[at];", names[2], names[0]);
            }
            Move::Take(w) => {
                print_window(w, &names[1], text);
                line!(text, "{}[at] = {}[place];", names[2], names[0]);
            }
            Move::Gather(g) => print_gather(g, &names, text),
            Move::Links(g) => print_links(g, &names, text),
            Move::Scatter(g) => print_scatter(g, &names, text),
            Move::Replace(g) => print_replace(g, &names, text),
            Move::Rope(r) => print_rope(r, &names, text),
        }
    }
}

/// Whether a parameter of a look-up holds rows, not ids.
fn is_row(g: &Gather, parameter: &Parameter) -> bool {
    parameter.dtype == g.dtype
        && !matches!(parameter.buffer, Buffer::Workspace(_))
        && (g.dtype != DType::I32 || !matches!(parameter.buffer, Buffer::Input(_)))
}

fn print_copy(c: &Copy, [source, target]: [&String; 2], text: &mut Text) {
    let of = |stride: fn(&CopyLoop) -> usize| {
        let loops: Vec<[usize; 2]> = c.loops.iter().map(|l| [l.size, stride(l)]).collect();
        nest(&loops, "at")
    };
    let (from, to) = (of(|l| l.source), of(|l| l.target));
    line!(text, "{target}[{} + {to}] = {source}[(u64)start + {from}];", c.target_offset);
}

/// Prints `place`: where an element of the window lies in the whole.
fn print_window(w: &Window, position: &str, text: &mut Text) {
    let Window { outer, positions, len, capacity, inner, .. } = w;
    let most = capacity - len;
    let (window, whole) = (len * inner, capacity * inner);
    match positions {
        1 => line!(text, "i64 first = {position}[0];"),
        _ => line!(text, "i64 first = {position}[at / {}];", outer / positions * window),
    }
    line!(text, "first = first < 0 ? 0 : first > {most} ? {most} : first;");
    line!(
        text,
        "const u64 place = at / {window} * {whole} + (u64)first * {inner} + at % {window};"
    );
}

/// Prints `row`: the local row that an id means, and whether `is_own`.
fn print_row(g: &Gather, id: &str, text: &mut Text) {
    line!(text, "const i64 row = (i64){id} - base;");
    line!(text, "const bool is_own = {id} >= 0 && row >= 0 && row < {};", g.rows);
}

fn print_gather(g: &Gather, names: &[String], text: &mut Text) {
    let Gather { count, width, rows, .. } = g;
    line!(text, "const u64 i = at / {width}, col = at % {width};");
    line!(text, "const i32 id = {}[i % {count}];", names[1]);
    print_row(g, "id", text);
    line!(
        text,
        "{}[at] = is_own ? {}[(i / {count} * {rows} + (u64)row) * {width} + col] : 0;",
        names[2],
        names[0]
    );
}

fn print_links(g: &Gather, names: &[String], text: &mut Text) {
    let (ids, links, count) = (&names[0], &names[1], g.count);
    line!(text, "const i32 id = {ids}[at];");
    print_row(g, "id", text);
    line!(text, "bool is_first = is_own;");
    line!(text, "for (u64 other = 0; other < at && is_first; other += 1) {{");
    line!(text, "is_first = {ids}[other] != id;");
    text.end();
    line!(text, "u64 next = at + 1;");
    line!(text, "while (next < {count} && {ids}[next] != id) next += 1;");
    line!(text, "{links}[at] = is_first ? 1 : 0;");
    line!(text, "{links}[{count} + at] = (i32)next;");
}

/// Prints where the thread's element is, and ends those that are not the first of their id.
fn print_first(g: &Gather, names: &[String], text: &mut Text) {
    let Gather { count, width, rows, .. } = g;
    line!(text, "const u64 i = at / {width} % {count}, col = at % {width};");
    line!(text, "const u64 outer = at / {};", count * width);
    line!(text, "if ({}[i] == 0) return;", names[1]);
    line!(text, "const i64 row = (i64){}[i] - base;", names[0]);
    line!(text, "const u64 place = (outer * {rows} + (u64)row) * {width} + col;");
}

fn print_scatter(g: &Gather, names: &[String], text: &mut Text) {
    let Gather { count, width, dtype, .. } = g;
    let (links, rows, table) = (&names[1], &names[2], &names[3]);
    print_first(g, names, text);
    line!(text, "{} sum = {table}[place];", element(*dtype));
    line!(text, "for (u64 from = i; from < {count}; from = {links}[{count} + from]) {{");
    let x = format!("{rows}[(outer * {count} + from) * {width} + col]");
    let sum = if *dtype == DType::I64 {
        format!("add(sum, {x})")
    } else if *dtype == DType::I32 {
        format!("(i32)((u32)sum + (u32){x})")
    } else {
        format!("sum + {x}")
    };
    line!(text, "sum = {sum};");
    text.end();
    line!(text, "{table}[place] = sum;");
}

fn print_replace(g: &Gather, names: &[String], text: &mut Text) {
    let Gather { count, width, .. } = g;
    let (links, rows, table) = (&names[1], &names[2], &names[3]);
    print_first(g, names, text);
    line!(text, "u64 last = i;");
    line!(text, "while ({links}[{count} + last] < {count}) last = {links}[{count} + last];");
    line!(text, "{table}[place] = {rows}[(outer * {count} + last) * {width} + col];");
}

fn print_rope(r: &Rope, names: &[String], text: &mut Text) {
    let (half, seq) = (r.dim / 2, r.seq);
    let (x, y, dtype) = (&names[0], &names[names.len() - 1], r.dtype.accumulation());
    let (compute, memory) = (element(dtype), element(r.dtype));
    let frequencies: Vec<String> =
        r.frequencies.iter().map(|f| super::text::number(DType::F64, *f)).collect();
    line!(text, "TABLE double frequencies[{}] = {{{}}};", half.max(1), frequencies.join(", "));
    line!(text, "const u64 i = at % {half}, token = at / {half};");
    line!(text, "const u64 b = token / {seq}, s = token % {seq};");
    let position = match r.positions {
        Positions::From(_) => "(double)(offset + (i64)s)".to_owned(),
        Positions::FromInput(_) => format!("(double)(offset + (i64)s) + (double){}[0]", names[1]),
        Positions::FromInputs(_) => {
            format!("(double)(offset + (i64)s) + (double){}[b]", names[1])
        }
        Positions::Table => format!("(double){}[token]", names[1]),
    };
    let sign = if r.inverse { "-1.0" } else { "1.0" };
    line!(text, "const double angle = {sign} * ({position}) * frequencies[i];");
    let gain = super::text::number(DType::F64, r.gain);
    line!(text, "double sine, cosine;");
    // Rounded to a number of F32 both are that of the library, which takes stack on a GPU.
    if dtype == DType::F32 && r.frequencies.iter().all(|f| f.abs() <= 1.0) {
        line!(text, "sine_and_cosine(angle, sine, cosine);");
    } else {
        line!(text, "sine = sin(angle), cosine = cos(angle);");
    }
    line!(text, "const {compute} c = ({compute})({gain} * cosine);");
    line!(text, "const {compute} n = ({compute})({gain} * sine);");
    line!(text, "for (u64 h = 0; h < {}; h += 1) {{", r.heads);
    for (name, [b, s, h]) in [("from", r.x), ("to", r.y)] {
        line!(text, "const u64 {name} = b * {b} + s * {s} + h * {h} + i;");
    }
    line!(text, "const {compute} p = Load<{compute}>::of({x}[from]);");
    line!(text, "const {compute} q = Load<{compute}>::of({x}[from + {half}]);");
    line!(text, "{y}[to] = Store<{memory}>::of(p * c - q * n);");
    line!(text, "{y}[to + {half}] = Store<{memory}>::of(q * c + p * n);");
    text.end();
}

impl fmt::Display for Move {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if let Move::Transpose(t) = self {
            return t.fmt(f);
        }
        f.write_str(match self {
            Move::Rope(_) => "one thread per pair of elements, all heads",
            Move::Links(_) => "one thread per id",
            Move::CopyRows(_) => "one thread per vector of a row",
            Move::Fill { .. }
            | Move::Copy(_)
            | Move::Transpose(_)
            | Move::Place(_)
            | Move::Take(_)
            | Move::Gather(_)
            | Move::Scatter(_)
            | Move::Replace(_) => "one thread per element",
        })
    }
}

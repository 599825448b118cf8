//! What a device function is passed: buffers, and the offsets that its text names.

use std::fmt;

use ir::DType;

use crate::offset::Offset;

/// An offset that the text names: a scalar of the launch, which is passed, or a constant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Named {
    /// The name.
    pub name: String,
    /// What it is.
    pub offset: Offset,
}

impl Named {
    pub(super) fn new(name: impl Into<String>, offset: Offset) -> Named {
        Named { name: name.into(), offset }
    }

    /// One that is the same in every launch.
    pub(super) fn fixed(name: &str, value: i64) -> Named {
        Named::new(name, Offset::Fixed(value))
    }

    /// Whether it is passed.
    pub(super) fn is_scalar(&self) -> bool {
        matches!(self.offset, Offset::Scalar { .. })
    }
}

/// A buffer that a function is passed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Parameter {
    /// Which one.
    pub buffer: Buffer,
    /// The type of its elements.
    pub dtype: DType,
}

/// Where a parameter lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Buffer {
    /// An input of the kernel.
    Input(usize),
    /// An output of the kernel.
    Output(usize),
    /// One of [`Functions::workspaces`](super::Functions::workspaces).
    Workspace(usize),
    /// The counters of [`Functions::tickets`](super::Functions::tickets).
    Tickets,
}

impl Parameter {
    /// The name in the text.
    pub fn name(&self) -> String {
        self.buffer.to_string()
    }
}

impl fmt::Display for Buffer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Buffer::Input(at) => write!(f, "in{at}"),
            Buffer::Output(at) => write!(f, "out{at}"),
            Buffer::Workspace(at) => write!(f, "workspace{at}"),
            Buffer::Tickets => f.write_str("tickets"),
        }
    }
}

//! Activations of feed-forward layers.

use super::config::fields::{Fields, list};

/// An elementwise function between two layers.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// GELU by the tangent's approximation.
    GeluTanh,
    /// GELU by the error function.
    GeluErf,
    /// `x / (1 + e^-x)`
    Silu,
    /// `max(x, 0)`
    Relu,
}

impl Activation {
    /// The names in a config; the first is the one that is written.
    const NAMES: [(&'static str, Activation); 6] = [
        ("gelu_new", Activation::GeluTanh),
        ("gelu_pytorch_tanh", Activation::GeluTanh),
        ("gelu", Activation::GeluErf),
        ("silu", Activation::Silu),
        ("swish", Activation::Silu),
        ("relu", Activation::Relu),
    ];

    /// The composite that computes it.
    pub fn composite(self) -> &'static str {
        match self {
            Activation::GeluTanh => "gelu_tanh",
            Activation::GeluErf => "gelu_erf",
            Activation::Silu => "silu",
            Activation::Relu => "relu",
        }
    }

    /// The name in a config.
    pub fn name(self) -> &'static str {
        let named = Activation::NAMES.iter().find(|(_, activation)| *activation == self);
        named.expect("every activation has a name").0
    }

    /// The activation of a name.
    pub fn named(word: &str) -> Option<Activation> {
        let known = Activation::NAMES.iter().find(|(name, _)| *name == word);
        known.map(|(_, activation)| *activation)
    }

    /// Reads the field `key`.
    pub(crate) fn read(fields: &mut Fields<'_>, key: &str, default: Activation) -> Activation {
        let Some(word) = fields.word(key) else { return default };
        if let Some(found) = Activation::named(&word) {
            return found;
        }
        let names: Vec<&str> = Activation::NAMES.iter().map(|(name, _)| *name).collect();
        let wrong = fields.wrong("E1107", key, format!("the activation `{word}` is not supported"));
        fields.report(wrong.help(format!("supported are {}", list(&names))));
        default
    }
}

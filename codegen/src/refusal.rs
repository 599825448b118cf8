//! Refusals: why a function cannot be compiled.

use std::fmt;

/// Why a function cannot be compiled, in a sentence.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Refusal {
    /// Nodes have no kernel.
    NoKernel(String),
    /// The plan does not fit the function.
    Unfit(String),
}

/// The code of a diagnostic that says which nodes have no kernel.
pub const CODE_NO_KERNEL: &str = "E2003";

/// The code of a diagnostic that says that a plan does not fit.
pub const CODE_UNFIT: &str = "E2002";

impl Refusal {
    /// The code of a diagnostic that says so.
    pub fn code(&self) -> &'static str {
        match self {
            Refusal::NoKernel(_) => CODE_NO_KERNEL,
            Refusal::Unfit(_) => CODE_UNFIT,
        }
    }

    /// The sentence.
    pub fn sentence(&self) -> &str {
        let (Refusal::NoKernel(why) | Refusal::Unfit(why)) = self;
        why
    }

    /// This refusal with its reason rewritten by `words`.
    pub fn map(self, words: impl FnOnce(String) -> String) -> Refusal {
        match self {
            Refusal::NoKernel(why) => Refusal::NoKernel(words(why)),
            Refusal::Unfit(why) => Refusal::Unfit(words(why)),
        }
    }

    /// Two reasons at once: one of kernels where either is.
    pub fn and(self, other: &Refusal) -> Refusal {
        let why = format!("{self}; {other}");
        match (self, other) {
            (Refusal::Unfit(_), Refusal::Unfit(_)) => Refusal::Unfit(why),
            _ => Refusal::NoKernel(why),
        }
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.sentence())
    }
}

impl From<String> for Refusal {
    fn from(why: String) -> Refusal {
        Refusal::Unfit(why)
    }
}

impl From<&str> for Refusal {
    fn from(why: &str) -> Refusal {
        Refusal::Unfit(why.to_owned())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sentences may speak of kernels without being about them.
    #[test]
    fn the_code_follows_from_the_reason_and_not_from_its_words() {
        let unfit = Refusal::from("`%x` has no kernel of its size");
        let lacks = Refusal::NoKernel("`sort` is not computed".to_owned());
        assert_eq!([unfit.code(), lacks.code()], [CODE_UNFIT, CODE_NO_KERNEL]);
        for both in [unfit.clone().and(&lacks), lacks.and(&unfit)] {
            assert_eq!(both.code(), CODE_NO_KERNEL);
            assert!(both.sentence().contains("; "), "{both}");
        }
        assert_eq!(unfit.clone().and(&unfit).code(), CODE_UNFIT);
    }
}

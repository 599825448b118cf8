//! What kernels are compiled for on a cluster.

use ir::target::{Arch, InstructionSet, Target};

use super::{Cluster, Kind};

/// Words that a device's name begins with, and the architecture whose kernels it runs.
const GPUS: [(&str, Arch); 20] = [
    ("A100", Arch::Sm80),
    ("A800", Arch::Sm80),
    ("A10", Arch::Sm80),
    ("A10G", Arch::Sm80),
    ("A30", Arch::Sm80),
    ("A40", Arch::Sm80),
    ("RTX A6000", Arch::Sm80),
    ("RTX 3090", Arch::Sm80),
    ("L4", Arch::Sm89),
    ("L40S", Arch::Sm89),
    ("RTX 4090", Arch::Sm89),
    ("H100", Arch::Sm90a),
    ("H200", Arch::Sm90a),
    ("H800", Arch::Sm90a),
    ("H20", Arch::Sm90a),
    ("GH200", Arch::Sm90a),
    ("B200", Arch::Sm100),
    ("B300", Arch::Sm100),
    ("GB200", Arch::Sm100),
    ("GB300", Arch::Sm100),
];

impl Cluster {
    /// What plans for the cluster are compiled for: what is asked for, else what its file says as
    /// `isa`, else what its devices are known to run; none where no kernels are written for them.
    pub fn target(&self) -> Option<Target> {
        if self.compiled_for.is_some() {
            return self.compiled_for;
        }
        let isa = self.device.instruction_set.as_deref();
        match self.device.kind {
            Kind::Cpu => {
                let set = isa.and_then(|name| name.parse().ok());
                Some(Target::Cpu(set.unwrap_or(InstructionSet::Portable)))
            }
            Kind::Gpu => {
                let named = isa.and_then(|name| name.parse().ok());
                named.or_else(|| known(&self.device.name)).map(Target::Cuda)
            }
        }
    }
}

/// The architecture of a device that is known by its name.
fn known(device: &str) -> Option<Arch> {
    let is_it = |(name, _): &&(&str, Arch)| {
        device.strip_prefix(name).is_some_and(|rest| rest.is_empty() || rest.starts_with(' '))
    };
    GPUS.iter().find(is_it).map(|(_, arch)| *arch)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn devices_are_known_by_whole_words() {
        assert_eq!(known("H100 SXM"), Some(Arch::Sm90a));
        assert_eq!(known("L4"), Some(Arch::Sm89));
        assert_eq!(known("L40S"), Some(Arch::Sm89));
        assert_eq!(known("L400"), None);
        assert_eq!(known("MI300X"), None);
        assert_eq!(known("V100 SXM 32 GB"), None);
    }
}

//! The table against random plans, and the search within it against trying everything.

use super::*;
use crate::configuration::{Offload, Place, Recompute, Schedule, USUAL_ORDER, Zero};
use ir::Axis;
use ir::random::mix;

/// Numbers below a bound, one after the other.
fn numbers(seed: u64) -> impl FnMut(usize) -> usize {
    let mut state = seed;
    move |below| {
        state = mix(state.wrapping_add(0x9e37_79b9));
        (state % below as u64) as usize
    }
}

/// A random plan of 24 layers, and of what model.
pub(crate) fn random(seed: u64) -> (Configuration, Sizes) {
    let mut below = numbers(seed);
    let mut pick = |all: &[u32]| all[below(all.len())];
    let mut c = Configuration {
        tp: pick(&[1, 1, 2, 4, 8]),
        cp: pick(&[1, 1, 1, 2]),
        ep: pick(&[1, 1, 1, 2, 3, 4]),
        pp: pick(&[1, 1, 2, 4, 5]),
        dp: pick(&[1, 2, 4, 8]),
        microbatch: pick(&[1, 2]),
        sequence_parallel: pick(&[0, 1]) == 1,
        ..Configuration::default()
    };
    c.zero = Zero { stage: pick(&[0, 0, 1, 2, 3]) as u8, shard: pick(&[0, 0, 0, 2]) };
    c.recompute = [Recompute::None, Recompute::None, Recompute::Attention, Recompute::Full]
        [pick(&[0, 1, 2, 3]) as usize];
    if pick(&[0, 0, 0, 1]) == 1 {
        c.recompute = Recompute::Layers(pick(&[1, 2, 3]));
    }
    let place =
        |place| [Place::Device, Place::Device, Place::Device, Place::Host, Place::Disk][place];
    let mut place = || place(pick(&[0, 1, 2, 3, 4]) as usize);
    c.offload =
        Offload { optimizer: place(), parameters: Place::Device, activations: Place::Device };
    if pick(&[0, 0, 1]) == 1 {
        c.offload.parameters = Place::Host;
    }
    if pick(&[0, 0, 1]) == 1 {
        c.offload.activations = Place::Host;
    }
    if c.pp > 1 {
        c.schedule = Schedule::ALL[pick(&[0, 1, 1, 1, 2, 3]) as usize];
        c.vpp = if c.schedule == Schedule::default() { pick(&[1, 1, 2, 3]) } else { 1 };
        if c.vpp == 1 && pick(&[0, 0, 1]) == 1 {
            c.stage_layers = vec![24 / c.pp; c.pp as usize];
            c.stage_layers[0] += 24 % c.pp + 1;
            c.stage_layers[1] -= 1;
        }
    }
    c.order = [
        USUAL_ORDER,
        USUAL_ORDER,
        [Axis::Tp, Axis::Cp, Axis::Pp, Axis::Dp],
        [Axis::Cp, Axis::Tp, Axis::Dp, Axis::Pp],
    ][pick(&[0, 1, 2, 3]) as usize];
    if pick(&[0, 0, 0, 1]) == 1 {
        c.etp = pick(&[1, c.tp]);
    }
    let sizes = Sizes {
        layers: 24,
        seq: pick(&[4096, 4096, 1001]),
        kv_heads: pick(&[0, 4, 8]),
        experts: pick(&[0, 8]),
    };
    (c, sizes)
}

/// The same plan with what is decided after `reads` at its defaults.
fn until(c: &Configuration, reads: Reads) -> Configuration {
    let mut c = c.clone();
    let open = Configuration::default();
    if reads < Reads::Experts {
        (c.ep, c.etp) = (open.ep, open.etp);
    }
    if reads < Reads::Sequence {
        (c.sequence_parallel, c.microbatch) = (open.sequence_parallel, open.microbatch);
    }
    if reads < Reads::Order {
        c.order = open.order;
    }
    if reads < Reads::Schedule {
        (c.schedule, c.vpp) = (open.schedule, open.vpp);
    }
    if reads < Reads::Zero {
        c.zero = open.zero;
    }
    if reads < Reads::Offload {
        c.offload = open.offload;
    }
    if reads < Reads::Recompute {
        c.recompute = open.recompute;
    }
    if reads < Reads::Stages {
        c.stage_layers.clear();
    }
    c
}

/// A rule is decided by what is decided when the search asks it. `EVEN` looks at stages too, which
/// make it hold: there the search asks for even ones, which it breaks or not.
#[test]
fn rules_read_nothing_that_is_decided_later() {
    for seed in 0..4000 {
        let (mut c, sizes) = random(seed);
        c.stage_layers.clear();
        for tool in Tool::ALL {
            for release in 0..tool.releases().len().max(1) {
                for rule in tool.rules() {
                    let early = until(&c, rule.reads);
                    let form = Form::Launch;
                    let broken =
                        |c: &Configuration| (rule.breaks)(&Case { c, sizes, release, form });
                    let what = rule.what;
                    assert_eq!(broken(&c), broken(&early), "{}: {what}: {c}", tool.name());
                }
            }
        }
    }
}

/// Every rule refuses something, and each tool takes something whole.
#[test]
fn every_rule_refuses_something() {
    for tool in Tool::ALL {
        let mut unbroken: Vec<&str> = tool.rules().iter().map(|rule| rule.what).collect();
        let mut whole = 0;
        for seed in 0..20_000 {
            let (c, sizes) = random(seed);
            for release in 0..tool.releases().len().max(1) {
                let lost = Target { tool, release }.refusals(&c, sizes, Form::Launch);
                unbroken.retain(|what| !lost.contains(what));
                whole += usize::from(lost.is_empty());
            }
        }
        assert_eq!(unbroken, [""; 0], "{}", tool.name());
        assert!(whole > 20, "{}: {whole}", tool.name());
    }
}

/// A release that nobody measured is answered with the nearest that was.
#[test]
fn releases_are_known_or_have_a_neighbour() {
    for (text, name) in [
        ("megatron", "megatron@core-0.13"),
        ("megatron@v3.0", "megatron@v3.0"),
        ("deepspeed", "deepspeed@0.16"),
        ("torchtitan", "torchtitan@0.2"),
    ] {
        assert_eq!(Target::parse(text).unwrap().to_string(), name);
    }
    for (text, near) in [
        ("megatron@core-0.9", "`megatron@core-0.13`"),
        ("megatron@core-0.14", "`megatron@core-0.13`"),
        ("megatron@v2.7", "`megatron@v3.0`"),
        ("megatron@newest", "`megatron@core-0.13`"),
        ("deepspeed@0.9.2", "`deepspeed@0.5`"),
        ("deepspeed@0.19", "`deepspeed@0.16`"),
        ("torchtitan@0.1", "`torchtitan@0.0.2`"),
        ("torchtitan@", "`torchtitan@0.2`"),
    ] {
        let (headline, help) = Target::parse(text).unwrap_err();
        assert!(headline.starts_with("no run of"), "{headline}");
        assert!(help.starts_with(&format!("the nearest that was is {near}")), "{text}: {help}");
    }
    for (text, said) in [("megatorn", "did you mean `megatron`?"), ("x", "megatron, deepspeed")] {
        let (headline, help) = Target::parse(text).unwrap_err();
        assert!(headline.contains("is planned for") && help.contains(said), "{headline}: {help}");
    }
    assert!(Target::parse("calculon").is_err(), "it trains nothing");
}

/// A release that is older than the devices is priced as what followed it, and that is said.
#[test]
fn whose_numbers_they_are_is_said() {
    let machine =
        crate::machine::Machine { cores: 4, memory_bytes: 8 << 30, instruction_set: "avx2".into() };
    let on = |name: &str| Cluster::load_on(name, &machine).unwrap();
    for (tool, cluster, profile, newer) in [
        ("megatron", "h100", "megatron-bridge", false),
        ("megatron@v3.0", "a100", "megatron-2022", false),
        ("megatron@v3.0", "h100", "megatron-bridge", true),
        ("deepspeed", "h100", "deepspeed", true),
        ("torchtitan", "h100", "torchtitan-2025", false),
    ] {
        let (target, cluster) = (Target::parse(tool).unwrap(), on(cluster));
        let found = target.profile_on(&cluster).unwrap();
        let said = target.whose_numbers(&cluster);
        assert_eq!(found.name, profile, "{tool}");
        assert!(said.contains(target.release().unwrap().measured), "{said}");
        assert_eq!(said.contains("is newer than these runs"), newer, "{said}");
        assert_eq!(found.doubt > 0.0, newer, "{tool}");
    }
}

//! Decoder families compiled and run, against transformers: a sample of the cases that
//! `benches/families.rs` takes all of. `ir/tests/families.rs` holds the interpreter against them.

pub(crate) mod case;

use ir::random::mix;

use crate::drawn::{WITHOUT_TEXT, each_case, family, names, writes_no_text};
use case::Case;

/// What draws a sample: `SEED`, where it is set.
fn seed() -> u64 {
    let given = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok());
    given.unwrap_or(0)
}

/// One case of each family, drawn by a seed.
fn sample(seed: u64) -> Vec<String> {
    let (names, mut found) = (names(), Vec::new());
    let mut start = 0;
    while start < names.len() {
        let of = |name: &&String| family(name) == family(&names[start]);
        let count = names[start..].iter().take_while(of).count();
        let drawn = mix(seed ^ (start as u64) << 32) as usize % count;
        found.push(names[start + drawn].clone());
        start += count;
    }
    assert!(found.len() >= 24, "{found:?}");
    found
}

#[test]
fn families_are_trained_as_in_transformers() {
    let seed = seed();
    println!("SEED={seed}");
    each_case(&sample(seed + 1), |name| Case::open(name, "families-training").check_training());
}

#[test]
fn families_write_the_text_of_transformers() {
    let seed = seed();
    println!("SEED={seed}");
    let mut sample = sample(seed + 2);
    sample.retain(|name| !writes_no_text(name));
    sample.extend(WITHOUT_TEXT.iter().map(|name| (*name).to_owned()));
    each_case(&sample, |name| Case::open(name, "families-text").check_text());
}

#[test]
fn families_run_to_the_logits_of_transformers() {
    let seed = seed();
    println!("SEED={seed}");
    each_case(&sample(seed + 3), |name| Case::open(name, "families-logits").check_logits());
}

#[test]
fn families_compute_the_same_on_every_mesh() {
    let seed = seed();
    println!("SEED={seed}");
    let sample = sample(seed + 4);
    each_case(&sample[..6], |name| Case::open(name, "families-meshes").check_meshes(4, 1));
}

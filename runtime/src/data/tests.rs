//! Files to tokens to batches.

use std::collections::BTreeSet;
use std::fs;

use super::*;
use crate::scratch::Scratch;

fn codes<T>(result: Result<T, Failure>) -> Vec<&'static str> {
    match result {
        Ok(_) => Vec::new(),
        Err(Failure::Input(diagnostics)) => diagnostics.iter().map(|d| d.code).collect(),
        Err(Failure::World(error)) => panic!("{error}"),
    }
}

#[test]
fn arguments_expand_to_files_in_the_order_of_their_paths() {
    let scratch = Scratch::new("data");
    fs::create_dir_all(scratch.join("in/deep")).unwrap();
    for (name, text) in [("b.txt", "B"), ("a.txt", "A"), ("in/c.md", "C"), ("in/deep/d.txt", "D")] {
        fs::write(scratch.join(name), text).unwrap();
    }
    fs::write(scratch.join("in/.hidden"), "H").unwrap();
    fs::write(scratch.join("empty"), "").unwrap();
    let bytes = Tokenizer::bytes(256).unwrap();
    let load = |names: &[&str]| {
        let arguments: Vec<String> =
            names.iter().map(|name| scratch.join(name).display().to_string()).collect();
        Corpus::load(&arguments, &bytes)
    };
    let text = |names: &[&str]| {
        let corpus = load(names).unwrap();
        corpus.tokens().iter().map(|&t| char::from(t as u8)).collect::<String>()
    };
    assert_eq!(text(&["b.txt", "a.txt", "b.txt"]), "AB");
    assert_eq!(text(&["in"]), "CD");
    assert_eq!(text(&["*.txt"]), "AB");
    assert_eq!(text(&["**/*.txt"]), "ABD");
    assert_eq!(text(&["in", "**/*.txt", "empty"]), "ABCD");
    assert_eq!(codes(load(&["none.txt", "*.rs", "[", "a.txt"])), ["E4030", "E4030", "E4030"]);
    assert_eq!(codes(load(&["empty"])), ["E4031"]);
    assert_eq!(load(&["in"]).unwrap().hash(), load(&["in/c.md", "in/deep"]).unwrap().hash());
    assert_ne!(load(&["in"]).unwrap().hash(), load(&["in/c.md"]).unwrap().hash());
}

#[test]
fn files_of_tokens_are_taken_as_they_are() {
    let scratch = Scratch::new("bins");
    let mut file: Vec<u8> = [20_240_520_u32, 1, 2].iter().flat_map(|w| w.to_le_bytes()).collect();
    file.resize(1024, 0);
    file.extend([5, 1, 6, 0]);
    fs::write(scratch.join("x.bin"), file).unwrap();
    let load = |vocabulary| {
        let tokenizer = Tokenizer::bytes(vocabulary).unwrap();
        Corpus::load(&[scratch.path().display().to_string()], &tokenizer)
    };
    assert_eq!(load(300).unwrap().tokens(), [261, 6]);
    assert_eq!(codes(load(256)), ["E4034"]);
    fs::write(scratch.join("x.bin"), "text").unwrap();
    assert_eq!(codes(load(300)), ["E4033"]);
}

#[test]
fn an_epoch_visits_every_window_once() {
    let corpus = Corpus::new((0..1000).collect(), "test", 1);
    assert_eq!((corpus.training_tokens(), corpus.validation_tokens()), (900, 100));
    let batches = corpus.batches(42, 16, 8).unwrap();
    assert_eq!(batches.windows(), 56);
    let mut orders = BTreeSet::new();
    for epoch in 0..3 {
        let mut starts = Vec::new();
        for step in 7 * epoch..7 * (epoch + 1) {
            let batch = batches.training(step, 0..8);
            for (inputs, labels) in batch.inputs.chunks(16).zip(batch.labels.chunks(16)) {
                assert!(inputs.windows(2).all(|w| w[0] + 1 == w[1]));
                assert!(inputs.iter().zip(labels).all(|(input, label)| input + 1 == *label));
                assert!(labels[15] < 900, "a validation token");
                starts.push(inputs[0]);
            }
        }
        orders.insert(starts.clone());
        starts.sort_unstable();
        assert!(starts.windows(2).all(|w| w[0] + 16 == w[1]), "{starts:?}");
        assert_eq!(starts.len(), 56);
    }
    assert_eq!(orders.len(), 3, "epochs differ");
}

#[test]
fn any_layout_reads_the_same_global_batch() {
    let corpus = Corpus::new((0..5000).map(|i| i * 7 % 251).collect(), "test", 1);
    let batches = corpus.batches(1, 8, 12).unwrap();
    let whole = batches.training(1_000_003, 0..12);
    for ranks in [2, 3, 4, 6] {
        let per_rank = 12 / ranks;
        let inputs: Vec<i32> = (0..ranks)
            .flat_map(|r| batches.training(1_000_003, r * per_rank..(r + 1) * per_rank).inputs)
            .collect();
        assert_eq!(inputs, whole.inputs);
    }
    assert_ne!(whole, corpus.batches(2, 8, 12).unwrap().training(1_000_003, 0..12));
}

#[test]
fn validation_batches_are_consecutive() {
    let corpus = Corpus::new((0..1000).collect(), "test", 1);
    let batches = corpus.batches(1, 10, 3).unwrap();
    assert_eq!(batches.validation_batches(), 3);
    let batch = batches.validation(1, 1..3);
    assert_eq!((batch.samples, batch.seq, batch.inputs[0], batch.labels[19]), (2, 10, 940, 960));
    assert_eq!(corpus.batches(1, 60, 3).unwrap().validation_batches(), 0);
}

#[test]
fn too_few_tokens_are_refused_with_numbers() {
    let corpus = Corpus::new((0..100).collect(), "test", 1);
    let error = corpus.batches(1, 40, 4).unwrap_err();
    assert_eq!(error.code, "E4032");
    assert!(error.headline.contains("90 tokens") && error.headline.contains("needs 161"));
    assert_eq!(error.help.as_deref(), Some("use --seq 22, or --gbs 2, or more data"));
    assert!(corpus.batches(1, 22, 4).is_ok() && corpus.batches(1, 40, 2).is_ok());
    let none = Corpus::new(vec![1], "test", 1).batches(1, 40, 4).unwrap_err();
    assert_eq!(none.help.as_deref(), Some("use more data"));
}

#[test]
fn reading_ahead_gives_the_batches_of_the_steps_in_order() {
    let corpus = Corpus::new((0..1000).collect(), "bytes", 1);
    let batches = corpus.batches(1, 8, 12).unwrap();
    let mut ahead = Prefetch::start(&batches, 5..40).unwrap();
    for step in 5..40 {
        assert_eq!(*ahead.next_batch(), batches.training(step, 0..12), "step {step}");
    }
    let beyond = std::panic::AssertUnwindSafe(|| drop(ahead.next_batch().clone()));
    let panic = std::panic::catch_unwind(beyond).unwrap_err();
    let text = panic.downcast_ref::<String>().unwrap();
    assert_eq!(text, "step 40 is beyond those that are read");
}

#[test]
fn reading_ahead_ends_with_whoever_reads() {
    let corpus = Corpus::new((0..1000).collect(), "bytes", 1);
    for taken in 0..4 {
        let batches = corpus.batches(1, 8, 12).unwrap();
        let mut ahead = Prefetch::start(&batches, 0..u64::MAX).unwrap();
        for _ in 0..taken {
            ahead.next_batch();
        }
        drop(batches);
        let before = Arc::strong_count(&corpus.tokens);
        drop(ahead);
        // The thread had the tokens, and has ended.
        assert_eq!((before, Arc::strong_count(&corpus.tokens)), (2, 1));
    }
}

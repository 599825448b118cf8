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

/// Each window against a walk over all tokens of the corpus.
#[test]
fn windows_know_where_their_documents_start() {
    let scratch = Scratch::new("documents");
    for (name, text) in [("a.txt", "ab.cde..f"), ("b.txt", ""), ("c.txt", "ghi.j"), ("d.txt", "k.")]
    {
        fs::write(scratch.join(name), text).unwrap();
    }
    let bytes = Tokenizer::bytes(256).unwrap();
    let load = || Corpus::load(&[scratch.path().display().to_string()], &bytes).unwrap();
    let plain = load();
    assert_eq!((plain.documents(), load().with_documents_apart(None).documents()), (None, Some(3)));
    let corpus = load().with_documents_apart(Some(b'.'.into()));
    // ab. cde. . f | ghi. j | k.
    assert_eq!(corpus.documents(), Some(7));
    assert_ne!(corpus.hash(), plain.hash());
    assert_ne!(corpus.hash(), load().with_documents_apart(None).hash());
    assert_eq!(corpus.hash(), load().with_documents_apart(Some(b'.'.into())).hash());
    let number = |at: usize| [3, 7, 8, 9, 13, 14].iter().filter(|first| **first <= at).count();
    let (seq, mut seen) = (5, 0);
    let batches = corpus.batches(3, seq, 2).unwrap();
    for step in 0..20 {
        let batch = batches.training(step, 0..2);
        let starts = [0, 1].map(|sample| batches.start(u128::from(step) * 2 + sample));
        for (sample, start) in starts.into_iter().enumerate() {
            for place in 0..seq {
                let at = sample * seq + place;
                let same =
                    (0..=place).rev().take_while(|p| number(start + p) == number(start + place));
                assert_eq!(batch.documents[at], same.last().unwrap() as i32, "{start} {place}");
                let is_last = number(start + place) != number(start + place + 1);
                let label = if is_last { -100 } else { corpus.tokens()[start + place + 1] as i32 };
                assert_eq!(batch.labels[at], label, "{start} {place}");
                seen += usize::from(is_last);
            }
        }
    }
    assert!(seen > 20, "{seen} ends of documents");
    assert!(plain.batches(3, seq, 2).unwrap().training(0, 0..2).documents.is_empty());
}

#[test]
fn documents_of_a_megatron_data_set_are_those_of_its_index() {
    let scratch = Scratch::new("index");
    let mut index = b"MMIDIDX\0\0".to_vec();
    index.extend(1_u64.to_le_bytes());
    index.push(1);
    index.extend([3_u64, 3].iter().flat_map(|n| n.to_le_bytes()));
    index.extend([2_i32, 3, 4].iter().flat_map(|n| n.to_le_bytes()));
    // The second document is two sequences.
    index.extend([0_i64, 2, 5, 0, 1, 3].iter().flat_map(|n| n.to_le_bytes()));
    fs::write(scratch.join("a.bin"), [1, 2, 3, 4, 5, 6, 7, 8, 9]).unwrap();
    fs::write(scratch.join("a.idx"), index).unwrap();
    fs::write(scratch.join("b.txt"), "text").unwrap();
    let bytes = Tokenizer::bytes(256).unwrap();
    let corpus = Corpus::load(&[scratch.path().display().to_string()], &bytes).unwrap();
    assert_eq!(corpus.firsts, [0, 2, 9]);
}

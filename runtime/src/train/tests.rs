//! Runs that are interrupted and resumed, with what they leave behind.

use std::cell::Cell;
use std::fs;

use super::*;
use crate::data::Corpus;
use crate::execute::{Part, tiny};
use crate::scratch::Scratch;

const SAMPLES: usize = 4;

fn corpus() -> Corpus {
    let tokens = (0..1000_u32).map(|i| i * i % 13 + i % 3).collect();
    Corpus::new(tokens, "bytes", 1)
}

fn identity() -> Identity {
    let text = |text: &str| text.to_owned();
    let (model, plan) = (text("{\"eps\": 1e-5}"), text("plan tiny"));
    Identity { model, plan, tokenizer: text("bytes"), data: corpus().hash() }
}

fn config(scratch: &Scratch, steps: u64) -> Config {
    Config {
        steps,
        seed: 3,
        schedule: Schedule::constant(0.01, 2),
        clip: Some(1.0),
        optimizer: Optimizer::AdamW {
            beta1: 0.5,
            beta2: 0.75,
            eps: 1e-8,
            decay: 0.0,
            decay_biases: 0.0,
        },
        validate_every: Some(2),
        validation_batches: 2,
        checkpoint_every: Some(2),
        keep: Some(2),
        out: scratch.join("run"),
        predicted_step_s: Some(0.5),
        settings: "lr = 0.01".to_owned(),
        on_spike: OnSpike::Warn,
        spike_norm: None,
        loss_scale: None,
    }
}

/// Trains on a mesh; asks to stop after a step. Returns the session, too, to look into.
fn run(
    (dp, tp): (usize, usize),
    config: &Config,
    stop_at: u64,
    resume: bool,
) -> (Session, Result<Outcome, Failure>) {
    let mut session = tiny::session(tiny::mesh(dp, tp), 1, SAMPLES / dp);
    session
        .init_weights(config.seed, &|_, _| crate::init::Init::Normal { std: 1.0, zero_row: None });
    let batches = corpus().batches(u64::from(config.seed), tiny::SEQ, SAMPLES).unwrap();
    let seen = Cell::new(0);
    let mut run = Run {
        since: Instant::now(),
        config,
        batches: &batches,
        identity: &identity(),
        stop: &|| seen.get() >= stop_at,
        progress: &mut |progress| seen.set(progress.step),
    };
    let store = Store::new(&config.out.join(CHECKPOINTS), None);
    let checkpoint = resume.then(|| store.latest().unwrap());
    let outcome = train(&mut session, &mut run, checkpoint.as_ref());
    (session, outcome)
}

fn tensors(session: &Session) -> [crate::execute::Values; 2] {
    [Part::Weight, Part::State(0)].map(|part| session.read_weight("w", part).unwrap())
}

fn codes(failure: Failure) -> Vec<(&'static str, String)> {
    match failure {
        Failure::Input(found) => found.into_iter().map(|d| (d.code, d.headline)).collect(),
        Failure::World(error) => panic!("{error}"),
    }
}

#[test]
fn a_resumed_run_repeats_bit_for_bit_what_it_would_have_done() {
    let (straight, broken) = (Scratch::new("straight"), Scratch::new("broken"));
    let whole = run((2, 2), &config(&straight, 7), u64::MAX, false);
    let Outcome::Finished(summary) = whole.1.unwrap() else { panic!("interrupted") };
    assert_eq!((summary.steps, summary.last.unwrap().step), (7, 7));
    let (_, outcome) = run((2, 2), &config(&broken, 7), 3, false);
    let Outcome::Interrupted(summary) = outcome.unwrap() else { panic!("finished") };
    assert_eq!(summary.steps, 3);
    assert!(summary.checkpoint.unwrap().ends_with("step-3"));
    let (resumed, outcome) = run((2, 2), &config(&broken, 7), u64::MAX, true);
    assert!(matches!(outcome, Ok(Outcome::Finished(_))));
    assert_eq!(tensors(&resumed), tensors(&whole.0));
    for key in ["loss", "validation_loss", "lr", "grad_norm"] {
        let series = |scratch: &Scratch| series(&scratch.join("run").join(METRICS), key).unwrap();
        assert_eq!(series(&straight), series(&broken), "{key}");
        assert_eq!(series(&straight).len(), if key == "validation_loss" { 4 } else { 7 });
    }
    let losses = series(&straight.join("run").join(METRICS), "loss").unwrap();
    assert!(losses[6].1 < losses[0].1);
    let store = Store::new(&straight.join("run").join(CHECKPOINTS), None);
    assert_eq!(store.steps().unwrap(), [6, 7]);
    let svg = fs::read_to_string(straight.join("run").join(PLOT)).unwrap();
    assert!(svg.starts_with("<svg"));
    let nothing_left = run((2, 2), &config(&broken, 7), u64::MAX, true).1.unwrap();
    let expected = Summary { last: None, steps: 7, checkpoint: None, goodput: 0.0 };
    assert_eq!(nothing_left, Outcome::Finished(expected));
}

#[test]
fn a_run_resumes_on_another_number_of_ranks() {
    let scratch = Scratch::new("elastic");
    let (before, _) = run((2, 2), &config(&scratch, 2), u64::MAX, false);
    let store = Store::new(&scratch.join("run").join(CHECKPOINTS), None);
    for (dp, tp) in [(1, 1), (1, 4), (4, 1)] {
        let mut session = tiny::session(tiny::mesh(dp, tp), 1, SAMPLES / dp);
        restore(&mut session, &store.latest().unwrap()).unwrap();
        assert_eq!(tensors(&session), tensors(&before));
    }
    let (after, outcome) = run((1, 4), &config(&scratch, 5), u64::MAX, true);
    assert!(matches!(outcome, Ok(Outcome::Finished(_))));
    let other = Scratch::new("rigid");
    let (straight, _) = run((2, 2), &config(&other, 5), u64::MAX, false);
    let [a, b] = [&after, &straight].map(|session| tensors(session)[0].to_f64());
    assert!(a.iter().zip(&b).all(|(a, b)| (a - b).abs() < 1e-5), "{a:?} {b:?}");
}

#[test]
fn another_run_is_not_resumed() {
    let scratch = Scratch::new("other");
    let right = config(&scratch, 2);
    let _ = run((1, 1), &right, u64::MAX, false);
    let checkpoint = Store::new(&right.out.join(CHECKPOINTS), None).latest().unwrap();
    let samples = Samples { size: 1, dp: 1, count: SAMPLES, seq: tiny::SEQ };
    let check = |config: &Config, identity: &Identity, samples| {
        let state = RunState::new(config, identity, samples);
        state.check(&checkpoint).map_err(codes).err().unwrap_or_default()
    };
    assert_eq!(check(&right, &identity(), samples), []);
    let other_plan = Identity { plan: "another".to_owned(), ..identity() };
    assert_eq!(check(&right, &other_plan, Samples { dp: 4, count: 1, ..samples }), []);
    let wrong =
        Identity { model: "m".into(), tokenizer: "t".into(), data: "d".into(), ..identity() };
    let found = check(&Config { seed: 4, ..right.clone() }, &wrong, Samples { seq: 9, ..samples });
    assert!(found.iter().all(|(code, _)| *code == "E4051"));
    assert_eq!(found.len(), 5);
    assert_eq!(found[0].1, "the checkpoint was made with seed 3, not 4");
    let state = RunState::read(&checkpoint).unwrap();
    assert_eq!(state.schedule(), Some(right.schedule));
    assert_eq!(state.identity, identity());
}

#[test]
fn a_loss_that_is_not_finite_ends_the_run_before_a_checkpoint() {
    let scratch = Scratch::new("infinite");
    let config = Config { schedule: Schedule::constant(1e30, 0), ..config(&scratch, 9) };
    let (_, outcome) = run((1, 2), &config, u64::MAX, false);
    let Err(Failure::Input(found)) = outcome else { panic!("the loss is not finite") };
    assert_eq!(found[0].code, "E4052");
    let headline = &found[0].headline;
    assert!(headline.starts_with("step 2 has a loss of "), "{headline}");
    let place = found[0].notes.last().unwrap();
    assert!(place.starts_with("the first value that is not finite is in `"), "{place}");
    assert!(place.contains("on rank ") && place.contains("(launch rows "), "{place}");
    assert!(Store::new(&config.out.join(CHECKPOINTS), None).steps().unwrap().is_empty());
}

#[test]
fn weights_that_are_not_finite_are_not_saved() {
    let scratch = Scratch::new("overflow");
    let config = config(&scratch, 2);
    let mut session = tiny::session(tiny::mesh(1, 2), 1, SAMPLES);
    session.init_weights(1, &|_, _| crate::init::Init::Normal { std: 1.0, zero_row: None });
    let state =
        RunState::new(&config, &identity(), session.classes().samples(Phase::Step).unwrap());
    let store = Store::new(&config.out.join(CHECKPOINTS), None);
    save(&session, &store, 1, &state).unwrap();
    // The last element, which is on the last rank.
    let mut put = |block: &[std::ops::Range<usize>], _| {
        let value = |i| if i == tiny::SEQ - 1 { f32::INFINITY } else { 1.0 };
        Ok::<_, ()>(block[0].clone().flat_map(|i| value(i).to_le_bytes()).collect())
    };
    assert_eq!(session.write_weight("w", Part::State(0), &mut put), Ok(true));
    let Err(Failure::Input(found)) = save(&session, &store, 2, &state) else {
        panic!("it is saved")
    };
    assert_eq!(found[0].code, "E4054");
    let place = "the first value that is not finite is in `w/state0` on rank 1, before the step";
    assert_eq!(found[0].notes[0], place);
    assert_eq!(store.steps().unwrap(), [1]);
}

#[test]
fn a_spike_ends_the_run_where_it_is_asked_to() {
    let scratch = Scratch::new("spike");
    let progress = Progress {
        step: 20,
        steps: 30,
        loss: 9.0,
        grad_norm: 1.0,
        rate: 0.1,
        tokens_per_s: 1.0,
        step_s: 1.0,
        predicted_step_s: None,
        validation: None,
        spike: Some(8.25),
        loss_scale: None,
        skipped: None,
        slow: None,
        ranks: Vec::new(),
    };
    let config = config(&scratch, 30);
    assert!(check_spike(&config, &progress).is_ok());
    let stopping = Config { on_spike: OnSpike::Stop, ..config };
    let wrong = check_spike(&stopping, &progress).unwrap_err();
    assert_eq!(wrong.code, "E4053");
    assert!(wrong.headline.contains("step 20 is 9.0000, 8.2 standard"), "{}", wrong.headline);
    assert!(check_spike(&stopping, &Progress { spike: None, ..progress }).is_ok());
}

#[test]
fn a_run_whose_step_is_abandoned_keeps_the_step_before() {
    let (scratch, other) = (Scratch::new("abandoned"), Scratch::new("finished"));
    let config = Config { checkpoint_every: None, ..config(&scratch, 1_000_000) };
    let mut session = tiny::session(tiny::mesh(2, 2), 1, SAMPLES / 2);
    session
        .init_weights(config.seed, &|_, _| crate::init::Init::Normal { std: 1.0, zero_row: None });
    let batches = corpus().batches(u64::from(config.seed), tiny::SEQ, SAMPLES).unwrap();
    let abandon = session.abandon();
    let seen = Cell::new(0);
    let outcome = std::thread::scope(|scope| {
        let mut run = Run {
            since: Instant::now(),
            config: &config,
            batches: &batches,
            identity: &identity(),
            stop: &|| false,
            progress: &mut |progress| {
                if progress.step == 3 {
                    let abandon = abandon.clone();
                    scope.spawn(move || abandon.now());
                }
                seen.set(progress.step);
            },
        };
        train(&mut session, &mut run, None)
    });
    let Ok(Outcome::Interrupted(summary)) = outcome else { panic!("{outcome:?}") };
    let steps = summary.steps;
    assert!(steps >= 3 && steps == seen.get(), "{steps}");
    assert!(summary.checkpoint.unwrap().ends_with(format!("step-{steps}")));
    let straight = Config { out: other.join("run"), steps, ..config };
    assert_eq!(tensors(&session), tensors(&run((2, 2), &straight, u64::MAX, false).0));
}

#[test]
fn scalars_follow_schedule_and_optimizer() {
    let scratch = Scratch::new("scalars");
    let mut config = config(&scratch, 3);
    let first = Guard::new(&config).scalars(&config, 1);
    assert_eq!((first.rate, first.correction1, first.correction2), (0.005, 0.5, 0.25));
    assert_eq!((first.seed, first.step, first.clip), (3, 1, 1.0));
    config.optimizer = Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 };
    config.clip = None;
    let later = Guard::new(&config).scalars(&config, 3);
    assert_eq!((later.rate, later.correction1, later.clip), (0.01, 1.0, f64::INFINITY));
}

/// Numbers that are not finite once are skipped where that is asked for; where they stay, the run
/// ends as the outside world's fault.
#[test]
fn what_stays_not_finite_ends_the_run_after_some_skips() {
    let scratch = Scratch::new("stays");
    let config = Config {
        schedule: Schedule::constant(1e30, 0),
        on_spike: OnSpike::Skip,
        ..config(&scratch, 99)
    };
    let (_, outcome) = run((1, 2), &config, u64::MAX, false);
    let Err(Failure::Input(found)) = outcome else { panic!("{outcome:?}") };
    assert_eq!(found[0].code, "E4055");
    assert!(found[0].headline.starts_with("step 26 has a loss of "), "{}", found[0].headline);
    assert!(
        found[0].notes[0].starts_with("24 steps in a row were skipped"),
        "{:?}",
        found[0].notes
    );
}

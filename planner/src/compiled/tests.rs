use codegen::prepare::prepare_training;
use ir::DType;
use ir::diagnostic::render;
use ir::import::{Options, import, read_config};
use ir::plan::Offload;

use super::*;
use crate::machine::Machine;

pub(crate) fn module(layers: usize) -> Module {
    module_of(layers, 33)
}

fn module_of(layers: usize, seq: usize) -> Module {
    let config = format!(
        r#"{{"model_type": "gpt2", "vocab_size": 259, "n_positions": 64, "n_embd": 48,
            "n_layer": {layers}, "n_head": 4, "resid_pdrop": 0, "embd_pdrop": 0,
            "attn_pdrop": 0}}"#
    );
    described(&config, seq)
}

/// Six experts in each of two layers.
fn routed() -> Module {
    let config = r#"{"model_type": "mixtral", "vocab_size": 259, "max_position_embeddings": 64,
        "num_hidden_layers": 2, "hidden_size": 24, "intermediate_size": 36,
        "num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 6}"#;
    described(config, 33)
}

fn described(config: &str, seq: usize) -> Module {
    let description = read_config("config.json", config, "small").unwrap();
    let options = Options { seq, dtype: DType::F32, dropout: None, documents: false };
    prepare_training(import(&description, &options).unwrap().module, "loss").unwrap()
}

pub(crate) fn cluster(memory_bytes: u64) -> Cluster {
    let machine = Machine { cores: 4, memory_bytes, instruction_set: "avx2".into() };
    Cluster::load_on("cpu-local", &machine).unwrap()
}

pub(crate) fn job<'a>(module: &'a Module, cluster: &'a Cluster, ranks: usize) -> Job<'a> {
    Job {
        module,
        entry: "loss",
        model: "small".into(),
        cluster,
        ranks,
        global_batch_size: 4,
        seq: 33,
        precision: ir::precision::Precision::uniform(DType::F32),
        optimizer: Optimizer::AdamW {
            beta1: 0.9,
            beta2: 0.95,
            eps: 1e-8,
            decay: 0.1,
            decay_biases: 0.0,
        },
        clip: Some(1.0),
        lora: None,
        limits: Limits::default(),
        evaluations_max: usize::MAX,
    }
}

/// The job with all values in memory.
fn in_memory(job: Job<'_>) -> Job<'_> {
    Job { limits: Limits::parse(&[], &["offload".to_owned()], &[]).unwrap(), ..job }
}

#[test]
fn infeasible_is_explained_with_numbers() {
    let module = module(3);
    let cluster = cluster(2 << 20);
    let diagnostic = search(&in_memory(job(&module, &cluster, 2))).unwrap_err();
    let text = ir::diagnostic::render(&diagnostic, None);
    assert_eq!(diagnostic.code, "E3201");
    assert!(text.contains("of 2.0 MiB") && text.contains("optimizer state"), "{text}");
}

#[test]
fn without_an_update_there_is_no_state_and_no_time_for_it() {
    let module = module(2);
    let cluster = cluster(1 << 30);
    let mut job = job(&module, &cluster, 2);
    let mut found = |optimizer| {
        job.optimizer = optimizer;
        search(&job).unwrap()
    };
    let none = found(Optimizer::None);
    let sgd = found(Optimizer::Sgd { decay: 0.0, decay_biases: 0.0 });
    assert!(none.best.footprints.iter().all(|f| f.states == 0 && f.grads > 0));
    assert!(none.best.time.breakdown.update_s < sgd.best.time.breakdown.update_s);
    assert_eq!(ir::text::parse_plan("printed", &none.plan.to_string()), Ok(none.plan));
}

#[test]
fn limits_hold() {
    let module = module(3);
    let cluster = cluster(1 << 30);
    let mut job = job(&module, &cluster, 4);
    job.limits = Limits::parse(&["pp=2".into()], &["tp".into()], &["mbs=1".into()]).unwrap();
    let plan = search(&job).unwrap().plan;
    assert_eq!((plan.mesh.pp, plan.mesh.dp, plan.microbatch_size), (2, 2, 1));
    assert_eq!(plan.global_batch_size(), 4);
    job.global_batch_size = 3;
    job.limits = Limits::parse(&["dp=2".into()], &[], &[]).unwrap();
    assert_eq!(search(&job).unwrap_err().code, "E3203");
}

/// A job that fixes what is offloaded compiles each candidate once at most.
#[test]
fn what_is_offloaded_may_be_fixed() {
    let (module, cluster) = (module(2), cluster(1 << 30));
    for (fixed, candidates) in [("mbs=4,keep=full,dp=1,pp=1", 1..=1), ("pp=1", 2..=1000)] {
        let usual = "offload-parameters=device,offload-activations=device";
        let fixed = format!("offload-optimizer=disk,{usual},{fixed}");
        let fixed: Vec<String> = fixed.split(',').map(str::to_owned).collect();
        let limits = Limits::parse(&fixed, &[], &[]).unwrap();
        let found = search(&Job { limits, ..job(&module, &cluster, 1) }).unwrap();
        assert_eq!(found.plan.offload.optimizer, ir::plan::Place::Disk);
        assert!(candidates.contains(&found.candidate_count), "{}", found.candidate_count);
        assert_eq!(found.bounded_out + found.evaluated.len(), found.candidate_count);
        let mut once: Vec<&Candidate> = found.evaluated.iter().map(|s| &s.candidate).collect();
        once.sort();
        once.dedup();
        assert_eq!(once.len(), found.evaluated.len());
    }
}

#[test]
fn ranks_that_a_model_cannot_use_are_refused() {
    let module = module(3);
    let cluster = cluster(1 << 30);
    let mut job = job(&module, &cluster, 1);
    // Three blocks, what is before and after them, and four heads.
    let usable = Usable::of(&job).unwrap();
    assert_eq!((usable.stages, usable.tensor), (5, 4));
    let can = |ranks: usize| {
        let divides = |n: usize, of: usize| of.is_multiple_of(n);
        let pp = (1..=5).filter(|pp| divides(*pp, ranks));
        let mut tp = pp.flat_map(|pp| {
            (1..=4).filter(move |tp| divides(pp * tp, ranks)).map(move |tp| ranks / pp / tp)
        });
        tp.any(|dp| divides(dp, 4))
    };
    for ranks in 1..=100 {
        job.ranks = ranks;
        let refused = usable.check(&job);
        assert_eq!(refused.is_ok(), can(ranks), "{ranks} ranks");
        if let Err(diagnostic) = refused {
            let help = diagnostic.help.unwrap();
            let suggested =
                help.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
            let suggested: Vec<usize> = suggested.collect();
            let nearest: Vec<usize> = (1..ranks).rev().filter(|n| can(*n)).take(3).collect();
            assert_eq!((diagnostic.code, suggested), ("E3204", nearest), "{ranks} ranks: {help}");
        }
    }
    for ranks in [257, 521, 1021] {
        job.ranks = ranks;
        assert_eq!(search(&job).unwrap_err().code, "E3204");
        assert_eq!(crate::fit::fit(&job).unwrap_err().code, "E3204");
    }
}

#[test]
fn every_mesh_compiles_into_a_legal_plan() {
    let models = [
        ("gpt2", crate::shard::tests::gpt2(&crate::shard::tests::config(9, 36, 259, 0.1), 33)),
        ("llama", crate::shard::tests::llama(9, 3, 259, 33)),
        ("llama", crate::shard::tests::llama(8, 4, 64, 33)),
    ];
    let cluster = cluster(1 << 30);
    for (name, module) in &models {
        for (pp, dp, tp) in [(1, 1, 1), (2, 2, 1), (1, 2, 2), (2, 1, 3), (4, 1, 2), (1, 1, 8)] {
            for (sequence, keep) in [(0, 0), (1, 1)] {
                let mut job = job(module, &cluster, pp * dp * tp);
                let fixed = [
                    (Decision::Pp, pp),
                    (Decision::Tp, tp),
                    (Decision::Keep, keep),
                    (Decision::Mbs, 1),
                ];
                fixed.into_iter().for_each(|(decision, number)| job.limits.fix(decision, number));
                job.limits.fix(Decision::Sp, if tp > 1 { sequence } else { 0 });
                let found = search(&job);
                let found =
                    found.unwrap_or_else(|d| panic!("{}", ir::diagnostic::render(&d, None)));
                let wrong = crate::check::check(module, "loss", &found.plan, &cluster);
                let wrong: String = wrong.iter().map(|d| ir::diagnostic::render(d, None)).collect();
                assert!(wrong.is_empty(), "{name} {}:\n{wrong}", found.best.name);
                let text = found.plan.to_string();
                assert_eq!(ir::text::parse_plan("printed", &text).as_ref(), Ok(&found.plan));
            }
        }
    }
}

mod slow {
    use super::*;

    mod clusters;

    /// Compiles all candidates of a job, each of which takes no less than its bound, and as long as
    /// its layers say; returns them, and the time of the fastest that fits.
    fn tried(job: &Job<'_>) -> (Vec<Candidate>, f64) {
        let mut table = LayerTable::new(job).unwrap();
        let [usual, others] = offloads(job);
        let lacks_memory = job.cluster.device.memory_bytes.value < 1e8;
        let placed = if lacks_memory { [usual, others].concat() } else { usual };
        let (all, _) = candidates(job, &mut table, &placed).unwrap();
        let mut least = f64::INFINITY;
        for (candidate, bound) in &all {
            let plan = table.plan(candidate).unwrap();
            let scored = table.score(&plan, candidate).unwrap();
            let seconds = scored.time.seconds;
            assert!(bound.seconds <= seconds * (1.0 + ROUNDING), "{candidate:?}");
            assert!(bound.need <= scored.need.0, "{candidate:?}");
            let timed = table.seconds(candidate).unwrap();
            assert!((timed - seconds).abs() <= ROUNDING * seconds, "{candidate:?}: {timed}");
            let sum = scored.time.breakdown.total();
            assert!((sum - scored.time.seconds).abs() <= 1e-9 * sum, "{candidate:?}: {scored:?}");
            if scored.fits() {
                least = least.min(scored.time.seconds);
            }
        }
        (all.into_iter().map(|(candidate, _)| candidate).collect(), least)
    }

    #[test]
    fn the_answer_is_that_of_trying_all() {
        let module = module(3);
        for (ranks, memory) in [(1, 1 << 30), (2, 1 << 30), (4, 1 << 30), (4, 12 << 20)] {
            let cluster = cluster(memory);
            let job = in_memory(job(&module, &cluster, ranks));
            let (_, least) = tried(&job);
            match search(&job) {
                Ok(found) => {
                    assert_eq!(found.best.time.seconds, least, "on {ranks} ranks");
                }
                Err(_) => assert_eq!(least, f64::INFINITY, "on {ranks} ranks"),
            }
        }
    }

    /// Where memory is lacking, what lies on a disk makes room.
    #[test]
    fn values_are_placed_on_a_disk_where_memory_is_lacking() {
        let module = module(3);
        let mut placed = BTreeSet::new();
        for (ranks, kib) in [(1, 3_500), (1, 2_600), (2, 5_000)] {
            let cluster = cluster(kib << 10);
            let job = job(&module, &cluster, ranks);
            let (_, least) = tried(&job);
            let found = search(&job).unwrap_or_else(|d| panic!("{}", render(&d, None)));
            assert_eq!(found.best.time.seconds, least, "{kib} KiB: {}", found.best.name);
            let without = search(&in_memory(job));
            let without = without.map_or(f64::INFINITY, |found| found.best.time.seconds);
            assert!(without >= least, "{kib} KiB");
            placed.insert(found.plan.offload);
            let text = found.plan.to_string();
            assert_eq!(ir::text::parse_plan("printed", &text), Ok(found.plan));
        }
        assert!(placed.iter().any(|offload| *offload != Offload::default()), "{placed:?}");
    }

    /// Ranks share experts in every number that divides these, and the answer is the best of all.
    #[test]
    fn ranks_share_experts() {
        let module = routed();
        for (ranks, memory) in [(2, 1 << 30), (4, 1 << 30), (4, 6 << 20)] {
            let cluster = cluster(memory);
            let job = in_memory(job(&module, &cluster, ranks));
            let (all, least) = tried(&job);
            let shares = |ep: usize| all.iter().any(|candidate| candidate.experts.ep == ep);
            assert!(shares(1) && shares(2) && !shares(4), "4 ranks do not divide 6 experts");
            let found = search(&job).map(|found| found.best.time.seconds);
            assert_eq!(found.unwrap_or(f64::INFINITY), least, "on {ranks} ranks");
        }
    }

    /// Ranks that are too many to have samples of their own share tokens, and others where they are
    /// told to.
    #[test]
    fn ranks_without_samples_share_tokens() {
        let module = module_of(2, 32);
        let cluster = cluster(1 << 30);
        let all = |samples: usize, fixed: Option<usize>| {
            let mut job = Job { global_batch_size: samples, seq: 32, ..job(&module, &cluster, 4) };
            fixed.iter().for_each(|cp| job.limits.fix(Decision::Cp, *cp));
            let (all, least) = tried(&job);
            assert_eq!(search(&job).unwrap().best.time.seconds, least, "{samples} samples");
            let mut shared: Vec<usize> = all.iter().map(|candidate| candidate.mesh.cp).collect();
            shared.sort_unstable();
            shared.dedup();
            shared
        };
        assert_eq!(all(1, None), [1, 2, 4]);
        assert_eq!(all(4, None), [1]);
        assert_eq!(all(4, Some(2)), [2]);
        let three = Job { seq: 33, ..job(&module, &cluster, 4) };
        let mut limits = three.limits.clone();
        limits.fix(Decision::Cp, 2);
        let wrong = search(&Job { limits, ..three }).unwrap_err();
        assert_eq!(wrong.code, "E3204", "{wrong:?}");
        assert_eq!(wrong.headline, "33 tokens are not 4 equal pieces");
    }
}

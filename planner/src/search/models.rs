//! Published shapes of transformers, by name: what can be planned for without a file.

use ir::import::{Architecture, BertSizes, Sizes, T5Sizes, nearest, preset, presets};

use crate::estimate::workload::family::family_shape;
use crate::estimate::workload::{LowRank, Routed, Shape};

const TABLE: &str = include_str!("../preset/models.csv");
const ENCODERS: &str = include_str!("../preset/encoders.csv");

/// Attention of DeepSeek-AI 2024, whose sizes all models that have it share.
pub(crate) const LOW_RANK: LowRank =
    LowRank { q_rank: 1536, kv_rank: 512, plain_dim: 128, rope_dim: 64, v_dim: 128 };

/// What is published under a name.
#[derive(Clone, Debug, PartialEq)]
pub enum Published {
    /// The shape of a decoder, and what it leaves out.
    Shape(Shape, Option<&'static str>),
    /// The sizes of a model with an encoder.
    Sizes(Sizes),
}

/// Rows of a table, without its comments and its header.
fn rows_of(table: &'static str) -> impl Iterator<Item = Vec<&'static str>> {
    let lines = table.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.map(|line| line.split(',').collect())
}

fn rows() -> impl Iterator<Item = Vec<&'static str>> {
    rows_of(TABLE)
}

/// The names of all shapes of decoders, presets and other names included.
pub fn names() -> impl Iterator<Item = &'static str> {
    let names = rows().flat_map(|row| [row[0], row[1]]).filter(|name| !name.is_empty());
    presets().chain(names)
}

/// The names of all models, each once.
pub fn first_names() -> impl Iterator<Item = &'static str> {
    rows().chain(rows_of(ENCODERS)).map(|row| row[0])
}

/// What is published under a name, of models that are not built.
pub fn published(name: &str) -> Option<Published> {
    let decoder = row(name).map(|row| {
        let unpriced = row.get(19).copied().filter(|text| !text.is_empty());
        Published::Shape(shape_of(&row, name), unpriced)
    });
    decoder.or_else(|| sizes(name).map(Published::Sizes))
}

fn row(name: &str) -> Option<Vec<&'static str>> {
    rows().find(|row| row[0] == name || (!name.is_empty() && row[1] == name))
}

/// The sizes of a model with an encoder.
fn sizes(name: &str) -> Option<Sizes> {
    let is_named = |row: &Vec<&str>| row[0] == name || (!name.is_empty() && row[1] == name);
    let row = rows_of(ENCODERS).find(is_named)?;
    let number =
        |column: usize| row[column].parse::<usize>().expect("the table holds whole numbers");
    let (layers, model, heads, inner) = (number(3), number(4), number(5), number(7));
    let (vocab, positions) = (number(9), number(10));
    Some(match row[2] {
        "bert" => {
            let (segments, follows) = (2, true);
            Sizes::Bert(BertSizes {
                vocab,
                positions,
                segments,
                model,
                layers,
                heads,
                inner,
                follows,
            })
        }
        _ => Sizes::T5(T5Sizes {
            vocab,
            positions,
            buckets: 32,
            model,
            encoders: layers,
            decoders: layers,
            heads,
            head_size: number(6),
            inner,
            gated: number(8) == 1,
            tied: number(11) == 1,
        }),
    })
}

/// The shape of a decoder: of a preset, with the longest sequence that it was made for, or of a
/// published shape, with the sequence that it was published with.
pub fn shape(name: &str) -> Option<Shape> {
    match preset(name).map(|preset| preset.architecture) {
        Some(Architecture::Family(model)) => Some(family_shape(name.to_owned(), &model)),
        Some(Architecture::Graph(_) | Architecture::Sized(_)) | None => {
            row(name).map(|row| shape_of(&row, name))
        }
    }
}

fn shape_of(row: &[&str], name: &str) -> Shape {
    let number = |column: usize| row[column].parse::<u32>().expect("the table holds whole numbers");
    let is = |column: usize| number(column) == 1;
    let routed = Routed {
        experts: number(12),
        top_k: number(13),
        ffn: number(14),
        shared_ffn: number(15),
        dense_layers: number(16),
    };
    Shape {
        name: name.to_owned(),
        layers: number(2),
        hidden: number(3),
        heads: number(4),
        kv_heads: number(5),
        head_dim: number(6),
        ffn: number(7),
        gated: is(8),
        vocab: number(9),
        seq: number(10),
        positions: if is(8) { 0 } else { number(10) },
        causal: true,
        biases: !is(8),
        tied: is(11),
        routed: (routed.experts > 0).then_some(routed),
        head_norm: 0,
        low_rank: None,
    }
}

/// The name that was perhaps meant.
pub fn near(name: &str) -> Option<&'static str> {
    let encoders = rows_of(ENCODERS).flat_map(|row| [row[0], row[1]]);
    nearest(name, names().chain(encoders.filter(|name| !name.is_empty())))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::estimate::described::described;

    /// Each model of a published run is known by the name that the run's source gives it.
    #[test]
    fn models_of_measured_runs_are_known() {
        let text = include_str!("../../tests/measured_models.csv");
        for line in text.lines().filter(|line| !line.starts_with('#')).skip(1) {
            let [name, preset, billions] = line.split(',').collect::<Vec<_>>()[..] else {
                panic!("{line}")
            };
            let work = described(preset, None).unwrap_or_else(|wrong| panic!("{name}: {wrong:?}"));
            let ratio = work.work.parameters() as f64 / 1e9 / billions.parse::<f64>().unwrap();
            assert!((0.89..1.19).contains(&ratio), "{name}: {ratio}");
        }
    }

    /// One name, one model.
    #[test]
    fn no_shape_has_the_name_of_a_preset() {
        let mut known = std::collections::BTreeSet::new();
        let encoders = rows_of(ENCODERS).flat_map(|row| [row[0], row[1]]);
        for name in names().chain(encoders.filter(|name| !name.is_empty())) {
            assert!(known.insert(name), "`{name}` is there twice");
        }
    }

    #[test]
    fn encoders_have_the_parameters_that_are_published() {
        for row in rows_of(ENCODERS) {
            let work = described(row[0], None).unwrap().work;
            let ratio = work.parameters() as f64 / 1e9 / row[12].parse::<f64>().unwrap();
            assert!((ratio - 1.0).abs() < 0.15, "{}: {ratio}", row[0]);
        }
    }

    /// The closed form of latent attention and of layers of two kinds has the parameters of the
    /// module, but for the corrections of routers; also where queries are not compressed.
    #[test]
    fn latent_attention_has_the_parameters_of_its_module() {
        for (name, corrections) in [
            ("deepseek-v2-lite", 0),
            ("deepseek-v2", 0),
            ("deepseek-v3", 58 * 256),
            ("kimi-k2", 60 * 384),
        ] {
            let shape = shape(name).unwrap();
            assert!(shape.low_rank.is_some() && shape.routed.is_some_and(|r| r.dense_layers > 0));
            let module = described(name, None).unwrap().work.parameters();
            assert_eq!(shape.workload().unwrap().parameters() + corrections, module, "{name}");
        }
    }

    /// What is published counts sometimes without embeddings and always rounded.
    #[test]
    fn shapes_have_the_parameters_that_are_published() {
        let mut off = Vec::new();
        for row in rows() {
            assert_eq!(row.len(), 20, "{row:?}");
            let published: f64 = row[17].parse().unwrap();
            let work = shape(row[0]).unwrap().workload().unwrap();
            let ratio = work.parameters() as f64 / 1e9 / published;
            if (ratio - 1.0).abs() > 0.02 {
                off.push((row[0], (ratio * 1000.0).round() / 1000.0));
            }
        }
        assert!(off.len() <= 12, "{off:?}");
        assert!(off.iter().all(|(_, ratio)| (0.9..1.2).contains(ratio)), "{off:?}");
    }
}

//! Published shapes of transformers, by name: what can be planned for without a file.

use ir::import::nearest;

use crate::estimate::workload::{LowRank, Routed, Shape};

const TABLE: &str = include_str!("../preset/models.csv");

/// Attention of DeepSeek-AI 2024, whose sizes all models that have it share.
pub(crate) const LOW_RANK: LowRank =
    LowRank { q_rank: 1536, kv_rank: 512, plain_dim: 128, rope_dim: 64, v_dim: 128 };

/// Rows of the table, without its comments and its header.
fn rows() -> impl Iterator<Item = Vec<&'static str>> {
    let lines = TABLE.lines().filter(|line| !line.starts_with('#')).skip(1);
    lines.map(|line| line.split(',').collect())
}

/// The names of all shapes, other names included.
pub fn names() -> impl Iterator<Item = &'static str> {
    rows().flat_map(|row| [row[0], row[1]]).filter(|name| !name.is_empty())
}

/// The shape of a name, with the sequence that it was published with.
pub fn shape(name: &str) -> Option<Shape> {
    let row = rows().find(|row| row[0] == name || (!name.is_empty() && row[1] == name))?;
    let number = |column: usize| row[column].parse::<u32>().expect("the table holds whole numbers");
    let is = |column: usize| number(column) == 1;
    let routed = Routed {
        experts: number(12),
        top_k: number(13),
        ffn: number(14),
        shared_ffn: number(15),
        dense_layers: number(16),
    };
    Some(Shape {
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
        causal: true,
        biases: !is(8),
        tied: is(11),
        routed: (routed.experts > 0).then_some(routed),
        low_rank: is(17).then_some(LOW_RANK),
    })
}

/// The name that was perhaps meant.
pub fn near(name: &str) -> Option<&'static str> {
    nearest(name, names())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What is published counts sometimes without embeddings and always rounded.
    #[test]
    fn shapes_have_the_parameters_that_are_published() {
        let mut off = Vec::new();
        for row in rows() {
            assert_eq!(row.len(), 20, "{row:?}");
            let published: f64 = row[18].parse().unwrap();
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

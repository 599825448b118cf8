//! What the work of a transformer is, against formulas and published counts.

use super::*;

fn gpt3() -> Shape {
    Shape {
        name: "gpt3-175b".into(),
        layers: 96,
        hidden: 12288,
        heads: 96,
        kv_heads: 96,
        head_dim: 128,
        ffn: 4 * 12288,
        gated: false,
        vocab: 51200,
        seq: 2048,
        positions: 2048,
        causal: false,
        biases: true,
        tied: true,
        routed: None,
        head_norm: 0,
        low_rank: None,
    }
}

/// Narayanan et al. 2021, equations 2 and 3: `P = 12 l h² (1 + 13/(12h) + (V+s)/(12lh))` and
/// `F = 72 B s l h² (1 + s/(6h) + V/(12 l h))`, without recomputation.
#[test]
fn parameters_and_operations_are_those_of_the_formulas() {
    let work = gpt3().workload().unwrap();
    let (l, h, s, v) = (96.0, 12288.0, 2048.0, 51200.0);
    let expected = 12.0 * l * h * h * (1.0 + 13.0 / (12.0 * h) + (v + s) / (12.0 * l * h));
    // The final norm is not in the formula.
    assert!((work.parameters() as f64 - expected - 2.0 * h).abs() < 0.5);
    let flops = 72.0 * l * h * h * (1.0 + s / (6.0 * h) + v / (12.0 * l * h));
    assert!((work.flops_per_token() / flops - 1.0).abs() < 1e-12);
}

#[test]
fn published_parameter_counts_are_met() {
    let llama = Shape {
        name: "llama-3-70b".into(),
        layers: 80,
        hidden: 8192,
        heads: 64,
        kv_heads: 8,
        head_dim: 128,
        ffn: 28672,
        gated: true,
        vocab: 128_256,
        seq: 8192,
        positions: 0,
        causal: true,
        biases: false,
        tied: false,
        routed: None,
        head_norm: 0,
        low_rank: None,
    };
    assert_eq!(llama.workload().unwrap().parameters(), 70_553_706_496);
    let routed = Routed { experts: 256, top_k: 8, ffn: 2048, shared_ffn: 2048, dense_layers: 3 };
    let low_rank = LowRank { q_rank: 1536, kv_rank: 512, plain_dim: 128, rope_dim: 64, v_dim: 128 };
    let deepseek = Shape {
        layers: 61,
        hidden: 7168,
        heads: 128,
        kv_heads: 128,
        ffn: 18432,
        vocab: 129_280,
        routed: Some(routed),
        head_norm: 0,
        low_rank: Some(low_rank),
        ..llama
    };
    let billions = deepseek.workload().unwrap().parameters() as f64 / 1e9;
    assert!((billions - 671.0).abs() < 1.0, "{billions}");
}

#[test]
fn impossible_shapes_are_refused() {
    let shape = Shape { layers: 0, kv_heads: 7, ..gpt3() };
    assert_eq!(shape.workload().unwrap_err().len(), 2);
    let routed = Routed { experts: 8, top_k: 2, ffn: 1024, shared_ffn: 0, dense_layers: 0 };
    let of = |ffn, routed| Shape { ffn, routed, ..gpt3() };
    // Dense layers have a width inside; where all are routed there is none.
    assert!(of(0, Some(routed)).workload().is_ok());
    let refused = [
        of(0, None),
        of(0, Some(Routed { dense_layers: 1, ..routed })),
        of(4, Some(Routed { top_k: 9, ..routed })),
        of(4, Some(Routed { top_k: 0, ..routed })),
        of(4, Some(Routed { experts: 0, ..routed })),
    ];
    for shape in refused {
        let wrong = shape.workload().unwrap_err();
        assert_eq!((wrong.len(), wrong[0].code), (1, "E3403"), "{shape:?}: {wrong:?}");
    }
}

/// A token of Mixtral 8x7B meets the router's 8 columns and three products of each of two experts;
/// DeepSeek-V3 rotates 64 elements of each of 128 queries, and one key that all heads share.
#[test]
fn routers_and_shared_keys_count() {
    let (width, ffn) = (4096, 14336);
    let experts = Item::Experts { count: 8, top_k: 2, width, ffn, gated: true, busiest: 1.0 };
    let expected = 2.0 * 4096.0 * 8.0 + 2.0 * 3.0 * 2.0 * 4096.0 * 14336.0;
    assert_eq!(experts.forward_flops(2048), expected);
    let work = crate::search::models::shape("deepseek-v3").unwrap().workload().unwrap();
    let rotated = |layer: &Layer| {
        let widths = layer.items.iter().filter_map(|item| {
            let Item::Rope { width } = item else { return None };
            Some(*width)
        });
        widths.sum::<u32>()
    };
    assert!(work.layers.iter().all(|layer| rotated(layer) == 128 * 64 + 64), "{work:?}");
}

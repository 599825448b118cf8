//! Blocks of weights against the whole tensor, and files that do not fit.

#![allow(clippy::single_range_in_vec_init)]

use std::convert::Infallible;

use ir::import::{Init, Source};

use super::*;
use crate::scratch::Scratch;

fn weight(
    name: &str,
    dims: &[usize],
    tensor: &str,
    of: &[usize],
    part: Option<Range<usize>>,
) -> Weight {
    let names = vec![format!("model.{tensor}"), tensor.to_owned()];
    let (width, rows) = (of[of.len() - 1], of[..of.len() - 1].iter().product());
    let source = match part {
        None => Source::whole(names, of.to_vec()),
        Some(part) => {
            Source::view(names, of.to_vec(), part.start, [(rows, width), (part.len(), 1)])
        }
    };
    Weight {
        name: name.into(),
        dims: dims.to_vec(),
        init: Init::Zeros,
        source,
        layer: None,
        frozen: false,
    }
}

/// `qkv [3, 8]`, of which `q [3, 2, 2]` are the first columns; `out [2, 6]`; a buffer.
fn model() -> Vec<Weight> {
    vec![
        weight("q", &[3, 2, 2], "qkv", &[3, 8], Some(0..4)),
        weight("k", &[3, 4], "qkv", &[3, 8], Some(4..8)),
        weight("out", &[2, 3, 2], "out", &[2, 6], None),
    ]
}

fn numbers(count: usize) -> Vec<u8> {
    (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect()
}

fn files(scratch: &Scratch, tensors: &[(&str, &[usize])]) -> Weights {
    let named = tensors.iter().map(|(name, dims)| {
        let bytes = numbers(dims.iter().product());
        let values = Values { dtype: DType::F32, dims: dims.to_vec(), bytes };
        Named { name: (*name).to_owned(), values }
    });
    let path = scratch.join("m.safetensors");
    write_named(&path, &named.collect::<Vec<_>>()).unwrap();
    Weights::open(&path).unwrap()
}

fn read(weight: &Weight, files: &Weights, block: &[Range<usize>]) -> Vec<f64> {
    let bytes = read_weight(weight, files, block, DType::F64).unwrap();
    bytes.as_chunks().0.iter().map(|&b| f64::from_le_bytes(b)).collect()
}

#[test]
fn blocks_come_from_their_columns() {
    let scratch = Scratch::new("load");
    let files = files(&scratch, &[("model.qkv", &[3, 8]), ("out", &[2, 6])]);
    let model = model();
    assert_eq!(check_weights(&model, &files), []);
    let q = [0.0, 1.0, 2.0, 3.0, 8.0, 9.0, 10.0, 11.0, 16.0, 17.0, 18.0, 19.0];
    assert_eq!(read(&model[0], &files, &[0..3, 0..2, 0..2]), q);
    assert_eq!(read(&model[0], &files, &[1..3, 1..2, 0..2]), [10.0, 11.0, 18.0, 19.0]);
    assert_eq!(read(&model[1], &files, &[1..2, 0..4]), [12.0, 13.0, 14.0, 15.0]);
    assert_eq!(read(&model[2], &files, &[0..2, 1..2, 1..2]), [3.0, 9.0]);
    assert_eq!(read(&model[2], &files, &[1..2, 0..3, 0..2]), [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]);
}

#[test]
fn what_was_taken_apart_is_joined_again() {
    let scratch = Scratch::new("load");
    let files = files(&scratch, &[("qkv", &[3, 8]), ("model.out", &[2, 6])]);
    let mut values = |weight: &Weight| {
        let block = block::whole(&weight.dims);
        let bytes = read_weight(weight, &files, &block, DType::F32).unwrap();
        Ok::<_, Infallible>(Values { dtype: DType::F32, dims: weight.dims.clone(), bytes })
    };
    let Ok(joined) = join_weights(&model(), &mut values);
    let names: Vec<&str> = joined.iter().map(|tensor| tensor.name.as_str()).collect();
    assert_eq!(names, ["model.qkv", "model.out"]);
    assert_eq!(joined[0].values.dims, [3, 8]);
    assert_eq!(joined[0].values.bytes, numbers(24));
    assert_eq!(joined[1].values.bytes, numbers(12));
}

#[test]
fn files_that_do_not_fit_are_refused() {
    let check = |tensors: &[(&str, &[usize])]| -> Vec<String> {
        let scratch = Scratch::new("load");
        let wrong = check_weights(&model(), &files(&scratch, tensors));
        wrong
            .iter()
            .map(|d| format!("{} {} ({})", d.code, d.headline, d.notes.join("; ")))
            .collect()
    };
    assert_eq!(
        check(&[("qkv", &[3, 8]), ("h.0.attn.bias", &[1])]),
        ["E4006 no tensor `model.out` in the weights (nor is there `out`; there are 2 others)"]
    );
    assert_eq!(
        check(&[("model.qkv", &[3, 9]), ("out", &[2, 6])]),
        ["E4007 tensor `model.qkv` is [3, 9], and the model has [3, 8] \
          (it is the weight `q` of the model)"]
    );
    // A layer that predicts further is left out.
    let further: [(&str, &[usize]); 2] =
        [("model.layers.2.eh_proj.weight", &[2, 4]), ("model.layers.2.mlp.gate.weight", &[2, 2])];
    let fits: [(&str, &[usize]); 2] = [("qkv", &[3, 8]), ("out", &[2, 6])];
    assert_eq!(check(&[&fits[..], &further].concat()), [""; 0]);
    assert_eq!(check(&[&fits[..], &further[1..]].concat()).len(), 1);
    assert_eq!(
        check(&[("qkv", &[3, 8]), ("out", &[2, 6]), ("more", &[5])]),
        ["E4008 tensor `more` belongs to no weight of the model \
          (the model has 36 parameters; these are 5 more)"]
    );
    assert_eq!(
        check(&[("qkv", &[3, 8]), ("out", &[2, 6]), ("more", &[5]), ("rest.a", &[1])]),
        ["E4008 2 tensors belong to no weight of the model, the first is `more` \
          (they are `more`, `rest.a`; the model has 36 parameters; these are 6 more)"]
    );
}

/// A tied weight that a checkpoint has twice: equal copies are one, others are told.
#[test]
fn tensors_that_would_be_one_have_to_be_equal() {
    let check = |bytes: Vec<u8>, dims: &[usize]| -> Vec<String> {
        let scratch = Scratch::new("load");
        let tensor = |name: &str, dims: &[usize], bytes: Vec<u8>| {
            let values = Values { dtype: DType::F32, dims: dims.to_vec(), bytes };
            Named { name: name.to_owned(), values }
        };
        let tensors = [
            tensor("model.out", &[2, 6], numbers(12)),
            tensor("out", dims, bytes),
            tensor("qkv", &[3, 8], numbers(24)),
        ];
        let path = scratch.join("m.safetensors");
        write_named(&path, &tensors).unwrap();
        let wrong = check_weights(&model(), &Weights::open(&path).unwrap());
        wrong
            .iter()
            .map(|d| format!("{} {} ({})", d.code, d.headline, d.notes.join("; ")))
            .collect()
    };
    assert_eq!(check(numbers(12), &[2, 6]), [""; 0]);
    let mut other = numbers(12);
    other[20] ^= 1;
    let headline = "E4009 tensors `model.out` and `out` differ, and the model has one of them \
                    (both are the weight `out` of the model";
    assert_eq!(check(other, &[2, 6]), [format!("{headline})")]);
    let dims = "; one is [2, 6], the other [12])";
    assert_eq!(check(numbers(12), &[12]), [format!("{headline}{dims}")]);
}

/// Tensors of the given dims: codes where they are called `weight`, else numbers.
fn coded(scratch: &Scratch, tensors: &[(&str, &[usize])]) -> Weights {
    let named = tensors.iter().enumerate().map(|(at, (name, dims))| {
        let count: usize = dims.iter().product();
        let (dtype, bytes) = match name.ends_with("weight") {
            true => (DType::F8E4M3, (0..count).map(|i| (i * 37 + at * 11) as u8 % 120).collect()),
            false => (DType::F32, numbers(count)),
        };
        let values = Values { dtype, dims: dims.to_vec(), bytes };
        Named { name: (*name).to_owned(), values }
    });
    let path = scratch.join("m.safetensors");
    write_named(&path, &named.collect::<Vec<_>>()).unwrap();
    Weights::open(&path).unwrap()
}

fn in_blocks(mut source: Source) -> Source {
    source.scaled = Some([2, 3]);
    source
}

/// Columns of a matrix of codes, and rows of several of them, are their codes times the scales of
/// the blocks that they lie in.
#[test]
fn codes_are_read_with_the_scales_of_their_blocks() {
    let scratch = Scratch::new("load-codes");
    let tensors: [(&str, &[usize]); 7] = [
        ("qkv.weight", &[5, 8]),
        ("qkv.weight_scale_inv", &[3, 3]),
        ("up.0.weight", &[3, 4]),
        ("up.0.weight_scale_inv", &[2, 2]),
        ("up.1.weight", &[3, 4]),
        ("up.1.weight_scale_inv", &[2, 2]),
        ("norm", &[4]),
    ];
    let files = coded(&scratch, &tensors);
    let names = |name: &str| vec![name.to_owned()];
    let scaled = |source: Source, dims: &[usize]| {
        let source = in_blocks(source);
        let (name, dims) = ("w".to_owned(), dims.to_vec());
        Weight { name, dims, init: Init::Zeros, source, layer: None, frozen: false }
    };
    let mut several = Source::view(names("up.{}.weight"), vec![3, 4], 0, [(24, 1)]);
    several.count = 2;
    let all = vec![
        scaled(Source::view(names("qkv.weight"), vec![5, 8], 2, [(5, 8), (4, 1)]), &[5, 4]),
        // Two tensors below each other.
        scaled(several, &[6, 4]),
        scaled(Source::whole(names("norm"), vec![4]), &[4]),
    ];
    let number = |code: u8| ir::formats::decode(DType::F8E4M3, u16::from(code));
    let scale = |row: usize, column: usize, columns: usize| (row / 2 * columns + column / 3) as f64;
    let of_view = (0..20).map(|at| {
        let (row, column) = (at / 4, at % 4 + 2);
        number(((row * 8 + column) * 37) as u8 % 120) * scale(row, column, 3)
    });
    assert_eq!(read(&all[0], &files, &[0..5, 0..4]), of_view.collect::<Vec<_>>());
    let blocks = [[0..5, 1..3], [2..4, 0..4], [4..5, 3..4]];
    let whole = read(&all[0], &files, &[0..5, 0..4]);
    for [rows, columns] in blocks {
        let wanted = rows.clone().flat_map(|r| columns.clone().map(move |c| r * 4 + c));
        let wanted: Vec<f64> = wanted.map(|at| whole[at]).collect();
        assert_eq!(read(&all[0], &files, &[rows, columns]), wanted);
    }
    let of_several = (0..24).map(|at| {
        let (tensor, row, column) = (at / 12, at / 4 % 3, at % 4);
        let code = (row * 4 + column) * 37 + (2 + 2 * tensor) * 11;
        number(code as u8 % 120) * scale(row, column, 2)
    });
    assert_eq!(read(&all[1], &files, &[0..6, 0..4]), of_several.collect::<Vec<_>>());
    assert_eq!(read(&all[2], &files, &[0..4]), [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(check_weights(&all, &files), []);
}

/// Two names of one weight are the same numbers: equal codes have equal scales.
#[test]
fn tied_codes_have_tied_scales() {
    let scratch = Scratch::new("load-tied");
    let names = vec!["a.weight".to_owned(), "b.weight".to_owned()];
    let weight = Weight {
        name: "a".into(),
        dims: vec![2, 3],
        init: Init::Zeros,
        source: in_blocks(Source::whole(names, vec![2, 3])),
        layer: None,
        frozen: false,
    };
    for (scales, wanted) in [([1.5_f32, 1.5], None), ([1.5, 3.0], Some("E4009"))] {
        let named = |name: &str, dtype, dims: &[usize], bytes: Vec<u8>| {
            let values = Values { dtype, dims: dims.to_vec(), bytes };
            Named { name: name.to_owned(), values }
        };
        let both = ["a", "b"].into_iter().zip(scales).flat_map(|(name, scale)| {
            let scale = scale.to_le_bytes().to_vec();
            [
                named(&format!("{name}.weight"), DType::F8E4M3, &[2, 3], vec![40; 6]),
                named(&format!("{name}.weight_scale_inv"), DType::F32, &[1, 1], scale),
            ]
        });
        let path = scratch.join("m.safetensors");
        write_named(&path, &both.collect::<Vec<_>>()).unwrap();
        let wrong = check_weights(std::slice::from_ref(&weight), &Weights::open(&path).unwrap());
        assert_eq!(wrong.first().map(|wrong| wrong.code), wanted, "{scales:?}");
    }
}

/// Codes without their scales, or with those of other blocks, are no weights.
#[test]
fn codes_need_a_scale_for_each_block() {
    let scratch = Scratch::new("load-scales");
    let source = in_blocks(Source::whole(vec!["a.weight".into()], vec![4, 6]));
    let all = [Weight {
        name: "a".into(),
        dims: vec![4, 6],
        init: Init::Zeros,
        source,
        layer: None,
        frozen: false,
    }];
    let codes: (&str, &[usize]) = ("a.weight", &[4, 6]);
    let of = |scales: &[(&str, &[usize])]| {
        let wrong = check_weights(&all, &coded(&scratch, &[&[codes], scales].concat()));
        wrong.iter().map(|d| (d.code, d.headline.clone())).collect::<Vec<_>>()
    };
    assert_eq!(of(&[("a.weight_scale_inv", &[2, 2])]), []);
    let missing = "no tensor `a.weight_scale_inv` in the weights".to_owned();
    assert_eq!(of(&[]), [("E4006", missing)]);
    let other = "the scales of `a.weight` are [3, 2]".to_owned();
    assert_eq!(of(&[("a.weight_scale_inv", &[3, 2])]), [("E4007", other)]);
    // A model whose config does not speak of scales has no such tensor.
    let mut plain = all.clone();
    plain[0].source.scaled = None;
    let files = coded(&scratch, &[codes, ("a.weight_scale_inv", &[2, 2])]);
    let codes: Vec<&str> = check_weights(&plain, &files).iter().map(|wrong| wrong.code).collect();
    assert_eq!(codes, ["E4007", "E4008"]);
}

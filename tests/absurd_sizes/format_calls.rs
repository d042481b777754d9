//! Formats, codes and tiles.

use kvpack::format::codebook::CoordinateDensity;
use kvpack::format::interchange::{msb_bytes, saw_int4};
use kvpack::format::sketch::{Sketch, sketch_level};
use kvpack::format::{
    AffineFormat, Bits, Calibration, CodeRange, Codebook, CodebookFormat, Field, Grouping, HEAD_DIMS, KeyOrValue,
    RangeRule, Rotation, ScoreMap, SegmentFormat, TensorFormat, TileLayout, TileOrder,
};

use kvpack::AttentionShape;

use crate::{Call, calls, done, floats, pairs, shape, sizes, triples, words};

fn formats() -> Vec<TensorFormat> {
    let mut formats = vec![TensorFormat::F16, TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::Two, 64))];
    for bits in Bits::ALL {
        for size in [0, 3, 32, usize::MAX] {
            formats.push(TensorFormat::Affine(AffineFormat::new(bits, Grouping::ChannelTokens(size))));
            formats.push(TensorFormat::Affine(AffineFormat::new(bits, Grouping::TokenChannels(size))));
        }
        formats.push(TensorFormat::Affine(AffineFormat::new(bits, Grouping::Channel)));
    }
    formats
}

/// Calls with formats of every kind, also ones that no shape has.
pub fn each_format(call: impl Fn(&TensorFormat)) {
    formats().iter().for_each(call);
}

fn affine() -> [AffineFormat; 2] {
    let format = AffineFormat::new(Bits::Four, Grouping::Token);
    [format, AffineFormat { ranges: RangeRule::Symmetric, ..format }]
}

fn rotations(call: impl Fn(Rotation)) {
    sizes(|order| {
        words(|seed| [Rotation::randomized(order, seed), Rotation::dealt(order, seed)].into_iter().for_each(&call));
        call(Rotation::hadamard(order));
    });
}

pub fn calls() -> Vec<Call> {
    let mut all = codes();
    all.extend(rotated());
    all.extend(tiles());
    all
}

fn codes() -> Vec<Call> {
    calls! {
        "format::AffineFormat::span_range" => floats(|x| floats(|y| affine().iter().for_each(|f| done(f.span_range(x, y)))));
        "format::AffineFormat::tile_range" => floats(|x| floats(|y| affine().iter().for_each(|f| done(f.tile_range(x, y)))));
        "format::AffineFormat::largest_error" => floats(|x| floats(|y| affine().iter().for_each(|f| done(f.largest_error(x, y)))));
        "format::CodeRange::new" => floats(|x| floats(|y| floats(|z| done(CodeRange::new(x, y, z, Bits::Eight)))));
        "format::CodeRange::symmetric" => floats(|x| floats(|y| floats(|z| done(CodeRange::symmetric(x, y, z, Bits::One)))));
        "format::CodeRange::encode" => floats(|x| floats(|scale| floats(|min| for bits in Bits::ALL {
            assert!(CodeRange { scale, min }.encode(x, bits) <= bits.max_code());
        })));
        "format::CodeRange::decode" => words(|w| floats(|x| done(CodeRange { scale: x, min: x }.decode(w))));
        "format::CodeRange::from_word" => words(|w| done(CodeRange::from_word(w)));
        "format::Bits::from_count" => words(|w| done(Bits::from_count(w)));
        "format::Calibration::new" => floats(|x| floats(|y| done(Calibration::new(x, y))));
        "format::Calibration::map" => floats(|x| floats(|y| done(Calibration::new(1.0, 2.0).unwrap().map(x, y))));
        "format::ScoreMap::apply" => floats(|x| floats(|y| done(ScoreMap { slope: x, offset: y }.apply(x))));
        "format::Codebook::of_format" => sizes(|a| Bits::ALL.into_iter().for_each(|bits| done(Codebook::of_format(bits, a))));
        "format::Codebook::lloyd_max" => words(|bits| for density in [0, 64, 1 << 16, usize::MAX] {
            done(Codebook::lloyd_max(bits, CoordinateDensity::Sphere(density)));
            done(Codebook::lloyd_max(bits, CoordinateDensity::Gaussian(density)));
        });
        "format::Codebook::encode" => floats(|x| floats(|y| {
            assert!(Codebook::of_format(Bits::Four, 64).unwrap().encode(x, y) < 16);
        }));
        "format::Codebook::decode" => words(|w| floats(|x| done(Codebook::of_format(Bits::Four, 64).unwrap().decode(w, x))));
        "format::tile_from_codes" => sizes(|a| each_format(|format| for which in [KeyOrValue::Key, KeyOrValue::Value] {
            done(msb_bytes::tile_from_codes(which, format, a, &[3; 128]));
        }));
        "format::codes_from_tile" => pairs(|a, b| each_format(|format| for which in [KeyOrValue::Key, KeyOrValue::Value] {
            done(msb_bytes::codes_from_tile(which, format, a, &[3; 512], b));
        }));
        "format::quantize_row" => rotations(|rotation| floats(|x| {
            done(saw_int4::quantize_row(&[x; 64], Some(rotation), saw_int4::RowRounding::F32));
            done(saw_int4::quantize_row(&[], Some(rotation), saw_int4::RowRounding::F32));
        }));
    }
}

fn rotated() -> Vec<Call> {
    calls! {
        "format::Rotation::hadamard" => sizes(|a| done(Rotation::hadamard(a).rotate(&mut [1.0; 64])));
        "format::Rotation::randomized" => rotations(|rotation| done(rotation.unrotate(&mut [f32::NAN; 80])));
        "format::Rotation::dealt" => rotations(|rotation| {
            done((rotation.scale(), rotation.to_string()));
            done(rotation.check(&shape()));
        });
        "format::Rotation::largest_order" => sizes(|a| done(Rotation::largest_order(a)));
        "format::Rotation::dealt_blocks" => sizes(|a| rotations(|rotation| done(rotation.dealt_blocks(a))));
        "format::Rotation::flips" => words(|w| rotations(|rotation| done(rotation.flips(w))));
        "format::AffineFormat::new" => sizes(|a| for grouping in [Grouping::ChannelTokens(a), Grouping::TokenChannels(a)] {
            let tensor = TensorFormat::Affine(AffineFormat::new(Bits::Three, grouping));
            done(SegmentFormat { key: tensor, value: tensor }.check(&shape()));
        });
        "format::AffineFormat::rotated" => rotations(|rotation| affine().iter().for_each(|format| {
            let tensor = TensorFormat::Affine(format.rotated(rotation));
            done(SegmentFormat { key: tensor, value: tensor }.check(&shape()));
        }));
        "format::AttentionShape::new" => triples(|a, b, c| {
            if let Ok(shape) = AttentionShape::new(a, b, c) {
                each_format(|&format| done(SegmentFormat { key: format, value: format }.page_bytes(&shape)));
            }
        });
        "format::Sketch::rotations" => pairs(|a, b| done(Sketch { seed: u32::MAX }.rotations(a, b).count()));
        "format::sketch_level" => sizes(|a| done(sketch_level(a)));
        "format::CodebookFormat::sketch_rotations" => sizes(|a| {
            done(CodebookFormat::turboquant_prod(Bits::Two, 64).sketch_rotations(a).count());
        });
        "format::CodebookFormat::field_levels" => sizes(|a| done(CodebookFormat::turboquant_prod(Bits::Two, 64).field_levels(a)));
        "format::CodebookFormat::turboquant" => sizes(|a| for bits in Bits::ALL {
            done(CodebookFormat::turboquant(bits, a).encode_row(&[1.0; 64]));
        });
        "format::CodebookFormat::turboquant_prod" => sizes(|a| for bits in Bits::ALL {
            done(CodebookFormat::turboquant_prod(bits, a).encode_row(&[1.0; 64]));
        });
        "format::SegmentFormat::turboquant" => sizes(|a| done(SegmentFormat::turboquant(Bits::Two, a).check(&shape())));
        "format::SegmentFormat::turboquant_renormalized" => sizes(|a| {
            done(SegmentFormat::turboquant_renormalized(Bits::Two, a).check(&shape()));
        });
        "format::SegmentFormat::turboquant_prod" => sizes(|a| done(SegmentFormat::turboquant_prod(Bits::Two, a).check(&shape())));
        "format::SegmentFormat::qjl" => sizes(|a| done(SegmentFormat::qjl(a).check(&shape())));
    }
}

fn tiles() -> Vec<Call> {
    calls! {
        "format::TensorFormat::ranges_per_tile" => sizes(|a| each_format(|format| done(format.ranges_per_tile(a))));
        "format::TensorFormat::largest_element" => sizes(|a| each_format(|format| done(format.largest_element(a))));
        "format::TensorFormat::range_index" => triples(|a, b, c| each_format(|format| done(format.range_index(a, b, c))));
        "format::Field::within" => sizes(|a| words(|w| done(Field::within(a, w, 8))));
        "format::Field::set" => words(|w| {
            let mut tile = [0; 4];
            Field::within(3, 24, 8).set(&mut tile, w);
            assert_eq!(Field::within(3, 24, 8).get(&tile), w & 0xff);
        });
        "format::TileLayout::new" => sizes(|a| each_format(|format| done(TileLayout::new(format, a))));
        "format::TileLayout::key_field" => pairs(|a, b| each_format(|format| for head_dim in HEAD_DIMS {
            done(TileLayout::new(format, head_dim).unwrap().key_field(a, b));
        }));
        "format::TileLayout::value_field" => pairs(|a, b| each_format(|format| for head_dim in HEAD_DIMS {
            done(TileLayout::new(format, head_dim).unwrap().value_field(a, b));
        }));
        "format::TileOrder::field" => triples(|a, b, c| each_format(|format| for which in [KeyOrValue::Key, KeyOrValue::Value] {
            done(TileOrder::DotProduct.field(which, format, a, b, c));
            done(TileOrder::MmaFragment.field(which, format, a, b, c));
        }));
        "format::TileOrder::tile_words" => sizes(|a| each_format(|format| for which in [KeyOrValue::Key, KeyOrValue::Value] {
            done(TileOrder::DotProduct.tile_words(which, format, a));
            done(TileOrder::MmaFragment.tile_words(which, format, a));
        }));
        "format::TileOrder::flip" => each_format(|format| done(TileOrder::MmaFragment.flip(KeyOrValue::Key, format)));
        "format::TileOrder::convert" => sizes(|a| each_format(|format| {
            done(TileOrder::MmaFragment.convert(TileOrder::DotProduct, KeyOrValue::Key, format, a, &[1; 1024]));
        }));
    }
}

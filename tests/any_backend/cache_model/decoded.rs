//! What a format makes of rows, computed naively: groups are collected, and every element is encoded and
//! decoded by itself.

use half::f16;
use kvpack::AttentionShape;
use kvpack::format::codebook::{renormalized, stored_norm};
use kvpack::format::sketch::sketch_level;
use kvpack::format::{Codebook, CodebookFormat, Direction, Grouping, NormRule, TensorFormat};

/// Groups elements naively and encodes and decodes each.
pub fn decoded(format: &TensorFormat, rows: &[f32], shape: &AttentionShape) -> Vec<f32> {
    let head_dim = shape.head_dim();
    let affine = match format {
        TensorFormat::F16 => return rows.iter().map(|&x| f16::from_f32(x).to_f32()).collect(),
        TensorFormat::Codebook(codebook) => return decoded_by_codebook(codebook, rows, head_dim),
        TensorFormat::Affine(affine) => affine,
    };
    let turn = |direction, rows: &mut Vec<f32>| {
        let rotation = affine.rotation.into_iter();
        rotation.for_each(|rotation| kvpack::cpu::hadamard(rows, head_dim, rotation, direction).unwrap());
    };
    let mut rows = rows.to_vec();
    turn(Direction::Forward, &mut rows);
    let kv_heads = shape.kv_heads();
    // The number of an element's group, below the number of elements.
    let group_of = |i: usize| {
        let (token, head, channel) = (i / (kv_heads * head_dim), i / head_dim % kv_heads, i % head_dim);
        let (token, channel) = match affine.grouping {
            Grouping::Channel => (0, channel),
            Grouping::ChannelTokens(n) => (token / n, channel),
            Grouping::Token => (token, 0),
            Grouping::TokenChannels(n) => (token, channel / n),
        };
        (token * kv_heads + head) * head_dim + channel
    };
    let mut extremes = vec![None; rows.len()];
    for (i, &x) in rows.iter().enumerate() {
        let (min, max) = extremes[group_of(i)].get_or_insert((x, x));
        (*min, *max) = (x.min(*min), x.max(*max));
    }
    let range = |(min, max)| {
        if affine.grouping == Grouping::Channel { affine.span_range(min, max) } else { affine.tile_range(min, max) }
    };
    let ranges: Vec<_> = extremes.into_iter().map(|extremes| extremes.map(range)).collect();
    let decode = |(i, &x): (usize, &f32)| {
        let range = ranges[group_of(i)].unwrap();
        range.decode(range.encode(x, affine.bits))
    };
    let mut decoded: Vec<f32> = rows.iter().enumerate().map(decode).collect();
    turn(Direction::Inverse, &mut decoded);
    decoded
}

/// Encodes and decodes row by row: levels, and the signs of what they leave where there is a sketch.
fn decoded_by_codebook(format: &CodebookFormat, rows: &[f32], head_dim: usize) -> Vec<f32> {
    let codebook = format.level_bits().map(|bits| Codebook::of_format(bits, head_dim).unwrap());
    let mut rows = rows.to_vec();
    for row in rows.chunks_exact_mut(head_dim) {
        format.rotation.rotate(row).unwrap();
        let norm = stored_norm(row);
        let code = |x: &f32| codebook.as_ref().map_or(0, |codebook| codebook.encode(*x, norm.to_f32()));
        let level = |x: &f32, norm| codebook.as_ref().map_or(0.0, |codebook| codebook.decode(code(x), norm).unwrap());
        let scale = match format.norms {
            NormRule::Row => norm,
            NormRule::Renormalized => renormalized(norm, &row.iter().map(|x| level(x, 1.0)).collect::<Vec<_>>()),
        };
        let levels: Vec<f32> = row.iter().map(|x| level(x, scale.to_f32())).collect();
        let mut rest: Vec<f32> = row.iter().zip(&levels).map(|(x, level)| x - level).collect();
        format.sketch_rotations(head_dim).for_each(|rotation| rotation.rotate(&mut rest).unwrap());
        let share = if format.sketch.is_some() { sketch_level(head_dim) } else { 0.0 };
        let norm = stored_norm(&rest).to_f32();
        rest.iter_mut().for_each(|x| *x = norm * if *x < 0.0 { -share } else { share });
        format.sketch_rotations(head_dim).rev().for_each(|rotation| rotation.unrotate(&mut rest).unwrap());
        row.iter_mut().zip(levels.iter().zip(&rest)).for_each(|(x, (level, rest))| *x = level + rest);
        format.rotation.unrotate(row).unwrap();
    }
    rows
}

//! Kernel `dequantize`: decodes a span into dense f32 rows.

use rayon::prelude::*;

use super::dense::check_span;
use super::hadamard::hadamard;
use super::key_tiles::levels;
use super::store::{CpuStore, TensorStore, Tile};
use super::uncentre_keys::uncentre_keys;
use crate::Result;
use crate::backend::SpanRead;
use crate::format::sketch::FieldLevels;
use crate::format::{CodeRange, Direction, Field, KeyOrValue, TILE_TOKENS, TensorFormat};

/// The stored keys or values of a span as `[kv_heads, tokens, head_dim]`: `min + scale · code`, `norm · level`, or the
/// f16 element. Rotated rows are rotated back, and keys get their centre back.
///
/// # Errors
/// [`Error::Plan`](crate::Error::Plan) when pages or slots do not exist,
/// [`Error::NoTokens`](crate::Error::NoTokens) for an empty span.
pub fn dequantize(store: &CpuStore, which: KeyOrValue, read: SpanRead<'_>) -> Result<Vec<f32>> {
    check_span("dequantize", read.tokens, read.pages)?;
    store.check_pages("dequantize", read.pages)?;
    store.check_slot("dequantize", read.range_slot)?;
    store.check_centre("dequantize", read.centre)?;

    let tensor = store.tensor(which);
    let head_dim = tensor.shape.head_dim();
    let mut rows = vec![0.0; tensor.shape.kv_heads() * read.tokens * head_dim];
    rows.par_chunks_exact_mut(read.tokens * head_dim).enumerate().for_each(|(head, rows)| {
        for (&page, rows) in read.pages.iter().zip(rows.chunks_mut(TILE_TOKENS * head_dim)) {
            let span_ranges = tensor.head_ranges(read.range_slot, head);
            let tile = tensor.tile(page, head);
            decode_tile(tensor, tile, span_ranges, rows);
        }
    });
    if let Some(rotation) = tensor.format.rotation() {
        hadamard(&mut rows, head_dim, rotation, Direction::Inverse)?;
    }
    if let Some(slot) = read.centre.filter(|_| which == KeyOrValue::Key) {
        uncentre_keys(&mut rows, store.centre(slot)?, head_dim);
    }
    Ok(rows)
}

/// Decodes the first tokens of a tile into rows of channels.
fn decode_tile(tensor: &TensorStore, tile: Tile<'_>, span_ranges: &[CodeRange], rows: &mut [f32]) {
    let head_dim = tensor.shape.head_dim();
    let levels = levels(&tensor.format, head_dim);
    for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
        add_sketch(tensor, &levels, tile, token, row);
        for (channel, value) in row.iter_mut().enumerate() {
            let word = field(tensor, token, channel).get(tile.codes);
            let range = || CodeRange::from_word(tile.ranges[tensor.format.range_index(head_dim, token, channel)]);
            match &tensor.format {
                TensorFormat::F16 => *value = half::f16::from_bits(word as u16).to_f32(),
                TensorFormat::Affine(format) => {
                    let range = span_ranges.get(channel).copied().unwrap_or_else(range);
                    *value = range.decode(word ^ (1 << (format.bits.count() - 1)));
                }
                TensorFormat::Codebook(format) => {
                    *value += range().scale * levels.levels[(word ^ (1 << (format.bits.count() - 1))) as usize];
                }
            }
        }
    }
}

/// Sets a row to the values of its sketch, in the basis of the levels. Leaves it unchanged if there is no sketch.
fn add_sketch(tensor: &TensorStore, levels: &FieldLevels, tile: Tile<'_>, token: usize, row: &mut [f32]) {
    let Some(format) = tensor.format.sketched() else { return };
    let residual = CodeRange::from_word(tile.ranges[token]).min;
    for (channel, value) in row.iter_mut().enumerate() {
        let flipped = field(tensor, token, channel).get(tile.codes) ^ (1 << (format.bits.count() - 1));
        *value = residual * levels.signs[flipped as usize];
    }
    format.sketch_rotations(row.len()).rev().for_each(|rotation| rotation.turn_checked(Direction::Inverse, row));
}

fn field(tensor: &TensorStore, token: usize, channel: usize) -> Field {
    match tensor.which {
        KeyOrValue::Key => tensor.layout.key_field(token, channel),
        KeyOrValue::Value => tensor.layout.value_field(token, channel),
    }
}

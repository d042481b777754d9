//! Kernel `dequantize`: what a span holds, as dense f32 rows.

use rayon::prelude::*;

use super::dense::check_span;
use super::hadamard::hadamard;
use super::key_tiles::levels;
use super::store::{CpuStore, TensorStore};
use crate::Result;
use crate::backend::SpanRead;
use crate::format::{CodeRange, Direction, Field, KeyOrValue, TILE_TOKENS, TensorFormat};

/// The stored keys or values of a span as `[kv_heads, tokens, head_dim]`: `min + scale · code`, `norm · level`, or the f16 element;
/// rotated rows are rotated back.
///
/// # Errors
/// [`Error::Plan`](crate::Error::Plan) when pages or slots do not exist,
/// [`Error::NoTokens`](crate::Error::NoTokens) for an empty span.
pub fn dequantize(store: &CpuStore, which: KeyOrValue, read: SpanRead<'_>) -> Result<Vec<f32>> {
    check_span("dequantize", read.tokens, read.pages)?;
    store.check_pages("dequantize", read.pages)?;
    store.check_slot("dequantize", read.range_slot)?;

    let tensor = store.tensor(which);
    let head_dim = tensor.shape.head_dim();
    let mut rows = vec![0.0; tensor.shape.kv_heads() * read.tokens * head_dim];
    rows.par_chunks_exact_mut(read.tokens * head_dim).enumerate().for_each(|(head, rows)| {
        for (&page, rows) in read.pages.iter().zip(rows.chunks_mut(TILE_TOKENS * head_dim)) {
            let span_ranges = tensor.head_ranges(read.range_slot, head);
            let tile = tensor.tile(page, head);
            decode_tile(tensor, tile.codes, tile.ranges, span_ranges, rows);
        }
    });
    if let Some(rotation) = tensor.format.rotation() {
        hadamard(&mut rows, head_dim, rotation, Direction::Back)?;
    }
    Ok(rows)
}

/// Decodes the first tokens of a tile into rows of channels.
fn decode_tile(tensor: &TensorStore, codes: &[u32], ranges: &[u32], span_ranges: &[CodeRange], rows: &mut [f32]) {
    let head_dim = tensor.shape.head_dim();
    let levels = levels(&tensor.format, head_dim);
    for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
        for (channel, value) in row.iter_mut().enumerate() {
            let field = field(tensor, token, channel);
            let word = field.get(codes);
            *value = match &tensor.format {
                TensorFormat::F16 => half::f16::from_bits(word as u16).to_f32(),
                TensorFormat::Affine(format) => {
                    let range = match span_ranges.get(channel) {
                        Some(range) => *range,
                        None => CodeRange::from_word(ranges[tensor.format.range_index(head_dim, token, channel)]),
                    };
                    let code = word ^ (1 << (format.bits.count() - 1));
                    range.decode(code)
                }
                TensorFormat::Codebook(format) => {
                    let norm = CodeRange::from_word(ranges[tensor.format.range_index(head_dim, token, channel)]).scale;
                    let code = word ^ (1 << (format.bits.count() - 1));
                    norm * levels[code as usize]
                }
            };
        }
    }
}

fn field(tensor: &TensorStore, token: usize, channel: usize) -> Field {
    match tensor.which {
        KeyOrValue::Key => tensor.layout.key_field(token, channel),
        KeyOrValue::Value => tensor.layout.value_field(token, channel),
    }
}

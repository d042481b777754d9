//! Kernel `quantize`: computes ranges, codes and tiles of one span.

use std::ops::Range;

use rayon::prelude::*;

use super::centre_keys::centre_row;
use super::dense::{CpuIndices, check_span, read_row};
use super::store::{CpuStore, TensorStore};
use crate::Result;
use crate::backend::SpanWrite;
use crate::format::sketch::CodedRow;
use crate::format::{
    AffineFormat, CodeRange, CodebookFormat, Direction, KeyOrValue, Rotation, TILE_TOKENS, TensorFormat,
};
use crate::plan::{Elements, RowLayout, Rows};

/// Tiles that are encoded before they are copied into their pages: enough for all threads, and a few MiB, however long
/// the span.
const TILES_AT_ONCE: usize = 256;

/// Packs tokens of dense keys and values into pages as one span.
///
/// The centre, if there is one, is subtracted from keys. Then rows are rotated if the format does. Span ranges cover
/// all tokens of the span, tile ranges the tokens of a tile. Tile ranges are rounded to f16 before they encode
/// anything, so that codes fit the ranges that decode them. A partial last tile has zero bits in its unused fields, and
/// zero ranges for groups without a token. The input must be finite.
///
/// # Errors
/// [`Error::Elements`](crate::Error::Elements) when keys or values are shorter than their layout requires,
/// [`Error::Plan`](crate::Error::Plan) when the tokens, pages or slot do not fit. On an error the store is unchanged.
pub fn quantize(
    store: &mut CpuStore,
    keys: Elements<'_>,
    values: Elements<'_>,
    write: SpanWrite<'_, CpuIndices>,
) -> Result<()> {
    check_write(store, keys, values, &write)?;
    for (which, elements) in [(KeyOrValue::Key, keys), (KeyOrValue::Value, values)] {
        let rotation = store.tensor(which).format.rotation();
        let centre = match write.centre.filter(|_| which == KeyOrValue::Key) {
            Some(slot) => store.centre(slot)?.to_vec(),
            None => Vec::new(),
        };
        let source = Source { elements, rows: write.rows, tokens: write.tokens, centre: &centre, rotation };
        let tensor = store.tensor(which);
        let span_ranges = span_ranges(tensor, &source);
        let kv_heads = tensor.shape.kv_heads();
        let tiles = write.pages.len() * kv_heads;
        for first in (0..tiles).step_by(TILES_AT_ONCE) {
            let encoded =
                encode_tiles(store.tensor(which), &source, &span_ranges, first..tiles.min(first + TILES_AT_ONCE));
            let tensor = store.tensor_mut(which);
            for (i, tile) in (first..).zip(&encoded) {
                tensor.put_tile(write.pages[i / kv_heads], i % kv_heads, &tile.codes, &tile.ranges);
            }
        }
        let tensor = store.tensor_mut(which);
        if tensor.format.has_span_ranges() {
            tensor.put_slot(write.range_slot, &span_ranges);
        }
    }
    Ok(())
}

/// The tokens to pack, of keys or of values.
struct Source<'a> {
    elements: Elements<'a>,
    rows: RowLayout,
    tokens: Rows<'a, CpuIndices>,
    /// `[kv_heads, head_dim]`, or empty.
    centre: &'a [f32],
    rotation: Option<Rotation>,
}

impl Source<'_> {
    /// Reads the row of a token of the span in its stored form: centred and rotated.
    fn read(&self, token: usize, head: usize, row: &mut [f32]) {
        let token = match self.tokens {
            Rows::Run(run) => run.start() + token,
            Rows::Gather(indices) => indices.token(head, token),
        };
        read_row(self.elements, self.rows.row(token, head), row);
        if !self.centre.is_empty() {
            centre_row(row, &self.centre[head * row.len()..]);
        }
        if let Some(rotation) = self.rotation {
            rotation.turn_checked(Direction::Forward, row);
        }
    }
}

struct EncodedTile {
    codes: Vec<u32>,
    ranges: Vec<u32>,
}

fn check_write(
    store: &CpuStore,
    keys: Elements<'_>,
    values: Elements<'_>,
    write: &SpanWrite<'_, CpuIndices>,
) -> Result<()> {
    write.rows.check("keys", keys.len(), store.shape())?;
    write.rows.check("values", values.len(), store.shape())?;
    check_span("quantize", write.tokens.len(), write.pages)?;
    write.tokens.check("quantize", &write.rows, store.shape())?;
    store.check_pages("quantize", write.pages)?;
    store.check_slot("quantize", write.range_slot)?;
    store.check_centre("quantize", write.centre)
}

/// Smallest and largest of a group of elements.
#[derive(Clone, Copy)]
struct Extremes {
    min: f32,
    max: f32,
}

impl Extremes {
    const NONE: Self = Self { min: f32::INFINITY, max: f32::NEG_INFINITY };

    fn add(&mut self, value: f32) {
        self.min = self.min.min(value);
        self.max = self.max.max(value);
    }

    /// The range that `range` computes from them, or the zero range for a group without a token.
    fn range(self, range: impl Fn(f32, f32) -> CodeRange) -> CodeRange {
        if self.min > self.max { CodeRange::default() } else { range(self.min, self.max) }
    }
}

/// Ranges `[kv_head][head_dim]` over the whole span, or an empty list.
fn span_ranges(tensor: &TensorStore, source: &Source<'_>) -> Vec<CodeRange> {
    let Some(format) = tensor.format.affine().filter(|_| tensor.format.has_span_ranges()) else { return Vec::new() };
    let head_dim = tensor.shape.head_dim();
    (0..tensor.shape.kv_heads())
        .into_par_iter()
        .flat_map_iter(|head| {
            let mut extremes = vec![Extremes::NONE; head_dim];
            let mut row = vec![0.0; head_dim];
            for token in 0..source.tokens.len() {
                source.read(token, head, &mut row);
                extremes.iter_mut().zip(&row).for_each(|(extremes, &value)| extremes.add(value));
            }
            extremes.into_iter().map(|extremes| extremes.range(|min, max| format.span_range(min, max)))
        })
        .collect()
}

/// Some of the tiles of the span, `[page][kv_head]`.
fn encode_tiles(
    tensor: &TensorStore,
    source: &Source<'_>,
    span_ranges: &[CodeRange],
    tiles: Range<usize>,
) -> Vec<EncodedTile> {
    let (kv_heads, head_dim) = (tensor.shape.kv_heads(), tensor.shape.head_dim());
    tiles
        .into_par_iter()
        .map(|i| {
            let (page, head) = (i / kv_heads, i % kv_heads);
            let first = page * TILE_TOKENS;
            let tokens = TILE_TOKENS.min(source.tokens.len() - first);
            let mut rows = vec![0.0; tokens * head_dim];
            for (token, row) in rows.chunks_exact_mut(head_dim).enumerate() {
                source.read(first + token, head, row);
            }
            match &tensor.format {
                TensorFormat::F16 => EncodedTile { codes: f16_words(tensor, &rows), ranges: Vec::new() },
                TensorFormat::Affine(format) if tensor.format.has_span_ranges() => {
                    let ranges = &span_ranges[head * head_dim..][..head_dim];
                    EncodedTile { codes: code_words(tensor, format, &rows, |_, c| ranges[c]), ranges: Vec::new() }
                }
                TensorFormat::Codebook(format) => codebook_tile(tensor, format, &rows),
                TensorFormat::Affine(format) => {
                    let ranges = tile_ranges(tensor, format, &rows);
                    let range = |token, channel| ranges[tensor.format.range_index(head_dim, token, channel)];
                    let codes = code_words(tensor, format, &rows, range);
                    EncodedTile { codes, ranges: ranges.iter().map(|range| range.to_word()).collect() }
                }
            }
        })
        .collect()
}

/// Norms and codes of the rotated rows of one tile.
fn codebook_tile(tensor: &TensorStore, format: &CodebookFormat, rows: &[f32]) -> EncodedTile {
    let coded: Vec<CodedRow> =
        rows.chunks_exact(tensor.shape.head_dim()).map(|row| format.encode_checked_row(row)).collect();
    let mut ranges = vec![0; tensor.ranges_per_tile()];
    ranges.iter_mut().zip(&coded).for_each(|(range, row)| *range = row.range.to_word());
    let codes = fill_tile(tensor, rows, |token, channel, _| coded[token].fields[channel]);
    EncodedTile { codes, ranges }
}

/// Ranges of the groups of one tile, rounded to f16.
fn tile_ranges(tensor: &TensorStore, format: &AffineFormat, rows: &[f32]) -> Vec<CodeRange> {
    let head_dim = tensor.shape.head_dim();
    let mut extremes = vec![Extremes::NONE; tensor.ranges_per_tile()];
    for (token, row) in rows.chunks_exact(head_dim).enumerate() {
        for (channel, &value) in row.iter().enumerate() {
            extremes[tensor.format.range_index(head_dim, token, channel)].add(value);
        }
    }
    extremes.into_iter().map(|extremes| extremes.range(|min, max| format.tile_range(min, max))).collect()
}

fn f16_words(tensor: &TensorStore, rows: &[f32]) -> Vec<u32> {
    fill_tile(tensor, rows, |_, _, value| u32::from(half::f16::from_f32(value).to_bits()))
}

fn code_words(
    tensor: &TensorStore,
    format: &AffineFormat,
    rows: &[f32],
    range: impl Fn(usize, usize) -> CodeRange,
) -> Vec<u32> {
    let sign = 1 << (format.bits.count() - 1);
    fill_tile(tensor, rows, |token, channel, value| range(token, channel).encode(value, format.bits) ^ sign)
}

/// Writes the field of every element to its place.
fn fill_tile(tensor: &TensorStore, rows: &[f32], field: impl Fn(usize, usize, f32) -> u32) -> Vec<u32> {
    let mut words = vec![0; tensor.tile_words()];
    for (token, row) in rows.chunks_exact(tensor.shape.head_dim()).enumerate() {
        for (channel, &value) in row.iter().enumerate() {
            let place = match tensor.which {
                KeyOrValue::Key => tensor.layout.key_field(token, channel),
                KeyOrValue::Value => tensor.layout.value_field(token, channel),
            };
            place.set(&mut words, field(token, channel, value));
        }
    }
    words
}

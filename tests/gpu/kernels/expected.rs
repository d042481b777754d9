//! What the tests store, and what tiles and ranges of it must be: written with nothing but `kvpack::format`.

use half::{bf16, f16};
use kvpack::AttentionShape;
use kvpack::backend::Device;
use kvpack::format::{AffineFormat, CodeRange, KeyOrValue, TILE_TOKENS, TensorFormat, TileLayout};
use kvpack::plan::{ElementType, Elements, RowLayout, TokenRange};
use kvpack::wgpu::{Tensor, Wgpu};

/// Values that look like keys: channels of different spreads, outliers, a constant channel, ties, both zeros.
pub fn values(count: usize, seed: u32) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        state as f32 / u32::MAX as f32 - 0.5
    };
    let value = |i: usize| match i % 16 {
        3 => 2.5,
        5 => (i % 64) as f32 * 0.5,
        7 => -0.0,
        9 => next() * 40.0 + 20.0,
        _ => next() * (1 + i % 5) as f32,
    };
    (0..count).map(value).collect()
}

/// Dense rows of keys or values, and what the device holds of them.
pub struct Rows {
    pub layout: RowLayout,
    pub elements: Vec<f32>,
    pub tensor: Tensor,
}

impl Rows {
    /// Uploads `elements`, rounded to their type.
    pub fn new(backend: &Wgpu, layout: RowLayout, elements: Vec<f32>, element_type: ElementType) -> Self {
        let upload = |elements: Elements<'_>| pollster::block_on(backend.upload(elements)).unwrap();
        let (elements, tensor) = match element_type {
            ElementType::F32 => {
                let tensor = upload(elements.as_slice().into());
                (elements, tensor)
            }
            ElementType::F16 => {
                let rounded: Vec<f16> = elements.into_iter().map(f16::from_f32).collect();
                let tensor = upload(rounded.as_slice().into());
                (rounded.into_iter().map(f16::to_f32).collect(), tensor)
            }
            ElementType::Bf16 => {
                let rounded: Vec<bf16> = elements.into_iter().map(bf16::from_f32).collect();
                let tensor = upload(rounded.as_slice().into());
                (rounded.into_iter().map(bf16::to_f32).collect(), tensor)
            }
        };
        Self { layout, elements, tensor }
    }

    /// The element of a token of a span.
    pub fn get(&self, tokens: &TokenRange, token: usize, kv_head: usize, channel: usize) -> f32 {
        self.elements[self.layout.row(tokens.start() + token, kv_head) + channel]
    }
}

/// What the store must hold of one KV head of a span.
pub struct Packed {
    /// The tiles, one after the other.
    pub tiles: Vec<u32>,
    /// Their ranges.
    pub tile_ranges: Vec<u32>,
    /// Span ranges by channel.
    pub span_ranges: Vec<CodeRange>,
    /// The elements that they decode to, `[tokens, head_dim]`.
    pub decoded: Vec<f32>,
}

/// Packs one KV head element by element.
pub fn pack(
    shape: &AttentionShape,
    format: &TensorFormat,
    which: KeyOrValue,
    (rows, tokens, kv_head): (&Rows, &TokenRange, usize),
) -> Packed {
    let head_dim = shape.head_dim();
    let count = tokens.len();
    let tiles = count.div_ceil(TILE_TOKENS);
    let layout = TileLayout::new(format, head_dim).unwrap();
    let tile_words = match which {
        KeyOrValue::Key => layout.key_tile_words(),
        KeyOrValue::Value => layout.value_tile_words(),
    };
    let range_of = |group: &mut dyn Iterator<Item = f32>| {
        let affine = format.affine().unwrap();
        let values: Vec<f32> = group.collect();
        let low = values.iter().copied().fold(f32::INFINITY, f32::min);
        let high = values.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let range = if format.has_span_ranges() { AffineFormat::span_range } else { AffineFormat::tile_range };
        if values.is_empty() { CodeRange::default() } else { range(affine, low, high) }
    };
    let span_ranges: Vec<CodeRange> = match format.has_span_ranges() {
        false => Vec::new(),
        true => (0..head_dim)
            .map(|channel| range_of(&mut (0..count).map(|token| rows.get(tokens, token, kv_head, channel))))
            .collect(),
    };
    let per_tile = format.ranges_per_tile(head_dim);
    let mut groups: Vec<Vec<f32>> = vec![Vec::new(); per_tile * tiles];
    if per_tile > 0 {
        for token in 0..count {
            for channel in 0..head_dim {
                let range = format.range_index(head_dim, token % TILE_TOKENS, channel);
                groups[token / TILE_TOKENS * per_tile + range].push(rows.get(tokens, token, kv_head, channel));
            }
        }
    }
    let tile_ranges: Vec<CodeRange> = groups.into_iter().map(|group| range_of(&mut group.into_iter())).collect();

    let mut packed = vec![0u32; tile_words * tiles];
    let mut decoded = Vec::with_capacity(count * head_dim);
    for token in 0..count {
        for channel in 0..head_dim {
            let value = rows.get(tokens, token, kv_head, channel);
            let (tile, slot) = (token / TILE_TOKENS, token % TILE_TOKENS);
            let (bits, back) = match format.affine() {
                None => (u32::from(f16::from_f32(value).to_bits()), f16::from_f32(value).to_f32()),
                Some(affine) => {
                    let range = match format.has_span_ranges() {
                        true => span_ranges[channel],
                        false => tile_ranges[tile * per_tile + format.range_index(head_dim, slot, channel)],
                    };
                    let code = range.encode(value, affine.bits);
                    (code ^ (1 << (affine.bits.count() - 1)), range.decode(code))
                }
            };
            let field = match which {
                KeyOrValue::Key => layout.key_field(slot, channel),
                KeyOrValue::Value => layout.value_field(slot, channel),
            };
            field.set(&mut packed[tile * tile_words..][..tile_words], bits);
            decoded.push(back);
        }
    }
    let tile_ranges = tile_ranges.into_iter().map(CodeRange::to_word).collect();
    Packed { tiles: packed, tile_ranges, span_ranges, decoded }
}

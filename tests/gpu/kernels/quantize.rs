//! Kernels `quantize`, `ranges_span`, `ranges_tile` and `dequantize` against the format's own arithmetic, bit for bit.

use kvpack::backend::{Device, Packing, Storage};
use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::format::{AffineFormat, Grouping, HEAD_DIMS, KeyOrValue, TILE_TOKENS, TensorFormat};
use kvpack::plan::{ElementType, Page, RowLayout, TokenRange};
use kvpack::wgpu::{Indices, Store, StoreBuffer, Tensor, Wgpu};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use pollster::block_on;

use super::expected::{Packed, Rows, pack, values};
use super::words::words;
use crate::gpu_device::shared;

struct Case {
    shape: AttentionShape,
    format: SegmentFormat,
    rows: RowLayout,
    tokens: TokenRange,
    types: (ElementType, ElementType),
}

const SLOT: usize = 1;

/// A store of two small shards, and pages of both, out of order, for the span.
fn store_and_pages(backend: &Wgpu, case: &Case) -> (Store, Vec<Page>) {
    let mut store = backend.create_store(case.shape, case.format).unwrap();
    let needed = case.tokens.len().div_ceil(TILE_TOKENS) as u32;
    block_on(backend.add_shard(&mut store, needed + 1)).unwrap();
    block_on(backend.add_shard(&mut store, needed)).unwrap();
    block_on(backend.reserve_ranges(&mut store, SLOT + 2)).unwrap();
    // Backwards through both shards in turns.
    let page = |i: u32| Page { shard: i % 2, index: needed - 1 - i / 2 };
    let pages: Vec<Page> = (0..needed).map(page).collect();
    (store, pages)
}

fn check(case: &Case) {
    let backend = shared();
    let count = case.rows.elements_needed(&case.shape);
    let keys = Rows::new(&backend, case.rows, values(count, 1), case.types.0);
    let values = Rows::new(&backend, case.rows, values(count, 2), case.types.1);
    let (mut store, pages) = store_and_pages(&backend, case);
    let write =
        SpanWrite { rows: case.rows, tokens: case.tokens.into(), pages: &pages, range_slot: SLOT, centre: None };
    backend.quantize(&mut store, &keys.tensor, &values.tensor, write).unwrap();
    let read = SpanRead { pages: &pages, tokens: case.tokens.len(), range_slot: SLOT, centre: None };
    let decoded = backend.dequantize(&store, read).unwrap();
    for (which, rows, decoded) in [(KeyOrValue::Key, &keys, &decoded.0), (KeyOrValue::Value, &values, &decoded.1)] {
        let decoded = block_on(backend.download(decoded)).unwrap();
        let stored = Stored::new(&backend, &store, which);
        for kv_head in 0..case.shape.kv_heads() {
            let expected = pack(&case.shape, &stored.format, which, (rows, &case.tokens, kv_head));
            stored.compare(&pages, kv_head, &expected);
            let of_head = &decoded[kv_head * expected.decoded.len()..][..expected.decoded.len()];
            let at = of_head.iter().zip(&expected.decoded).position(|(a, b)| a.to_bits() != b.to_bits());
            assert_eq!(at.map(|i| (i, of_head[i], expected.decoded[i])), None, "{which} {} decoded", stored.format);
        }
    }
}

/// The words of a store, keys or values.
struct Stored {
    which: KeyOrValue,
    format: TensorFormat,
    kv_heads: usize,
    head_dim: usize,
    /// By shard.
    tiles: Vec<Vec<u32>>,
    tile_ranges: Vec<Vec<u32>>,
    span_ranges: Vec<u32>,
}

impl Stored {
    fn new(backend: &Wgpu, store: &Store, which: KeyOrValue) -> Self {
        let format = *store.format().tensor(which);
        let of_shards = |part| {
            let shards = 0..store.shards() as u32;
            shards.map(|shard| words(backend, store.shard_buffer(shard, part).unwrap())).collect()
        };
        let has_tile_ranges = format.ranges_per_tile(store.shape().head_dim()) > 0;
        Self {
            which,
            format,
            kv_heads: store.shape().kv_heads(),
            head_dim: store.shape().head_dim(),
            tiles: of_shards(StoreBuffer::tiles(which)),
            tile_ranges: if has_tile_ranges { of_shards(StoreBuffer::ranges(which)) } else { Vec::new() },
            span_ranges: match format.has_span_ranges() {
                true => words(backend, store.span_ranges_buffer(which).unwrap()),
                false => Vec::new(),
            },
        }
    }

    fn compare(&self, pages: &[Page], kv_head: usize, expected: &Packed) {
        if self.format.has_span_ranges() {
            let words = self.head_dim * 2;
            let stored = &self.span_ranges[(SLOT * self.kv_heads + kv_head) * words..][..words];
            let wanted = expected.span_ranges.iter().flat_map(|range| [range.scale.to_bits(), range.min.to_bits()]);
            assert_eq!(stored, wanted.collect::<Vec<u32>>(), "{} {} span ranges", self.which, self.format);
        }
        for (i, page) in pages.iter().enumerate() {
            let compare = |what: &str, shards: &[Vec<u32>], expected: &[u32]| {
                let per_tile = expected.len() / pages.len();
                let tile = page.index as usize * self.kv_heads + kv_head;
                let stored = &shards[page.shard as usize][tile * per_tile..][..per_tile];
                let wanted = &expected[i * per_tile..][..per_tile];
                let at = stored.iter().zip(wanted).position(|(a, b)| a != b);
                let differ = at.map(|at| format!("word {at} is {:#x}, not {:#x}", stored[at], wanted[at]));
                assert_eq!(differ, None, "{what} of {} {}, tile {i}", self.which, self.format);
            };
            if !expected.tile_ranges.is_empty() {
                compare("ranges", &self.tile_ranges, &expected.tile_ranges);
            }
            compare("codes", &self.tiles, &expected.tiles);
        }
    }
}

fn affine(bits: Bits, grouping: Grouping, shrink: f32) -> TensorFormat {
    TensorFormat::Affine(AffineFormat { shrink, ..AffineFormat::new(bits, grouping) })
}

/// Every width with every grouping, keys and values differently, lengths that end anywhere in a tile.
#[test]
fn every_format_is_stored_bit_for_bit() {
    let mut formats = vec![TensorFormat::F16];
    for bits in Bits::ALL {
        for grouping in [
            Grouping::Channel,
            Grouping::ChannelTokens(32),
            Grouping::ChannelTokens(128),
            Grouping::Token,
            Grouping::TokenChannels(16),
        ] {
            formats.push(affine(bits, grouping, if bits == Bits::One { 0.3 } else { 1.0 }));
        }
    }
    for (i, &key) in formats.iter().enumerate() {
        let value = formats[(i * 5 + 2) % formats.len()];
        let head_dim = HEAD_DIMS[i % HEAD_DIMS.len()];
        let shape = AttentionShape::new(2, 2, head_dim).unwrap();
        let total = [1, 130, 37, 300, 257][i / 2 % 5];
        let rows = match i % 2 {
            0 => RowLayout::token_major(total + 3, &shape),
            _ => RowLayout::head_major(total + 3, &shape),
        };
        let types = match i % 7 {
            0 => (ElementType::F32, ElementType::F32),
            1 => (ElementType::F16, ElementType::F16),
            2 => (ElementType::Bf16, ElementType::Bf16),
            3 => (ElementType::F32, ElementType::F16),
            4 => (ElementType::F16, ElementType::F32),
            5 => (ElementType::F32, ElementType::Bf16),
            _ => (ElementType::Bf16, ElementType::F16),
        };
        let tokens = TokenRange::new(2, 2 + total).unwrap();
        check(&Case { shape, format: SegmentFormat { key, value }, rows, tokens, types });
    }
}

/// Widths of 1 bit whose rows fill no whole word or vector, for every head dimension.
#[test]
fn every_head_dim_is_stored_bit_for_bit() {
    for head_dim in HEAD_DIMS {
        for bits in [Bits::One, Bits::Two] {
            let shape = AttentionShape::new(3, 3, head_dim).unwrap();
            let rows = RowLayout::token_major(140, &shape);
            let format = SegmentFormat::calibquant(bits);
            let tokens = TokenRange::new(0, 140).unwrap();
            check(&Case { shape, format, rows, tokens, types: (ElementType::F32, ElementType::F32) });
        }
    }
}

/// Scales, ties and codes over ranges of very different magnitude, shrunk by every kind of factor.
#[test]
fn rounding_is_that_of_the_format() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let tokens = 128;
    let rows = RowLayout::token_major(tokens, &shape);
    let mut elements = values(tokens * 64, 9);
    for (i, x) in elements.iter_mut().enumerate() {
        // Channel c spans about 2^(c - 50), up to the limit of f16.
        let power = (i % 64) as i32 - 50;
        *x = (*x * (power as f32).exp2()).clamp(-65504.0, 65504.0);
    }
    for bits in Bits::ALL {
        for shrink in [1.0, 0.5, 0.3, 1e-3] {
            let format = SegmentFormat {
                key: affine(bits, Grouping::Channel, shrink),
                value: affine(bits, Grouping::ChannelTokens(64), shrink),
            };
            let keys = Rows::new(&backend, rows, elements.clone(), ElementType::F32);
            let tokens = TokenRange::new(0, tokens).unwrap();
            let mut store = backend.create_store(shape, format).unwrap();
            block_on(backend.add_shard(&mut store, 1)).unwrap();
            block_on(backend.reserve_ranges(&mut store, SLOT + 1)).unwrap();
            let pages = [Page { shard: 0, index: 0 }];
            let write = SpanWrite { rows, tokens: tokens.into(), pages: &pages, range_slot: SLOT, centre: None };
            backend.quantize(&mut store, &keys.tensor, &keys.tensor, write).unwrap();
            for which in [KeyOrValue::Key, KeyOrValue::Value] {
                let expected = pack(&shape, format.tensor(which), which, (&keys, &tokens, 0));
                Stored::new(&backend, &store, which).compare(&pages, 0, &expected);
            }
        }
    }
}

/// Tensors that begin in the middle of an engine's buffer, at any element.
#[test]
fn tensors_at_any_offset_are_read() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let all = values(64 * 40 + 101, 4);
    let whole = Rows::new(&backend, RowLayout::token_major(1, &shape), all, ElementType::F16);
    let rows = RowLayout::token_major(40, &shape);
    let part = whole.tensor.slice(101, 64 * 40).unwrap();
    let part = Rows { layout: rows, elements: whole.elements[101..].to_vec(), tensor: part };
    let mut store = backend.create_store(shape, SegmentFormat::per_channel(Bits::Four)).unwrap();
    block_on(backend.add_shard(&mut store, 1)).unwrap();
    block_on(backend.reserve_ranges(&mut store, SLOT + 1)).unwrap();
    let tokens = TokenRange::new(0, 40).unwrap();
    let pages = [Page { shard: 0, index: 0 }];
    let write = SpanWrite { rows, tokens: tokens.into(), pages: &pages, range_slot: SLOT, centre: None };
    backend.quantize(&mut store, &part.tensor, &part.tensor, write).unwrap();
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        let expected = pack(&shape, store.format().tensor(which), which, (&part, &tokens, 0));
        Stored::new(&backend, &store, which).compare(&pages, 0, &expected);
    }
}

/// What does not fit is refused before anything is encoded.
#[test]
fn misfits_are_refused() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(200, &shape);
    let tensor = Rows::new(&backend, rows, values(200 * 64, 1), ElementType::F32).tensor;
    let short = tensor.slice(0, 64).unwrap();
    let mut store = backend.create_store(shape, SegmentFormat::per_channel(Bits::Two)).unwrap();
    block_on(backend.add_shard(&mut store, 2)).unwrap();
    let tokens = TokenRange::new(0, 200).unwrap();
    let pages = [Page { shard: 0, index: 0 }, Page { shard: 0, index: 1 }];
    let write = SpanWrite { rows, tokens: tokens.into(), pages: &pages, range_slot: 0, centre: None };
    let quantize = |store: &mut Store, keys: &Tensor, write: SpanWrite<'_, Indices>| {
        backend.quantize(store, keys, &tensor, write).unwrap_err()
    };
    assert!(matches!(quantize(&mut store, &tensor, write), Error::Plan { .. }), "no range slot");
    block_on(backend.reserve_ranges(&mut store, 1)).unwrap();
    assert!(matches!(quantize(&mut store, &short, write), Error::Elements { .. }));
    let beyond = [Page { shard: 0, index: 0 }, Page { shard: 0, index: 2 }];
    assert!(matches!(quantize(&mut store, &tensor, SpanWrite { pages: &beyond, ..write }), Error::Plan { .. }));
    let few = SpanWrite { pages: &pages[..1], ..write };
    assert!(matches!(quantize(&mut store, &tensor, few), Error::Plan { .. }));
    let late = SpanWrite { tokens: TokenRange::new(100, 300).unwrap().into(), ..write };
    assert!(matches!(quantize(&mut store, &tensor, late), Error::Plan { .. }));
    let read = SpanRead { pages: &pages, tokens: 200, range_slot: 1, centre: None };
    assert!(matches!(backend.dequantize(&store, read), Err(Error::Plan { .. })));
}

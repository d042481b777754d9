//! The CPU references: what wgpu stores and reads back equals what the CPU does, bit for bit, for any shape.

use kvpack::backend::{Device, Packing, Storage};
use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::cpu::Cpu;
use kvpack::format::sketch::Sketch;
use kvpack::format::{
    AffineFormat, CodebookFormat, Grouping, HEAD_DIMS, KeyOrValue, NormRule, RangeRule, Rotation, TILE_TOKENS,
    TensorFormat,
};
use kvpack::plan::{Elements, IndexShape, Page, RowLayout, Rows, TokenRange};
use kvpack::wgpu::{Indices, StoreBuffer};
use kvpack::{AttentionShape, Backend, Bits, SegmentFormat};
use pollster::block_on;
use proptest::prelude::*;

use super::expected::values;
use super::words::words;
use crate::gpu_device::shared;

/// Stores a span and reads it back.
fn stored_and_decoded<B: Backend>(backend: &B, case: &Case) -> (B::Store, Vec<u32>) {
    let upload = |seed| {
        let elements = values(case.rows.elements_needed(&case.shape), seed);
        let halves: Vec<half::f16> = elements.iter().map(|&x| half::f16::from_f32(x)).collect();
        let elements: Elements<'_> = if seed % 3 == 0 { halves.as_slice().into() } else { elements.as_slice().into() };
        block_on(backend.upload(elements)).unwrap()
    };
    let (keys, values) = (upload(case.seed), upload(case.seed + 1));
    let mut store = backend.create_store(case.shape, case.format).unwrap();
    block_on(backend.add_shard(&mut store, case.pages.len() as u32)).unwrap();
    block_on(backend.reserve_ranges(&mut store, 1)).unwrap();
    let gathered = case.gathered.as_ref().map(|tokens| {
        block_on(backend.upload_indices(tokens, case.shape.kv_heads(), case.rows.tokens as u32)).unwrap()
    });
    let tokens = gathered.as_ref().map_or(Rows::Run(case.tokens), Rows::Gather);
    let write = SpanWrite { rows: case.rows, tokens, pages: &case.pages, range_slot: 0, centre: None };
    backend.quantize(&mut store, &keys, &values, write).unwrap();
    let read = SpanRead { pages: &case.pages, tokens: case.tokens.len(), range_slot: 0, centre: None };
    let (keys, values) = backend.dequantize(&store, read).unwrap();
    let mut decoded = block_on(backend.download(&keys)).unwrap();
    decoded.extend(block_on(backend.download(&values)).unwrap());
    // +0 and −0 are alike.
    (store, decoded.into_iter().map(|x| (x + 0.0).to_bits()).collect())
}

#[derive(Debug)]
struct Case {
    shape: AttentionShape,
    format: SegmentFormat,
    rows: RowLayout,
    tokens: TokenRange,
    pages: Vec<Page>,
    seed: u32,
    /// Token numbers that are stored in place of the run, `[kv_heads, tokens.len()]`.
    gathered: Option<Vec<u32>>,
}

fn tensor_formats() -> impl Strategy<Value = TensorFormat> {
    let grouping = prop_oneof![
        Just(Grouping::Channel),
        prop::sample::select(vec![32, 64, 128]).prop_map(Grouping::ChannelTokens),
        Just(Grouping::Token),
        prop::sample::select(vec![4, 8, 16]).prop_map(Grouping::TokenChannels),
    ];
    let rotation = prop_oneof![
        3 => Just(None),
        1 => prop::sample::select(vec![2, 8, 16]).prop_map(|order| Some(Rotation::hadamard(order))),
        1 => any::<u32>().prop_map(|seed| Some(Rotation::randomized(16, seed))),
    ];
    let shrink = prop::sample::select(vec![1.0, 0.5, 0.3, 0.77]);
    let affine = (prop::sample::select(Bits::ALL.to_vec()), any::<bool>(), grouping, shrink, rotation).prop_map(
        |(bits, symmetric, grouping, shrink, rotation)| {
            let ranges = if symmetric && bits != Bits::One { RangeRule::Symmetric } else { RangeRule::MinMax };
            TensorFormat::Affine(AffineFormat { bits, grouping, ranges, shrink, rotation })
        },
    );
    let rotation =
        prop_oneof![Just(Rotation::hadamard(8)), any::<u32>().prop_map(|seed| Rotation::randomized(16, seed))];
    let norms = prop::sample::select(vec![NormRule::Row, NormRule::Renormalized]);
    let codebook = (prop::sample::select(vec![Bits::One, Bits::Two, Bits::Three, Bits::Four]), rotation, norms)
        .prop_map(|(bits, rotation, norms)| {
            TensorFormat::Codebook(CodebookFormat { bits, rotation, sketch: None, norms })
        });
    prop_oneof![1 => Just(TensorFormat::F16), 6 => affine, 3 => codebook]
}

/// Keys take sketches too.
fn key_formats() -> impl Strategy<Value = TensorFormat> {
    let rotation = any::<u32>().prop_map(|seed| Rotation::randomized(16, seed));
    let sketch = any::<u32>().prop_map(|seed| Some(Sketch { seed }));
    let sketched = (prop::sample::select(vec![Bits::One, Bits::Two, Bits::Three, Bits::Four]), rotation, sketch)
        .prop_map(|(bits, rotation, sketch)| {
            TensorFormat::Codebook(CodebookFormat { bits, rotation, sketch, norms: NormRule::Row })
        });
    prop_oneof![2 => tensor_formats(), 1 => sketched]
}

fn cases() -> impl Strategy<Value = Case> {
    let formats = (key_formats(), tensor_formats());
    let sizes = (1usize..4, 0..HEAD_DIMS.len(), 0usize..3, 1usize..400, 0usize..3);
    (formats, sizes, any::<bool>(), any::<bool>(), 1u32..1000).prop_map(
        |(formats, sizes, token_major, gathers, seed)| {
            let (key, value) = formats;
            let (kv_heads, head_dim, before, tokens, after) = sizes;
            let shape = AttentionShape::new(kv_heads, kv_heads, HEAD_DIMS[head_dim]).unwrap();
            let all = before + tokens + after;
            let rows =
                if token_major { RowLayout::token_major(all, &shape) } else { RowLayout::head_major(all, &shape) };
            let pages = (0..tokens.div_ceil(TILE_TOKENS) as u32).rev().map(|index| Page { shard: 0, index }).collect();
            let tokens = TokenRange::new(before, before + tokens).unwrap();
            let gathered = gathers.then(|| {
                let index = |i: usize| (i as u32).wrapping_mul(0x9e37_79b9).wrapping_add(seed) % all as u32;
                (0..tokens.len() * kv_heads).map(index).collect()
            });
            Case { shape, format: SegmentFormat { key, value }, rows, tokens, pages, seed, gathered }
        },
    )
}

/// Holds what wgpu stores and reads back against what the CPU does.
fn assert_stored_alike(case: &Case) {
    let (backend, twin) = (shared(), Cpu::new());
    let (store, decoded) = stored_and_decoded(&backend, case);
    let (expected, expected_decoded) = stored_and_decoded(&twin, case);
    assert!(decoded == expected_decoded, "decoded");
    assert_eq!(backend.store_bytes(&store), twin.store_bytes(&expected));
    for which in [KeyOrValue::Key, KeyOrValue::Value] {
        let tiles = words(&backend, store.shard_buffer(0, StoreBuffer::tiles(which)).unwrap());
        let ranges = store.shard_buffer(0, StoreBuffer::ranges(which)).map(|buffer| words(&backend, buffer));
        let ranges = ranges.unwrap_or_default();
        for page in &case.pages {
            for kv_head in 0..case.shape.kv_heads() {
                let tile = page.index as usize * case.shape.kv_heads() + kv_head;
                let (wanted, wanted_ranges) = expected.tile_words(which, *page, kv_head).unwrap();
                assert!(tiles[tile * wanted.len()..][..wanted.len()] == *wanted, "{which} tile {tile}");
                let ranges = &ranges[tile * wanted_ranges.len()..][..wanted_ranges.len()];
                assert!(*ranges == *wanted_ranges, "{which} ranges of tile {tile}");
            }
        }
        let wanted = expected.span_ranges(which, 0).unwrap_or_default();
        if !wanted.is_empty() {
            let ranges = words(&backend, store.span_ranges_buffer(which).unwrap());
            let wanted: Vec<u32> = wanted.iter().flat_map(|x| [x.scale.to_bits(), x.min.to_bits()]).collect();
            assert!(ranges == wanted, "{which} span ranges");
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stores_are_equal(case in cases()) {
        assert_stored_alike(&case);
    }
}

/// Spans so long that rows are rotated in several pieces.
#[test]
fn pieces_of_rotated_rows_join() {
    let shape = AttentionShape::new(8, 8, 256).unwrap();
    let rotated =
        |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Four, grouping).rotated(Rotation::randomized(256, 3)));
    let format = SegmentFormat { key: rotated(Grouping::Channel), value: rotated(Grouping::Token) };
    let tokens = TokenRange::new(3, 2100).unwrap();
    let rows = RowLayout::token_major(2100, &shape);
    let pages = (0..17).rev().map(|index| Page { shard: 0, index }).collect();
    // Indices are counted on from piece to piece, as tokens of a run are.
    let gathered = Some((0..8).flat_map(|_| (3..2100).rev()).collect());
    assert_stored_alike(&Case { shape, format, rows, tokens, pages, seed: 5, gathered });
}

/// Every family of formats, gathered.
#[test]
fn gathers_are_stored_alike_in_every_format() {
    let affine = |bits, grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
    let rotated =
        |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Four, grouping).rotated(Rotation::randomized(16, 3)));
    let codebook = |bits| CodebookFormat::turboquant(bits, 80);
    let values = [
        TensorFormat::F16,
        affine(Bits::Two, Grouping::Channel),
        affine(Bits::Three, Grouping::ChannelTokens(32)),
        affine(Bits::Four, Grouping::Token),
        affine(Bits::Eight, Grouping::TokenChannels(16)),
        rotated(Grouping::Channel),
        rotated(Grouping::Token),
        TensorFormat::Codebook(codebook(Bits::Three)),
        TensorFormat::Codebook(codebook(Bits::Two).renormalized()),
    ];
    let sketched = TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::Three, 80));
    let shape = AttentionShape::new(3, 3, 80).unwrap();
    let rows = RowLayout::token_major(260, &shape);
    let (count, all) = (150, 260);
    for (i, value) in values.into_iter().enumerate() {
        let key = if i == 0 { sketched } else { value };
        let gathered = (0..3 * count).map(|i| (i * 7919 % all) as u32).collect();
        let tokens = TokenRange::new(0, count).unwrap();
        let pages = [1, 0].map(|index| Page { shard: 0, index }).to_vec();
        let format = SegmentFormat { key, value };
        assert_stored_alike(&Case { shape, format, rows, tokens, pages, seed: 3, gathered: Some(gathered) });
    }
}

/// What lies on the device decides nothing about memory: indices that are too large stand for the last token.
#[test]
fn indices_beyond_the_rows_are_the_last_token() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(4, &shape);
    let tensor = block_on(backend.upload(values(4 * 64, 1).as_slice().into())).unwrap();
    let stored = |indices: &Indices| {
        let mut store = backend.create_store(shape, SegmentFormat::F16).unwrap();
        block_on(backend.add_shard(&mut store, 1)).unwrap();
        let pages = [Page { shard: 0, index: 0 }];
        let write = SpanWrite { rows, tokens: Rows::Gather(indices), pages: &pages, range_slot: 0, centre: None };
        backend.quantize(&mut store, &tensor, &tensor, write).unwrap();
        words(&backend, store.shard_buffer(0, StoreBuffer::Keys).unwrap())
    };
    let upload = |tokens: &[u32], below| block_on(backend.upload_indices(tokens, 1, below)).unwrap();
    let wild = upload(&[1, u32::MAX - 1, 4, 0], u32::MAX);
    assert_eq!(block_on(backend.download_indices(&wild)).unwrap(), [1, u32::MAX - 1, 4, 0]);
    // The same buffer, as a kernel's output that was to hold numbers below 4.
    let wild = Indices::from_buffer(wild.buffer().clone(), 0, IndexShape::new(1, 4, 4).unwrap()).unwrap();
    assert!(stored(&wild) == stored(&upload(&[1, 3, 3, 0], 4)));
}

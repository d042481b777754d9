//! Many windows packed at once hold what windows packed one after the other hold, bit for bit.

use kvpack::backend::{SpanRead, SpanWrite, WindowMove};
use kvpack::cpu::Cpu;
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, Rotation, TILE_TOKENS, TensorFormat};
use kvpack::plan::{Page, RowLayout, TokenRange};
use kvpack::{AttentionShape, Backend, Bits, SegmentFormat};
use pollster::block_on;

use super::expected::values;
use crate::gpu_device::shared;

/// What the windows of a store of f16 pages decode to once they are packed.
fn packed<B: Backend>(backend: &B, shape: AttentionShape, format: SegmentFormat, windows: &[WindowMove]) -> Vec<u32> {
    let tokens = windows.len() * TILE_TOKENS;
    let rows = RowLayout::token_major(tokens, &shape);
    let upload = |seed| block_on(backend.upload(values(rows.elements_needed(&shape), seed).as_slice().into())).unwrap();
    let (keys, values) = (upload(1), upload(2));
    let mut open = backend.create_store(shape, SegmentFormat::F16).unwrap();
    let mut store = backend.create_store(shape, format).unwrap();
    for _ in 0..2 {
        block_on(backend.add_shard(&mut open, windows.len() as u32)).unwrap();
        block_on(backend.add_shard(&mut store, windows.len() as u32)).unwrap();
    }
    block_on(backend.reserve_ranges(&mut store, windows.len() + 1)).unwrap();
    let pages: Vec<Page> = windows.iter().map(|window| window.from).collect();
    let write = SpanWrite {
        rows,
        tokens: TokenRange::new(0, tokens).unwrap().into(),
        pages: &pages,
        range_slot: 0,
        centre: None,
    };
    backend.quantize(&mut open, &keys, &values, write).unwrap();
    backend.pack_windows(&shape, &open, &mut store, windows).unwrap();
    let mut decoded = Vec::new();
    for window in windows {
        let read = SpanRead { pages: &[window.to], tokens: TILE_TOKENS, range_slot: window.range_slot, centre: None };
        let (keys, values) = backend.dequantize(&store, read).unwrap();
        for rows in [keys, values] {
            // +0 and −0 are alike.
            decoded.extend(block_on(backend.download(&rows)).unwrap().into_iter().map(|x| (x + 0.0).to_bits()));
        }
    }
    decoded
}

#[test]
fn windows_packed_at_once_are_those_packed_one_by_one() {
    let affine = |bits, grouping| AffineFormat::new(bits, grouping);
    let rotation = Rotation::randomized(64, 3);
    let keys = [
        TensorFormat::Affine(affine(Bits::Two, Grouping::Channel)),
        TensorFormat::Affine(affine(Bits::Four, Grouping::Channel).rotated(rotation)),
        TensorFormat::Affine(affine(Bits::Eight, Grouping::Channel).symmetric()),
        TensorFormat::Affine(affine(Bits::Three, Grouping::ChannelTokens(32))),
        TensorFormat::Codebook(CodebookFormat::turboquant_prod(Bits::Three, 64)),
    ];
    let values = [
        TensorFormat::Affine(affine(Bits::One, Grouping::Channel)),
        TensorFormat::Affine(affine(Bits::Four, Grouping::Token)),
    ];
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    // Out of order, in two shards, every window with a slot of its own.
    let window = |i: u32| WindowMove {
        from: Page { shard: i % 2, index: 4 - i / 2 },
        to: Page { shard: 1 - i % 2, index: i / 2 },
        range_slot: 5 - i as usize,
    };
    let windows: Vec<WindowMove> = (0..5).map(window).collect();
    for (i, key) in keys.into_iter().enumerate() {
        let format = SegmentFormat { key, value: values[i % 2] };
        let at_once = packed(&shared(), shape, format, &windows);
        assert!(at_once == packed(&Cpu::new(), shape, format, &windows), "{format}");
        assert!(at_once.iter().any(|&bits| bits != 0));
    }
}

/// More windows than pass at once.
#[test]
fn pieces_of_windows_join() {
    let shape = AttentionShape::new(16, 16, 256).unwrap();
    let window = |i: u32| {
        let page = Page { shard: 0, index: i };
        WindowMove { from: page, to: page, range_slot: i as usize }
    };
    let windows: Vec<WindowMove> = (0..10).map(window).collect();
    let format = SegmentFormat::per_channel(Bits::Four);
    assert!(packed(&shared(), shape, format, &windows) == packed(&Cpu::new(), shape, format, &windows));
}

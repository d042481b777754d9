//! Kernel `append` against what packing the whole span at once stores.

use kvpack::backend::{Packing, Storage};
use kvpack::backend::{SpanRead, SpanWrite, TokenWrite};
use kvpack::cpu::Cpu;
use kvpack::format::KeyOrValue;
use kvpack::plan::{ElementType, Page, RowLayout, TokenRange};
use kvpack::wgpu::{StoreBuffer, Wgpu};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use pollster::block_on;

use super::expected::{Rows, values};
use super::words::words;
use crate::gpu_device::shared;
use any_backend::key_means::means;

fn stored(backend: &Wgpu, store: &kvpack::wgpu::Store) -> [Vec<u32>; 2] {
    [KeyOrValue::Key, KeyOrValue::Value].map(|which| {
        let shards = 0..store.shards() as u32;
        shards.flat_map(|shard| words(backend, store.shard_buffer(shard, StoreBuffer::tiles(which)).unwrap())).collect()
    })
}

/// Tokens put one call after the other, several per call and over two shards, make the tiles that one span makes.
#[test]
fn appended_tokens_make_the_tiles_of_a_span() {
    let backend = shared();
    for (head_dim, types) in [
        (80, (ElementType::F16, ElementType::F32)),
        (128, (ElementType::F32, ElementType::F16)),
        (256, (ElementType::F16, ElementType::F16)),
        (96, (ElementType::Bf16, ElementType::Bf16)),
    ] {
        let shape = AttentionShape::new(2, 2, head_dim).unwrap();
        let rows = RowLayout::token_major(140, &shape);
        let keys = Rows::new(&backend, rows, values(rows.elements_needed(&shape), 5), types.0);
        let values = Rows::new(&backend, rows, values(rows.elements_needed(&shape), 6), types.1);
        let pages = [Page { shard: 1, index: 1 }, Page { shard: 0, index: 0 }];
        let empty = || {
            let mut store = backend.create_store(shape, SegmentFormat::F16).unwrap();
            block_on(backend.add_shard(&mut store, 2)).unwrap();
            block_on(backend.add_shard(&mut store, 2)).unwrap();
            store
        };
        let mut whole = empty();
        let write = SpanWrite {
            rows,
            tokens: TokenRange::new(0, 140).unwrap().into(),
            pages: &pages,
            range_slot: 0,
            centre: None,
        };
        backend.quantize(&mut whole, &keys.tensor, &values.tensor, write).unwrap();

        let mut one_by_one = empty();
        let place = |token: usize| TokenWrite { token, page: pages[token / 128], slot: token % 128, centre: None };
        // The first call holds tokens that share words.
        let calls = [(0..70).collect::<Vec<_>>(), (70..139).rev().collect(), vec![139]];
        for call in calls {
            let writes: Vec<TokenWrite> = call.into_iter().map(place).collect();
            backend.append(&mut one_by_one, &keys.tensor, &values.tensor, rows, &writes).unwrap();
        }
        assert!(stored(&backend, &whole) == stored(&backend, &one_by_one), "{head_dim}");
        let read = SpanRead { pages: &pages, tokens: 140, range_slot: 0, centre: None };
        assert!(backend.dequantize(&one_by_one, read).is_ok());
    }
}

#[test]
fn ranges_over_tokens_take_no_single_tokens() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(1, &shape);
    let row = Rows::new(&backend, rows, values(64, 1), ElementType::F32);
    let mut store = backend.create_store(shape, SegmentFormat::per_channel(Bits::Eight)).unwrap();
    block_on(backend.add_shard(&mut store, 1)).unwrap();
    let writes = [TokenWrite { token: 0, page: Page { shard: 0, index: 0 }, slot: 0, centre: None }];
    let appended = backend.append(&mut store, &row.tensor, &row.tensor, rows, &writes);
    assert!(matches!(appended, Err(Error::Plan { .. })), "{appended:?}");
}

/// Bit for bit, wherever the tokens begin.
#[test]
fn means_of_keys_are_those_of_the_cpu() {
    assert!(means(&shared()) == means(&Cpu::new()));
}

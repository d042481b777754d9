//! A layout and a step of it, for tests.

use std::sync::Arc;

use super::{LayerWrites, PageCopy, StoreCapacity, TokenWrite, WindowCapacity, WindowMove, WriteLayout};
use crate::plan::Page;
use crate::{AttentionShape, Bits, SegmentFormat};

/// A layout of two stores, whose f16 pages are packed into 4 bits.
pub(super) fn layout() -> Arc<WriteLayout> {
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let of = |format, tokens| StoreCapacity {
        format,
        shard_pages: vec![5, 3],
        range_slots: 4,
        tokens,
        copies: 2,
        centres: 0,
        centre_slots: 0,
    };
    let stores = vec![of(SegmentFormat::F16, 3), of(SegmentFormat::per_channel(Bits::Four), 0)];
    let windows = vec![WindowCapacity { from: 0, to: 1, windows: 2, newer: 0 }];
    Arc::new(WriteLayout::new(shape, 8, stores, windows).unwrap())
}

/// A page of a shard.
pub(super) const fn page(shard: u32, index: u32) -> Page {
    Page { shard, index }
}

/// A step that writes to both stores.
pub(super) fn writes(layout: &WriteLayout) -> LayerWrites {
    let mut writes = LayerWrites::of(layout);
    writes.stores[0].copies.push(PageCopy { from: page(0, 4), to: page(1, 2) });
    writes.stores[0].tokens.push(TokenWrite { token: 7, page: page(1, 2), slot: 127, centre: None });
    writes.stores[0].tokens.push(TokenWrite { token: 0, page: page(0, 0), slot: 0, centre: None });
    writes.windows[0].push(WindowMove { from: page(1, 2), to: page(0, 1), range_slot: 3 });
    writes
}

//! Stores: shards, limits, growth, and a device without room.

use kvpack::backend::{Device, Packing, Storage};
use kvpack::backend::{SpanRead, SpanWrite};
use kvpack::plan::{ElementType, Page, RowLayout, TokenRange};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use pollster::block_on;

use super::expected::{Rows, values};
use super::words::words;
use crate::gpu_device::{fresh, shared};

#[test]
fn shards_keep_to_an_artificial_limit() {
    let backend = shared().with_binding_limit(64 << 10);
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    // A page of 4-bit keys of two heads has 2 · 128 · 64 / 2 = 8 KiB.
    let format = SegmentFormat::per_channel(Bits::Four);
    assert_eq!(backend.max_shard_pages(&shape, &format), 8);
    let mut store = backend.create_store(shape, format).unwrap();
    let error = block_on(backend.add_shard(&mut store, 9)).unwrap_err();
    assert!(matches!(error, Error::Limit { needed: 9, allowed: 8, .. }), "{error}");
    assert!(block_on(backend.add_shard(&mut store, 0)).is_err());
    block_on(backend.add_shard(&mut store, 8)).unwrap();
    assert_eq!(backend.store_bytes(&store), 128 << 10);

    let none = shared().with_binding_limit(1 << 10);
    let error = none.create_store(shape, SegmentFormat::F16).unwrap_err();
    assert!(matches!(error, Error::Limit { needed: 32768, allowed: 1024, .. }), "{error}");
}

#[test]
fn slots_grow_and_keep_what_they_hold() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(100, &shape);
    let tensor = Rows::new(&backend, rows, values(6400, 3), ElementType::F32).tensor;
    let mut store = backend.create_store(shape, SegmentFormat::per_channel(Bits::Two)).unwrap();
    block_on(backend.add_shard(&mut store, 1)).unwrap();
    block_on(backend.reserve_ranges(&mut store, 1)).unwrap();
    let page = [Page { shard: 0, index: 0 }];
    let write =
        SpanWrite { rows, tokens: TokenRange::new(0, 100).unwrap().into(), pages: &page, range_slot: 0, centre: None };
    backend.quantize(&mut store, &tensor, &tensor, write).unwrap();
    let decoded = |store: &kvpack::wgpu::Store| {
        let read = SpanRead { pages: &page, tokens: 100, range_slot: 0, centre: None };
        let (keys, values) = backend.dequantize(store, read).unwrap();
        (block_on(backend.download(&keys)).unwrap(), block_on(backend.download(&values)).unwrap())
    };
    let before = decoded(&store);
    let bytes = backend.store_bytes(&store);
    block_on(backend.reserve_ranges(&mut store, 5)).unwrap();
    assert_eq!(decoded(&store), before);
    assert_eq!(backend.store_bytes(&store), bytes + 2 * 4 * 64 * 8);
    let ranges = words(&backend, store.span_ranges_buffer(kvpack::format::KeyOrValue::Key).unwrap());
    assert!(ranges[128..].iter().all(|&word| word == 0));
    // Bytes that wrap around to those of one slot, and more than all numbers.
    for slots in [(1 << 55) + 1, usize::MAX] {
        let refused = block_on(backend.reserve_ranges(&mut store, slots));
        assert!(matches!(refused, Err(Error::Limit { .. })), "{slots}: {refused:?}");
        assert_eq!(decoded(&store), before);
    }
    // A format without span ranges needs no slots.
    let mut window = backend.create_store(shape, SegmentFormat::F16).unwrap();
    block_on(backend.reserve_ranges(&mut window, 5)).unwrap();
    assert_eq!((window.range_slots(), window.bytes()), (0, 0));
}

/// The device has no room at some point: the call says so, the store is as it was, and the device goes on working.
///
/// A child process runs the body under a limit of address space, which a software driver allocates from.
#[test]
#[cfg(target_os = "linux")]
fn a_device_without_room_is_survived() {
    let info = shared().device().adapter_info();
    if info.device_type != wgpu::DeviceType::Cpu {
        eprintln!("not run on {}: only a software driver's memory can be limited", info.name);
        return;
    }
    let test = std::env::current_exe().unwrap();
    let command = "ulimit -v 6000000; exec \"$0\" --exact \"$1\" --ignored --nocapture --test-threads 1";
    let output = std::process::Command::new("sh")
        .args(["-c", command])
        .arg(test)
        .arg("kernels::memory::without_room")
        .output()
        .unwrap();
    let text = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

#[test]
#[ignore = "needs the limited address space that a_device_without_room_is_survived gives it"]
fn without_room() {
    let backend = fresh();
    let shape = AttentionShape::new(8, 8, 128).unwrap();
    let mut store = backend.create_store(shape, SegmentFormat::F16).unwrap();
    block_on(backend.add_shard(&mut store, 2)).unwrap();
    let rows = RowLayout::token_major(128, &shape);
    let tensor = Rows::new(&backend, rows, values(rows.elements_needed(&shape), 3), ElementType::F32).tensor;
    let page = [Page { shard: 0, index: 1 }];
    let write =
        SpanWrite { rows, tokens: TokenRange::new(0, 128).unwrap().into(), pages: &page, range_slot: 0, centre: None };
    let read = SpanRead { pages: &page, tokens: 128, range_slot: 0, centre: None };
    backend.quantize(&mut store, &tensor, &tensor, write).unwrap();
    let decoded = || block_on(backend.download(&backend.dequantize(&store, read).unwrap().0)).unwrap();
    let before = decoded();

    let mut hoard = backend.create_store(shape, SegmentFormat::F16).unwrap();
    let error = loop {
        let held = (hoard.shards(), hoard.bytes());
        assert!(held.0 < 100, "the limit was never reached");
        // 64 MiB of keys and as much of values.
        if let Err(error) = block_on(backend.add_shard(&mut hoard, 256)) {
            assert_eq!(held, (hoard.shards(), hoard.bytes()));
            break error;
        }
    };
    assert!(matches!(error, Error::OutOfMemory { bytes, .. } if bytes > 1 << 20), "{error}");
    assert!(hoard.shards() > 0);
    drop(hoard);
    assert_eq!(decoded(), before);
}

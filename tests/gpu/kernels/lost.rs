//! A lost device: every call says so; none panics, hangs or pretends to work.

use kvpack::backend::{AttendOptions, SpanRead, SpanWrite, TokenWrite};
use kvpack::backend::{Attention, Device, Packing, Storage};
use kvpack::format::KeyOrValue;
use kvpack::plan::{AttendPlan, ElementType, Page, QueryRun, RowLayout, SpanView, StoreView, TokenRange};
use kvpack::wgpu::{AttendStep, AttendTensors, Scratch, Tensor, measure};
use kvpack::{AttentionShape, Bits, Error, SegmentFormat};
use pollster::block_on;

use super::expected::{Rows, values};
use crate::gpu_device::fresh;

#[test]
fn every_call_on_a_lost_device_says_so() {
    let backend = fresh();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(4, &shape);
    let tensor = Rows::new(&backend, rows, values(256, 1), ElementType::F32).tensor;
    let store = |format| {
        let mut store = backend.create_store(shape, format).unwrap();
        block_on(backend.add_shard(&mut store, 1)).unwrap();
        block_on(backend.reserve_ranges(&mut store, 1)).unwrap();
        store
    };
    let (mut packed, mut window) = (store(SegmentFormat::per_channel(Bits::Two)), store(SegmentFormat::F16));
    let page = Page { shard: 0, index: 0 };
    let write =
        SpanWrite { rows, tokens: TokenRange::new(0, 4).unwrap().into(), pages: &[page], range_slot: 0, centre: None };
    let read = SpanRead { pages: &[page], tokens: 4, range_slot: 0, centre: None };
    backend.quantize(&mut packed, &tensor, &tensor, write).unwrap();
    backend.dequantize(&packed, read).unwrap();
    let bytes = packed.bytes();

    let pages = [page];
    let spans = vec![SpanView { sequence: 0, start: 0, tokens: 4, gathered: None, pages: &pages, range_slot: 0 }];
    let view = StoreView { format: *packed.format(), calibration: None, spans };
    let plan = AttendPlan::new(shape, &QueryRun::decode_batch(1), &[view]).unwrap();
    let query = tensor.slice(0, 64).unwrap();
    block_on(backend.attend(&plan, &[&packed], &query, AttendOptions::default())).unwrap();

    // An engine's own step, planned and with its scratch while the device was there.
    let options = AttendOptions::default();
    let step = AttendStep::new(backend.capabilities(), &plan, ElementType::F32, options).unwrap();
    let scratch = block_on(Scratch::new(backend.device(), step.scratch())).unwrap();
    let output = Tensor::zeroed(backend.device(), 64, ElementType::F32).unwrap();
    let tensors = AttendTensors { queries: &query, output: &output, lse: None };
    step.bind(backend.kernels(), &[&packed], &scratch, tensors).unwrap();

    backend.device().destroy();

    let lost = |what: &str, error: Option<Error>| {
        assert!(matches!(error, Some(Error::DeviceLost { .. })), "{what}: {error:?}");
    };
    lost("upload", block_on(backend.upload([1f32].as_slice().into())).err());
    lost("download", block_on(backend.download(&tensor)).err());
    lost("zeroed", Tensor::zeroed(backend.device(), 4, ElementType::F32).err());
    lost("add_shard", block_on(backend.add_shard(&mut packed, 1)).err());
    lost("reserve_ranges", block_on(backend.reserve_ranges(&mut packed, 9)).err());
    lost(
        "first_non_finite",
        block_on(backend.first_non_finite(KeyOrValue::Key, &tensor, &rows, &shape, 65504.0)).err(),
    );
    lost("quantize", backend.quantize(&mut packed, &tensor, &tensor, write).err());
    lost("dequantize", backend.dequantize(&packed, read).err());
    let token = TokenWrite { token: 0, page, slot: 0, centre: None };
    lost("append", backend.append(&mut window, &tensor, &tensor, rows, &[token]).err());
    lost("attend", block_on(backend.attend(&plan, &[&packed], &query, AttendOptions::default())).err());
    lost("bind", step.bind(backend.kernels(), &[&packed], &scratch, tensors).err());
    lost("read_bandwidth", block_on(measure::read_bandwidth(&backend, 1, measure::Repeats::default())).err());
    assert_eq!((packed.shards(), packed.range_slots(), packed.bytes()), (1, 1, bytes), "the store is as it was");
}

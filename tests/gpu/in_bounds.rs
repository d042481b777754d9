//! Kernels stay in bounds, whatever the memory that a caller can reach holds: `docs/in-bounds.md`.
//!
//! Software drivers skip accesses that are out of bounds, so that nothing would show beside a buffer. Kernels that
//! count such indices show them ([`Kernels::counting`]). The count takes a storage buffer of its own beside those of
//! all kernels, which SwiftShader has no room for: `scripts/test.sh` runs these tests on its first driver alone.

use std::sync::Arc;

use kvpack::backend::{AttendOptions, Device, Packing, QueryPrecision, SpanWrite, Storage};
use kvpack::cache::{PromptSpan, StoreId};
use kvpack::conformance::{self, Check};
use kvpack::format::{AffineFormat, Grouping, KeyOrValue, TensorFormat};
use kvpack::plan::{ElementType, Elements, IndexShape, Page, QueryRun, RowLayout, Rows, Split, TokenRange};
use kvpack::wgpu::shader::{Binding, Source};
use kvpack::wgpu::{
    AttendStep, AttendTensors, GatherPlan, Indices, Kernels, Requirements, Scratch, StoreBuffer, Tensor, Wgpu,
    open_device,
};
use kvpack::{AttentionShape, Bits, Calibration, KvCache, Recipe, SegmentFormat};
use pollster::block_on;

use crate::gpu_device;
use any_backend::random_rows::Random;

fn values(count: usize, seed: u64) -> Vec<f32> {
    let mut random = Random::new(seed);
    (0..count).map(|_| random.unit()).collect()
}

/// A device that allows the buffer of the count beside those of all kernels.
fn device() -> (wgpu::Device, wgpu::Queue) {
    let adapter = gpu_device::adapter().unwrap();
    let path = gpu_device::forced_path().unwrap().unwrap_or(kvpack::wgpu::Path::Matrices);
    let mut requirements = Requirements::of(&adapter, wgpu::ExperimentalFeatures::disabled()).restricted_to(path);
    requirements.limits.max_storage_buffers_per_shader_stage += 1;
    block_on(open_device(&adapter, requirements)).unwrap()
}

fn counting() -> Wgpu {
    let (device, queue) = device();
    Wgpu::with_kernels(queue, Arc::new(Kernels::counting(&device).unwrap())).unwrap()
}

fn counted(backend: &Wgpu) -> u32 {
    block_on(backend.kernels().out_of_bounds(backend.queue())).unwrap().unwrap()
}

/// Without this the other tests would show nothing.
#[test]
fn an_index_out_of_bounds_is_counted() {
    let wgsl = "@group(0) @binding(0) var<storage, read_write> words: array<u32>;\n\
                var<workgroup> shared_words: array<u32, 8>;\n\
                @compute @workgroup_size(16)\n\
                fn main(@builtin(local_invocation_index) i: u32) {\n\
                    shared_words[i] = i;\n    words[words[i] + 1u] = shared_words[i % 8u];\n}\n";
    let bindings = vec![Binding { index: 0, name: "words".into(), writable: true, least_bytes: 4 }];
    let source = Source { wgsl: wgsl.into(), bindings }.counted();
    let (device, queue) = device();
    let module = device.create_shader_module(wgpu::ShaderModuleDescriptor {
        label: None,
        source: wgpu::ShaderSource::Wgsl(source.wgsl.into()),
    });
    let pipeline = device.create_compute_pipeline(&wgpu::ComputePipelineDescriptor {
        label: None,
        layout: None,
        module: &module,
        entry_point: None,
        compilation_options: wgpu::PipelineCompilationOptions::default(),
        cache: None,
    });
    let upload = |words: &[f32]| block_on(Tensor::upload(&device, &queue, Elements::F32(words))).unwrap();
    let (words, count) = (upload(&[0.0; 12]), upload(&[0.0]));
    let [words, count] = [(0, &words), (15, &count)]
        .map(|(binding, tensor)| wgpu::BindGroupEntry { binding, resource: tensor.buffer().as_entire_binding() });
    let layout = pipeline.get_bind_group_layout(0);
    let entries = [words, count.clone()];
    let group =
        device.create_bind_group(&wgpu::BindGroupDescriptor { label: None, layout: &layout, entries: &entries });
    let mut encoder = device.create_command_encoder(&Default::default());
    {
        let mut pass = encoder.begin_compute_pass(&Default::default());
        pass.set_pipeline(&pipeline);
        pass.set_bind_group(0, &group, &[]);
        pass.dispatch_workgroups(1, 1, 1);
    }
    queue.submit([encoder.finish()]);
    let wgpu::BindingResource::Buffer(count) = &count.resource else { unreachable!("it is a buffer") };
    let count = Tensor::from_buffer(count.buffer.clone(), 0, 1, ElementType::F32).unwrap();
    let count = block_on(count.download(&device, &queue)).unwrap()[0].to_bits();
    // Eight places beyond workgroup memory, and four invocations beyond the twelve words.
    assert_eq!(count, 8 + 4);
}

/// A part of the quick cases, or with `KVPACK_ALL_CASES=1` the whole registry.
#[test]
fn no_case_leaves_the_bounds() {
    let backend = counting();
    let all = std::env::var("KVPACK_ALL_CASES").is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
    let quick = || conformance::checks().into_iter().filter(Check::is_quick);
    let centred = quick().filter(|check| check.name().contains("centred")).step_by(3);
    let quick = quick().step_by(6).chain(centred).collect();
    for check in if all { conformance::checks() } else { quick } {
        let report = block_on(check.run(&backend)).unwrap();
        assert!(report.passed(), "{}: {}", check.name(), report.reason());
        assert_eq!(counted(&backend), 0, "{}", check.name());
    }
}

/// Words beside what a step writes.
const CANARIES: usize = 64;
const CANARY: f32 = 7.0;

/// A buffer of at least `bytes`, zeros, with canaries behind them.
fn guarded(backend: &Wgpu, bytes: u64) -> (wgpu::Buffer, usize) {
    let words = (bytes / 4).max(1) as usize;
    let page = [vec![0.0; words], vec![CANARY; CANARIES]].concat();
    (block_on(backend.upload(Elements::F32(&page))).unwrap().buffer().clone(), words)
}

fn canaries_live(backend: &Wgpu, (buffer, words): &(wgpu::Buffer, usize)) -> bool {
    let page = Tensor::from_buffer(buffer.clone(), 0, words + CANARIES, ElementType::F32).unwrap();
    block_on(backend.download(&page)).unwrap()[*words..].iter().all(|&word| word == CANARY)
}

/// What callers may write where the tables of a step belong.
fn forged_tables(words: usize) -> Vec<Vec<u32>> {
    let mut random = Random::new(9);
    let mut words_of = |most: u64| (0..words).map(|_| (random.word() % (most + 1)) as u32).collect::<Vec<_>>();
    vec![vec![u32::MAX; words], words_of(200), words_of(u64::from(u32::MAX))]
}

/// Every kernel of a step, over every kind of format, with tables that no plan would make.
#[test]
fn no_table_leads_out_of_bounds() {
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let per_channel = SegmentFormat::per_channel(Bits::Four);
    let affine = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Four, grouping));
    let kivi = SegmentFormat { key: affine(Grouping::ChannelTokens(32)), value: affine(Grouping::TokenChannels(32)) };
    let formats = [
        SegmentFormat::F16,
        per_channel,
        SegmentFormat::saw_int4(),
        SegmentFormat::turboquant(Bits::Three, 64),
        SegmentFormat::turboquant_prod(Bits::Four, 64),
        kivi,
    ];
    let plain = formats.into_iter().map(|format| (format, None));
    let calibrated = (per_channel, Some(Calibration::new(0.0, 3.0).unwrap()));
    let backend = counting();
    for (turn, (format, calibration)) in plain.chain([calibrated]).enumerate() {
        // Few tokens, whose states `attend` merges itself, and many in two shards, whose launches write states to buffers
        // of their own.
        for tokens in if turn % 2 == 0 { [200].as_slice() } else { &[3000] }.iter().copied() {
            let recipe = Recipe::pack_all(format);
            let recipe = calibration.map_or(recipe.clone(), |calibration| recipe.with_calibration(calibration));
            let mut cache = KvCache::new(backend.clone(), shape, 1, recipe).unwrap();
            for tokens in [1500, 3000].into_iter().filter(|&part| part <= tokens) {
                block_on(cache.reserve(StoreId::PACKED, tokens)).unwrap();
            }
            let rows = RowLayout::token_major(tokens, &shape);
            let upload =
                |seed| block_on(backend.upload(Elements::F32(&values(rows.elements_needed(&shape), seed)))).unwrap();
            let prompt = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
            block_on(cache.prefill(0, rows, &upload(1), &upload(2), &prompt)).unwrap();
            let query = [QueryPrecision::Int16, QueryPrecision::Int8][turn / 2 % 2];
            let split = Split { tile_step: 1, ..Split::default() };
            let options = AttendOptions { query, split, ..AttendOptions::default() };
            let plan = cache.plan(&QueryRun::decode_batch(1)).unwrap();
            let step = AttendStep::new(backend.capabilities(), &plan, ElementType::F32, options).unwrap();
            assert_eq!(step.scratch().states[1] > 0, tokens == 3000, "{format}, {tokens} tokens");
            for (forged, table) in forged_tables(step.tables().len() / 4).into_iter().enumerate() {
                let row = shape.query_heads() * shape.head_dim();
                let page = [
                    vec![CANARY; CANARIES],
                    values(row, 3),
                    vec![CANARY; CANARIES],
                    vec![0.0; row],
                    vec![CANARY; CANARIES],
                ];
                let page = block_on(backend.upload(Elements::F32(&page.concat()))).unwrap();
                let (queries, output) =
                    (page.slice(CANARIES, row).unwrap(), page.slice(2 * CANARIES + row, row).unwrap());
                let needed = step.scratch();
                let [tables, prepared, scores, arrived] =
                    [needed.tables, needed.queries, needed.scores, needed.arrived]
                        .map(|bytes| guarded(&backend, bytes));
                let states = needed.states.map(|bytes| guarded(&backend, bytes));
                let scratch = Scratch {
                    tables: tables.0.clone(),
                    queries: prepared.0.clone(),
                    scores: scores.0.clone(),
                    states: states.each_ref().map(|(states, _)| states.clone()),
                    arrived: arrived.0.clone(),
                };
                let tensors = AttendTensors { queries: &queries, output: &output, lse: None };
                let launches = step.bind(backend.kernels(), &cache.stores(), &scratch, tensors).unwrap();
                backend.queue().write_buffer(&scratch.tables, 0, bytemuck::cast_slice(&table));
                let mut encoder = backend.device().create_command_encoder(&Default::default());
                launches.encode(&mut encoder.begin_compute_pass(&Default::default()));
                backend.queue().submit([encoder.finish()]);

                let what = format!("{format}, {tokens} tokens, table {forged}");
                assert_eq!(counted(&backend), 0, "{what}");
                let page = block_on(backend.download(&page)).unwrap();
                let beside =
                    [0..CANARIES, CANARIES + row..2 * CANARIES + row, 2 * CANARIES + 2 * row..3 * CANARIES + 2 * row];
                assert!(beside.into_iter().flatten().all(|at| page[at] == CANARY), "{what}: beside the tensors");
                for section in [&tables, &prepared, &scores, &arrived].into_iter().chain(&states) {
                    assert!(canaries_live(&backend, section), "{what}: behind a buffer of scratch");
                }
            }
        }
    }
}

/// Token numbers that kernels are handed in buffers of the caller's.
#[test]
fn no_index_leads_out_of_bounds() {
    let backend = counting();
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let rows = RowLayout::token_major(300, &shape);
    let tensor = |seed| block_on(backend.upload(Elements::F32(&values(rows.elements_needed(&shape), seed)))).unwrap();
    let (keys, dense_values) = (tensor(1), tensor(2));
    for forged in [u32::MAX, 300, 1 << 31] {
        let words = block_on(backend.upload(Elements::F32(&vec![f32::from_bits(forged); 2 * 200]))).unwrap();
        let indices = Indices::from_buffer(words.buffer().clone(), 0, IndexShape::new(2, 200, 300).unwrap()).unwrap();
        let gathered = Tensor::zeroed(backend.device(), 200 * 2 * 64, ElementType::F32).unwrap();
        let plan = GatherPlan::new(&shape, rows, 200).unwrap();
        let launches = plan.bind(backend.kernels(), &keys, &indices, &gathered).unwrap();
        let mut encoder = backend.device().create_command_encoder(&Default::default());
        launches.encode(&mut encoder.begin_compute_pass(&Default::default()));
        backend.queue().submit([encoder.finish()]);
        assert_eq!(counted(&backend), 0, "gather, {forged}");

        let mut store = backend.create_store(shape, SegmentFormat::per_channel(Bits::Two)).unwrap();
        block_on(backend.add_shard(&mut store, 4)).unwrap();
        block_on(backend.reserve_ranges(&mut store, 1)).unwrap();
        let pages = [Page { shard: 0, index: 2 }, Page { shard: 0, index: 1 }];
        let write = SpanWrite { rows, tokens: Rows::Gather(&indices), pages: &pages, range_slot: 0, centre: None };
        backend.quantize(&mut store, &keys, &dense_values, write).unwrap();
        assert_eq!(counted(&backend), 0, "quantize, {forged}");
    }
}

/// Pages beside those that are written are canaries: what is packed stays in its own.
#[test]
fn packing_touches_no_other_page() {
    let backend = gpu_device::fresh();
    let shape = AttentionShape::new(2, 2, 80).unwrap();
    let rows = RowLayout::token_major(200, &shape);
    let tensor = |seed| block_on(backend.upload(Elements::F32(&values(rows.elements_needed(&shape), seed)))).unwrap();
    let (keys, dense_values) = (tensor(1), tensor(2));
    for format in [
        SegmentFormat::F16,
        SegmentFormat::per_channel(Bits::Three),
        SegmentFormat::saw_int4(),
        SegmentFormat::turboquant(Bits::Two, 80),
    ] {
        let mut store = backend.create_store(shape, format).unwrap();
        block_on(backend.add_shard(&mut store, 5)).unwrap();
        block_on(backend.reserve_ranges(&mut store, 2)).unwrap();
        let parts = [StoreBuffer::Keys, StoreBuffer::Values, StoreBuffer::KeyRanges, StoreBuffer::ValueRanges];
        let buffers: Vec<wgpu::Buffer> =
            parts.iter().filter_map(|&part| store.shard_buffer(0, part).ok().cloned()).collect();
        for buffer in &buffers {
            backend.queue().write_buffer(buffer, 0, &vec![0xa5; buffer.size() as usize]);
        }
        let pages = [Page { shard: 0, index: 3 }, Page { shard: 0, index: 1 }];
        let tokens = Rows::Run(TokenRange::new(0, 200).unwrap());
        backend
            .quantize(
                &mut store,
                &keys,
                &dense_values,
                SpanWrite { rows, tokens, pages: &pages, range_slot: 1, centre: None },
            )
            .unwrap();
        for buffer in &buffers {
            let words = (buffer.size() / 4) as usize;
            let tensor = Tensor::from_buffer(buffer.clone(), 0, words, ElementType::F32).unwrap();
            let words = block_on(backend.download(&tensor)).unwrap();
            for (index, page) in words.chunks(words.len() / 5).enumerate() {
                let untouched = page.iter().all(|word| word.to_bits() == 0xa5a5_a5a5);
                assert_eq!(untouched, ![1, 3].contains(&index), "{format}: page {index}");
            }
        }
        let found = block_on(backend.first_non_finite(KeyOrValue::Key, &keys, &rows, &shape, 65504.0)).unwrap();
        assert_eq!(found, None);
    }
}

//! What the CUDA backend stores and computes, on a device. `kvpack check --backend cuda` runs the conformance cases
//! there; these are what no case covers.

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::thread;

use futures::executor::block_on;
use half::bf16;
use kvpack::backend::{Device, FlaggedToken, Packing, SpanWrite, Storage, WriteInput};
use kvpack::cache::PromptSpan;
use kvpack::cpu::{Cpu, CpuIndices, CpuStore, CpuTensor, nmse, quantize};
use kvpack::cuda::cudarc::driver::DevicePtr;
use kvpack::cuda::cudarc::driver::sys::{CUgraphInstantiate_flags, CUstreamCaptureMode};
use kvpack::cuda::{
    AttendStep, AttendTensors, Cuda, Indices, KernelCache, NonFiniteFlags, Store, StoreStep, Tensor, TokenScoresPlan,
    TopKPlan, Words, WriteMemory,
};
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, HEAD_DIMS, KeyOrValue, TensorFormat, TileOrder};
use kvpack::plan::{
    ElementType, Elements, LayerWrites, Page, QueryLayout, QueryRun, RowLayout, Rows, TokenRange, TokenWrite,
    WriteTable,
};
use kvpack::policy::{self, HeadAggregation, ScoreRequest, ScoreRule, Spans, TextRule, Weighing};
use kvpack::{AttentionShape, Bits, Calibration, Error, KvCache, Recipe, SegmentFormat};

use any_backend::step_writes::{Case, formats, pages};
use any_backend::{cache_edges, non_finite_queries, rounding};

fn rows(elements: usize, factor: f32) -> Vec<f32> {
    (0..elements).map(|i| (i as f32 * factor).sin() * 3.0 + (i % 7) as f32).collect()
}

fn device() -> Cuda {
    Cuda::open(0, KernelCache::of_user()).expect("a CUDA device")
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn nan_in_queries_propagates() {
    non_finite_queries::check(&device(), |_| true);
    non_finite_queries::check_policies(&device());
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn edges_of_a_cache_are_those_of_the_cpu() {
    cache_edges::truncation_leaves_nothing(&device());
    cache_edges::the_largest_elements_are_taken(&device());
    cache_edges::steps_write_into_outputs(&device());
}

/// A tile on the device is the CPU's tile in the other order, bit for bit. Each format has a program of its own to
/// compile at each head dimension, so threads take them from one list.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn tiles_are_those_of_the_cpu_in_fragment_order() {
    let backend = device();
    let of_head_dim = |head_dim| tile_formats(head_dim).into_iter().map(move |format| (head_dim, format));
    let cases: Vec<(usize, SegmentFormat)> = HEAD_DIMS.into_iter().flat_map(of_head_dim).collect();
    let next = AtomicUsize::new(0);
    thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, usize::from).min(cases.len()) {
            scope.spawn(|| {
                // Calls of one stream share scratch memory, and wait for it while another compiles.
                let own = backend.on_stream(backend.stream().context().new_stream().unwrap()).unwrap();
                while let Some(&(head_dim, format)) = cases.get(next.fetch_add(1, Ordering::Relaxed)) {
                    compare_tiles(&own, head_dim, format);
                }
            });
        }
    });
}

/// Formats of every width and kind of group.
fn tile_formats(head_dim: usize) -> Vec<SegmentFormat> {
    let value = TensorFormat::Codebook(CodebookFormat::turboquant(Bits::Three, head_dim));
    let mut formats = vec![SegmentFormat::F16];
    for bits in Bits::ALL {
        let affine = |grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping));
        formats
            .extend([Grouping::Channel, Grouping::Token].map(|g| SegmentFormat { key: affine(g), value: affine(g) }));
        if bits != Bits::Eight {
            let key = TensorFormat::Codebook(CodebookFormat::turboquant_prod(bits, head_dim));
            formats.push(SegmentFormat { key, value });
        }
    }
    formats
}

/// The tiles of a run of tokens, and of tokens that each head names for itself.
fn compare_tiles(backend: &Cuda, head_dim: usize, segment: SegmentFormat) {
    let shape = AttentionShape::new(4, 2, head_dim).unwrap();
    let tokens = 128 + 77;
    let keys = CpuTensor::F32(rows(tokens * 2 * head_dim, 0.37));
    let values = CpuTensor::F32(rows(tokens * 2 * head_dim, 0.73));
    // The fields of the second page that no token has are zero bits in both orders, which a flip makes different codes.
    let pages = [1, 0].map(|index| Page { shard: 0, index });
    let full_page = pages[0];
    let rows = RowLayout::token_major(tokens, &shape);
    let all = TokenRange::new(0, tokens).unwrap();
    let named: Vec<u32> = (0..2 * tokens).map(|i| (i * 7919 % tokens) as u32).collect();
    for gathers in [false, true] {
        let mut cpu = CpuStore::new(shape, segment).unwrap();
        cpu.add_shard(2).unwrap();
        cpu.reserve_ranges(1).unwrap();
        let indices = CpuIndices::new(&named, 2, tokens as u32).unwrap();
        let write = SpanWrite {
            rows,
            tokens: if gathers { Rows::Gather(&indices) } else { all.into() },
            pages: &pages,
            range_slot: 0,
            centre: None,
        };
        quantize(&mut cpu, keys.elements(), values.elements(), write).unwrap();

        let mut cuda = backend.create_store(shape, segment).unwrap();
        block_on(backend.add_shard(&mut cuda, 2)).unwrap();
        block_on(backend.reserve_ranges(&mut cuda, 1)).unwrap();
        let upload = |tensor: &CpuTensor| block_on(backend.upload(tensor.elements())).unwrap();
        let indices = block_on(backend.upload_indices(&named, 2, tokens as u32)).unwrap();
        assert_eq!(block_on(backend.download_indices(&indices)).unwrap(), named);
        let write = SpanWrite {
            rows,
            tokens: if gathers { Rows::Gather(&indices) } else { all.into() },
            pages: &pages,
            range_slot: 0,
            centre: None,
        };
        backend.quantize(&mut cuda, &upload(&keys), &upload(&values), write).unwrap();

        for which in [KeyOrValue::Key, KeyOrValue::Value] {
            for head in 0..2 {
                let format = segment.tensor(which);
                let (words, _) = cpu.tile_words(which, full_page, head).unwrap();
                let expected =
                    TileOrder::DotProduct.convert(TileOrder::MmaFragment, which, format, head_dim, words).unwrap();
                let stored = cuda.tile_words(backend.stream(), which, full_page, head).unwrap();
                assert_eq!(stored, expected, "{which} {format} at {head_dim}, gathered {gathers}");
            }
        }
    }
}

/// A cache that packs its windows while it grows gives the same outputs as on the CPU.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_growing_cache_attends_as_on_the_cpu() {
    let shape = AttentionShape::new(8, 2, 128).unwrap();
    let recipe = || Recipe::calibquant(Bits::Four);
    let mut cpu = KvCache::new(Cpu::new(), shape, 2, recipe()).unwrap();
    let backend = device();
    let mut cuda = KvCache::new(backend.clone(), shape, 2, recipe()).unwrap();
    let tokens = 300;
    let (keys, values) = (rows(tokens * 256, 0.31), rows(tokens * 256, 0.57));
    let (text, image) = (TokenRange::new(0, 40).unwrap(), TokenRange::new(40, tokens).unwrap());
    let layout = RowLayout::token_major(tokens, &shape);
    let on_cpu = |x: &[f32]| CpuTensor::F32(x.to_vec());
    let on_cuda = |x: &[f32]| block_on(backend.upload(Elements::F32(x))).unwrap();
    for sequence in 0..2 {
        let prompt = [PromptSpan::f16(text), PromptSpan::packed(image)];
        block_on(cpu.prefill(sequence, layout, &on_cpu(&keys), &on_cpu(&values), &prompt)).unwrap();
        let prompt = [PromptSpan::f16(text), PromptSpan::packed(image)];
        block_on(cuda.prefill(sequence, layout, &on_cuda(&keys), &on_cuda(&values), &prompt)).unwrap();
    }
    for step in 0..140 {
        let row = rows(2 * 256, 0.011 * (step + 1) as f32);
        let layout = RowLayout::token_major(2, &shape);
        block_on(cpu.append(layout, &on_cpu(&row), &on_cpu(&row))).unwrap();
        let tensor = on_cuda(&row);
        block_on(cuda.append(layout, &tensor, &tensor)).unwrap();
    }
    let query = rows(2 * 8 * 128, 0.17);
    let expected = block_on(cpu.attend(&on_cpu(&query), ElementType::F32)).unwrap().to_f32();
    let tensor = on_cuda(&query);
    let output = block_on(cuda.attend(&tensor, ElementType::F32)).unwrap();
    let output = block_on(backend.download(&output)).unwrap();
    let expected: Vec<f64> = expected.into_iter().map(f64::from).collect();
    assert!(nmse(&output, &expected) < 1e-6, "{}", nmse(&output, &expected));
}

/// A graph that captured a step with calibrated scores, which clears their extremes and launches twice, yields at every
/// replay the bits of the step launched directly.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_captured_step_with_calibrated_scores_is_the_direct_one() {
    let shape = AttentionShape::new(8, 2, 128).unwrap();
    let backend = device();
    let recipe = Recipe::calibquant(Bits::Two).with_calibration(Calibration::new(0.0, 3.0).unwrap());
    let mut cache = KvCache::new(backend.clone(), shape, 2, recipe).unwrap();
    // Several blocks to a sequence, whose extremes meet, and an f16 window that is merged with what is packed.
    let tokens = 5000;
    let upload = |x: &[f32]| block_on(backend.upload(Elements::F32(x))).unwrap();
    let (keys, values) = (upload(&rows(tokens * 256, 0.31)), upload(&rows(tokens * 256, 0.57)));
    let prompt = [
        PromptSpan::packed(TokenRange::new(0, 4900).unwrap()),
        PromptSpan::f16(TokenRange::new(4900, tokens).unwrap()),
    ];
    for sequence in 0..2 {
        block_on(cache.prefill(sequence, RowLayout::token_major(tokens, &shape), &keys, &values, &prompt)).unwrap();
    }
    let queries = upload(&rows(2 * 8 * 128, 0.17));
    let step = AttendStep::new(&backend, &cache.plan(&QueryRun::decode_batch(2)).unwrap()).unwrap();
    assert_eq!(step.launch_labels().len(), 3, "{:?}", step.launch_labels());
    let stream = backend.stream();
    let bits = |tensor: &Tensor| {
        let output = tensor.download(stream).unwrap();
        output.into_iter().map(f32::to_bits).collect::<Vec<_>>()
    };
    let bind = || {
        let output = Tensor::zeroed(stream, queries.elements(), ElementType::F32).unwrap();
        (
            step.bind(&backend, &cache.stores(), AttendTensors { queries: &queries, output: &output, lse: None })
                .unwrap(),
            output,
        )
    };

    let (direct, expected) = bind();
    direct.launch().unwrap();
    let expected = bits(&expected);
    assert!(expected.iter().any(|&bits| f32::from_bits(bits) != 0.0));

    let (captured, output) = bind();
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    captured.launch().unwrap();
    let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
    assert!(bits(&output).iter().all(|&bits| bits == 0), "capturing runs nothing");
    for replay in 0..3 {
        graph.launch().unwrap();
        assert_eq!(bits(&output), expected, "replay {replay}");
    }
    // Replays after one another, without the host between them.
    (0..20).for_each(|_| graph.launch().unwrap());
    assert_eq!(bits(&output), expected);
}

#[test]
#[ignore = "needs an NVIDIA GPU"]
fn outputs_are_rounded_to_even() {
    rounding::outputs_are_rounded_to_even(device());
}

/// Keys, values, queries and output in one allocation of an engine's, as it lies.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn memory_of_an_engine_is_used_in_place() {
    let shape = AttentionShape::new(4, 2, 128).unwrap();
    let backend = device();
    let stream = backend.stream();
    let rounded = |x: &f32| bf16::from_f32(*x);
    let keys: Vec<bf16> = rows(256, 0.3).iter().map(rounded).collect();
    let values: Vec<bf16> = rows(256, 0.7).iter().map(rounded).collect();
    let queries: Vec<bf16> = rows(512, 0.2).iter().map(rounded).collect();
    // One element before them, so that nothing is aligned to more than its element.
    let parts = [&[bf16::ZERO][..], &keys, &values, &queries, &[bf16::ZERO; 512]].concat();
    let slice = stream.clone_htod(&parts.iter().map(|x| x.to_bits()).collect::<Vec<u16>>()).unwrap();
    let (address, elements) = (slice.device_ptr(stream).0, slice.len());
    // SAFETY: the slice holds these elements, lives as long as the tensor, and is given back in the
    // order of the stream.
    let whole = unsafe { Tensor::from_address(Arc::new(slice), address, elements, ElementType::Bf16) }.unwrap();
    let part = |first, elements| whole.slice(first, elements).unwrap();
    let mut cache = KvCache::new(backend.clone(), shape, 1, Recipe::f16()).unwrap();
    block_on(cache.append(RowLayout::token_major(1, &shape), &part(1, 256), &part(257, 256))).unwrap();
    let output = part(1025, 512);
    let step = AttendStep::new(&backend, &cache.plan(&[QueryRun::decode(0)]).unwrap()).unwrap();
    step.bind(&backend, &cache.stores(), AttendTensors { queries: &part(513, 512), output: &output, lse: None })
        .unwrap()
        .launch()
        .unwrap();
    // Two query heads to a value.
    let expected: Vec<f32> = (0..512).map(|i| values[i / 256 * 128 + i % 128].to_f32()).collect();
    assert_eq!(output.download(stream).unwrap(), expected);
    let before = part(0, 1025).download(stream).unwrap();
    assert!(before.iter().zip(&parts).all(|(a, b)| *a == b.to_f32()), "what lies before the output is as it was");
}

/// What kvpack allocates is given back in the order of its stream: another must not work on it.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn stores_and_tensors_of_other_streams_are_refused() {
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let backend = device();
    let other = backend.on_stream(backend.stream().context().new_stream().unwrap()).unwrap();
    let [own, foreign] = [&backend, &other].map(|of| block_on(of.upload(Elements::F32(&[1.0; 64]))).unwrap());
    let mut cache = KvCache::new(backend.clone(), shape, 1, Recipe::f16()).unwrap();
    let layout = RowLayout::token_major(1, &shape);
    let refused = |error: Option<Error>| assert!(matches!(error, Some(Error::Plan { .. })), "{error:?}");
    refused(block_on(cache.append(layout, &foreign, &own)).err());
    block_on(cache.append(layout, &own, &own)).unwrap();
    refused(block_on(cache.attend(&foreign, ElementType::F32)).err());
    let step = AttendStep::new(&other, &cache.plan(&[QueryRun::decode(0)]).unwrap()).unwrap();
    refused(step.bind(&other, &cache.stores(), AttendTensors { queries: &foreign, output: &foreign, lse: None }).err());
    refused(own.write(other.stream(), Elements::F32(&[2.0; 64])).err());
    let flags = NonFiniteFlags::new(backend.stream(), 1).unwrap();
    refused(flags.clear(other.stream()).err());
    let best = TopKPlan::new(1, 64, 2).unwrap();
    let chosen = Indices::zeroed(backend.stream(), best.indices()).unwrap();
    refused(best.bind(&backend, &foreign, &chosen).err());
    refused(best.bind(&backend, &own, &chosen).unwrap().launch(other.stream()).err());
}

/// A word for every head, no fewer.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn token_scores_need_a_word_for_every_head() {
    let backend = device();
    let (rows, spans) = (policy::QueryPositions::last(1, 8).unwrap(), Spans::new(8, &[]).unwrap());
    let scores = ScoreRule { aggregation: HeadAggregation::Sum, weighing: Weighing::Sum, pooling: None };
    let request = ScoreRequest { rows: &rows, spans: &spans, scores, group: 1, text: TextRule::Equal, recent: 0 };
    let plan = TokenScoresPlan::new(2, &request).unwrap();
    let tensor = || Tensor::zeroed(backend.stream(), 16, ElementType::F32).unwrap();
    let words = Words::zeroed(backend.stream(), "words", 1).unwrap();
    let refused = plan.bind(&backend, &tensor(), &tensor(), &words).map(drop);
    assert!(matches!(refused, Err(Error::Elements { given: 1, expected: 2, .. })), "{refused:?}");
}

/// Queries of a fused projection, and outputs among others: the bits of dense rows, and nothing between the
/// rows is touched.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn rows_may_be_parts_of_longer_ones() {
    const SEQUENCES: usize = 3;
    let shape = AttentionShape::new(4, 2, 128).unwrap();
    let row = 4 * 128;
    let (fused, ranks) = (QueryLayout { first: 256, stride: 8 * 128 }, QueryLayout { first: row, stride: 3 * row });
    let backend = device();
    let stream = backend.stream();
    let upload = |x: &[f32]| block_on(backend.upload(Elements::F32(x))).unwrap();
    for format in [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four), SegmentFormat::saw_int4()] {
        let mut cache = KvCache::new(backend.clone(), shape, SEQUENCES, Recipe::pack_all(format)).unwrap();
        let tokens = 3000;
        let (keys, values) = (upload(&rows(tokens * 256, 0.31)), upload(&rows(tokens * 256, 0.57)));
        let prompt = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
        for sequence in 0..SEQUENCES {
            block_on(cache.prefill(sequence, RowLayout::token_major(tokens, &shape), &keys, &values, &prompt)).unwrap();
        }
        let projected = rows(fused.elements_needed(SEQUENCES, &shape), 0.13);
        let dense: Vec<f32> = (0..SEQUENCES).flat_map(|at| projected[fused.row(at)..][..row].to_vec()).collect();
        let step = AttendStep::new(&backend, &cache.plan(&QueryRun::decode_batch(SEQUENCES)).unwrap()).unwrap();
        let run = |step: &AttendStep, queries: &[f32], output: &Tensor| {
            let queries = &upload(queries);
            step.bind(&backend, &cache.stores(), AttendTensors { queries, output, lse: None })
                .unwrap()
                .launch()
                .unwrap();
            output.download(stream).unwrap()
        };
        let zeroed = |elements| Tensor::zeroed(stream, elements, ElementType::Bf16).unwrap();
        let expected = run(&step, &dense, &zeroed(SEQUENCES * row));
        let strided = step.clone().with_query_layout(fused).with_output_layout(ranks);
        let got = run(&strided, &projected, &zeroed(SEQUENCES * 3 * row));
        for (at, got) in got.chunks(row).enumerate() {
            let expected = if at % 3 == 1 { &expected[at / 3 * row..][..row] } else { &[0.0; 512][..] };
            assert_eq!(got, expected, "{format}, piece {at}");
        }
        let (short, output) = (upload(&projected[1..]), zeroed(SEQUENCES * 3 * row));
        let tensors = AttendTensors { queries: &short, output: &output, lse: None };
        let bound = strided.bind(&backend, &cache.stores(), tensors);
        assert!(matches!(bound, Err(Error::Elements { what: "queries", .. })));
    }
}

/// Holds what the stores decode to, and the words of their tiles, against those of the twin.
fn assert_stores_alike(backend: &Cuda, stores: &[Store; 2], twins: &[CpuStore; 2], case: &Case) {
    assert!(
        case.decoded(backend, stores) == case.decoded(&Cpu::new(), twins),
        "{} decodes to something else",
        case.format
    );
    let head_dim = case.shape.head_dim();
    for (store, twin) in stores.iter().zip(twins) {
        assert!(case.centres(backend, store) == case.centres(&Cpu::new(), twin), "centres in {}", case.format);
        for which in [KeyOrValue::Key, KeyOrValue::Value] {
            let format = store.format().tensor(which);
            for (page, head) in pages().flat_map(|page| (0..case.shape.kv_heads()).map(move |head| (page, head))) {
                let (words, _) = twin.tile_words(which, page, head).unwrap();
                let expected =
                    TileOrder::DotProduct.convert(TileOrder::MmaFragment, which, format, head_dim, words).unwrap();
                let stored = store.tile_words(backend.stream(), which, page, head).unwrap();
                assert!(stored == expected, "{which} {page:?} of {format} in {}", case.format);
            }
        }
    }
}

/// Random steps of every family of formats store what the twin stores, over two shards, with tokens that share bytes.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn steps_store_what_the_twin_stores() {
    let backend = device();
    let check = &|(i, head_dim): (usize, usize)| {
        let shape = AttentionShape::new(3, 3, head_dim).unwrap();
        for (j, format) in formats(head_dim).into_iter().enumerate() {
            let (elements, seed) = (ElementType::ALL[(i + j) % 3], (i * 31 + j) as u64);
            let centred = format.key.takes_centre().then(|| Case::centred(shape, format, elements, seed));
            for case in [Case::new(shape, format, elements, seed)].into_iter().chain(centred) {
                let (expected, expected_found) = case.written(&Cpu::new());
                let (stores, found) = case.written(&backend);
                assert_stores_alike(&backend, &stores, &expected, &case);
                assert_eq!(found, expected_found, "{format} at {head_dim}");
            }
        }
    };
    // Every head dimension has kernels of its own to compile.
    thread::scope(|scope| {
        for of in HEAD_DIMS.into_iter().enumerate() {
            scope.spawn(move || check(of));
        }
    });
}

/// One graph that captured the launches of a step stores the tokens, copies and windows of step after step: only the
/// table, and the engine's tensors, change between its replays.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn a_captured_step_is_replayed_while_its_table_changes() {
    let backend = device();
    let stream = backend.stream();
    let shape = AttentionShape::new(3, 3, 128).unwrap();
    let cases = [
        Case::new(shape, SegmentFormat::saw_int4(), ElementType::F32, 40),
        Case::new(shape, SegmentFormat::per_channel(Bits::Two), ElementType::F32, 41),
        Case::centred(shape, SegmentFormat::saw_int4(), ElementType::F32, 42),
    ];
    for case in cases {
        let format = case.format;
        let (expected, expected_found) = case.written(&Cpu::new());
        let stores = case.stores(&backend);
        let elements = case.rows.elements_needed(&shape);
        let mut slices = [stream.alloc_zeros::<f32>(elements).unwrap(), stream.alloc_zeros::<f32>(elements).unwrap()];
        let tensors = slices.each_ref().map(|slice| {
            let address = slice.device_ptr(stream).0;
            // SAFETY: the slices live to the end of the loop, and all work on them is of one stream.
            unsafe { Tensor::from_address(Arc::new(()), address, elements, ElementType::F32) }.unwrap()
        });
        let flags = NonFiniteFlags::new(stream, 3).unwrap();
        let memory = WriteMemory::new(stream, &case.layout).unwrap();
        let [keys, values] = tensors.each_ref();
        let input = WriteInput { keys, values, rows: case.rows, flags: &flags, layer: 2 };
        let step =
            StoreStep::new(&case.layout).bind(&backend, &[&stores[0], &stores[1]], &memory, Some(input)).unwrap();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
        step.launch().unwrap();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).unwrap().expect("a graph");
        let mut table = WriteTable::new(&case.layout);
        for step in &case.steps {
            for (slice, tensor) in slices.iter_mut().zip([&step.keys, &step.values]) {
                stream.memcpy_htod(&tensor.to_f32(), slice).unwrap();
            }
            table.set(&step.writes).unwrap();
            memory.write(stream, &table).unwrap();
            graph.launch().unwrap();
        }
        assert_eq!(flags.read(stream).unwrap(), expected_found, "{format}");
        assert_stores_alike(&backend, &stores, &expected, &case);
    }
}

/// A step of one token after another, with nothing between them but a table, and what does not fit is refused.
#[test]
#[ignore = "needs an NVIDIA GPU"]
fn steps_of_another_layout_are_refused() {
    let backend = device();
    let shape = AttentionShape::new(2, 2, 64).unwrap();
    let case = Case::new(shape, SegmentFormat::per_channel(Bits::Four), ElementType::F32, 3);
    let mut stores = case.stores(&backend);
    let refused = |result: Result<(), Error>| assert!(matches!(result, Err(Error::Plan { .. })), "{result:?}");
    let plan = StoreStep::new(&case.layout);
    let memory = WriteMemory::new(backend.stream(), &case.layout).unwrap();
    refused(plan.bind(&backend, &[&stores[0], &stores[1]], &memory, None).map(drop));
    refused(plan.bind(&backend, &[&stores[1], &stores[0]], &memory, None).map(drop));
    let other = backend.on_stream(backend.stream().context().new_stream().unwrap()).unwrap();
    refused(plan.bind(&other, &[&stores[0], &stores[1]], &memory, None).map(drop));
    let layout =
        Arc::new(kvpack::plan::WriteLayout::new(shape, 1, vec![stores[0].step_capacity(1, 0)], vec![]).unwrap());
    let (mut table, mut writes) = (WriteTable::new(&layout), LayerWrites::of(&layout));
    refused(memory.write(backend.stream(), &table));
    writes.stores[0].tokens.push(TokenWrite { token: 0, page: Page { shard: 1, index: 4 }, slot: 9, centre: None });
    table.set(&writes).unwrap();
    // The token is flagged, and stored as zeros.
    let nan = block_on(backend.upload(Elements::F32(&[f32::NAN; 128]))).unwrap();
    let flags = backend.create_non_finite_flags(1).unwrap();
    let rows = RowLayout::token_major(1, &shape);
    let input = WriteInput { keys: &nan, values: &nan, rows, flags: &flags, layer: 0 };
    backend.write_step(&mut [&mut stores[0]], Some(input), &table).unwrap();
    let of = |tensor| FlaggedToken { layer: 0, tensor, token: 0 };
    let found = block_on(backend.read_non_finite_flags(&flags)).unwrap();
    assert_eq!(found, [of(KeyOrValue::Key), of(KeyOrValue::Value)]);
}

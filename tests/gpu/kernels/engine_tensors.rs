//! Queries and output as engines have them: in one buffer where they allocate from large pages, and as parts
//! of longer rows.

use half::{bf16, f16};
use kvpack::backend::{AttendOptions, Device};
use kvpack::cache::PromptSpan;
use kvpack::plan::{ElementType, Elements, QueryLayout, QueryRun, RowLayout, TokenRange};
use kvpack::wgpu::{AttendStep, AttendTensors, Scratch, Tensor, Wgpu};
use kvpack::{AttentionShape, Bits, Error, KvCache, Recipe, SegmentFormat};
use pollster::block_on;

use super::expected::values;
use crate::gpu_device::shared;

/// Formats whose queries `attend` prepares, as floats and as integers, and whose queries are prepared by a
/// launch of their own.
fn formats() -> [SegmentFormat; 3] {
    [SegmentFormat::F16, SegmentFormat::per_channel(Bits::Four), SegmentFormat::saw_int4()]
}

/// Few tokens, whose states `attend` merges itself on some devices, and many, which take a launch for that.
const TOKENS: [usize; 2] = [200, 3000];

fn filled(
    backend: &Wgpu,
    shape: AttentionShape,
    sequences: usize,
    format: SegmentFormat,
    tokens: usize,
) -> KvCache<Wgpu> {
    let mut cache = KvCache::new(backend.clone(), shape, sequences, Recipe::pack_all(format)).unwrap();
    let prompt = [PromptSpan::packed(TokenRange::new(0, tokens).unwrap())];
    let rows = RowLayout::token_major(tokens, &shape);
    for sequence in 0..sequences {
        let seed = 2 * sequence as u32 + 1;
        let upload =
            |seed| block_on(backend.upload(Elements::F32(&values(rows.elements_needed(&shape), seed)))).unwrap();
        block_on(cache.prefill(sequence, rows, &upload(seed), &upload(seed + 1), &prompt)).unwrap();
    }
    cache
}

fn step(cache: &KvCache<Wgpu>, input: ElementType, output: ElementType) -> AttendStep {
    let all = QueryRun::decode_batch(cache.sequences());
    let options = AttendOptions { output, ..AttendOptions::default() };
    AttendStep::new(cache.backend().capabilities(), &cache.plan(&all).unwrap(), input, options).unwrap()
}

/// The output tensor after a step. Errors that nothing captures panic.
fn run(cache: &KvCache<Wgpu>, step: &AttendStep, tensors: AttendTensors<'_>) -> Vec<f32> {
    let backend = cache.backend();
    let scratch = block_on(Scratch::new(backend.device(), step.scratch())).unwrap();
    let launches = step.bind(backend.kernels(), &cache.stores(), &scratch, tensors).unwrap();
    backend.queue().write_buffer(&scratch.tables, 0, step.tables());
    let mut encoder = backend.device().create_command_encoder(&Default::default());
    launches.encode(&mut encoder.begin_compute_pass(&Default::default()));
    backend.queue().submit([encoder.finish()]);
    block_on(backend.download(tensors.output)).unwrap()
}

/// The same bits as with buffers apart, and wgpu has nothing to say.
#[test]
fn queries_and_output_may_lie_in_one_buffer() {
    let backend = shared();
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let row = 4 * 64;
    for (format, tokens) in formats().into_iter().flat_map(|format| TOKENS.map(|tokens| (format, tokens))) {
        let cache = filled(&backend, shape, 1, format, tokens);
        // 64 words between them, since offsets are aligned to at most 256 bytes.
        let page = [values(row, 3), vec![7.0; 64 + row]].concat();
        let page = block_on(backend.upload(Elements::F32(&page))).unwrap();
        let (queries, output) = (page.slice(0, row).unwrap(), page.slice(row + 64, row).unwrap());

        let step = step(&cache, ElementType::F32, ElementType::F32);
        let capabilities = backend.capabilities();
        if tokens == 200 && capabilities.coherent && capabilities.limits.storage_buffers >= 10 {
            let merges = step.launch_labels().iter().all(|label| !label.contains("merge_states"));
            assert!(merges, "few states are merged by attend: {:?}", step.launch_labels());
        }
        let apart = Tensor::zeroed(backend.device(), row, ElementType::F32).unwrap();
        let expected = run(&cache, &step, AttendTensors { queries: &queries, output: &apart, lse: None });
        let got = run(&cache, &step, AttendTensors { queries: &queries, output: &output, lse: None });
        assert_eq!(got, expected, "{format}, {tokens} tokens: {:?}", step.launch_labels());
        let between = block_on(backend.download(&page.slice(row, 64).unwrap())).unwrap();
        assert!(between.iter().all(|&x| x == 7.0));

        let scratch = block_on(Scratch::new(backend.device(), step.scratch())).unwrap();
        let tensors = AttendTensors { queries: &queries, output: &queries, lse: None };
        let bound = step.bind(backend.kernels(), &cache.stores(), &scratch, tensors);
        assert!(matches!(bound, Err(Error::Buffer { what: "output", .. })));
    }
}

/// Queries of a fused projection, and the output of one rank's heads among those of all: the bits of dense rows, and
/// what lies between rows is left alone.
#[test]
fn rows_may_be_parts_of_longer_ones() {
    const SEQUENCES: usize = 3;
    let backend = shared();
    let shape = AttentionShape::new(4, 2, 64).unwrap();
    let row = 4 * 64;
    let (fused, ranks) = (QueryLayout { first: 128, stride: 8 * 64 }, QueryLayout { first: row, stride: 3 * row });
    for (turn, format) in formats().into_iter().enumerate() {
        for tokens in TOKENS {
            let cache = filled(&backend, shape, SEQUENCES, format, tokens);
            let (input, output) = (ElementType::ALL[turn], ElementType::ALL[(turn + 1) % 3]);
            let projected = values(fused.elements_needed(SEQUENCES, &shape) + 5, 9);
            let dense: Vec<f32> = (0..SEQUENCES).flat_map(|at| projected[fused.row(at)..][..row].to_vec()).collect();
            let upload = |elements: &[f32]| {
                let halves: Vec<f16> = elements.iter().map(|&x| f16::from_f32(x)).collect();
                let brains: Vec<bf16> = elements.iter().map(|&x| bf16::from_f32(x)).collect();
                let elements = match input {
                    ElementType::F32 => Elements::F32(elements),
                    ElementType::F16 => Elements::F16(&halves),
                    ElementType::Bf16 => Elements::Bf16(&brains),
                };
                block_on(backend.upload(elements)).unwrap()
            };
            let (projected, dense) = (upload(&projected), upload(&dense));
            let zeroed = |elements| Tensor::zeroed(backend.device(), elements, output).unwrap();
            let step = step(&cache, input, output);
            let expected =
                run(&cache, &step, AttendTensors { queries: &dense, output: &zeroed(SEQUENCES * row), lse: None });

            let strided = step.clone().with_query_layout(fused).with_output_layout(ranks);
            let whole = zeroed(SEQUENCES * 3 * row);
            let got = run(&cache, &strided, AttendTensors { queries: &projected, output: &whole, lse: None });
            for (at, got) in got.chunks(row).enumerate() {
                let expected = match at % 3 {
                    1 => expected[at / 3 * row..][..row].to_vec(),
                    _ => vec![0.0; row],
                };
                assert_eq!(got, expected, "{format}, {tokens} tokens, piece {at}");
            }
            // A row less than it takes.
            let scratch = block_on(Scratch::new(backend.device(), step.scratch())).unwrap();
            let short = projected.slice(0, projected.elements() - 6).unwrap();
            let tensors = AttendTensors { queries: &short, output: &whole, lse: None };
            let bound = strided.bind(backend.kernels(), &cache.stores(), &scratch, tensors);
            assert!(matches!(bound, Err(Error::Elements { what: "queries", .. })));
        }
    }
}

//! The kernels that measure and select, on a GPU, against their CPU references.

use kvpack::backend::{AttentionStates, Device, TokenSelection};
use kvpack::cpu::{self, DenseRows, KeptTokens, attention_column_stats, attention_row_stats};
use kvpack::format::{Direction, Rotation};
use kvpack::plan::{ElementType, Elements, IndexShape, RowLayout, TokenRange};
use kvpack::policy::{
    ColumnRequest, HeadAggregation, Merging, Nearest, QueryPositions, RowStatsSource, ScoreRequest, ScoreRule, Spans,
    StatsRequest, TextRule, Weighing, evicted,
};
use kvpack::wgpu::{
    AttentionStats, AttentionStatsPlan, Capabilities, ChunkSimilarityPlan, EvictedPlan, GatherPlan, HadamardPlan,
    Indices, KernelLimits, Kernels, Launches, MergePairPlan, MergePartsPlan, MergePlan, ReorderChunksPlan, Tensor,
    TopKPlan, Wgpu,
};
use kvpack::{AttentionShape, Error};
use pollster::block_on;

use crate::gpu_device::shared;

use any_backend::select_cases::{Case, cases, every_third};

fn kernels(backend: &Wgpu) -> &Kernels {
    backend.kernels()
}

fn run(backend: &Wgpu, launches: &Launches) {
    let mut encoder = backend.device().create_command_encoder(&Default::default());
    launches.encode(&mut encoder.begin_compute_pass(&Default::default()));
    backend.queue().submit([encoder.finish()]);
}

fn upload(backend: &Wgpu, elements: &[f32], element_type: ElementType) -> Tensor {
    let tensor = cpu::CpuTensor::from_f32(elements.to_vec(), element_type);
    block_on(backend.upload(tensor.elements())).unwrap()
}

/// A view that begins one element after its tensor, as those of engines do.
fn view(backend: &Wgpu, elements: &[f32], element_type: ElementType) -> Tensor {
    let shifted = [&[9.0], elements].concat();
    upload(backend, &shifted, element_type).slice(1, elements.len()).unwrap()
}

fn download(backend: &Wgpu, tensor: &Tensor) -> Vec<f32> {
    block_on(backend.download(tensor)).unwrap()
}

fn zeroed(backend: &Wgpu, elements: usize, element_type: ElementType) -> Tensor {
    Tensor::zeroed(backend.device(), elements, element_type).unwrap()
}

fn indices(backend: &Wgpu, tokens: &[u32], kv_heads: usize, below: usize) -> Indices {
    Indices::upload(backend.device(), tokens, kv_heads, below as u32).unwrap()
}

#[track_caller]
fn close(what: &str, got: &[f32], want: &[f32], tolerance: f32) {
    assert_eq!(got.len(), want.len(), "{what}");
    for (i, (&got, &want)) in got.iter().zip(want).enumerate() {
        let error = (got - want).abs();
        assert!(error <= tolerance * (1.0 + want.abs()), "{what}, {i}: {got} against {want}");
    }
}

fn plan(
    backend: &Wgpu,
    case: &Case,
    aggregation: HeadAggregation,
    threshold: Option<f32>,
    rows: RowStatsSource,
) -> AttentionStatsPlan {
    without_matrices(case, aggregation, threshold, rows).for_device(backend.capabilities())
}

fn without_matrices(
    case: &Case,
    aggregation: HeadAggregation,
    threshold: Option<f32>,
    rows: RowStatsSource,
) -> AttentionStatsPlan {
    let request = StatsRequest { columns: ColumnRequest { aggregation, threshold }, rows };
    let layouts = [case.query_layout, case.key_layout];
    let plan = AttentionStatsPlan::new(&case.shape, case.rows.clone(), layouts, request).unwrap();
    plan.with_scale(case.scale)
}

/// Element types in turn; the numbers of the cases are exact in both.
fn types(i: usize) -> [ElementType; 2] {
    [[ElementType::F32, ElementType::F16], [ElementType::F16, ElementType::F32], [ElementType::F16; 2]][i % 3]
}

/// The aggregations in turn, measured and with a known log-sum-exp.
///
/// One to a case, for the time that they take on software drivers.
#[test]
fn statistics_are_those_of_the_cpu() {
    let backend = shared();
    for (i, case) in cases().iter().enumerate() {
        let [query_type, key_type] = types(i);
        let (queries, keys) = (view(&backend, &case.queries, query_type), view(&backend, &case.keys, key_type));
        let all = TokenRange::new(0, case.rows.tokens()).unwrap();
        let input = case.input();
        let rows = attention_row_stats(&input, all).unwrap();
        let aggregation = HeadAggregation::ALL[i % HeadAggregation::ALL.len()];
        let request = ColumnRequest { aggregation, threshold: Some(0.01) };
        let want = attention_column_stats(&input, all, request, &rows.lse, &rows.max).unwrap();
        let plan = plan(&backend, case, aggregation, Some(0.01), RowStatsSource::Measured);
        let AttentionStats { launches, row_max, row_lse, column_sums, counts } =
            plan.bind(kernels(&backend), &queries, &keys, None).unwrap();
        // Views begin within a vector, so that no matrices read them.
        let launched =
            |threshold, rows| without_matrices(case, aggregation, threshold, rows).variants(query_type, key_type).len();
        assert_eq!(launches.len(), launched(Some(0.01), RowStatsSource::Measured));
        run(&backend, &launches);
        let name = format!("{}, {aggregation:?}", case.name);
        close(&name, &download(&backend, &row_max.unwrap()), &rows.max, 1e-5);
        close(&name, &download(&backend, &row_lse), &rows.lse, 1e-5);
        let sums = download(&backend, &column_sums);
        close(&name, &sums, &want.sums, 1e-4);
        let got = block_on(counts.unwrap().download(backend.device(), backend.queue())).unwrap();
        check_counts(case, &got, &rows.lse, &rows.max);

        // The same bits again, and from the log-sum-exp alone.
        run(&backend, &launches);
        assert_eq!(download(&backend, &column_sums), sums, "{name}");
        let known = self::plan(&backend, case, aggregation, None, RowStatsSource::KnownLse);
        let again = known.bind(kernels(&backend), &queries, &keys, Some(&row_lse)).unwrap();
        assert_eq!(again.launches.len(), launched(None, RowStatsSource::KnownLse));
        run(&backend, &again.launches);
        assert_eq!(download(&backend, &again.column_sums), sums, "{name}");
    }
}

/// Counts lie between those of a threshold just above and just below: f32 and f64 may disagree about a score on it.
fn check_counts(case: &Case, got: &[u32], lse: &[f32], max: &[f32]) {
    let all = TokenRange::new(0, case.rows.tokens()).unwrap();
    let counts = |threshold| {
        let request = ColumnRequest { aggregation: HeadAggregation::Each, threshold: Some(threshold) };
        attention_column_stats(&case.input(), all, request, lse, max).unwrap().counts
    };
    let (few, many) = (counts(0.01 * 1.0005), counts(0.01 / 1.0005));
    assert_eq!(got.len(), few.len());
    for (i, &count) in got.iter().enumerate() {
        assert!((few[i]..=many[i]).contains(&count), "{}, row {i}: {count} of {}..={}", case.name, few[i], many[i]);
    }
}

/// Thresholds of 0 and of 100 % count all visible keys, and those that reach the maximum.
#[test]
fn thresholds_of_nothing_and_of_everything() {
    let backend = shared();
    let all = cases();
    let equal = all.last().unwrap();
    let (queries, keys) =
        (upload(&backend, &equal.queries, ElementType::F32), upload(&backend, &equal.keys, ElementType::F32));
    for threshold in [0.0, 1.0] {
        let plan = plan(&backend, equal, HeadAggregation::Sum, Some(threshold), RowStatsSource::Measured);
        let stats = plan.bind(kernels(&backend), &queries, &keys, None).unwrap();
        run(&backend, &stats.launches);
        let counts = block_on(stats.counts.unwrap().download(backend.device(), backend.queue())).unwrap();
        let visible: Vec<u32> = equal.rows.positions().iter().map(|position| position + 1).collect();
        assert_eq!(counts, visible.repeat(2), "{threshold}");
    }
}

/// Neither scores nor weights nor masks reach memory: nothing that the plan makes grows with rows × keys.
#[test]
fn no_scores_reach_memory() {
    let shape = AttentionShape::new(32, 8, 128).unwrap();
    let queries = AttentionShape::new(32, 32, 128).unwrap();
    for (rows, tokens) in [(50, 32768), (512, 131_072), (8192, 8192), (32768, 32768)] {
        let columns = ColumnRequest { aggregation: HeadAggregation::Each, threshold: Some(0.01) };
        let plan = AttentionStatsPlan::new(
            &shape,
            QueryPositions::last(rows, tokens).unwrap(),
            [RowLayout::token_major(rows, &queries), RowLayout::token_major(tokens, &shape)],
            StatsRequest { columns, rows: RowStatsSource::Measured },
        )
        .unwrap();
        let scores_in_bits = 32 * rows * tokens;
        let backend = shared();
        let limits = KernelLimits { workgroup_memory: 48 << 10, ..backend.capabilities().limits };
        let matrices = Capabilities { matrices: true, limits, ..*backend.capabilities() };
        let by_matrices = plan.clone().for_device(&matrices);
        for buffer in plan.buffers().into_iter().chain(by_matrices.buffers()) {
            assert!(buffer.bytes <= 64 << 20, "{buffer:?} of {rows} rows, {tokens} keys");
            assert!(buffer.bytes * 8 < scores_in_bits, "{buffer:?}: a mask of {rows} rows, {tokens} keys would fit");
        }
    }
}

/// Ties, infinities, NaN, zeros of both signs, all equal; k from 1 to n; 1 to many scores.
#[test]
fn the_best_are_those_of_the_cpu() {
    let backend = shared();
    let mut random = fastrand::Rng::with_seed(3);
    for n in [1, 2, 255, 256, 257, 5000] {
        for kind in 0..4 {
            let heads = 1 + kind;
            let special = [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, -0.0, f32::MIN_POSITIVE, 1e-40, -1e-40];
            let score = |random: &mut fastrand::Rng| match kind {
                0 => random.f32(),
                1 => random.i32(-3..=3) as f32,
                2 => 7.0,
                _ => *random.choice(&special).unwrap(),
            };
            let scores: Vec<f32> = (0..heads * n).map(|_| score(&mut random)).collect();
            let tensor = upload(&backend, &scores, ElementType::F32);
            for k in [1, n / 3, n - 1, n] {
                if k == 0 {
                    continue;
                }
                let plan = TopKPlan::new(heads, n, k).unwrap();
                let chosen = Indices::zeroed(backend.device(), plan.indices()).unwrap();
                run(&backend, &plan.bind(kernels(&backend), &tensor, &chosen).unwrap());
                let got = block_on(chosen.download(backend.device(), backend.queue())).unwrap();
                assert_eq!(got, cpu::top_k(&scores, heads, k).unwrap(), "{k} of {n}, kind {kind}");
            }
        }
    }
    assert!(matches!(TopKPlan::new(1, 5, 6), Err(Error::TopK { k: 6, n: 5 })));
    assert!(matches!(TopKPlan::new(1, 5, 0), Err(Error::NoTokens { .. })));
    let plan = TopKPlan::new(1, 5, 2).unwrap();
    let wrong = Indices::zeroed(backend.device(), IndexShape::new(1, 3, 5).unwrap()).unwrap();
    let scores = upload(&backend, &[0.0; 5], ElementType::F32);
    assert!(matches!(plan.bind(kernels(&backend), &scores, &wrong), Err(Error::Elements { .. })));
}

/// A million scores, few of them different.
#[test]
fn the_best_of_a_million() {
    let backend = shared();
    let n = 1 << 20;
    let scores: Vec<f32> = (0..n).map(|i: u32| (i.wrapping_mul(2_654_435_761) >> 22) as f32).collect();
    let plan = TopKPlan::new(1, n as usize, 100_003).unwrap();
    let chosen = Indices::zeroed(backend.device(), plan.indices()).unwrap();
    run(&backend, &plan.bind(kernels(&backend), &upload(&backend, &scores, ElementType::F32), &chosen).unwrap());
    let got = block_on(chosen.download(backend.device(), backend.queue())).unwrap();
    assert_eq!(got, cpu::top_k(&scores, 1, 100_003).unwrap());
}

/// Bit for bit, rows that begin in the middle of a word included.
#[test]
fn kept_tokens_are_gathered_bit_for_bit() {
    let backend = shared();
    for (i, case) in cases().iter().enumerate() {
        let (tokens, heads) = (case.rows.tokens(), case.shape.kv_heads());
        for element_type in ElementType::ALL {
            // One element before the first row.
            let shifted: Vec<f32> = std::iter::once(9.0).chain(case.keys.iter().copied()).collect();
            let tensor = upload(&backend, &shifted, element_type).slice(1, case.keys.len()).unwrap();
            let every = (0..heads).flat_map(|_| 0..tokens as u32).collect();
            for kept in [every_third(tokens, heads), every] {
                let plan = GatherPlan::new(&case.shape, case.key_layout, kept.len() / heads).unwrap();
                let gathered = zeroed(&backend, plan.elements(), element_type);
                let on_device = indices(&backend, &kept, heads, tokens);
                run(&backend, &plan.bind(kernels(&backend), &tensor, &on_device, &gathered).unwrap());
                let keys = cpu::CpuTensor::from_f32(case.keys.clone(), element_type);
                let rows = DenseRows { elements: keys.elements(), layout: case.key_layout };
                let want = cpu::gather(&case.shape, rows, &kept).unwrap().to_f32();
                assert_eq!(download(&backend, &gathered), want, "case {i}, {element_type:?}");
            }
        }
    }
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    assert!(matches!(GatherPlan::new(&shape, RowLayout::token_major(4, &shape), 0), Err(Error::NoTokens { .. })));
}

#[test]
fn evicted_tokens_merge_as_on_the_cpu() {
    let backend = shared();
    for (i, case) in cases().iter().enumerate().filter(|(_, case)| case.rows.tokens() > 3) {
        let (tokens, heads) = (case.rows.tokens(), case.shape.kv_heads());
        let kept = every_third(tokens, heads);
        let k = kept.len() / heads;
        let gone: Vec<u32> = kept.chunks(k).flat_map(|kept| evicted(kept, tokens).unwrap()).collect();
        let merging = [Merging::Averaged, Merging::Pivotal, Merging::Weighted][i % 3];
        let [key_type, value_type] = types(i);
        let values: Vec<f32> = case.keys.iter().rev().copied().collect();
        let (keys_on, values_on) = (view(&backend, &case.keys, key_type), view(&backend, &values, value_type));
        let plan = MergePlan::new(&case.shape, case.key_layout, [k, gone.len() / heads], merging).unwrap();
        let (kept_on, gone_on) = (indices(&backend, &kept, heads, tokens), indices(&backend, &gone, heads, tokens));
        let bound = plan.bind(kernels(&backend), [&keys_on, &values_on], &kept_on, &gone_on).unwrap();
        run(&backend, &bound.launches);

        let tokens = KeptTokens { kept: &kept, evicted: &gone };
        let want = cpu::nearest_kept(&case.shape, case.keys(), tokens).unwrap();
        let places = block_on(bound.nearest.download(backend.device(), backend.queue())).unwrap();
        let similarities = download(&backend, &bound.similarities);
        let best: Vec<f32> = want.iter().map(|nearest| nearest.similarity).collect();
        close(&case.name, &similarities, &best, 1e-5);
        let nearest: Vec<Nearest> =
            places.iter().zip(&similarities).map(|(&kept, &similarity)| Nearest { kept, similarity }).collect();
        let differing = nearest.iter().zip(&want).filter(|(got, want)| got.kept != want.kept).count();
        // Another key of the same similarity may win where sums are rounded.
        assert!(differing * 200 <= nearest.len(), "{}: {differing} of {}", case.name, nearest.len());

        // Given the assignment, rows are those of the CPU.
        let dense = |elements| DenseRows { elements: Elements::F32(elements), layout: case.key_layout };
        let merged = |rows| cpu::merge_tokens(&case.shape, dense(rows), tokens, &nearest, merging).unwrap();
        let keys = download(&backend, &bound.keys);
        close(&case.name, &keys, &merged(&case.keys), 1e-5);
        close(&case.name, &download(&backend, &bound.values), &merged(&values), 1e-5);
        run(&backend, &bound.launches);
        assert_eq!(download(&backend, &bound.keys), keys, "{}: the same bits in every run", case.name);
    }
}

/// Equal keys tie, and the first is taken; a key of zeros is near nothing.
#[test]
fn the_first_of_equal_keys_is_nearest() {
    let backend = shared();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let mut keys = vec![1.0f32; 40 * 64];
    keys[39 * 64..].fill(0.0);
    let kept: Vec<u32> = (0..20).collect();
    let gone: Vec<u32> = (20..40).collect();
    let tensor = upload(&backend, &keys, ElementType::F32);
    let plan = MergePlan::new(&shape, RowLayout::token_major(40, &shape), [20, 20], Merging::Averaged).unwrap();
    let (kept, gone) = (indices(&backend, &kept, 1, 40), indices(&backend, &gone, 1, 40));
    let bound = plan.bind(kernels(&backend), [&tensor, &tensor], &kept, &gone).unwrap();
    run(&backend, &bound.launches);
    assert_eq!(block_on(bound.nearest.download(backend.device(), backend.queue())).unwrap(), [0; 20]);
    let similarities = download(&backend, &bound.similarities);
    close("similarities", &similarities[..19], &[1.0; 19], 1e-6);
    assert_eq!(similarities[19], 0.0);
    let merged = download(&backend, &bound.keys);
    // 19 ones and a zero merge into the first.
    close("merged", &merged[..64], &[20.0 / 21.0; 64], 1e-6);
    assert_eq!(merged[64..], keys[64..20 * 64]);
    assert!(matches!(
        MergePlan::new(&shape, RowLayout::token_major(40, &shape), [0, 40], Merging::Averaged),
        Err(Error::NoTokens { .. })
    ));
}

/// Sums that begin within a tensor.
#[test]
fn sums_of_a_view_are_scored() {
    let backend = shared();
    let sums: Vec<f32> = (0..2 * 40).map(|i| (i * 7 % 23) as f32).collect();
    let (rows, spans) = (QueryPositions::last(40, 40).unwrap(), Spans::new(40, &[]).unwrap());
    let scores = ScoreRule { aggregation: HeadAggregation::Mean, weighing: Weighing::MeanOfVisible, pooling: None };
    let request = ScoreRequest { rows: &rows, spans: &spans, scores, group: 1, text: TextRule::Equal, recent: 0 };
    let on_device = view(&backend, &sums, ElementType::F32);
    let got = backend.token_scores(&on_device, 2, &request).unwrap();
    let (want, _) = cpu::token_scores(&sums, 2, &request).unwrap();
    close("scores", &download(&backend, &got.scores), &want, 1e-6);
}

#[test]
fn chunks_are_compared_and_reordered_as_on_the_cpu() {
    let backend = shared();
    let mut random = fastrand::Rng::with_seed(8);
    for (i, (width, count)) in [(1, 1), (64, 3), (96, 89), (384, 40), (768, 15)].into_iter().enumerate() {
        // Exact in f16.
        let mut number = || random.i32(-128..=128) as f32 / 64.0;
        let query: Vec<f32> = (0..width).map(|_| number()).collect();
        let mut chunks: Vec<f32> = (0..width * count).map(|_| number()).collect();
        chunks[..width].fill(0.0);
        let [query_type, chunk_type] = types(i);
        let plan = ChunkSimilarityPlan::new(width, count).unwrap();
        let (query_on, chunks_on) = (view(&backend, &query, query_type), view(&backend, &chunks, chunk_type));
        let similarities = zeroed(&backend, count, ElementType::F32);
        run(&backend, &plan.bind(kernels(&backend), &query_on, &chunks_on, &similarities).unwrap());
        let want = cpu::chunk_similarity(&query, &chunks).unwrap();
        close("similarities", &download(&backend, &similarities), &want, 1e-5);
        let wrong = ChunkSimilarityPlan::new(width, count + 1).unwrap();
        let refused = wrong.bind(kernels(&backend), &query_on, &chunks_on, &similarities);
        assert!(matches!(refused, Err(Error::Chunks { .. })));
    }

    for (i, case) in cases().iter().enumerate() {
        let (tokens, heads, chunk) = (case.rows.tokens(), case.shape.kv_heads(), [16, 32, 128, 40][i % 4]);
        let mut order: Vec<u32> = (0..(tokens / chunk) as u32).collect();
        random.shuffle(&mut order);
        for element_type in ElementType::ALL {
            let plan = ReorderChunksPlan::new(&case.shape, case.key_layout, chunk, &order).unwrap();
            assert_eq!(plan.elements(), tokens * heads * case.shape.head_dim());
            let rows = upload(&backend, &case.keys, element_type);
            let reordered = zeroed(&backend, plan.elements(), element_type);
            run(&backend, &plan.bind(kernels(&backend), &rows, &reordered).unwrap());
            let keys = cpu::CpuTensor::from_f32(case.keys.clone(), element_type);
            let rows = DenseRows { elements: keys.elements(), layout: case.key_layout };
            let want = cpu::reorder_chunks(&case.shape, rows, chunk, &order).unwrap().to_f32();
            assert_eq!(download(&backend, &reordered), want, "{}", case.name);
        }
        let doubled = vec![0; order.len() + 1];
        assert!(matches!(
            ReorderChunksPlan::new(&case.shape, case.key_layout, chunk, &doubled),
            Err(Error::Chunks { .. })
        ));
    }
}

/// A log-sum-exp must be given exactly where the plan says so, and counts need maxima.
#[test]
fn known_and_measured_rows_are_not_mixed_up() {
    let backend = shared();
    let case = &cases()[0];
    let (queries, keys) =
        (upload(&backend, &case.queries, ElementType::F32), upload(&backend, &case.keys, ElementType::F32));
    let lse = zeroed(&backend, case.shape.query_heads() * case.rows.len(), ElementType::F32);
    let bind = |source, lse: Option<&Tensor>| {
        plan(&backend, case, HeadAggregation::Sum, None, source).bind(kernels(&backend), &queries, &keys, lse).err()
    };
    assert!(matches!(bind(RowStatsSource::KnownLse, None), Some(Error::Plan { .. })));
    assert!(matches!(bind(RowStatsSource::Measured, Some(&lse)), Some(Error::Plan { .. })));
    let short = zeroed(&backend, 7, ElementType::F32);
    assert!(matches!(bind(RowStatsSource::KnownLse, Some(&short)), Some(Error::Elements { .. })));
    let columns = ColumnRequest { aggregation: HeadAggregation::Sum, threshold: Some(0.01) };
    let request = StatsRequest { columns, rows: RowStatsSource::KnownLse };
    let layouts = [case.query_layout, case.key_layout];
    let refused = AttentionStatsPlan::new(&case.shape, case.rows.clone(), layouts, request);
    assert!(matches!(refused, Err(Error::Plan { .. })));
}

/// wgpu would refuse that only when the engine's commands are finished.
#[test]
fn no_buffer_is_both_read_and_written() {
    let backend = shared();
    // Parts that begin at multiples of 64 elements are aligned on every device.
    let page = zeroed(&backend, 4096, ElementType::F32);
    let part = |first, elements| page.slice(first, elements).unwrap();
    let indices_at =
        |first: u64, shape: IndexShape| Indices::from_buffer(page.buffer().clone(), first * 4, shape).unwrap();
    let of = |tokens| IndexShape::new(1, tokens, 8).unwrap();
    let shape = AttentionShape::new(1, 1, 64).unwrap();
    let rows = RowLayout::token_major(8, &shape);
    let states = |first| AttentionStates { outputs: part(first, 64), lse: part(first + 64, 1) };
    let apart =
        AttentionStates { outputs: zeroed(&backend, 64, ElementType::F32), lse: zeroed(&backend, 1, ElementType::F32) };
    let bound = [
        ("top_k", TopKPlan::new(1, 8, 2).unwrap().bind(kernels(&backend), &part(0, 8), &indices_at(64, of(2))).err()),
        (
            "evicted",
            EvictedPlan::new(of(2))
                .unwrap()
                .bind(kernels(&backend), &indices_at(0, of(2)), &indices_at(64, of(6)))
                .err(),
        ),
        (
            "gather",
            GatherPlan::new(&shape, rows, 2)
                .unwrap()
                .bind(kernels(&backend), &part(0, 512), &indices(&backend, &[1, 2], 1, 8), &part(1024, 128))
                .err(),
        ),
        (
            "reorder_chunks",
            ReorderChunksPlan::new(&shape, RowLayout::token_major(32, &shape), 16, &[1, 0])
                .unwrap()
                .bind(kernels(&backend), &part(0, 2048), &part(2048, 2048))
                .err(),
        ),
        (
            "chunk_similarity",
            ChunkSimilarityPlan::new(64, 2)
                .unwrap()
                .bind(kernels(&backend), &upload(&backend, &[1.0; 64], ElementType::F32), &part(0, 128), &part(1024, 2))
                .err(),
        ),
        ("merge_pair", MergePairPlan::new(shape, 1).bind(kernels(&backend), &states(0), &apart, &states(1024)).err()),
        (
            "merge_parts",
            MergePartsPlan::new(shape, 1, 1).unwrap().bind(kernels(&backend), &states(0), &part(1024, 256), None).err(),
        ),
        (
            "hadamard",
            HadamardPlan::new(&shape, rows, Rotation::hadamard(64), Direction::Forward)
                .unwrap()
                .bind(kernels(&backend), &part(0, 512), &part(1024, 512))
                .err(),
        ),
    ];
    for (kernel, error) in bound {
        assert!(matches!(error, Some(Error::Plan { what: "bind group", .. })), "{kernel}: {error:?}");
    }
}

/// Grids beyond what the device dispatches are refused when they are bound.
#[test]
fn grids_stay_within_the_device() {
    let backend = shared();
    let most = backend.device().limits().max_compute_workgroups_per_dimension;
    // Where 32 bits do not count so many tokens, no grid is too large.
    let Some(tokens) = most.checked_mul(256).and_then(|tokens| tokens.checked_add(1)) else { return };
    // One token is kept, and nothing runs.
    let kept = IndexShape::new(1, 1, tokens).unwrap();
    let plan = EvictedPlan::new(kept).unwrap();
    let device = backend.device();
    let [kept, gone] = [kept, plan.indices()].map(|shape| Indices::zeroed(device, shape).unwrap());
    let refused = plan.bind(kernels(&backend), &kept, &gone).err();
    assert!(matches!(refused, Some(Error::Limit { .. })), "{refused:?}");
}

//! Which launches a decode step has: pure, on any machine.

use std::time::{Duration, Instant};

use kvpack::backend::AttendOptions;
use kvpack::format::{AffineFormat, Grouping, Rotation, TensorFormat};
use kvpack::plan::{AttendPlan, ElementType, Page, QueryRun, Scoring, SpanView, Split, StoreView, Visible};
use kvpack::wgpu::{AttendStep, Capabilities, KernelLimits, Path, SubgroupSizes, Timestamps};
use kvpack::{AttentionShape, Bits, Calibration, SegmentFormat, conformance};

fn capabilities() -> Capabilities {
    let limits = KernelLimits {
        binding_bytes: 128 << 20,
        binding_alignment: 256,
        storage_buffers: 10,
        workgroup_memory: 32 << 10,
        invocations: 1024,
        workgroups: 65535,
    };
    let subgroups = Some(SubgroupSizes { min: 32, max: 32 });
    Capabilities { f16: true, subgroups, coherent: true, matrices: false, timestamps: Timestamps::None, limits }
}

/// Kernels of a step of one sequence of `tiles` tiles, cut into items of one tile.
fn kernels(
    capabilities: Capabilities,
    format: SegmentFormat,
    calibration: Option<Calibration>,
    tiles: u32,
) -> Vec<String> {
    kernels_of(AttentionShape::new(8, 2, 64).unwrap(), capabilities, format, calibration, tiles)
}

fn kernels_of(
    shape: AttentionShape,
    capabilities: Capabilities,
    format: SegmentFormat,
    calibration: Option<Calibration>,
    tiles: u32,
) -> Vec<String> {
    let pages: Vec<Page> = (0..tiles).map(|index| Page { shard: 0, index }).collect();
    let spans = vec![SpanView {
        sequence: 0,
        start: 0,
        tokens: pages.len() * 128,
        gathered: None,
        pages: &pages,
        range_slot: 0,
    }];
    let split = Split { target_items: usize::MAX, tile_step: 1, max_tiles: 1 };
    let plan = AttendPlan::new(shape, &QueryRun::decode_batch(1), &[StoreView { format, calibration, spans }]).unwrap();
    let options = AttendOptions { split, ..AttendOptions::default() };
    let step = AttendStep::new(&capabilities, &plan, ElementType::F32, options).unwrap();
    let name = |label: String| label.split(' ').nth(1).unwrap_or_default().to_owned();
    step.launch_labels().into_iter().map(name).collect()
}

#[test]
fn few_states_of_plain_keys_take_one_launch() {
    let affine = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Two, grouping));
    let decoded =
        SegmentFormat { key: affine(Grouping::ChannelTokens(32)), value: affine(Grouping::TokenChannels(32)) };
    for format in [SegmentFormat::F16, SegmentFormat::per_channel(Bits::One), decoded] {
        assert_eq!(kernels(capabilities(), format, None, 8), ["attend"], "{format}");
    }
}

#[test]
fn many_states_are_merged_by_a_launch() {
    assert_eq!(kernels(capabilities(), SegmentFormat::F16, None, 9), ["attend", "merge_states"]);
}

#[test]
fn rotated_keys_and_calibrated_scores_have_their_queries_prepared() {
    let affine = AffineFormat::new(Bits::Four, Grouping::Token);
    let format = SegmentFormat {
        key: TensorFormat::Affine(affine.rotated(Rotation::hadamard(16))),
        value: TensorFormat::Affine(affine),
    };
    assert_eq!(kernels(capabilities(), format, None, 8), ["prepare_query", "attend"]);
    let calibration = Some(Calibration::new(0.0, 3.0).unwrap());
    let format = SegmentFormat::per_channel(Bits::Two);
    assert_eq!(kernels(capabilities(), format, calibration, 8), ["prepare_query", "scores", "weighted_values"]);
}

/// Coherent memory and ten storage buffers are needed for less: neither is on the floor.
#[test]
fn less_able_devices_merge_by_a_launch() {
    let merged_apart = ["attend", "merge_states"];
    let incoherent = Capabilities { coherent: false, ..capabilities() };
    assert_eq!(kernels(incoherent, SegmentFormat::F16, None, 1), merged_apart);
    let limits = KernelLimits { storage_buffers: 9, ..capabilities().limits };
    assert_eq!(kernels(Capabilities { limits, ..capabilities() }, SegmentFormat::F16, None, 1), merged_apart);
    assert_eq!(kernels(capabilities().restricted_to(Path::Floor), SegmentFormat::F16, None, 1), merged_apart);
}

/// Eight query heads per KV head in f16 go to cooperative matrices where a launch merges the states anyway, and
/// nothing else does.
#[test]
fn many_heads_in_f16_take_matrices() {
    let limits = KernelLimits { workgroup_memory: 48 << 10, ..capabilities().limits };
    let matrices = Capabilities { matrices: true, limits, ..capabilities() };
    let shape = AttentionShape::new(16, 2, 128).unwrap();
    let with = |capabilities, format, calibration, tiles| kernels_of(shape, capabilities, format, calibration, tiles);
    assert_eq!(with(matrices, SegmentFormat::F16, None, 9), ["attend_matrix", "merge_states"]);
    assert_eq!(with(matrices, SegmentFormat::F16, None, 8), ["attend"]);
    assert_eq!(with(matrices.restricted_to(Path::Subgroups), SegmentFormat::F16, None, 9), ["attend", "merge_states"]);
    assert_eq!(with(matrices, SegmentFormat::per_channel(Bits::Two), None, 9), ["attend", "merge_states"]);
    let calibration = Some(Calibration::new(0.0, 3.0).unwrap());
    let launches = ["prepare_query", "scores", "weighted_values", "merge_states"];
    assert_eq!(with(matrices, SegmentFormat::F16, calibration, 9), launches);
}

/// The registry has cases of cooperative matrices for devices that have them.
#[test]
fn the_registry_covers_matrices() {
    let limits = KernelLimits { workgroup_memory: 48 << 10, ..capabilities().limits };
    let matrices = Capabilities { matrices: true, limits, ..capabilities() };
    let takes_matrices = |case: &conformance::AttendCase| {
        let stores: Vec<(SegmentFormat, Vec<Vec<Page>>)> = case
            .segments
            .iter()
            .enumerate()
            .map(|(index, segment)| {
                let spans = case.sequences.iter().map(|spans| {
                    let of_segment = spans.iter().filter(|span| span.segment == index);
                    let tokens: usize = of_segment.map(|span| span.tokens).sum();
                    (0..tokens.div_ceil(128) as u32).map(|index| Page { shard: 0, index }).collect()
                });
                (segment.format, spans.collect())
            })
            .collect();
        let views: Vec<StoreView<'_>> = stores
            .iter()
            .map(|(format, tables)| {
                let spans = tables.iter().enumerate().map(|(sequence, pages)| SpanView {
                    sequence,
                    start: 0,
                    tokens: pages.len() * 128,
                    gathered: None,
                    pages,
                    range_slot: 0,
                });
                StoreView { format: *format, calibration: None, spans: spans.collect() }
            })
            .collect();
        let plan = AttendPlan::new(case.shape, &QueryRun::decode_batch(case.sequences.len()), &views).unwrap();
        let step = AttendStep::new(&matrices, &plan, case.input.elements, case.options).unwrap();
        step.launch_labels().iter().any(|label| label.contains("attend_matrix"))
    };
    let cases = conformance::attend_cases();
    for name in ["split-many-heads-f16", "sink-long-many-heads-f16", "segments-many-heads-f16"] {
        let case = cases.iter().find(|case| case.name == name);
        assert!(case.is_some_and(takes_matrices), "{name}");
    }
}

/// Whole prompts in f16 take one launch, which reads the given queries. All else has them prepared.
#[test]
fn whole_prompts_in_f16_take_one_launch() {
    let limits = KernelLimits { storage_buffers: 12, workgroup_memory: 48 << 10, ..capabilities().limits };
    let matrices = Capabilities { matrices: true, limits, ..capabilities() };
    let pages: Vec<Page> = (0..8).map(|index| Page { shard: 0, index }).collect();
    let launches = |format, head_dim, queries, [input, output]: [ElementType; 2], scoring: fn(Scoring) -> Scoring| {
        let shape = AttentionShape::new(8, 2, head_dim).unwrap();
        let span = SpanView { sequence: 0, start: 0, tokens: 1024, gathered: None, pages: &pages, range_slot: 0 };
        let store = StoreView { format, calibration: None, spans: vec![span] };
        let plan = AttendPlan::new(shape, &[QueryRun::causal(0, queries)], &[store]).unwrap();
        let plan = plan.with_scoring(scoring(Scoring::of(&shape))).unwrap();
        // So few blocks would be cut, to fill a device.
        let split = Split { target_items: 1, tile_step: 1, max_tiles: 64 };
        let options = AttendOptions { output, split, ..AttendOptions::default() };
        let step = AttendStep::new(&matrices, &plan, input, options).unwrap();
        step.launch_labels()
            .iter()
            .map(|label| label.split(' ').nth(1).unwrap_or_default().to_owned())
            .collect::<Vec<_>>()
    };
    let (halves, same) = ([ElementType::F16; 2], |scoring| scoring);
    assert_eq!(launches(SegmentFormat::F16, 128, 1024, halves, same), ["attend_run"]);
    let prepared = ["prepare_run_query", "attend_run"];
    assert_eq!(launches(SegmentFormat::per_channel(Bits::Four), 128, 1024, halves, same), prepared);
    assert_eq!(launches(SegmentFormat::F16, 128, 20, halves, same)[0], prepared[0]);
    assert_eq!(launches(SegmentFormat::F16, 64, 1024, halves, same)[0], prepared[0]);
    for types in [[ElementType::F32, ElementType::F16], [ElementType::F16, ElementType::F32]] {
        assert_eq!(launches(SegmentFormat::F16, 128, 1024, types, same), prepared);
    }
    let with_sinks = |scoring: Scoring| scoring.with_sinks(&[0.5; 8]).unwrap();
    assert_eq!(launches(SegmentFormat::F16, 128, 1024, halves, with_sinks), prepared);
}

/// A prompt whose queries workgroups take one by one has a few items for each tile of queries, and none for each query.
#[test]
fn prompts_have_items_of_many_queries() {
    let shape = AttentionShape::new(8, 2, 64).unwrap();
    let pages: Vec<Page> = (0..32).map(|index| Page { shard: 0, index }).collect();
    let items = |queries, visible: &Visible| {
        let span = SpanView { sequence: 0, start: 0, tokens: 4096, gathered: None, pages: &pages, range_slot: 0 };
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans: vec![span] };
        let plan = AttendPlan::new(shape, &[QueryRun::new(0, queries, visible.clone())], &[store]).unwrap();
        let step = AttendStep::new(&capabilities(), &plan, ElementType::F16, AttendOptions::default()).unwrap();
        let segment = &step.work().segments()[0];
        segment.items().iter().map(|item| item.queries as usize).collect::<Vec<_>>()
    };
    for visible in [Visible::All, Visible::Causal, Visible::Window { left: 500 }] {
        let of_prompt = items(4096, &visible);
        assert!(of_prompt.len() < 32 * 8, "{visible:?}: {}", of_prompt.len());
        assert!(items(31, &visible).iter().all(|&queries| queries == 1), "{visible:?}");
        assert!(items(32, &visible).iter().all(|&queries| queries > 1), "{visible:?}");
    }
}

/// What the host pays for planning a prompt: `cargo test --release --test shaders -- --ignored --nocapture planning`.
#[test]
#[ignore = "prints times"]
fn planning_of_prompts() {
    let heads = |query, kv, channels| AttentionShape::new(query, kv, channels).unwrap();
    let (f16, window) = (SegmentFormat::F16, Visible::Window { left: 1023 });
    let calibration = Calibration::new(0.0, 3.0).ok();
    let cases = [
        ("f16, matrices", heads(32, 8, 128), true, f16, None, Visible::Causal),
        ("saw-int4, matrices", heads(32, 8, 128), true, SegmentFormat::saw_int4(), None, Visible::Causal),
        ("f16", heads(32, 8, 128), false, f16, None, Visible::Causal),
        ("4 bits", heads(32, 8, 128), false, SegmentFormat::per_channel(Bits::Four), None, Visible::Causal),
        ("f16, a query head per KV head", heads(8, 8, 128), false, f16, None, Visible::Causal),
        ("calibrated", heads(8, 2, 128), false, SegmentFormat::per_channel(Bits::Two), calibration, Visible::Causal),
        ("f16, window", heads(32, 8, 128), true, f16, None, window),
    ];
    for (sequences, tokens) in [(1, 16_384), (4, 4096), (16, 1024)] {
        // Of longer prompts scores do not fit a binding.
        let fits = |calibrated: bool| !calibrated || tokens < 4096;
        for (name, shape, matrices, format, calibration, visible) in cases.iter().filter(|case| fits(case.4.is_some()))
        {
            let [plan, step, items] = planning_times(sequences, tokens, |views| {
                let store = StoreView { format: *format, calibration: *calibration, spans: views };
                let run = |sequence| QueryRun::new(sequence, tokens, visible.clone());
                let runs: Vec<QueryRun> = (0..sequences).map(run).collect();
                let begun = Instant::now();
                let plan = AttendPlan::new(*shape, &runs, &[store]).unwrap();
                (plan, begun.elapsed(), *matrices)
            });
            println!("{sequences} × {tokens} {name}: plan {plan:.3} ms, step {step:.3} ms, {items} items");
        }
    }
}

/// Milliseconds of a plan and of its step, the shortest of some, and the number of items.
fn planning_times(
    sequences: usize,
    tokens: usize,
    plan: impl Fn(Vec<SpanView<'_>>) -> (AttendPlan, Duration, bool),
) -> [f64; 3] {
    let limits = KernelLimits { workgroup_memory: 48 << 10, binding_bytes: 2 << 30, ..capabilities().limits };
    let pages: Vec<Page> = (0..tokens as u32 / 128).map(|index| Page { shard: 0, index }).collect();
    let span = |sequence| SpanView { sequence, start: 0, tokens, gathered: None, pages: &pages, range_slot: 0 };
    let mut least = [f64::MAX; 3];
    for _ in 0..20 {
        let (plan, planned, matrices) = plan((0..sequences).map(span).collect());
        let capabilities = Capabilities { matrices, limits, ..capabilities() };
        let begun = Instant::now();
        let step = AttendStep::new(&capabilities, &plan, ElementType::F16, AttendOptions::default()).unwrap();
        let items = step.work().segments()[0].items().len() as f64;
        for (least, time) in least.iter_mut().zip([planned, begun.elapsed()]) {
            *least = least.min(time.as_secs_f64() * 1e3);
        }
        least[2] = items;
    }
    least
}

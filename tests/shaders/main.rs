//! Every shader variant is valid and can be written for every graphics interface, on any machine.

mod inserted;
mod named_files;
mod parts;
mod snapshots;
mod step_launches;

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::Path;
use std::sync::LazyLock;

use kvpack::backend::{AttendOptions, QueryPrecision};
use kvpack::format::sketch::Sketch;
use kvpack::format::{AffineFormat, CodebookFormat, Grouping, HEAD_DIMS, NormRule, Rotation, TensorFormat};
use kvpack::plan::{
    AttendPlan, ElementType, Page, QueryLayout, QueryRun, RowLayout, SpanView, Split, StoreView, Visible,
};
use kvpack::policy::{ColumnRequest, HeadAggregation, RowStatsSource, StatsRequest};
use kvpack::wgpu::shader::Source;
use kvpack::wgpu::{
    AttendStep, AttentionStatsPlan, Capabilities, KernelLimits, SubgroupSizes, Timestamps, Variant, variants,
};
use kvpack::{AttentionShape, Bits, Calibration, SegmentFormat};
use naga::back::{hlsl, msl, spv};
use naga::valid::{self, ModuleInfo, ValidationFlags, Validator};

fn parse(source: &Source) -> Result<(naga::Module, ModuleInfo), String> {
    let module = naga::front::wgsl::parse_str(&source.wgsl).map_err(|error| error.emit_to_string(&source.wgsl))?;
    // Only what kernels may rely on: the floor, where every WebGPU device unpacks halves, and the features of the other
    // paths.
    let allowed = valid::Capabilities::SHADER_FLOAT16_IN_FLOAT32
        | valid::Capabilities::SHADER_FLOAT16
        | valid::Capabilities::SUBGROUP
        | valid::Capabilities::SUBGROUP_BARRIER
        | valid::Capabilities::COOPERATIVE_MATRIX
        | valid::Capabilities::MEMORY_DECORATION_COHERENT;
    let info = Validator::new(ValidationFlags::all(), allowed)
        .validate(&module)
        .map_err(|error| error.emit_to_string(&source.wgsl))?;
    Ok((module, info))
}

/// Kernels that merge states without a launch of their own are for Vulkan (`Capabilities::coherent`).
fn merges_alone(source: &Source) -> bool {
    source.wgsl.contains("@coherent")
}

/// Those, and what multiplies cooperative matrices, which nobody has run elsewhere.
fn is_for_vulkan(source: &Source) -> bool {
    merges_alone(source) || source.wgsl.contains("coopMultiplyAdd")
}

fn write_spirv(module: &naga::Module, info: &ModuleInfo) -> Result<Vec<u32>, String> {
    let options = spv::Options { lang_version: (1, 3), ..Default::default() };
    spv::write_vec(module, info, &options, None).map_err(|error| error.to_string())
}

fn write_msl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = msl::Options { lang_version: (2, 4), fake_missing_bindings: true, ..Default::default() };
    let pipeline = msl::PipelineOptions::default();
    msl::write_string(module, info, &options, &pipeline).map(drop).map_err(|error| error.to_string())
}

fn write_hlsl(module: &naga::Module, info: &ModuleInfo) -> Result<(), String> {
    let options = hlsl::Options { shader_model: hlsl::ShaderModel::V6_4, ..Default::default() };
    let pipeline = hlsl::PipelineOptions::default();
    let mut text = String::new();
    hlsl::Writer::new(&mut text, &options, &pipeline)
        .write(module, info, None)
        .map(drop)
        .map_err(|error| error.to_string())
}

/// The variants of decode steps over every format, each with head dimensions, group sizes, calibration, types and
/// device features in turn.
fn decode_variants(capabilities: impl Fn(usize) -> Capabilities) -> Vec<Variant> {
    let groupings = [Grouping::Channel, Grouping::ChannelTokens(32), Grouping::Token, Grouping::TokenChannels(16)];
    let affine = |bits| groupings.map(|grouping| TensorFormat::Affine(AffineFormat::new(bits, grouping)));
    let rotated = groupings.map(|grouping| AffineFormat::new(Bits::Four, grouping));
    let rotated = rotated.into_iter().zip([Rotation::hadamard(16), Rotation::randomized(16, 9)].into_iter().cycle());
    let rotated = rotated.map(|(format, rotation)| TensorFormat::Affine(format.rotated(rotation)));
    let formats: Vec<TensorFormat> =
        std::iter::once(TensorFormat::F16).chain(Bits::ALL.into_iter().flat_map(affine)).chain(rotated).collect();
    // Codebooks of order 16, which divides every head.
    let widths = [Bits::One, Bits::Two, Bits::Three, Bits::Four];
    let rotation = Rotation::randomized(16, 4);
    let codebook = |bits| TensorFormat::Codebook(CodebookFormat { bits, rotation, sketch: None, norms: NormRule::Row });
    let formats: Vec<TensorFormat> = formats.into_iter().chain(widths.map(codebook)).collect();
    let sketch = Some(Sketch { seed: 5 });
    let sketched = |bits| TensorFormat::Codebook(CodebookFormat { bits, rotation, sketch, norms: NormRule::Row });
    let keys: Vec<TensorFormat> = formats.iter().copied().chain(widths.map(sketched)).collect();
    let mut found = Vec::new();
    for turn in 0..keys.len() * 4 {
        let (key, value) = (keys[turn % keys.len()], formats[(turn * 5 + turn / formats.len()) % formats.len()]);
        let head_dim = HEAD_DIMS[turn % HEAD_DIMS.len()];
        let shape = AttentionShape::new([1, 4, 7, 8][turn % 4] * 2, 2, head_dim).unwrap();
        let calibration = (turn % 3 == 0).then(|| Calibration::new(1.0, 2.0).unwrap());
        let pages = [Page { shard: 0, index: 0 }];
        let span = SpanView { sequence: 0, start: 0, tokens: 100, gathered: None, pages: &pages, range_slot: 0 };
        let store = StoreView { format: SegmentFormat { key, value }, calibration, spans: vec![span] };
        let types = ElementType::ALL;
        let query = if turn % 5 == 0 { QueryPrecision::Int8 } else { QueryPrecision::Int16 };
        let options = AttendOptions { query, output: types[turn / 2 % 3], ..AttendOptions::default() };
        // A decoding query, and a prompt whose queries workgroups take one by one, or a few together.
        let visible = if calibration.is_some() { Visible::Causal } else { Visible::Window { left: 30 + turn % 50 } };
        let prompt = (turn % 4 == 3 || turn % 5 == 3).then(|| QueryRun::new(0, 40, visible));
        for run in std::iter::once(QueryRun::decode(0)).chain(prompt) {
            let plan = AttendPlan::new(shape, &[run], std::slice::from_ref(&store)).unwrap();
            let step = AttendStep::new(&capabilities(turn), &plan, types[turn % 3], options).unwrap();
            let rows = QueryLayout { first: head_dim, stride: 20 * head_dim };
            let step = if turn % 5 == 1 { step.with_query_layout(rows).with_output_layout(rows) } else { step };
            found.extend(step.variants());
        }
    }
    found
}

/// f16 with many heads, on a device with cooperative matrices.
fn matrix_variants() -> Vec<Variant> {
    let all = capabilities(15);
    let limits = KernelLimits { workgroup_memory: 48 << 10, storage_buffers: 12, ..all.limits };
    let capabilities = Capabilities { matrices: true, limits, ..all };
    let pages = vec![Page { shard: 0, index: 0 }; 9];
    let variants = ElementType::ALL.map(|input| {
        let spans =
            vec![SpanView { sequence: 0, start: 0, tokens: 9 * 128, gathered: None, pages: &pages, range_slot: 0 }];
        let store = StoreView { format: SegmentFormat::F16, calibration: None, spans };
        let split = Split { target_items: usize::MAX, tile_step: 1, max_tiles: 1 };
        let plan =
            AttendPlan::new(AttentionShape::new(16, 2, 128).unwrap(), &QueryRun::decode_batch(1), &[store]).unwrap();
        let options = AttendOptions { split, ..AttendOptions::default() };
        AttendStep::new(&capabilities, &plan, input, options).unwrap().variants()
    });
    let variants = variants.concat();
    assert_eq!(variants.iter().filter(|variant| variant.kernel() == "attend_matrix").count(), 3);
    [variants, run_variants(&capabilities), statistics_variants(&capabilities)].concat()
}

/// Long runs of queries on the same device, beside a short one.
fn run_variants(capabilities: &Capabilities) -> Vec<Variant> {
    let affine = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Four, grouping));
    let formats = |head_dim| {
        [
            SegmentFormat::F16,
            SegmentFormat::per_channel(Bits::Four),
            SegmentFormat::saw_int4(),
            SegmentFormat { key: affine(Grouping::Token), value: affine(Grouping::Channel) },
            SegmentFormat::turboquant(Bits::Four, head_dim),
            SegmentFormat { key: affine(Grouping::ChannelTokens(32)), value: affine(Grouping::TokenChannels(32)) },
            SegmentFormat { key: affine(Grouping::TokenChannels(32)), value: affine(Grouping::ChannelTokens(64)) },
        ]
    };
    let mut found = Vec::new();
    let shapes = [(4, 128), (3, 96), (1, 64), (4, 256)];
    let all = shapes.into_iter().flat_map(|shape| formats(shape.1).map(|format| (shape, format)));
    for (turn, ((group, head_dim), format)) in all.enumerate() {
        let shape = AttentionShape::new(2 * group, 2, head_dim).unwrap();
        let pages = [0; 5].map(|index| Page { shard: 0, index });
        let spans = [0, 1].map(|sequence| SpanView {
            sequence,
            start: 0,
            tokens: 600,
            gathered: None,
            pages: &pages,
            range_slot: 0,
        });
        let store = StoreView { format, calibration: None, spans: spans.to_vec() };
        let runs = [QueryRun::causal(0, [120, 200][turn % 2] / group), QueryRun::causal(1, 2)];
        let plan = AttendPlan::new(shape, &runs, &[store]).unwrap();
        let variants = AttendStep::new(capabilities, &plan, ElementType::ALL[turn % 3], AttendOptions::default());
        let variants = variants.unwrap().variants();
        // Which of the two it is depends on the head dimension and the format.
        let plain = |kernel| if kernel == "attend_run_apart" { "attend_run" } else { kernel };
        let kernels: Vec<&str> = variants.iter().map(Variant::kernel).map(plain).collect();
        let (kernels, rotated) = (kernels.as_slice(), format.key.rotation().is_some());
        let expected: &[&str] = match rotated {
            true => &["prepare_query", "prepare_run_query", "attend", "attend_run", "merge_states"],
            false => &["prepare_run_query", "attend", "attend_run", "merge_states"],
        };
        assert_eq!(kernels, expected, "{format}");
        found.extend(variants);
    }
    found
}

/// Statistics of f16 keys on the same device: head dimensions, chunks of some heads and of one, aggregations.
fn statistics_variants(capabilities: &Capabilities) -> Vec<Variant> {
    let mut found = Vec::new();
    for (turn, queries) in ElementType::ALL.into_iter().cycle().take(12).enumerate() {
        let head_dim = [64, 80, 96, 128][turn / 3];
        let (shape, rows) = (AttentionShape::new(8, 2, head_dim).unwrap(), [1, 50, 300][turn % 3]);
        let query_shape = AttentionShape::new(8, 8, head_dim).unwrap();
        let aggregation = [HeadAggregation::Each, HeadAggregation::Sum, HeadAggregation::Mean][turn / 2 % 3];
        let columns = ColumnRequest { aggregation, threshold: turn.is_multiple_of(2).then_some(0.01) };
        let layouts = [RowLayout::token_major(rows, &query_shape), RowLayout::token_major(1000, &shape)];
        let request = StatsRequest { columns, rows: RowStatsSource::Measured };
        let rows = kvpack::policy::QueryPositions::last(rows, 1000).unwrap();
        let plan = AttentionStatsPlan::new(&shape, rows, layouts, request).unwrap().for_device(capabilities);
        let variants = plan.variants(queries, ElementType::F16);
        let kernels: Vec<&str> = variants.iter().map(Variant::kernel).take(2).collect();
        assert_eq!(kernels, ["prepare_stats_queries", "attention_row_stats_matrix"]);
        found.extend(variants);
    }
    found
}

/// The floor, f16 alone, subgroups alone, and both.
fn capabilities(turn: usize) -> Capabilities {
    let limits = KernelLimits {
        binding_bytes: 128 << 20,
        binding_alignment: 256,
        storage_buffers: [8, 10][turn / 4 % 2],
        workgroup_memory: 16 << 10,
        invocations: 256,
        workgroups: 65535,
    };
    let sizes = [SubgroupSizes { min: 4, max: 128 }, SubgroupSizes { min: 32, max: 32 }];
    let subgroups = (turn / 2 % 2 == 1).then_some(sizes[turn / 8 % 2]);
    Capabilities {
        f16: turn % 2 == 1,
        subgroups,
        coherent: turn / 4 % 2 == 1,
        matrices: false,
        timestamps: Timestamps::None,
        limits,
    }
}

/// Each once.
fn all_variants() -> BTreeSet<Variant> {
    [variants(), decode_variants(capabilities), matrix_variants()].concat().into_iter().collect()
}

/// All variants with their sources, assembled once for all tests.
fn assembled() -> &'static BTreeMap<Variant, Source> {
    static ASSEMBLED: LazyLock<BTreeMap<Variant, Source>> = LazyLock::new(|| {
        let with_source = |variant: Variant| {
            let source = variant.source().unwrap_or_else(|error| panic!("{}: {error}", variant.label()));
            (variant, source)
        };
        all_variants().into_iter().map(with_source).collect()
    });
    &ASSEMBLED
}

/// Whether tests write what they would compare.
fn updates() -> bool {
    std::env::var_os("KVPACK_UPDATE").is_some()
}

/// The entry points of a text that is valid and can be written for every interface it is for.
fn translated(source: &Source) -> Result<Vec<String>, String> {
    let (module, info) = parse(source)?;
    write_spirv(&module, &info)?;
    if !is_for_vulkan(source) {
        write_msl(&module, &info)?;
        write_hlsl(&module, &info)?;
    }
    Ok(module.entry_points.into_iter().map(|entry| entry.name).collect())
}

/// The kernel's source is the same for all its entry points, so each text is translated once. The floor binds at most 8
/// storage buffers.
#[test]
fn every_variant_is_valid_translates_and_binds_few_buffers() {
    let mut entry_points: BTreeMap<&str, Vec<String>> = BTreeMap::new();
    for (variant, source) in assembled() {
        let found = entry_points
            .entry(&source.wgsl)
            .or_insert_with(|| translated(source).unwrap_or_else(|reason| panic!("{}: {reason}", variant.label())));
        assert!(found.iter().any(|name| name == variant.entry_point()), "{}", variant.label());
        let most = match variant.entry_point() {
            "side_by_side" | "attend_run" | "attend_run_apart" => 12,
            _ if is_for_vulkan(source) => 10,
            _ => 8,
        };
        assert!(source.bindings.len() <= most, "{} binds {}", variant.label(), source.bindings.len());
        let declared = source.wgsl.matches("var<storage, ").count();
        assert_eq!(source.bindings.len(), declared, "{}", variant.label());
    }
    assert!(entry_points.len() > 200, "{}", entry_points.len());
}

/// Products of matrices read rows from workgroup memory as vectors of 16 bytes. Drivers place variables in an order of
/// their own. A variable of another size moves what lies behind it off these rows. Once an item of 24 bytes made prompts
/// of 64 and 256 channels wrong on an H200. Drivers in software have no matrices and do not show it.
#[test]
fn workgroup_memory_next_to_matrices_is_aligned_in_any_order() {
    let texts: BTreeMap<&str, &Source> = assembled()
        .iter()
        .filter(|(_, source)| source.wgsl.contains("coopMultiplyAdd"))
        .map(|(_, source)| (source.wgsl.as_str(), source))
        .collect();
    assert!(texts.len() > 20, "{}", texts.len());
    let mut unaligned = BTreeSet::new();
    for source in texts.into_values() {
        let (module, _) = parse(source).unwrap();
        let mut layouts = naga::proc::Layouter::default();
        layouts.update(module.to_ctx()).unwrap();
        for (_, variable) in module.global_variables.iter() {
            let bytes = layouts[variable.ty].size;
            if variable.space == naga::AddressSpace::WorkGroup && bytes % 16 != 0 {
                unaligned.insert((variable.name.clone(), bytes));
            }
        }
    }
    assert!(unaligned.is_empty(), "not a multiple of 16 bytes: {unaligned:?}");
}

/// What a workgroup reads that others of its launch wrote relies on more than WGSL says: on coherent memory, and on
/// storage barriers that order it for the device.
#[test]
fn merging_without_a_launch_is_ordered_for_the_device() {
    const COHERENT: u32 = 23;
    const DEVICE: u32 = 1;
    const ACQUIRE_RELEASE_OF_BUFFERS: u32 = 0x8 | 0x40;
    let of_steps: BTreeSet<Variant> = decode_variants(capabilities).into_iter().collect();
    let merging: Vec<(&Variant, &Source)> =
        assembled().iter().filter(|(variant, source)| of_steps.contains(*variant) && merges_alone(source)).collect();
    assert!(!merging.is_empty());
    for (variant, source) in merging.into_iter().step_by(8) {
        let (module, info) = parse(source).unwrap();
        let words = write_spirv(&module, &info).unwrap();
        let mut constants = BTreeMap::new();
        let (mut barriers, mut coherent) = (0, 0);
        let mut rest = &words[5..];
        while let Some(&first) = rest.first() {
            let (instruction, after) = rest.split_at((first >> 16) as usize);
            match (first & 0xffff, &instruction[1..]) {
                (43, &[_, id, value]) => drop(constants.insert(id, value)), // OpConstant
                (71, &[_, COHERENT]) => coherent += 1,                      // OpDecorate
                (224, &[_, scope, semantics]) => {
                    // OpControlBarrier
                    let ordered = constants[&semantics] & ACQUIRE_RELEASE_OF_BUFFERS == ACQUIRE_RELEASE_OF_BUFFERS;
                    barriers += usize::from(constants[&scope] == DEVICE && ordered);
                }
                _ => {}
            }
            rest = after;
        }
        assert_eq!((barriers, coherent), (2, 1), "{}", variant.label());
    }
}

/// Writes every text that a browser may get to `target/tmp/browser-shaders`, a file each, for `web/test/tint.mjs`.
#[test]
#[ignore = "a part of the stage tint of scripts/test.sh"]
fn write_texts_for_browsers() {
    let folder = Path::new(env!("CARGO_TARGET_TMPDIR")).join("browser-shaders");
    fs::remove_dir_all(&folder).or_else(|e| if folder.exists() { Err(e) } else { Ok(()) }).unwrap();
    fs::create_dir_all(&folder).unwrap();
    // Every format with the floor, with f16, with subgroups of any size, with subgroups of 32, and with
    // both of the latter.
    let on = |turn| decode_variants(|_| Capabilities { coherent: false, ..capabilities(turn) });
    let variants: BTreeSet<Variant> = [variants(), [0, 1, 2, 10, 11].map(on).concat()].concat().into_iter().collect();
    let texts: BTreeSet<String> = variants.iter().map(|variant| variant.source().unwrap().for_browsers()).collect();
    let with = |line: &str| texts.iter().filter(|text| text.lines().any(|found| found == line)).count();
    let (subgroups, exempted) = (with("enable subgroups;"), with("diagnostic(off, subgroup_uniformity);"));
    assert!(subgroups > 100 && exempted > 0, "{subgroups} {exempted}");
    for (number, text) in texts.iter().enumerate() {
        fs::write(folder.join(format!("{number:04}.wgsl")), text).unwrap();
    }
    println!("{} texts for browsers, {subgroups} of them with subgroups", texts.len());
}

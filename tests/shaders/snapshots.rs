//! Whole kernels as they are assembled, so that a change of a part shows in what is made of it.
//!
//! `KVPACK_UPDATE=1 cargo test --test shaders` writes `tests/shaders/snapshots/` anew.

use std::fs;
use std::path::Path;
use std::sync::Arc;

use kvpack::backend::{AttendOptions, QueryPrecision};
use kvpack::format::{AffineFormat, Grouping, TensorFormat};
use kvpack::plan::{AttendPlan, ElementType, Page, QueryRun, SpanView, Split, StoreCapacity, StoreView, WriteLayout};
use kvpack::wgpu::{AttendStep, Capabilities, KernelLimits, StoreStep, SubgroupSizes, Timestamps, Variant};
use kvpack::{AttentionShape, Bits, Calibration, SegmentFormat, TILE_TOKENS};

use super::updates;

/// Neither f16 nor subgroups, or everything.
fn capabilities(everything: bool) -> Capabilities {
    let limits = KernelLimits {
        binding_bytes: 128 << 20,
        binding_alignment: 256,
        storage_buffers: if everything { 12 } else { 8 },
        workgroup_memory: if everything { 48 << 10 } else { 16 << 10 },
        invocations: 256,
        workgroups: 65535,
    };
    Capabilities {
        f16: everything,
        subgroups: everything.then_some(SubgroupSizes { min: 32, max: 32 }),
        coherent: everything,
        matrices: everything,
        timestamps: Timestamps::None,
        limits,
    }
}

/// A kernel of a decode step over nine tiles, or over one; `attend_run` of a run of 64 queries.
pub(super) fn of_step(
    kernel: &str,
    shape: &AttentionShape,
    format: SegmentFormat,
    calibration: Option<Calibration>,
    (query, everything, tiles): (QueryPrecision, bool, usize),
) -> Variant {
    let pages = vec![Page { shard: 0, index: 0 }; tiles];
    let spans = vec![SpanView {
        sequence: 0,
        start: 0,
        tokens: tiles * TILE_TOKENS,
        gathered: None,
        pages: &pages,
        range_slot: 0,
    }];
    let split = Split { target_items: usize::MAX, tile_step: 1, max_tiles: 1 };
    let store = StoreView { format, calibration, spans };
    let run = QueryRun::causal(0, if kernel == "attend_run" { 64 } else { 1 });
    let plan = AttendPlan::new(*shape, &[run], &[store]).unwrap();
    let options = AttendOptions { query, output: ElementType::F16, split };
    let step = AttendStep::new(&capabilities(everything), &plan, ElementType::F16, options).unwrap();
    let found = step.variants().into_iter().find(|variant| variant.kernel() == kernel);
    found.unwrap_or_else(|| panic!("no {kernel} of {format}"))
}

fn kernels() -> Vec<(&'static str, Variant)> {
    use QueryPrecision::{Int8, Int16};
    let shape = AttentionShape::new(8, 2, 128).unwrap();
    let many_heads = AttentionShape::new(16, 2, 128).unwrap();
    let affine = |grouping| TensorFormat::Affine(AffineFormat::new(Bits::Two, grouping));
    let groups = SegmentFormat { key: affine(Grouping::ChannelTokens(32)), value: affine(Grouping::TokenChannels(32)) };
    let channels = SegmentFormat::per_channel(Bits::Four);
    let calibration = Some(Calibration::new(0.0, 3.0).unwrap());
    let codebook = SegmentFormat::turboquant(Bits::Three, 128);
    let store = StoreCapacity {
        format: codebook,
        shard_pages: vec![1],
        range_slots: 0,
        tokens: 1,
        copies: 0,
        centres: 0,
        centre_slots: 0,
    };
    let first_of = |kernel: &str, store: &StoreCapacity, storage_buffers: u32| {
        let plan = StoreStep::new(&Arc::new(WriteLayout::new(shape, 1, vec![store.clone()], vec![]).unwrap()));
        let variants = plan.variants(storage_buffers, ElementType::F16, ElementType::F16);
        variants.into_iter().find(|variant| variant.kernel() == kernel).unwrap()
    };
    let centred = StoreCapacity { centres: 1, centre_slots: 1, ..store.clone() };
    let halves = StoreCapacity { format: SegmentFormat::F16, ..store.clone() };
    vec![
        ("attend_f16", of_step("attend", &shape, SegmentFormat::F16, None, (Int16, false, 9))),
        ("attend_4bit_per_channel", of_step("attend", &shape, channels, None, (Int16, true, 1))),
        ("attend_2bit_groups_int8", of_step("attend", &shape, groups, None, (Int8, true, 9))),
        ("weighted_values_4bit", of_step("weighted_values", &shape, channels, calibration, (Int16, false, 9))),
        ("attend_matrix_f16", of_step("attend_matrix", &many_heads, SegmentFormat::F16, None, (Int16, true, 9))),
        ("attend_run_4bit_per_channel", of_step("attend_run", &shape, channels, None, (Int16, true, 9))),
        ("prepare_query_3bit_codebook", of_step("prepare_query", &shape, codebook, None, (Int16, false, 9))),
        ("append_3bit_codebook_keys", first_of("append", &store, 8)),
        ("append_3bit_codebook_centred_keys", first_of("append", &centred, 8)),
        ("append_f16_keys_beside_values", first_of("append", &halves, 12)),
        ("key_mean_of_step", first_of("key_mean", &centred, 8)),
    ]
}

/// The first line in which two texts differ, counted from 1, with both.
fn first_difference<'a>(one: &'a str, other: &'a str) -> Option<(usize, &'a str, &'a str)> {
    let (mut ones, mut others) = (one.lines(), other.lines());
    for number in 1.. {
        match (ones.next(), others.next()) {
            (None, None) => return None,
            (a, b) if a == b => {}
            (a, b) => return Some((number, a.unwrap_or("(the end)"), b.unwrap_or("(the end)"))),
        }
    }
    None
}

#[test]
fn whole_kernels_are_what_they_were() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("shaders/snapshots");
    for (name, variant) in kernels() {
        let listing = variant.listing().unwrap();
        naga::front::wgsl::parse_str(&listing).unwrap_or_else(|error| panic!("{}", error.emit_to_string(&listing)));
        let file = folder.join(format!("{name}.wgsl"));
        if updates() {
            fs::write(&file, listing).unwrap();
            continue;
        }
        let kept = fs::read_to_string(&file).unwrap_or_default().replace("\r\n", "\n");
        if let Some((number, was, is)) = first_difference(&kept, &listing) {
            panic!(
                "tests/shaders/snapshots/{name}.wgsl, line {number}:\n  was {was}\n  is  {is}\n\
                 KVPACK_UPDATE=1 cargo test --test shaders writes it anew"
            );
        }
    }
    let kept = fs::read_dir(&folder).unwrap().count();
    assert_eq!(kept, kernels().len(), "files in tests/shaders/snapshots, and kernels");
}

#[test]
fn the_first_difference_is_named() {
    assert_eq!(first_difference("a\nb\nc", "a\nb\nc"), None);
    assert_eq!(first_difference("a\nb\nc", "a\nx\nc"), Some((2, "b", "x")));
    assert_eq!(first_difference("a\nb", "a"), Some((2, "b", "(the end)")));
}

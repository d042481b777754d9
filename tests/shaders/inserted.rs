//! What wgpu's run-time checks insert into a kernel: instructions of SPIR-V by how deep in loops they lie.
//!
//! `cargo test --test shaders -- --ignored --nocapture what_checks_insert` prints them.

use std::collections::BTreeMap;

use kvpack::backend::QueryPrecision;
use kvpack::wgpu::Variant;
use kvpack::{AttentionShape, Bits, SegmentFormat};
use naga::back::spv;
use naga::proc::{BoundsCheckPolicies, BoundsCheckPolicy};

use super::{parse, snapshots};

/// What a device with robust access to buffers gets, part by part.
const CHECKS: [(&str, BoundsCheckPolicy, bool, bool); 5] = [
    ("none (trusted)", BoundsCheckPolicy::Unchecked, false, false),
    ("clamped indices", BoundsCheckPolicy::Restrict, false, false),
    ("bounded loops", BoundsCheckPolicy::Unchecked, true, false),
    ("guarded divisions", BoundsCheckPolicy::Unchecked, false, true),
    ("all (safe)", BoundsCheckPolicy::Restrict, true, true),
];

/// Instructions of the functions of a module by the number of loops around them.
fn by_depth(words: &[u32]) -> BTreeMap<usize, usize> {
    let (mut found, mut merges) = (BTreeMap::new(), Vec::new());
    let mut rest = &words[5..];
    let mut in_function = false;
    while let Some(&first) = rest.first() {
        let (instruction, after) = rest.split_at((first >> 16) as usize);
        match (first & 0xffff, instruction[1..].first()) {
            (54, _) => (in_function, merges) = (true, Vec::new()),
            (56, _) => in_function = false,
            (246, Some(&merge)) => merges.push(merge),
            (248, Some(label)) if merges.last() == Some(label) => drop(merges.pop()),
            _ => {}
        }
        if in_function {
            *found.entry(merges.len()).or_default() += 1;
        }
        rest = after;
    }
    found
}

fn instructions(variant: &Variant, (_, index, loops, divisions): (&str, BoundsCheckPolicy, bool, bool)) -> String {
    let (mut module, info) = parse(&variant.source().unwrap()).unwrap();
    let buffer = BoundsCheckPolicy::Unchecked;
    let bounds_check_policies = BoundsCheckPolicies { index, buffer, image_load: buffer, binding_array: buffer };
    let options = spv::Options {
        lang_version: (1, 6),
        bounds_check_policies,
        force_loop_bounding: loops,
        emit_int_div_checks: divisions,
        ..Default::default()
    };
    module.entry_points.retain(|entry| entry.name == variant.entry_point());
    let words = spv::write_vec(&module, &info, &options, None).unwrap();
    by_depth(&words).into_iter().map(|(depth, count)| format!("{depth} loops: {count:5}   ")).collect()
}

#[test]
#[ignore = "prints what docs/in-bounds.md tells"]
fn what_checks_insert() {
    let shape = AttentionShape::new(32, 8, 128).unwrap();
    for (bits, query) in [(Bits::Four, QueryPrecision::Int8), (Bits::Four, QueryPrecision::Int16)] {
        let format = SegmentFormat::per_channel(bits);
        let variant = snapshots::of_step("attend", &shape, format, None, (query, true, 9));
        println!("{format}, {query:?}");
        for checks in CHECKS {
            println!("  {:20} {}", checks.0, instructions(&variant, checks));
        }
    }
}

//! `kvpack shader` from outside.

use crate::common::kvpack;

fn shader(arguments: &[&str]) -> String {
    let run = kvpack(&[&["shader"], arguments].concat());
    assert_eq!(run.code, 0, "{}", run.err);
    run.out
}

/// The files of a listing, in order.
fn files(listing: &str) -> Vec<&str> {
    listing.lines().filter_map(|line| line.strip_prefix("// shaders/")).collect()
}

#[test]
fn every_part_has_its_file_before_it() {
    let listing = shader(&["--format", "calibquant:2+query=int16", "--shape", "g4-b1-4k"]);
    assert!(listing.starts_with("// attend of 2-bit per channel at g4-b1-4k, path subgroups\n"), "{listing}");
    let files = files(&listing);
    for file in ["attend/attend.wgsl", "attend/work_item.wgsl", "attend/step_scores.wgsl#dot", "attend/values.wgsl#dot"]
    {
        assert!(files.contains(&file), "{file} of {files:?}");
    }
    // A default body stands under the same heading as the choice that lacks it.
    let (_, after) = listing.split_once("// shaders/attend/step_scores.wgsl#dot\n").expect("the slot has a choice");
    assert!(after.split("// shaders/").next().is_some_and(|part| part.contains("fn begin_keys(")), "{after}");
    assert!(listing.contains("const KEY_BITS: u32 = 2u;") && listing.contains("\n@compute "));
}

#[test]
fn paths_and_formats_choose_parts() {
    let parts = |arguments: &[&str]| {
        let listing = shader(arguments);
        files(&listing).into_iter().map(str::to_owned).collect::<Vec<_>>()
    };
    let has = |parts: &[String], file: &str| parts.iter().any(|part| part == file);
    let floor = parts(&["--path", "floor", "--format", "kivi:2+query=int8"]);
    assert!(has(&floor, "attend/step_scores.wgsl#groups") && has(&floor, "attend/key_totals.wgsl#memory"), "{floor:?}");
    let subgroups = parts(&["--path", "subgroups", "--format", "kivi:2+query=int8"]);
    assert!(has(&subgroups, "attend/key_totals.wgsl#subgroup"), "{subgroups:?}");
    let matrices = parts(&["--path", "matrices", "--format", "f16", "--shape", "g8-b8-32k"]);
    assert!(has(&matrices, "attend/attend_matrix.wgsl"), "{matrices:?}");
    let calibrated = parts(&["--format", "calibquant:1+tau=0,3"]);
    assert!(has(&calibrated, "attend/weighted_values.wgsl"), "{calibrated:?}");
}

#[test]
fn kernels_that_pack_are_of_keys_or_of_values() {
    let quantize = |tensor| shader(&["--kernel", "quantize", "--format", "kivi:2", "--tensor", tensor]);
    assert!(quantize("keys").contains("const KEYS: u32 = 1u;"));
    assert!(quantize("values").contains("const KEYS: u32 = 0u;"));
    assert!(files(&quantize("keys")).contains(&"pack/ranges.wgsl#of_tile"));
}

/// What is printed is what a device gets, but for loops: it is valid WGSL as it stands.
#[test]
fn listings_are_complete() {
    for arguments in
        [&["--format", "qjl"][..], &["--kernel", "merge_states"], &["--kernel", "append", "--format", "saw-int4"]]
    {
        let listing = shader(arguments);
        assert!(listing.contains("\n@compute @workgroup_size("), "{listing}");
        assert!(!listing.lines().any(|line| line.starts_with("// import ")), "{listing}");
    }
}

#[test]
fn errors_name_what_there_is() {
    let refused = |arguments: &[&str], named: &[&str]| {
        let run = kvpack(&[&["shader"], arguments].concat());
        assert_eq!(run.code, 2, "{}", run.out);
        assert!(named.iter().all(|name| run.err.contains(name)), "{}", run.err);
    };
    refused(&["--format", "kiwi:2"], &["kiwi", "kivi"]);
    refused(&["--shape", "g5"], &["'g5'", "g4-b8-32k", "g1-b1-4k"]);
    refused(&["--path", "metal"], &["metal", "floor, f16, subgroups and matrices"]);
    refused(&["--kernel", "scores"], &["'scores'", "calibquant:4", "attend", "quantize", "dequantize"]);
    refused(&["--tensor", "both"], &["both", "keys", "values"]);
}

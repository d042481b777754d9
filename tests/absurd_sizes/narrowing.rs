//! Casts that cut a number off: outside of `src/counts.rs` there are none but where a file of the list has its reason.

use std::path::Path;

use crate::public_functions::{code, sources};

/// Where numbers are cut, and why nothing is lost there.
const REASONED: &[(&str, &str)] = &[
    ("conformance/", "the sizes of cases are constants"),
    ("cpu/dequantize.rs", "the bits of an element are as many as its type has"),
    ("cpu/tile_lines.rs", "places within a tile, whose size is a constant"),
    ("cuda/", "a plan checks what 32 bits count before it binds"),
    ("format/affine.rs", "codes are below 256, and the halves of a word have 16 bits"),
    ("format/bits.rs", "an enum of widths"),
    ("format/codebook.rs", "levels are at most 256"),
    ("format/interchange/", "codes are below 256"),
    ("format/sketch.rs", "rotations are at most three"),
    ("format/tile.rs", "places within a tile, whose size is a constant"),
    ("format/tile_order.rs", "places within a tile, whose size is a constant"),
    ("plan/attend", "a plan counts rows, pages and states in 64 bits and refuses what 32 bits do not count"),
    ("plan/blocks", "a plan counts rows, pages and states in 64 bits and refuses what 32 bits do not count"),
    ("plan/cut", "a plan counts rows, pages and states in 64 bits and refuses what 32 bits do not count"),
    ("plan/grown_work.rs", "a plan counts rows, pages and states in 64 bits and refuses what 32 bits do not count"),
    ("plan/state_rows", "a plan counts rows, pages and states in 64 bits and refuses what 32 bits do not count"),
    ("plan/work", "a plan counts rows, pages and states in 64 bits and refuses what 32 bits do not count"),
    ("plan/visible.rs", "a plan refuses positions that 32 bits do not count before it asks what a query sees"),
    ("plan/write/entry.rs", "a layout checks the numbers of an entry before it is written"),
    ("wgpu/", "a plan checks what 32 bits count before it binds"),
];

/// Types that hold less than a count.
const NARROW: [&str; 6] = ["u8", "u16", "u32", "i8", "i16", "i32"];

#[test]
fn nothing_is_cut_without_a_reason() {
    let mut cut = Vec::new();
    for (path, text) in sources(Path::new("")) {
        let narrows = |line: &&str| {
            let code = line.split("//").next().unwrap_or_default();
            code.match_indices(" as ").any(|(at, _)| {
                let rest = &code[at + 4..];
                let end = rest.find(|letter: char| !letter.is_alphanumeric()).unwrap_or(rest.len());
                NARROW.contains(&&rest[..end])
            })
        };
        for line in code(&text).lines().filter(narrows) {
            if !REASONED.iter().any(|(prefix, _)| path.starts_with(prefix)) {
                cut.push(format!("{path}: {}", line.trim()));
            }
        }
    }
    assert!(cut.is_empty(), "casts that cut numbers off; counts::in_32_bits refuses instead: {cut:#?}");
}

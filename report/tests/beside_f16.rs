//! What plans say of packed formats beside f16 is what docs/results has, row by row.

use std::fs;

use kvpack::AttentionShape;
use kvpack::conformance::decode_formats;
use kvpack::plan::BesideF16;
use kvpack_report::{Measured, RowOutcome, read};

#[test]
fn plans_say_what_was_measured() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/results/nvidia-h200.json");
    let measured = read(&fs::read_to_string(file).unwrap()).unwrap();
    let (mut faster, mut slower) = (0, 0);
    for report in measured {
        let Measured::Bench(report) = report else { continue };
        if !report.backend.contains("Vulkan") || !report.not_default.is_empty() {
            continue;
        }
        for shape in &report.shapes {
            let heads = AttentionShape::new(shape.query_heads, shape.kv_heads, shape.head_dim).unwrap();
            for row in &shape.rows {
                let RowOutcome::Timed(figures) = &row.outcome else { continue };
                let Some(times_f16) = figures.times_f16 else { continue };
                let named = decode_formats().into_iter().find(|format| format.to_string() == row.format);
                let format = named.unwrap_or_else(|| panic!("the registry has no format '{}'", row.format));
                let said = BesideF16::through_wgpu(&format, &heads);
                let found = if times_f16 > 1.0 { BesideF16::Faster } else { BesideF16::Slower };
                assert_eq!(said, found, "{} on {}: × {times_f16}", row.format, shape.shape);
                *(if found == BesideF16::Faster { &mut faster } else { &mut slower }) += 1;
            }
        }
    }
    assert!(faster > 0 && slower > 0, "{faster} rows are faster than f16, {slower} are slower");
}

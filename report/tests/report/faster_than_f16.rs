//! Packing saves time as well as memory: docs/results has no packed format that is slower than f16 by default.

use std::fs;

use kvpack_report::{Measured, RowOutcome, read};

#[test]
fn packed_formats_are_faster_than_f16() {
    let file = concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/results/nvidia-h200.json");
    let measured = read(&fs::read_to_string(file).unwrap()).unwrap();
    let mut rows = 0;
    for report in measured {
        let Measured::Bench(report) = report else { continue };
        if !report.not_default.is_empty() {
            continue;
        }
        for shape in &report.shapes {
            for row in &shape.rows {
                let RowOutcome::Timed(figures) = &row.outcome else { continue };
                let Some(times_f16) = figures.times_f16 else { continue };
                assert!(times_f16 > 1.0, "{} on {} by {}: × {times_f16}", row.format, shape.shape, report.backend);
                rows += 1;
            }
        }
    }
    assert!(rows > 100, "{rows} rows have f16 beside them");
}

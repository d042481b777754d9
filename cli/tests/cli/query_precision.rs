//! The precision of the query that a format gets by default, on real keys and values through wgpu: it adds at most 5 %
//! to the error that the format has anyway, whatever the format (docs/query-precision.md).

use serde_json::Value;

use crate::common::kvpack;

const DUMP: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/data/smollm2_kv.safetensors");

/// What the default may add to a format's own error.
const MOST: f64 = 1.05;

/// Of the three layers the one on which rounded queries add most.
const LAYER: &str = "15";

fn number(value: &Value) -> f64 {
    value.as_f64().expect("a number")
}

#[test]
fn the_default_adds_at_most_a_twentieth_to_the_error_of_every_format() {
    let run = kvpack(&["eval", DUMP, "--precision", "--backend", "wgpu", "--layer", LAYER, "--json"]);
    assert_eq!(run.code, 0, "{}", run.err);
    let report: Value = serde_json::from_str(&run.out).expect("JSON on standard output");
    let formats = report["layers"][0]["formats"].as_array().expect("formats");
    assert!(formats.len() > 30, "{} formats", formats.len());
    let (mut one_byte, mut two_bytes) = (0, 0);
    // f16 holds the dump as it is, and has no error to hide another behind.
    let (f16, packed): (Vec<&Value>, Vec<&Value>) =
        formats.iter().partition(|format| number(&format["own_error"]) == 0.0);
    assert!(f16.len() == 1 && number(&f16[0]["int16"]["error"]) < 1e-4, "{f16:?}");
    for format in &packed {
        let default = format["default"].as_str().expect("the default");
        let (own, with) = (number(&format["own_error"]), number(&format[default]["error"]));
        assert!(with <= MOST * own, "{} with {default}: {with}, its own error is {own}", format["format"]);
        *(if default == "int8" { &mut one_byte } else { &mut two_bytes }) += 1;
    }
    assert!(one_byte > 0 && two_bytes > 0, "{one_byte} formats have queries of 8 bits, {two_bytes} of 16");
    // And it is needed: with 8 bits where the default has 16, most formats lose much more.
    let worse = |format: &&&Value| {
        format["default"] == "int16" && number(&format["int8"]["error"]) > MOST * number(&format["own_error"])
    };
    assert!(packed.iter().filter(worse).count() > 2, "{packed:?}");
}

#[test]
fn a_layer_that_is_not_there_is_refused() {
    let run = kvpack(&["eval", DUMP, "--backend", "cpu", "--layer", "3"]);
    assert_eq!(run.code, 2, "{}{}", run.out, run.err);
    assert!(run.err.contains("no layer 3") && run.err.contains("0, 15, 29"), "{}", run.err);
}

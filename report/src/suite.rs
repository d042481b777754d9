//! What the suites of `kvpack bench` measured that have rows of their own: append, causal, chunks, evict, linear,
//! prefill, ranks and step.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use crate::Run;

/// A row of a suite without figures: the device has no room for it, or no kernel.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Skipped {
    /// The row.
    pub what: String,
    /// The error of the device.
    pub reason: String,
}

/// One run of a suite. Its rows are read as they are: each suite has its own columns.
#[derive(Clone, Debug, Deserialize)]
pub struct SuiteReport {
    /// The device and what of it is used.
    pub backend: String,
    /// The run.
    pub run: Option<Run>,
    /// Sizes, and lists of rows.
    #[serde(flatten)]
    pub measured: Map<String, Value>,
}

/// A list of rows with its columns.
#[derive(Clone, Debug, PartialEq)]
pub struct SuiteTable {
    /// What the rows are called in the report.
    pub name: String,
    /// The columns, in the order of the report.
    pub columns: Vec<String>,
    /// The cells of each row.
    pub rows: Vec<Vec<String>>,
}

impl SuiteReport {
    /// The sizes of the run, as `query_heads 32, kv_heads 8`.
    pub fn sizes(&self) -> String {
        let sizes = self.measured.iter().filter(|(_, value)| value.is_number() || value.is_string());
        sizes.map(|(name, value)| format!("{name} {}", cell(value))).collect::<Vec<_>>().join(", ")
    }

    /// Its rows.
    pub fn tables(&self) -> Vec<SuiteTable> {
        let lists = self.measured.iter().filter_map(|(name, value)| Some((name, value.as_array()?)));
        lists.filter_map(|(name, rows)| table(name, rows)).collect()
    }
}

fn table(name: &str, rows: &[Value]) -> Option<SuiteTable> {
    let rows: Vec<&Map<String, Value>> = rows.iter().filter_map(Value::as_object).collect();
    let mut columns: Vec<String> = Vec::new();
    for column in rows.iter().flat_map(|row| row.keys()) {
        if !columns.contains(column) {
            columns.push(column.clone());
        }
    }
    // Texts first: they say what the numbers are about.
    let is_text = |column: &String| rows.iter().any(|row| row.get(column).is_some_and(Value::is_string));
    columns.sort_by_key(|column| !is_text(column));
    let cells =
        |row: &&Map<String, Value>| columns.iter().map(|column| row.get(column).map_or("–".into(), cell)).collect();
    let rows: Vec<Vec<String>> = rows.iter().map(cells).collect();
    (!rows.is_empty()).then(|| SuiteTable { name: name.to_owned(), columns, rows })
}

fn cell(value: &Value) -> String {
    match value {
        Value::Null => "–".into(),
        Value::String(text) => text.clone(),
        Value::Number(number) => match number.as_f64() {
            Some(x) if number.is_f64() => short(x),
            _ => number.to_string(),
        },
        Value::Array(items) => items.iter().map(cell).collect::<Vec<_>>().join(", "),
        Value::Object(of) => match ["low_us", "high_us", "samples"].map(|name| of.get(name)) {
            [Some(low), Some(high), Some(samples)] => format!("{} to {} ({})", cell(low), cell(high), cell(samples)),
            _ => value.to_string(),
        },
        Value::Bool(_) => value.to_string(),
    }
}

/// Three or four digits that count.
fn short(x: f64) -> String {
    match x.abs() {
        0.0 => "0".into(),
        ..0.001 => format!("{x:.1e}"),
        ..10.0 => format!("{x:.2}"),
        ..1000.0 => format!("{x:.1}"),
        _ => format!("{x:.0}"),
    }
}

#[cfg(test)]
mod tests {
    use crate::{Measured, read};

    #[test]
    fn rows_of_every_suite_are_a_table() {
        for suite in ["append", "causal", "chunks", "evict", "linear", "prefill", "ranks", "step"] {
            let text = format!(
                r#"{{"kind": "{suite}", "backend": "Card", "run": null, "kv_heads": 8, "rows": [
                {{"append_us": 1.25, "format": "f16", "pack_us": null}},
                {{"append_us": 1250.5, "format": "4-bit", "pack_us": {{"samples": 5, "low_us": 1.5, "high_us": 2.0}}}}]}}"#
            );
            let [measured] = &read(&text).unwrap()[..] else { panic!("one report") };
            let (Measured::Append(report)
            | Measured::Causal(report)
            | Measured::Chunks(report)
            | Measured::Evict(report)
            | Measured::Linear(report)
            | Measured::Prefill(report)
            | Measured::Ranks(report)
            | Measured::Step(report)) = measured
            else {
                panic!("{measured:?}")
            };
            assert_eq!(report.sizes(), "kv_heads 8");
            let [table] = &report.tables()[..] else { panic!("one table") };
            assert_eq!(table.columns, ["format", "append_us", "pack_us"]);
            assert_eq!(table.rows, [["f16", "1.25", "–"], ["4-bit", "1250", "1.50 to 2.00 (5)"]]);
        }
    }
}

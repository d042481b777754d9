//! What studies print and write.

use std::fs;
use std::path::Path;

use anyhow::{Context, Result};
use kvpack::backend::Device as _;
use kvpack_cli::this_run;
use kvpack_report::Run;
use kvpack_report::page::{Plot, Point, Scale, Series};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};

use super::Common;
use crate::rig::Rig;

/// A file of rows.
#[derive(Serialize)]
struct Report<'a, T> {
    study: &'a str,
    run: Run,
    device: String,
    model: &'a str,
    rows: &'a [T],
}

/// This run. The program is not the command that its decoder is taken from.
fn run() -> Run {
    let of_command = this_run(String::new(), None);
    let arguments = of_command.command.split_once(' ').map_or("", |(_, arguments)| arguments);
    Run { command: format!("candle-host {arguments}"), ..of_command }
}

/// Writes the JSON file and the plot that the options name.
pub fn write<R: Rig, T: Serialize>(
    rig: &R,
    common: &Common,
    (study, model): (&str, &str),
    rows: &[T],
    plot: impl FnOnce() -> Plot,
) -> Result<()> {
    if let Some(path) = &common.json {
        let report = Report { study, run: run(), device: rig.backend().name(), model, rows };
        to_file(path, &serde_json::to_string_pretty(&report)?)?;
    }
    if common.plot.is_some() { draw(common, &plot()) } else { Ok(()) }
}

/// Writes a plot where an option names its file.
pub fn draw(common: &Common, plot: &Plot) -> Result<()> {
    common.plot.as_ref().map_or(Ok(()), |path| to_file(path, &plot.file()))
}

/// The rows of a file that [`write`] wrote.
pub fn rows_of<T: DeserializeOwned>(path: &Path) -> Result<Vec<T>> {
    #[derive(Deserialize)]
    struct Rows<T> {
        rows: Vec<T>,
    }
    let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
    let Rows { rows } =
        serde_json::from_str(&text).with_context(|| format!("{} holds no rows of this study", path.display()))?;
    Ok(rows)
}

fn to_file(path: &Path, text: &str) -> Result<()> {
    fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))
}

/// Prints the lines before the table of a study.
pub fn heading<R: Rig>(rig: &R, study: &str, model: &str) {
    let Run { commit, date, command, .. } = run();
    println!("\n{study}: {model}; {}; commit {}; {date}", rig.backend().name(), commit.unwrap_or("unknown".into()));
    println!("{command}\n");
}

/// A time in a table.
pub fn ms(time: Option<f64>) -> String {
    time.map_or("–".into(), |ms| format!("{ms:.2}"))
}

/// Lines over a logarithmic axis, in the order of their names' first points.
pub fn lines(title: &str, (x, y): (&str, &str), points: impl Iterator<Item = (String, f64, f64)>) -> Plot {
    let mut series: Vec<Series> = Vec::new();
    for (name, x, y) in points {
        let tip = format!("{name}: {y:.2}");
        let point = Point { x, y, label: String::new(), tip, on_line: true, front: false };
        match series.iter_mut().find(|series| series.name == name) {
            Some(series) => series.points.push(point),
            None => series.push(Series { colour: series.len(), name, points: vec![point] }),
        }
    }
    Plot {
        title: title.into(),
        x: x.into(),
        y: y.into(),
        x_scale: Scale::PowersOfTwo,
        y_scale: Scale::Logarithmic,
        series,
        references: Vec::new(),
    }
}

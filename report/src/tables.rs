//! Tables of documents, in Markdown, made of what was measured on one device by one build.

mod first_screen;

use std::collections::BTreeSet;
use std::fmt::Write;

use crate::{BenchReport, BenchRow, Measured, PeersReport, RowOutcome, ShapeReport};

/// Bits of the columns of a table of decode steps.
const WIDTHS: [u32; 6] = [16, 8, 4, 3, 2, 1];

/// Longest line of prose.
const LINE: usize = 120;

/// Why measurements make no table.
#[derive(Debug, thiserror::Error)]
pub enum TableError {
    /// Nothing was benchmarked.
    #[error("there is no report of `kvpack bench --json` among the measurements")]
    Empty,
    /// A table shows one build.
    #[error("the rows are of several builds ({0}); measure all of them with one")]
    SeveralBuilds(String),
    /// Accuracy is the same on every device.
    #[error(
        "a table of a device has the rows of `kvpack bench --json` and scripts/peers.py, and nothing of `kvpack eval` or `kvpack check`"
    )]
    NoTiming,
    /// Other libraries were measured on another device.
    #[error(
        "the steps of other libraries were measured on {device}, and those of kvpack on {backends}; \
         give measurements of one device"
    )]
    OtherDevice {
        /// The device of the other libraries.
        device: String,
        /// The backends of kvpack.
        backends: String,
    },
    /// A row that cannot be repeated.
    #[error("a report does not say of which run it is: write it with `kvpack bench --json`")]
    NoRun,
    /// A benchmark found wrong outputs.
    #[error("{shape}, {format} was wrong: {reason}")]
    Wrong {
        /// The shape.
        shape: String,
        /// The format.
        format: String,
        /// What was wrong.
        reason: String,
    },
}

/// What was measured on one device by one build.
#[derive(Clone, Debug)]
pub struct Device {
    reports: Vec<BenchReport>,
    peers: Vec<PeersReport>,
}

impl Device {
    /// Takes what can stand in one table.
    ///
    /// # Errors
    /// When the rows are of several builds, or of another device than those of other libraries; when one of them is
    /// wrong or cannot be repeated, or there is none.
    pub fn new(measured: impl IntoIterator<Item = Measured>) -> Result<Self, TableError> {
        let mut device = Self { reports: Vec::new(), peers: Vec::new() };
        for measured in measured {
            match measured {
                Measured::Bench(report) => device.reports.push(report),
                Measured::Peers(report) => device.peers.push(report),
                _ => return Err(TableError::NoTiming),
            }
        }
        let mut commits = BTreeSet::new();
        for report in &device.reports {
            let commit = report.run.as_ref().and_then(|run| run.commit.clone()).ok_or(TableError::NoRun)?;
            commits.insert(commit);
            for (shape, row) in report.shapes.iter().flat_map(|shape| shape.rows.iter().map(move |row| (shape, row))) {
                if let RowOutcome::Wrong { reason } = &row.outcome {
                    let (shape, format) = (shape.shape.clone(), row.format.clone());
                    return Err(TableError::Wrong { shape, format, reason: reason.clone() });
                }
            }
        }
        match commits.len() {
            0 => Err(TableError::Empty),
            1 => device.check_peers().map(|()| device),
            _ => Err(TableError::SeveralBuilds(commits.into_iter().collect::<Vec<_>>().join(", "))),
        }
    }

    /// Refuses steps of other libraries on a device that no report of kvpack is of.
    fn check_peers(&self) -> Result<(), TableError> {
        let is_here = |peers: &&PeersReport| self.reports.iter().any(|report| peers.is_on_device_of(&report.backend));
        match self.peers.iter().find(|peers| !is_here(peers)) {
            None => Ok(()),
            Some(peers) => {
                let backends: BTreeSet<&str> = self.reports.iter().map(|report| report.backend.as_str()).collect();
                let backends = backends.into_iter().collect::<Vec<_>>().join(", ");
                Err(TableError::OtherDevice { device: peers.device.clone(), backends })
            }
        }
    }

    /// What the tables are of, in a paragraph: devices, drivers, commit, time, bandwidth, guard and accuracy.
    pub fn provenance(&self) -> String {
        let runs = || self.reports.iter().filter_map(|report| report.run.as_ref());
        let distinct = |texts: &mut dyn Iterator<Item = String>| {
            let mut seen = Vec::new();
            texts.for_each(|text| {
                if !seen.contains(&text) {
                    seen.push(text);
                }
            });
            seen.join(" and ")
        };
        let backends = distinct(&mut self.reports.iter().map(|report| report.backend.clone()));
        let drivers = distinct(&mut runs().map(|run| run.driver.clone()));
        let commit = runs().find_map(|run| run.commit.clone()).unwrap_or_default();
        let dates: BTreeSet<&str> = runs().map(|run| run.date.as_str()).collect();
        let dates = match (dates.first(), dates.last()) {
            (Some(first), Some(last)) if first != last => format!("{first} to {last}"),
            (Some(first), _) => (*first).to_owned(),
            _ => String::new(),
        };
        let mut text = format!("{backends}; driver {drivers}; commit `{commit}`; {dates}");
        let read = self.reports.iter().flat_map(|report| &report.shapes).filter_map(|s| s.read_gigabytes_per_second);
        if let Some((low, high)) = extent(read) {
            write!(text, "; read bandwidth {} GB/s", range(low, high, |x| number(x, 3))).ok();
        }
        if let Some(guard) = runs().find_map(|run| run.guard_percent) {
            write!(text, "; rows with a guard more than {guard:.0} % low are discarded").ok();
        }
        let nmse = self.rows().filter_map(|(_, _, row)| row.nmse).fold(0.0, f64::max);
        write!(text, "; NMSE at most {nmse:.0e} against f64 over the stored data.").ok();
        for peers in &self.peers {
            write!(text, " Peers: {} with driver {}, {}.", peers.device, peers.driver, peers.date).ok();
        }
        wrapped(&text)
    }

    /// Decode steps: a row for every shape and backend, a column for every width of one range per channel.
    pub fn decode(&self) -> String {
        let mut table = String::from("| step | by | f16 | 8-bit | 4-bit | 3-bit | 2-bit | 1-bit |\n");
        table += "| --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n";
        for shape in self.shapes() {
            let mut title = step_title(shape);
            for report in &self.reports {
                let Some(measured) = find(report, shape) else { continue };
                let cell = |width: u32| {
                    let row = measured.rows.iter().find(|row| plain_width(&row.format) == Some(width));
                    row.map_or("–".into(), cell)
                };
                let cells = WIDTHS.map(cell).join(" | ");
                if WIDTHS.iter().any(|&width| measured.rows.iter().any(|row| plain_width(&row.format) == Some(width))) {
                    writeln!(table, "| {title} | {} | {cells} |", backend_name(&report.backend)).ok();
                    title = String::new();
                }
            }
            for (peer, width, us) in self.peers_of(shape) {
                let cell = |column: u32| if column == width { number(us, 1) } else { String::new() };
                writeln!(table, "| {title} | {peer} | {} |", WIDTHS.map(cell).join(" | ")).ok();
                title = String::new();
            }
        }
        table
    }

    /// The other formats of whole sequences, a column for every shape that any of them was timed on; nothing
    /// where none was.
    pub fn other_formats(&self) -> String {
        let other =
            |row: &BenchRow| row.parts.len() == 1 && !row.format.contains('/') && plain_width(&row.format).is_none();
        let mut formats: Vec<&str> = Vec::new();
        let mut shapes: Vec<&ShapeReport> = Vec::new();
        for (_, shape, row) in self.rows().filter(|(_, _, row)| other(row)) {
            if !formats.contains(&row.format.as_str()) {
                formats.push(&row.format);
            }
            if !shapes.iter().any(|known| known.shape == shape.shape) {
                shapes.push(shape);
            }
        }
        if formats.is_empty() {
            return String::new();
        }
        let names = shapes.iter().map(|shape| format!("`{}`", shape.shape)).collect::<Vec<_>>().join(" | ");
        let mut table = format!("| format | by | {names} |\n| --- | --- |{}\n", " ---: |".repeat(shapes.len()));
        for format in formats {
            let mut title = format;
            for report in self.reports_by_backend() {
                let row_of = |shape: &&ShapeReport| {
                    let mut measured = report.iter().filter_map(|report| find(report, shape));
                    measured.find_map(|shape| shape.rows.iter().find(|row| row.format == format))
                };
                let rows: Vec<Option<&BenchRow>> = shapes.iter().map(row_of).collect();
                if rows.iter().any(Option::is_some) {
                    let cells: Vec<String> = rows.into_iter().map(|row| row.map_or("–".into(), cell)).collect();
                    let by = backend_name(&report[0].backend);
                    writeln!(table, "| {title} | {by} | {} |", cells.join(" | ")).ok();
                    title = "";
                }
            }
        }
        table
    }

    /// All rows with their reports.
    fn rows(&self) -> impl Iterator<Item = (&BenchReport, &ShapeReport, &BenchRow)> {
        let shapes = self.reports.iter().flat_map(|report| report.shapes.iter().map(move |shape| (report, shape)));
        shapes.flat_map(|(report, shape)| shape.rows.iter().map(move |row| (report, shape, row)))
    }

    /// The shapes, each once.
    fn shapes(&self) -> Vec<&ShapeReport> {
        let mut shapes: Vec<&ShapeReport> = Vec::new();
        for shape in self.reports.iter().flat_map(|report| &report.shapes) {
            if !shapes.iter().any(|known| known.shape == shape.shape) {
                shapes.push(shape);
            }
        }
        shapes
    }

    fn reports_by_backend(&self) -> Vec<Vec<&BenchReport>> {
        let mut groups: Vec<Vec<&BenchReport>> = Vec::new();
        for report in &self.reports {
            match groups.iter_mut().find(|group| group[0].backend == report.backend) {
                Some(group) => group.push(report),
                None => groups.push(vec![report]),
            }
        }
        groups
    }

    fn peers_of(&self, shape: &ShapeReport) -> impl Iterator<Item = (&str, u32, f64)> {
        let rows = self.peers.iter().flat_map(|peers| &peers.rows).filter(|row| row.shape == shape.shape);
        rows.filter_map(|row| Some((row.peer.as_str(), peer_width(&row.format)?, row.step_us)))
    }
}

fn find<'a>(report: &'a BenchReport, shape: &ShapeReport) -> Option<&'a ShapeReport> {
    report.shapes.iter().find(|known| known.shape == shape.shape)
}

/// `g4-b8-32k` and what it stands for.
fn step_title(shape: &ShapeReport) -> String {
    let tokens = step_tokens(shape);
    format!(
        "`{}`: {} × {tokens}, {} over {} heads × {}",
        shape.shape, shape.sequences, shape.query_heads, shape.kv_heads, shape.head_dim
    )
}

/// Tokens of a sequence: `32k`.
fn step_tokens(shape: &ShapeReport) -> String {
    match shape.tokens {
        tokens if tokens.is_multiple_of(1024) => format!("{}k", tokens / 1024),
        tokens => tokens.to_string(),
    }
}

/// By which of the three backends, as documents call them.
fn backend_name(backend: &str) -> &'static str {
    match backend {
        _ if backend.contains("(CUDA") => "CUDA",
        _ if backend.starts_with("CPU") => "CPU",
        _ => "WGSL",
    }
}

/// The width of a format that stores keys and values alike with one range per channel; 16 for f16.
pub fn plain_width(format: &str) -> Option<u32> {
    if format == "f16" {
        return Some(16);
    }
    if format.starts_with("K 1-bit per channel, ranges") && format.contains("V 1-bit per channel, ranges") {
        return Some(1);
    }
    format.strip_suffix("-bit per channel")?.parse().ok()
}

/// The column of a peer's format: `f16`, `fp8`, `4-bit`.
fn peer_width(format: &str) -> Option<u32> {
    let digits: String = format.chars().skip_while(|c| !c.is_ascii_digit()).take_while(char::is_ascii_digit).collect();
    digits.parse().ok()
}

/// Microseconds and percent of the read bandwidth, or why there are none.
fn cell(row: &BenchRow) -> String {
    match &row.outcome {
        RowOutcome::Timed(figures) => match figures.percent_of_read {
            Some(percent) => format!("{} ({percent:.0})", number(figures.step_us, 1)),
            None => number(figures.step_us, 1),
        },
        RowOutcome::Discarded { .. } => "discarded".into(),
        RowOutcome::Skipped { .. } => "did not fit".into(),
        RowOutcome::Wrong { .. } => "wrong".into(),
    }
}

/// A number with this many digits behind the point, fewer where it is large.
fn number(x: f64, digits: usize) -> String {
    let digits = match x {
        1000.0.. => 0,
        100.0.. => digits.min(1),
        _ => digits.min(2),
    };
    format!("{x:.digits$}")
}

fn extent(values: impl Iterator<Item = f64>) -> Option<(f64, f64)> {
    values.fold(None, |seen, x| match seen {
        None => Some((x, x)),
        Some((low, high)) => Some((low.min(x), high.max(x))),
    })
}

fn range(low: f64, high: f64, text: impl Fn(f64) -> String) -> String {
    let (low, high) = (text(low), text(high));
    if low == high { low } else { format!("{low} to {high}") }
}

/// A paragraph in lines that are not too long.
fn wrapped(text: &str) -> String {
    let mut lines = String::new();
    let mut length = 0;
    for word in text.split_whitespace() {
        let word_length = word.chars().count();
        if length > 0 && length + 1 + word_length > LINE {
            lines.push('\n');
            length = 0;
        } else if length > 0 {
            lines.push(' ');
            length += 1;
        }
        lines += word;
        length += word_length;
    }
    lines.push('\n');
    lines
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read;

    fn bench(commit: &str, backend: &str, rows: &str) -> String {
        format!(
            r#"{{"kind": "bench", "backend": "{backend}",
            "run": {{"commit": "{commit}", "date": "2026-01-02 03:04 UTC", "command": "kvpack bench", "driver": "D 1",
                "guard_percent": 3.0}},
            "shapes": [{{"shape": "g4-b8-32k", "sequences": 8, "tokens": 32768, "query_heads": 32, "kv_heads": 8,
                "head_dim": 128, "read_gigabytes_per_second": 4480.0, "plain_f32_us": null, "rows": [{rows}]}}]}}"#
        )
    }

    fn row(format: &str, us: f64, percent: f64) -> String {
        format!(
            r#"{{"format": "{format}", "parts": ["{format}"], "nmse": 2e-9, "nmse_int16": null, "bytes": 1000, "copies": 2,
            "outcome": "timed", "timer": "GPU timestamps", "launches": ["attend"], "step_us": {us},
            "gigabytes_per_second": 1.0, "read_gigabytes_per_second": 4480.0, "percent_of_read": {percent},
            "times_f16": 1.0, "times_plain_f32": null, "guard_low_percent": 0.5}}"#
        )
    }

    const DISCARDED: &str = r#"{"format": "1-bit per channel", "parts": ["1-bit per channel"], "nmse": 1e-9,
        "nmse_int16": null, "bytes": 1, "copies": 1, "outcome": "discarded", "reason": "low", "guard_low_percent": 9.0}"#;

    const PEERS: &str = r#"{"kind": "peers", "device": "Card", "driver": "D 1", "date": "2026-01-02", "command": "x",
        "rows": [{"peer": "library 2", "shape": "g4-b8-32k", "format": "f16", "step_us": 243.25}]}"#;

    fn device(texts: &[String]) -> Result<Device, TableError> {
        Device::new(read(&format!("[{}]", texts.join(","))).unwrap())
    }

    #[test]
    fn tables_show_what_was_measured() {
        let rows = [row("f16", 244.71, 98.4), row("4-bit per channel", 65.44, 92.0), DISCARDED.into()].join(",");
        let others = row("4-bit in groups of 32", 91.9, 82.0);
        let texts =
            [bench("abc", "Card (CUDA, sm_90)", &rows), bench("abc", "Card (Vulkan, f16)", &others), PEERS.into()];
        let device = device(&texts).unwrap();
        assert_eq!(
            device.decode(),
            "| step | by | f16 | 8-bit | 4-bit | 3-bit | 2-bit | 1-bit |\n\
             | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |\n\
             | `g4-b8-32k`: 8 × 32k, 32 over 8 heads × 128 | CUDA | 244.7 (98) | – | 65.4 (92) | – | – | discarded |\n\
             |  | library 2 | 243.2 |  |  |  |  |  |\n"
        );
        assert_eq!(
            device.other_formats(),
            "| format | by | `g4-b8-32k` |\n| --- | --- | ---: |\n| 4-bit in groups of 32 | WGSL | 91.9 (82) |\n"
        );
        let provenance = device.provenance();
        for part in
            ["commit `abc`", "2026-01-02 03:04 UTC", "4480 GB/s", "3 % low", "2e-9", "Card (CUDA, sm_90)", "D 1"]
        {
            assert!(provenance.replace('\n', " ").contains(part), "{part}: {provenance}");
        }
        assert!(provenance.lines().all(|line| line.chars().count() <= LINE));
        let row = "| 8\u{a0}×\u{a0}32k | 32/8 | CUDA | 243.2 | 244.7 ×1.0 | – | 65.4 ×3.7 | – | – |";
        assert!(device.against_peers().contains(row), "{}", device.against_peers());
        let captioned = device.captioned("plot.svg").replace('\n', " ");
        assert!(
            captioned.contains("(plot.svg)") && captioned.contains("Card, commit `abc`, 2026-01-02."),
            "{captioned}"
        );
        let plot = device.plot().unwrap();
        let lines: Vec<String> = plot.legend().into_iter().map(|(_, name)| name).collect();
        assert_eq!(lines, ["CUDA", "WGSL", "bytes / bandwidth, 4480 GB/s", "library 2, f16, Card"]);
        assert_eq!(plot.series[0].points.len(), 2, "f16 and 4 bits: {:?}", plot.series[0]);
    }

    #[test]
    fn peers_stand_next_to_the_rows_of_their_device() {
        let card = bench("abc", "Card (CUDA, sm_90)", &row("f16", 244.71, 98.4));
        let cpu = bench("abc", "CPU (8 threads)", &row("f16", 9000.0, 98.4));
        let captioned = |peers: &str| {
            let device = device(&[card.clone(), peers.to_owned()]).unwrap();
            device.captioned("plot.svg").replace('\n', " ")
        };
        let elsewhen = captioned(PEERS);
        assert!(elsewhen.contains("of another library, measured 2026-01-02."), "{elsewhen}");
        let same_run = captioned(&PEERS.replace("2026-01-02", "2026-01-02 03:04 UTC"));
        assert!(same_run.contains("of another library in the same run."), "{same_run}");
        let other = device(&[cpu.clone(), PEERS.into()]);
        assert!(matches!(&other, Err(TableError::OtherDevice { device, .. }) if device == "Card"), "{other:?}");
        let both = device(&[cpu, card, PEERS.into()]).unwrap();
        assert!(both.against_peer("g4-b8-32k", "CUDA").is_some());
        assert_eq!(both.against_peer("g4-b8-32k", "CPU"), None);
    }

    #[test]
    fn rows_of_two_builds_make_no_table() {
        let texts = [bench("abc", "Card (CUDA, sm_90)", &row("f16", 1.0, 9.0)), bench("abd", "Card (CUDA, sm_90)", "")];
        assert!(matches!(device(&texts), Err(TableError::SeveralBuilds(builds)) if builds == "abc, abd"));
        assert!(matches!(device(&[PEERS.into()]), Err(TableError::Empty)));
        let no_run = bench("abc", "Card", "").replace(r#""commit": "abc""#, r#""commit": null"#);
        assert!(matches!(device(&[no_run]), Err(TableError::NoRun)));
    }
}

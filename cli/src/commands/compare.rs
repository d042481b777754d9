//! `kvpack compare`: devices and builds next to each other.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kvpack_report::{Measured, page, read};

use crate::files::{self, Replacement};
use crate::outcome::Outcome;
use crate::print::say;

/// Compare JSON reports of devices, builds or libraries in one HTML page.
///
/// A report is what `check --json`, `eval --json`, `eval --report`, `bench --json` (every suite), `bench --report` and
/// scripts/peers.py write, or a list of them. Reports of `eval` and of `bench` together give a plot of quality and
/// speed.
#[derive(clap::Args)]
pub struct CompareArgs {
    /// The reports; NAME=FILE gives one a name other than its file's.
    #[arg(required = true, value_name = "[NAME=]FILE")]
    reports: Vec<String>,
    /// The page.
    #[arg(long, value_name = "FILE", default_value = "compare.html")]
    out: PathBuf,
}

/// Bytes of the largest report that is read.
const MOST_BYTES: u64 = 64 << 20;

/// Runs the command.
pub fn run(args: &CompareArgs) -> Result<Outcome> {
    files::check_apart(&args.out, args.reports.iter().map(|given| name_and_path(given).1))?;
    let mut named = Vec::new();
    for given in &args.reports {
        let (name, path) = name_and_path(given);
        let text = files::read(path, MOST_BYTES).map_err(anyhow::Error::from).and_then(|b| Ok(String::from_utf8(b)?));
        let text = text.with_context(|| format!("cannot read {}", path.display()))?;
        let reports = read(&text).with_context(|| path.display().to_string())?;
        named.extend(named_apart(&name, reports));
    }
    if named.is_empty() {
        bail!("the files hold no report; `kvpack bench --json` and `kvpack eval --json` write some");
    }
    let mut file = Replacement::new(&args.out)?;
    file.write(page::compare(&named).as_bytes())?;
    file.commit()?;
    say!("{}", args.out.display())?;
    Ok(Outcome::Passed)
}

/// `NAME=FILE`, or a file that is called by its own name.
fn name_and_path(given: &str) -> (String, &Path) {
    match given.split_once('=').filter(|(name, _)| !name.is_empty() && !name.contains(['/', '\\'])) {
        Some((name, path)) => (name.into(), Path::new(path)),
        None => (Path::new(given).file_stem().unwrap_or_default().to_string_lossy().into_owned(), Path::new(given)),
    }
}

/// The reports of a file. Benchmarks of one device are one report, however many processes they came from. Where one
/// file has several devices, their names are added.
fn named_apart(name: &str, reports: Vec<Measured>) -> Vec<(String, Measured)> {
    let mut apart: Vec<(String, Measured)> = Vec::new();
    for report in reports {
        let Measured::Bench(report) = report else {
            apart.push((name.into(), report));
            continue;
        };
        let known = apart.iter_mut().find_map(|(_, known)| match known {
            Measured::Bench(known) if known.backend == report.backend => Some(known),
            _ => None,
        });
        match known {
            Some(known) => known.shapes.extend(report.shapes),
            None => apart.push((name.into(), Measured::Bench(report))),
        }
    }
    let benches = apart.iter().filter(|(_, report)| matches!(report, Measured::Bench(_))).count();
    if benches > 1 {
        for (name, report) in &mut apart {
            if let Measured::Bench(report) = report {
                *name = format!("{name}, {}", report.backend);
            }
        }
    }
    apart
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reports_have_names() {
        assert_eq!(name_and_path("old=a/b.json"), ("old".into(), Path::new("a/b.json")));
        assert_eq!(name_and_path("a=b/c.json"), ("a".into(), Path::new("b/c.json")));
        assert_eq!(name_and_path("x/a=b/c.json"), ("c".into(), Path::new("x/a=b/c.json")));
    }

    #[test]
    fn processes_of_one_device_are_one_report() {
        let shape = r#"{"shape": "s", "sequences": 1, "tokens": 1, "query_heads": 1, "kv_heads": 1, "head_dim": 64,
            "read_gigabytes_per_second": null, "plain_f32_us": null, "rows": []}"#;
        let bench =
            |backend: &str| format!(r#"{{"kind": "bench", "backend": "{backend}", "run": null, "shapes": [{shape}]}}"#);
        let text = format!("[{}, {}, {}]", bench("a"), bench("b"), bench("a"));
        let named = named_apart("file", read(&text).unwrap());
        let names: Vec<&str> = named.iter().map(|(name, _)| name.as_str()).collect();
        assert_eq!(names, ["file, a", "file, b"]);
        assert!(matches!(&named[0].1, Measured::Bench(report) if report.shapes.len() == 2));
    }
}

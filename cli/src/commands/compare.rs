//! `kvpack compare`: devices and builds next to each other.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use kvpack_report::{BenchReport, Measured, page, read};

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

/// The reports of a file. Benchmarks of one device, build and choice of options are one report, however many processes
/// they came from. Their names say how several such reports of one file differ.
fn named_apart(name: &str, reports: Vec<Measured>) -> Vec<(String, Measured)> {
    let mut benches: Vec<BenchReport> = Vec::new();
    let mut others = Vec::new();
    for report in reports {
        match report {
            Measured::Bench(report) => {
                let mut apart = Some(Box::new(report));
                for known in &mut benches {
                    apart = apart.and_then(|report| known.join(*report).err());
                }
                benches.extend(apart.map(|report| *report));
            }
            other => others.push((name.to_owned(), other)),
        }
    }
    let names = bench_names(name, &benches);
    names.into_iter().zip(benches.into_iter().map(Measured::Bench)).chain(others).collect()
}

/// The names of the benchmarks of a file: with the backend where there are several reports, with commit and options
/// where a backend has several, and with a number where nothing else tells them apart.
fn bench_names(name: &str, benches: &[BenchReport]) -> Vec<String> {
    let mut names: Vec<String> = Vec::with_capacity(benches.len());
    for report in benches {
        let mut of_report = name.to_owned();
        if benches.len() > 1 {
            of_report = format!("{of_report}, {}", report.backend);
        }
        if benches.iter().filter(|other| other.backend == report.backend).count() > 1 {
            let commit = report.run.as_ref().and_then(|run| run.commit.as_deref()).unwrap_or("unknown commit");
            let options = report.not_default.iter().map(String::as_str);
            let parts: Vec<&str> = std::iter::once(commit).chain(options).collect();
            of_report = format!("{of_report}, {}", parts.join(", "));
        }
        let alike = names.iter().filter(|known| known.split(" #").next() == Some(&of_report)).count();
        names.push(if alike > 0 { format!("{of_report} #{}", alike + 1) } else { of_report });
    }
    names
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
    fn processes_of_one_device_and_build_are_one_report() {
        let row = r#"{"format": "f16", "parts": ["f16"], "nmse": null, "nmse_int16": null, "bytes": 0, "copies": 0,
            "outcome": "skipped", "reason": "too large"}"#;
        let bench = |backend: &str, commit: &str, options: &str, tokens: usize| {
            format!(
                r#"{{"kind": "bench", "backend": "{backend}", "not_default": [{options}], "run": {{"commit": "{commit}",
                "date": "d", "command": "c", "driver": "D", "guard_percent": null}}, "shapes": [{{"shape": "s",
                "sequences": 1, "tokens": {tokens}, "query_heads": 1, "kv_heads": 1, "head_dim": 64,
                "read_gigabytes_per_second": null, "plain_f32_us": null, "rows": [{row}]}}]}}"#
            )
        };
        let named = |reports: &[String]| named_apart("file", read(&format!("[{}]", reports.join(","))).unwrap());
        let names = |named: &[(String, Measured)]| named.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        let all = named(&[bench("a", "x", "", 1), bench("b", "x", "", 1), bench("a", "x", "", 1)]);
        assert_eq!(names(&all), ["file, a", "file, b"]);
        assert!(matches!(&all[0].1, Measured::Bench(report) if report.shapes.len() == 1), "one shape");
        assert!(matches!(&all[0].1, Measured::Bench(report) if report.shapes[0].rows.len() == 2), "of both processes");
        let query = "\"query int8\"";
        let all = named(&[
            bench("a", "x", "", 1),
            bench("a", "y", "", 1),
            bench("a", "x", query, 1),
            bench("a", "x", "", 2),
            bench("b", "x", "", 1),
        ]);
        assert_eq!(
            names(&all),
            ["file, a, x", "file, a, y", "file, a, x, query int8", "file, a, x #2", "file, b"],
            "another commit, option or size"
        );
    }

    #[test]
    fn suites_have_the_name_of_their_file() {
        let text =
            r#"[{"kind": "linear", "backend": "a", "run": null}, {"kind": "ranks", "backend": "a", "run": null}]"#;
        let names = named_apart("file", read(text).unwrap());
        assert!(names.len() == 2 && names.iter().all(|(name, _)| name == "file"));
    }
}

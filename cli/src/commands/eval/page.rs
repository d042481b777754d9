//! The files of a report: JSON, and a self-contained page.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use serde::Serialize;

use crate::files::{self, Replacement};

/// Writes `path.html`, and `path.json` of the report: both, or neither where one of them cannot be written.
///
/// # Errors
/// When a file cannot be written.
pub fn write(path: &Path, report: &impl Serialize, html: &str) -> Result<()> {
    let json = serde_json::to_string_pretty(report)?;
    let mut files = Files::new(path)?;
    files.json.write(json.as_bytes())?;
    files.html.write(html.as_bytes())?;
    files.commit()
}

/// Finds out whether both files can be written, before anything is computed for them.
///
/// # Errors
/// When one of them cannot be written, or is one of the inputs.
pub fn try_files<'a>(path: &Path, inputs: impl IntoIterator<Item = &'a Path> + Clone) -> Result<()> {
    for ending in [".json", ".html"] {
        files::check_apart(&with_ending(path, ending), inputs.clone())?;
    }
    Files::new(path).map(drop)
}

/// Both files, to be written.
pub struct Files {
    json: Replacement,
    html: Replacement,
}

impl Files {
    /// Begins to write `path.json` and `path.html`.
    ///
    /// # Errors
    /// When one of them cannot be written.
    pub fn new(path: &Path) -> Result<Self> {
        check_name(path)?;
        Ok(Self {
            json: Replacement::new(&with_ending(path, ".json"))?,
            html: Replacement::new(&with_ending(path, ".html"))?,
        })
    }

    fn commit(self) -> Result<()> {
        self.json.commit()?;
        self.html.commit()
    }
}

/// Refuses a path whose last part is no name: `.` would become `..json`.
fn check_name(path: &Path) -> Result<()> {
    let text = path.to_string_lossy();
    let last = text.rsplit(std::path::is_separator).next().unwrap_or_default();
    if matches!(last, "" | "." | "..") {
        bail!("--report {text}: name the files without their endings, as in {}", path.join("report").display());
    }
    Ok(())
}

/// The path with one extra ending: `run.1` is not `run.2`.
pub fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_need_a_name() {
        let directory = tempfile::tempdir().unwrap();
        for end in [".", "..", "", "a/.", "a/"] {
            let error = Files::new(&directory.path().join(end)).err().unwrap().to_string();
            assert!(error.contains("name the files"), "{end}: {error}");
        }
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 0);
    }

    #[test]
    fn both_files_are_written_and_nothing_else() {
        let directory = tempfile::tempdir().unwrap();
        // The user's own file, whose name is near.
        let neighbour = directory.path().join("report.tmp");
        std::fs::write(&neighbour, "mine").unwrap();
        let path = directory.path().join("report.1");
        write(&path, &[1, 2], "<p>").unwrap();
        write(&directory.path().join("report.2"), &[3], "").unwrap();
        assert_eq!(std::fs::read_to_string(directory.path().join("report.1.html")).unwrap(), "<p>");
        assert_eq!(std::fs::read_to_string(directory.path().join("report.1.json")).unwrap(), "[\n  1,\n  2\n]");
        assert_eq!(std::fs::read_to_string(neighbour).unwrap(), "mine");
        assert_eq!(std::fs::read_dir(directory.path()).unwrap().count(), 5, "nothing else is left");
    }
}

//! The files of a report: JSON, and a self-contained page.

use std::path::{Path, PathBuf};

use anyhow::Result;
use serde::Serialize;

use crate::files::Replacement;

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

/// The path with an ending more: `run.1` is not `run.2`.
pub fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    name.into()
}

#[cfg(test)]
mod tests {
    use super::*;

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

//! What a backend does right, in the JSON that `kvpack check --json` writes.

use serde::{Deserialize, Serialize};

use crate::Run;

/// The conformance checks of one backend.
#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(tag = "kind", rename = "check")]
pub struct ConformanceReport {
    /// The device and what of it is used.
    pub backend: String,
    /// The run.
    pub run: Option<Run>,
    /// How many checks were to run; none in reports of older builds. There are fewer rows where the run ended early.
    #[serde(default)]
    pub planned: Option<usize>,
    /// One row for each check that ran.
    pub rows: Vec<CheckRow>,
}

/// One check.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct CheckRow {
    /// Its name in the registry.
    pub check: String,
    /// The family of kernels that it is about: attention, packing, …
    pub of: String,
    /// The formats that it stores; none where it stores nothing packed.
    pub formats: Vec<String>,
    /// What came of it.
    pub outcome: CheckOutcome,
    /// Normalised mean square error against f64, where attention was computed.
    pub nmse: Option<f64>,
    /// What is wrong, or why the backend does not serve it.
    pub reason: Option<String>,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    /// The backend is right.
    Passed,
    /// It is wrong.
    Failed,
    /// It has no kernel for that, and says so.
    Unsupported,
}

impl ConformanceReport {
    /// How many checks came out so.
    pub fn count(&self, outcome: CheckOutcome) -> usize {
        self.rows.iter().filter(|row| row.outcome == outcome).count()
    }

    /// How many of the planned checks did not run.
    pub fn not_run(&self) -> usize {
        self.planned.map_or(0, |planned| planned.saturating_sub(self.rows.len()))
    }
}

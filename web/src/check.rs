//! Check: is this device right?

use kvpack::conformance::{Case, run_case};
use kvpack::{Backend, Error, Result};
use serde::Serialize;
use web_time::Instant;

/// A conformance case and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CaseRow {
    /// Its name in the registry.
    pub case: String,
    /// The formats of its segments.
    pub formats: String,
    /// What came of it.
    pub outcome: CaseOutcome,
    /// Normalised mean square error of the output, if there was one.
    pub nmse: Option<f64>,
    /// The largest that passes.
    pub limit: Option<f64>,
    /// Why it did not pass.
    pub reason: Option<String>,
    /// How long it took, the f64 reference and the CPU twin with it.
    pub milliseconds: f64,
}

/// What came of a case.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CaseOutcome {
    /// All of it is right.
    Passed,
    /// Something is wrong, or failed.
    Failed,
    /// The backend has no kernel for it.
    Unsupported,
}

/// Runs a case. An error of a case is its failure.
///
/// # Errors
/// [`Error::DeviceLost`]: nothing runs on a lost device.
pub async fn check<B: Backend>(backend: &B, case: &Case) -> Result<CaseRow> {
    let start = Instant::now();
    let (outcome, report, reason) = match run_case(backend, case).await {
        Ok(report) if report.passed() => (CaseOutcome::Passed, Some(report), None),
        Ok(report) => {
            let reason = report.reason();
            (CaseOutcome::Failed, Some(report), Some(reason))
        }
        Err(lost @ Error::DeviceLost { .. }) => return Err(lost),
        Err(error @ Error::Unsupported { .. }) => (CaseOutcome::Unsupported, None, Some(error.to_string())),
        Err(error) => (CaseOutcome::Failed, None, Some(error.to_string())),
    };
    Ok(CaseRow {
        case: case.name.clone(),
        formats: case.formats(),
        outcome,
        nmse: report.as_ref().map(|report| report.error.nmse),
        limit: report.as_ref().map(|report| report.limits.nmse),
        reason,
        milliseconds: start.elapsed().as_secs_f64() * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use kvpack::conformance::cases;
    use kvpack::cpu::Cpu;

    use super::*;

    #[test]
    fn a_case_passes_on_the_twin() {
        let case = cases().into_iter().find(|case| case.name == "length-one-token-f16").unwrap();
        let row = pollster::block_on(check(&Cpu::new(), &case)).unwrap();
        assert_eq!((row.case, row.outcome, row.reason), (case.name, CaseOutcome::Passed, None));
        assert!(row.nmse.unwrap() <= row.limit.unwrap() && row.milliseconds > 0.0);
    }
}

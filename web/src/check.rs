//! Check: is this device right?

use kvpack::conformance::{Accuracy, Check};
use kvpack::{Backend, Error, Result};
use serde::Serialize;
use web_time::Instant;

/// A conformance check and what came of it.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct CheckRow {
    /// Its name in the registry.
    pub check: String,
    /// What it is of: the formats of its stores, or its sizes.
    pub of: String,
    /// What came of it.
    pub outcome: CheckOutcome,
    /// Normalised mean square error of the output, if there was one.
    pub nmse: Option<f64>,
    /// The largest that passes.
    pub limit: Option<f64>,
    /// Why it did not pass.
    pub reason: Option<String>,
    /// How long it took, the f64 reference and the CPU reference with it.
    pub milliseconds: f64,
}

/// What came of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckOutcome {
    /// All of it is right.
    Passed,
    /// Something is wrong, or failed.
    Failed,
    /// The backend has no kernel for it.
    Unsupported,
}

/// Runs a check. An error of it is its failure.
///
/// # Errors
/// [`Error::DeviceLost`]: nothing runs on a lost device.
pub async fn check<B: Backend>(backend: &B, check: &Check) -> Result<CheckRow> {
    let start = Instant::now();
    let (outcome, report, reason) = match check.run(backend).await {
        Ok(report) if report.passed() => (CheckOutcome::Passed, Some(report), None),
        Ok(report) => {
            let reason = report.reason();
            (CheckOutcome::Failed, Some(report), Some(reason))
        }
        Err(lost @ Error::DeviceLost { .. }) => return Err(lost),
        Err(error @ Error::Unsupported { .. }) => (CheckOutcome::Unsupported, None, Some(error.to_string())),
        Err(error) => (CheckOutcome::Failed, None, Some(error.to_string())),
    };
    let accuracy: Option<Accuracy> = report.and_then(|report| report.accuracy);
    Ok(CheckRow {
        check: check.name().into(),
        of: check.subject(),
        outcome,
        nmse: accuracy.map(|accuracy| accuracy.error.nmse),
        limit: accuracy.map(|accuracy| accuracy.limits.nmse),
        reason,
        milliseconds: start.elapsed().as_secs_f64() * 1e3,
    })
}

#[cfg(test)]
mod tests {
    use kvpack::conformance::checks;
    use kvpack::cpu::Cpu;

    use super::*;

    #[test]
    fn a_check_passes_on_the_twin() {
        let one = checks().into_iter().find(|check| check.name() == "length-one-token-f16").unwrap();
        let row = pollster::block_on(check(&Cpu::new(), &one)).unwrap();
        assert_eq!((row.check.as_str(), row.outcome, row.reason), (one.name(), CheckOutcome::Passed, None));
        assert!(row.nmse.unwrap() <= row.limit.unwrap() && row.milliseconds > 0.0);
    }
}

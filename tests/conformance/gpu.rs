//! The conformance registry through wgpu: one test for each check and path. `adapter` says on which one.
//!
//! The quick checks run on every path that the adapter has, the f16 path only where it has f16, since it is the floor
//! with larger limits elsewhere; those whose kernels are the same on all paths run on the first. `KVPACK_PATH` (floor,
//! f16, subgroups, matrices) leaves one path. `KVPACK_TEST_BRIEF` leaves the best path, for a second driver.
//! `KVPACK_ALL_CASES=1` runs the whole registry. Without the adapter there is one test, and it fails.

#[path = "../gpu/adapter.rs"]
mod adapter;

use kvpack::conformance::{self, Check};
use kvpack::wgpu::{Capabilities, Path, Wgpu, offers_matrices};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let arguments = Arguments::from_args();
    let trials = trials().unwrap_or_else(|reason| vec![Trial::test("adapter", || Err(reason.into()))]);
    libtest_mimic::run(&arguments, trials).exit();
}

fn trials() -> Result<Vec<Trial>, String> {
    let adapter = adapter::adapter()?;
    let capabilities = Capabilities::from_adapter(&adapter, wgpu::ExperimentalFeatures::disabled());
    let matrices = offers_matrices(&adapter);
    let differs = |path: &Path| match path {
        Path::Floor => true,
        Path::F16 => capabilities.f16,
        Path::Subgroups => capabilities.subgroups.is_some(),
        Path::Matrices => matrices,
    };
    let paths = match adapter::forced_path()? {
        Some(path) => vec![path],
        None if adapter::is_brief() => Path::ALL.into_iter().rfind(differs).into_iter().collect(),
        None => Path::ALL.into_iter().filter(differs).collect(),
    };
    let all = std::env::var("KVPACK_ALL_CASES").is_ok_and(|value| !matches!(value.as_str(), "" | "0"));
    let mut trials = Vec::new();
    for (index, path) in paths.into_iter().enumerate() {
        let backend = adapter::restricted_to(path)?;
        let is_wanted = |check: &Check| (all || check.is_quick()) && (index == 0 || check.kind().depends_on_path());
        for check in conformance::checks().into_iter().filter(is_wanted) {
            let backend = backend.clone();
            trials.push(Trial::test(format!("{path}::{}", check.name()), move || run(&backend, &check)));
        }
    }
    Ok(trials)
}

fn run(backend: &Wgpu, check: &Check) -> Result<(), Failed> {
    let report = pollster::block_on(check.run(backend))?;
    if report.passed() { Ok(()) } else { Err(report.reason().into()) }
}

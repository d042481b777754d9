//! The conformance registry through wgpu: one test for each case and path, on the adapter that `WGPU_ADAPTER_NAME` names
//! or the best one.
//!
//! The best path of the adapter runs all cases and the lesser ones the quick subset. `KVPACK_PATH` (floor, f16,
//! subgroups) runs all cases on that path alone. Without an adapter there is one test, and it fails.

use kvpack::conformance::{self, Case};
use kvpack::wgpu::{Capabilities, Path, Requirements, Wgpu, choose_adapter, open_device};
use kvpack::{Error, Result};
use libtest_mimic::{Arguments, Failed, Trial};

fn main() {
    let trials = pollster::block_on(trials()).unwrap_or_else(|error| vec![missing(error)]);
    libtest_mimic::run(&Arguments::from_args(), trials).exit();
}

async fn trials() -> Result<Vec<Trial>> {
    let adapter = choose_adapter(None).await?;
    let best = Capabilities::from_adapter(&adapter).path();
    let forced: Option<Path> = std::env::var("KVPACK_PATH").ok().map(|path| path.parse()).transpose()?;
    let mut trials = Vec::new();
    for path in Path::ALL.into_iter().filter(|path| forced.map_or(*path <= best, |forced| *path == forced)) {
        let requirements = Requirements::of(&adapter).restricted_to(path);
        let (device, queue) = open_device(&adapter, requirements).await?;
        let backend = Wgpu::new(device, queue)?.restricted_to(path);
        let all = forced.is_some() || path == best;
        for case in conformance::cases().into_iter().filter(|case| all || case.quick) {
            let backend = backend.clone();
            trials.push(Trial::test(format!("wgpu-{path}::{}", case.name), move || run(&backend, &case)));
        }
    }
    Ok(trials)
}

fn run(backend: &Wgpu, case: &Case) -> std::result::Result<(), Failed> {
    let report = pollster::block_on(conformance::run_case(backend, case))?;
    if report.passed() { Ok(()) } else { Err(report.reason().into()) }
}

fn missing(error: Error) -> Trial {
    Trial::test("wgpu::adapter", move || Err(error.to_string().into()))
}

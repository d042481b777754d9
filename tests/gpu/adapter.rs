//! The adapter that GPU tests run on, and devices of it.
//!
//! `WGPU_ADAPTER_NAME` names the adapter; without it the best one is taken. `KVPACK_PATH` (floor, f16, subgroups,
//! matrices) takes away what that path forbids. `KVPACK_TEST_DRIVER`, which `scripts/test.sh` sets, says which driver is
//! expected: without an adapter, or on another one, the tests fail, since a test that ran elsewhere has shown nothing.
//! `KVPACK_CHECKS` (trusted, indices, safe) says whether kernels carry wgpu's run-time checks.

use std::sync::Arc;

use kvpack::wgpu::{Checks, Kernels, Path, Requirements, Wgpu, choose_adapter, open_device};
use pollster::block_on;

/// The adapter to test on.
///
/// # Errors
/// In words, when there is none or `KVPACK_TEST_DRIVER` expects another.
pub fn adapter() -> Result<wgpu::Adapter, String> {
    let adapter = block_on(choose_adapter(None)).map_err(|error| error.to_string())?;
    let driver = std::env::var("KVPACK_TEST_DRIVER").unwrap_or_else(|_| "system".into());
    let expected = match driver.as_str() {
        "lavapipe" => "llvmpipe",
        "swiftshader" => "SwiftShader",
        "system" => "",
        _ => {
            return Err(format!(
                "KVPACK_TEST_DRIVER is '{driver}'; the drivers are lavapipe, swiftshader and system (any)"
            ));
        }
    };
    let name = adapter.get_info().name;
    if name.contains(expected) {
        return Ok(adapter);
    }
    Err(format!("KVPACK_TEST_DRIVER asks for {driver}, whose adapters are named {expected}; the adapter is '{name}'"))
}

/// The path that `KVPACK_PATH` names, if it is set.
///
/// # Errors
/// In words, when there is no such path.
pub fn forced_path() -> Result<Option<Path>, String> {
    let path = std::env::var("KVPACK_PATH").ok().map(|path| path.parse());
    path.transpose().map_err(|error: kvpack::Error| format!("KVPACK_PATH: {error}"))
}

/// True where `KVPACK_TEST_BRIEF` is set: the first driver of `scripts/test.sh` has every case, and this one fewer.
pub fn is_brief() -> bool {
    std::env::var_os("KVPACK_TEST_BRIEF").is_some()
}

/// The checks that `KVPACK_CHECKS` (trusted, indices, safe) names, or the default.
///
/// # Errors
/// In words, when there are none of that name.
pub fn checks() -> Result<Checks, String> {
    match std::env::var("KVPACK_CHECKS").as_deref() {
        Ok("safe") => Ok(Checks::Safe),
        Ok("indices") => Ok(Checks::Indices),
        Ok("trusted") => Ok(Checks::Trusted),
        Ok(name) => Err(format!("KVPACK_CHECKS is '{name}'; the checks are trusted, indices and safe")),
        Err(_) => Ok(Checks::default()),
    }
}

/// A device that lacks the features that `path` forbids.
///
/// # Errors
/// In words, when there is no device, or not the one that is expected.
pub fn restricted_to(path: Path) -> Result<Wgpu, String> {
    let adapter = adapter()?;
    // SAFETY: a mistake of wgpu's experimental features would show in these tests, which is what they are for.
    let experimental = unsafe { wgpu::ExperimentalFeatures::enabled() };
    let requirements = Requirements::of(&adapter, experimental).restricted_to(path);
    let checks = checks()?;
    let opened = block_on(open_device(&adapter, requirements))
        .and_then(|(device, queue)| Wgpu::with_kernels(queue, Arc::new(Kernels::new(&device, checks))));
    let backend = opened.map_err(|error| error.to_string())?;
    Ok(backend.restricted_to(path))
}

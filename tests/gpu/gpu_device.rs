//! The device that GPU tests run on. `adapter` says which one that is.

use std::sync::LazyLock;

use kvpack::wgpu::{Path, Wgpu};

pub use crate::adapter::{adapter, forced_path, is_brief, restricted_to};

/// A device of its own on the forced path, or on the best one.
///
/// # Panics
/// When there is no device, or not the one that is expected.
pub fn fresh() -> Wgpu {
    let path = forced_path().unwrap().unwrap_or(Path::Matrices);
    restricted_to(path).unwrap()
}

/// One device for all tests that do not harm it.
///
/// # Panics
/// When there is no device, or not the one that is expected.
pub fn shared() -> Wgpu {
    static SHARED: LazyLock<Wgpu> = LazyLock::new(fresh);
    SHARED.clone()
}

//! Which devices multiply cooperative matrices.

use std::sync::{Mutex, PoisonError};

use kvpack_device::wgpu::Capabilities;

/// Whether kernels may multiply cooperative matrices on a device.
pub(super) fn multiplies_matrices(device: &wgpu::Device) -> bool {
    /// What was found about adapters whose devices have them enabled: to ask takes as long as to list all adapters.
    static FOUND: Mutex<Vec<(wgpu::AdapterInfo, bool)>> = Mutex::new(Vec::new());
    if !device.features().contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return false;
    }
    let info = device.adapter_info();
    let mut found = FOUND.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some((_, multiplies)) = found.iter().find(|(known, _)| *known == info) {
        return *multiplies;
    }
    let multiplies = Capabilities::from_device(device).is_ok_and(|capabilities| capabilities.matrices);
    found.push((info, multiplies));
    multiplies
}

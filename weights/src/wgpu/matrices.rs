//! Which devices multiply cooperative matrices.

use std::sync::{Mutex, PoisonError};

use kvpack_device::wgpu::Capabilities;

/// Workgroup memory of the largest kernels with matrices. `linear_rows_matrix` has two buffers of eight slices of 16 ×
/// 72 halves, and eight blocks of 16 × 20 sums. `linear_matrix` has two tiles of 128 × 72 halves, and the same sums.
const WORKGROUP_MEMORY: u32 = 2 * 8 * 16 * 72 * 2 + 8 * 16 * 20 * 4;

/// Whether kernels may multiply cooperative matrices on a device.
pub(super) fn multiplies_matrices(device: &wgpu::Device) -> bool {
    /// What was found about adapters whose devices have them enabled: to ask takes as long as to list all adapters.
    static FOUND: Mutex<Vec<(wgpu::AdapterInfo, bool)>> = Mutex::new(Vec::new());
    if !device.features().contains(wgpu::Features::EXPERIMENTAL_COOPERATIVE_MATRIX) {
        return false;
    }
    if device.limits().max_compute_workgroup_storage_size < WORKGROUP_MEMORY {
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

//! Shares of sequences through wgpu.

use crate::any_backend::shares;
use crate::gpu_device;

#[test]
fn shares_merge_to_the_whole() {
    shares::check(&gpu_device::shared(), 1e-5);
}

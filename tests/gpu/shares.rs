//! Shares of sequences through wgpu.

use crate::gpu_device;
use any_backend::shares;

#[test]
fn shares_merge_to_the_whole() {
    shares::check(&gpu_device::shared(), 1e-5);
}

//! Parts of prompts through wgpu.

use crate::gpu_device;
use any_backend::prompt_parts;

/// Queries see their part in f16, the step packs it, and an abandoned step leaves nothing.
#[test]
fn parts_are_seen_in_f16_and_packed_by_their_step() {
    let backend = gpu_device::shared();
    prompt_parts::RULES.into_iter().for_each(|recipe| prompt_parts::check(&backend, recipe, 1e-3));
}

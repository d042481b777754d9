//! Prompts that are measured, evicted, merged and packed through wgpu, against the CPU. `gpu_device` says
//! on which adapter.

use crate::gpu_device;
use any_backend::{compressed, scored_policies, select_cases};

#[test]
fn attention_is_measured_with_the_scale_of_the_layer() {
    scored_policies::check(&gpu_device::shared());
}

#[test]
fn the_device_keeps_what_the_cpu_keeps() {
    compressed::check_against_cpu(&gpu_device::shared());
}

#[test]
fn what_grows_is_compressed_again_as_on_the_cpu() {
    compressed::growing::check_growing(&gpu_device::shared(), 0.98);
}

#[test]
fn text_goes_first_by_exact_scores() {
    select_cases::check_text_first(&gpu_device::shared());
}

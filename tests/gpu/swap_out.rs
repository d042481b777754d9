//! Sequences that leave a cache while the device works. `gpu_device` says on which adapter.

use kvpack::Error;
use kvpack::cache::TokenRun;
use kvpack::plan::{ElementType, RowLayout};
use kvpack::wgpu::{LayerTensors, ModelStep};
use pollster::block_on;

use crate::gpu_device;
use crate::round_trips::newest_submission;
use any_backend::model_steps::{LAYERS, ROWS, shape};
use any_backend::swap_out;
use any_backend::swapped_bytes::{all_held, filled};

#[test]
fn a_sequence_leaves_while_others_go_on() {
    swap_out::check(&gpu_device::shared());
}

#[test]
fn a_sequence_that_changes_stays() {
    swap_out::check_misuse(&gpu_device::shared());
}

/// One submission begins it, whose copies follow the work before; nothing that comes later changes them, and to finish
/// submits nothing, so that an engine may have steps encoded meanwhile.
#[test]
fn copies_are_of_the_moment_they_began() {
    let backend = gpu_device::fresh();
    let mut cache = filled(&backend, "f16", |_| 64);
    let held = all_held(&cache, 0);
    let before = newest_submission(&backend);
    let leaving = cache.begin_swap_out(0).unwrap();
    let begun = newest_submission(&backend) - before - 1;
    // wgpu gives a number to the map as well.
    assert!(begun <= 2, "{begun} submissions");

    // Steps of the other sequence: encoded before it is finished, submitted after.
    let of = LayerTensors::zeroed(backend.device(), &shape(), ROWS, ElementType::F32).unwrap();
    let mut steps = ModelStep::new(&backend, RowLayout::token_major(ROWS, &shape()), vec![of; LAYERS]).unwrap();
    let runs = [TokenRun::chunk(1, ROWS)];
    block_on(cache.reserve_for_append(&runs)).unwrap();
    cache.begin_append(&runs).unwrap();
    let open = cache.open_steps().unwrap();
    let written = steps.write(&open).unwrap();
    let mut encoder = backend.device().create_command_encoder(&wgpu::CommandEncoderDescriptor::default());
    let mut pass = encoder.begin_compute_pass(&wgpu::ComputePassDescriptor::default());
    (0..LAYERS).for_each(|layer| written.encode_store(layer, &mut pass).unwrap());
    drop((pass, written, open));
    cache.commit().unwrap();
    assert!(matches!(cache.begin_swap_out(0), Err(Error::NotSubmitted { steps: 1, .. })), "it would overtake a step");
    let before = newest_submission(&backend);
    let swapped = block_on(cache.finish_swap_out(leaving)).unwrap();
    assert_eq!(newest_submission(&backend) - before - 1, 0, "to finish submits nothing");
    backend.queue().submit([encoder.finish()]);
    block_on(cache.swap_in(0, &swapped)).unwrap();
    assert!(all_held(&cache, 0) == held);
}

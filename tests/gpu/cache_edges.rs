//! Edges of a cache on a GPU.

use crate::gpu_device;
use any_backend::cache_edges;

#[test]
fn truncation_leaves_nothing() {
    cache_edges::truncation_leaves_nothing(&gpu_device::shared());
}

#[test]
fn the_largest_elements_are_taken() {
    cache_edges::the_largest_elements_are_taken(&gpu_device::shared());
}

#[test]
fn steps_write_into_outputs() {
    cache_edges::steps_write_into_outputs(&gpu_device::shared());
}

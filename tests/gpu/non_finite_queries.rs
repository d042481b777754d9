//! NaN in queries propagates on a GPU.

use crate::gpu_device;
use any_backend::non_finite_queries;

/// Floats, integers with ranges per token, channel and group, a query of 8 bits, calibrated scores, a
/// soft cap, levels and sketches.
const RECIPES: [&str; 7] = ["f16", "int8", "kivi:2", "calibrated", "8-bit query", "capped", "turboquant-prod:3"];

#[test]
fn nan_propagates() {
    non_finite_queries::check(&gpu_device::shared(), |name| RECIPES.contains(&name));
}

#[test]
fn policies_do_not_lose_nan() {
    non_finite_queries::check_policies(&gpu_device::shared());
}

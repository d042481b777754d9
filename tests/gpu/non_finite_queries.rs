//! NaN in queries propagates on a GPU.

use crate::gpu_device;
use any_backend::non_finite_queries;

/// Floats, integers with ranges per token, channel and group, a query of 8 bits, calibrated scores,
/// levels and sketches.
const RECIPES: [&str; 6] = ["f16", "int8", "kivi:2", "calibrated", "8-bit query", "turboquant-prod:3"];

#[test]
fn nan_propagates() {
    non_finite_queries::check(&gpu_device::shared(), |name| RECIPES.contains(&name));
}

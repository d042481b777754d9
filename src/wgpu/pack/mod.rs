//! The kernels that move tokens into pages and back.

mod append;
mod copy_page;
mod dequantize;
mod find_non_finite;
pub(super) mod hadamard;
mod levels;
mod pack_windows;
mod quantize;
mod tile_call;

pub use append::AppendPlan;
pub use dequantize::DequantizePlan;
pub use find_non_finite::{ElementPosition, FindNonFinite, FindNonFinitePlan};
pub use hadamard::HadamardPlan;
pub use pack_windows::PackWindowsPlan;
pub use quantize::QuantizePlan;
pub(super) use tile_call::rows_file;

use super::device::Variant;

/// Every kernel variant that plans of this folder can ask for, one of each that differ in more than numbers.
pub(super) fn variants() -> Vec<Variant> {
    [
        append::variants(),
        dequantize::variants(),
        find_non_finite::variants(),
        hadamard::variants(),
        quantize::variants(),
    ]
    .concat()
}

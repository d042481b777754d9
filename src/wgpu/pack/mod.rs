//! The kernels that move tokens into pages and back.

mod append;
mod centre_keys;
mod copy_page;
mod dequantize;
mod find_non_finite;
pub(super) mod hadamard;
mod key_mean;
mod levels;
mod non_finite_flags;
mod pack_windows;
mod quantize;
pub(super) mod staged;
mod store_step;
mod tile_call;
mod uncentre_keys;
mod window_packing;
mod write_launch;
mod write_memory;

pub use dequantize::DequantizePlan;
pub use find_non_finite::{ElementPosition, FindNonFinite, FindNonFinitePlan};
pub use hadamard::HadamardPlan;
pub use key_mean::KeyMeanPlan;
pub use non_finite_flags::NonFiniteFlags;
pub use quantize::QuantizePlan;
pub use store_step::{BoundStoreStep, StoreStep};
pub(super) use tile_call::rows_file;
pub use write_memory::WriteMemory;
pub(super) use write_memory::{rotated_bytes as rotated_window_bytes, rotated_now, table_bytes};

use super::device::Variant;

/// Every kernel variant that plans of this folder use. Variants that differ only in numbers appear once.
pub(super) fn variants() -> Vec<Variant> {
    [
        append::variants(),
        centre_keys::variants(),
        copy_page::variants(),
        dequantize::variants(),
        find_non_finite::variants(),
        hadamard::variants(),
        key_mean::variants(),
        pack_windows::variants(),
        quantize::variants(),
        vec![uncentre_keys::variant()],
    ]
    .concat()
}

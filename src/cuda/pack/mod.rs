//! The kernels that move tokens into pages and back.

pub(super) mod non_finite_flags;
pub(super) mod rows;
pub(super) mod scratch;
pub(super) mod store_step;
pub(super) mod write_memory;

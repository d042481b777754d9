//! The kernels that move tokens into pages and back.

pub(super) mod rows;

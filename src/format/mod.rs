//! Formats as plain data, with their exact meaning: what a code decodes to, and where it lies.

mod affine;
mod bits;
mod calibration;
pub mod codebook;
pub mod interchange;
mod rotation;
mod segment_format;
mod shape;
mod sizes;
pub mod sketch;
mod tensor_format;
pub mod tile;
mod tile_order;

pub use affine::{CodeRange, RangeRule};
pub use bits::Bits;
pub use calibration::{Calibration, ScoreMap};
pub use codebook::Codebook;
pub use kvpack_device::{HEAD_DIMS, KeyOrValue, MOST_HEADS};
pub use rotation::{Direction, Rotation};
pub use segment_format::SegmentFormat;
pub use shape::AttentionShape;
pub use tensor_format::{AffineFormat, CodebookFormat, Grouping, NormRule, TensorFormat};
pub use tile::{Field, LAYOUT_VERSION, TileLayout, TopBit};
pub use tile_order::TileOrder;

/// Tokens of a tile, and of a page.
pub const TILE_TOKENS: usize = 128;

//! Formats as plain data, with their exact meaning: what a code decodes to, and where it lies.

mod affine;
mod bits;
mod calibration;
pub mod codebook;
mod heads;
pub mod interchange;
mod key_or_value;
mod rotation;
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
pub use heads::{HEAD_DIMS, MOST_HEADS};
pub use key_or_value::KeyOrValue;
pub use rotation::{Direction, Rotation};
pub use shape::AttentionShape;
pub use tensor_format::{AffineFormat, CodebookFormat, Grouping, NormRule, SegmentFormat, TensorFormat};
pub use tile::{Field, LAYOUT_VERSION, TileLayout, TopBit};
pub use tile_order::TileOrder;

/// Tokens of a tile, and of a page.
pub const TILE_TOKENS: usize = 128;

//! The sizes of formats in bytes: exact, and the same on every backend.

use super::{AttentionShape, CodeRange, KeyOrValue, SegmentFormat, TILE_TOKENS, TileLayout};

impl SegmentFormat {
    /// Bytes of one page of keys, or of values: the tiles of all KV heads and their tile ranges.
    pub const fn tensor_page_bytes(&self, which: KeyOrValue, shape: &AttentionShape) -> usize {
        let format = self.tensor(which);
        let layout = TileLayout::of(format, shape.head_dim());
        let tile_words = match which {
            KeyOrValue::Key => layout.key_tile_words(),
            KeyOrValue::Value => layout.value_tile_words(),
        };
        (tile_words + format.ranges_per_tile(shape.head_dim())) * size_of::<u32>() * shape.kv_heads()
    }

    /// Bytes of one page: [`TILE_TOKENS`] tokens of keys and values of all KV heads, with their tile ranges.
    pub const fn page_bytes(&self, shape: &AttentionShape) -> usize {
        self.tensor_page_bytes(KeyOrValue::Key, shape) + self.tensor_page_bytes(KeyOrValue::Value, shape)
    }

    /// Bytes of one slot of span ranges: one [`CodeRange`] per KV head and channel, for keys and for values if they
    /// have span ranges.
    pub fn range_slot_bytes(&self, shape: &AttentionShape) -> usize {
        let tensors = usize::from(self.key.has_span_ranges()) + usize::from(self.value.has_span_ranges());
        tensors * shape.kv_heads() * shape.head_dim() * size_of::<CodeRange>()
    }

    /// Bytes of the centre of one sequence: one f32 per KV head and channel of its keys.
    pub const fn centre_bytes(shape: &AttentionShape) -> usize {
        shape.kv_heads() * shape.head_dim() * size_of::<f32>()
    }

    /// Whether keys or values need a slot of span ranges.
    pub fn has_span_ranges(&self) -> bool {
        self.key.has_span_ranges() || self.value.has_span_ranges()
    }

    /// Bits per element of a full page, including tile ranges, but not span ranges.
    ///
    /// ```
    /// use kvpack::{AttentionShape, Bits, SegmentFormat};
    /// let shape = AttentionShape::new(8, 2, 128)?;
    /// assert_eq!(SegmentFormat::per_channel(Bits::Two).bits_per_element(&shape), 2.0);
    /// # Ok::<(), kvpack::Error>(())
    /// ```
    pub fn bits_per_element(&self, shape: &AttentionShape) -> f64 {
        let elements = 2 * TILE_TOKENS * shape.kv_heads() * shape.head_dim();
        self.page_bytes(shape) as f64 * 8.0 / elements as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::format::{AffineFormat, Bits, Grouping, TensorFormat};

    #[test]
    fn bytes_of_pages_and_slots() {
        let shape = AttentionShape::new(6, 3, 64).unwrap();
        assert_eq!(SegmentFormat::F16.page_bytes(&shape), 2 * 128 * 64 * 2 * 3);
        let calibquant = SegmentFormat::calibquant(Bits::One);
        assert_eq!(calibquant.page_bytes(&shape), 2 * 128 * 64 / 8 * 3);
        assert_eq!(calibquant.range_slot_bytes(&shape), 2 * 3 * 64 * 8);
        let value = TensorFormat::Affine(AffineFormat::new(Bits::Four, Grouping::Token));
        let mixed = SegmentFormat { key: calibquant.key, value };
        assert_eq!(mixed.tensor_page_bytes(KeyOrValue::Value, &shape), 3 * (128 * 64 / 2 + 128 * 4));
        assert_eq!(mixed.range_slot_bytes(&shape), 3 * 64 * 8);
    }
}

//! The parts of `attend` for the values of a format, and their weights.

use super::code_bytes::CodeBytes;
use super::recipe::{ByteWeights, Exchange, Field, FloatWeights, SignedBytes, Sums, ValueRanges, Values};
use super::specialisation::Specialisation;
use crate::format::{Bits, Grouping};

impl Specialisation<'_> {
    pub(super) fn values(&self, heads: usize) -> Values {
        Values { channels: self.channel_split(heads), sums: self.value_sums(), rotation: self.format.value.rotation() }
    }

    fn value_sums(&self) -> Sums {
        let Some(bits) = self.format.value.code_bits() else { return self.float_sums(Field::F16) };
        let bytes = SignedBytes::new(bits, &self.format.value);
        let stand_for = CodeBytes::new(&self.format.value, self.shape.head_dim());
        match self.format.value.grouping() {
            Some(Grouping::Token) => {
                Sums::Dot { bytes, ranges: ValueRanges::Token { middle: stand_for.middle, unit: stand_for.unit } }
            }
            Some(Grouping::ChannelTokens(_)) if self.has_value_tiles() => {
                Sums::Byte { bytes, weights: ByteWeights::Tiles, block_max: self.block_max(bits) }
            }
            Some(Grouping::ChannelTokens(tokens)) => {
                self.float_sums(Field::ChannelTokens(bits, crate::TILE_TOKENS / tokens))
            }
            Some(Grouping::TokenChannels(channels)) => match self.value_groups() {
                Some(groups) => {
                    let weights = ByteWeights::Groups { groups, centre: bits.max_code() as f32 / 2.0 };
                    Sums::Byte { bytes, weights, block_max: self.block_max(bits) }
                }
                None => self.float_sums(Field::TokenChannels(bits, channels)),
            },
            Some(Grouping::Channel) | None if self.byte_weights() => {
                // Bytes are made unsigned by adding 128.
                let weights = ByteWeights::Shared { middle: stand_for.middle - 128.0 / stand_for.step };
                Sums::Byte { bytes, weights, block_max: self.block_max(bits) }
            }
            Some(Grouping::Channel) | None => {
                Sums::Dot { bytes, ranges: ValueRanges::Folded { middle: stand_for.middle } }
            }
        }
    }

    fn float_sums(&self, field: Field) -> Sums {
        Sums::Fma { field, weights: if self.capabilities.f16 { FloatWeights::F16 } else { FloatWeights::F32 } }
    }

    /// The eight lanes of a block of weights are spread over this many lanes: two neighbours for each word of a vector.
    fn block_max(&self, bits: Bits) -> Exchange {
        self.exchange_among(match bits {
            Bits::Three => 8,
            bits => 4 * bits.planes().max(2),
        })
    }
}

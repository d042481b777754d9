//! Which parts of `attend` serve the values of a format, and their weights.

use super::attend::{INVOCATIONS, Specialisation};
use super::code_bytes::{CodeBytes, top_bits};
use crate::format::{Bits, Direction, Grouping, TensorFormat};
use crate::wgpu::device::Variant;
use crate::wgpu::pack::hadamard::{Turn, with_turn};

impl Specialisation<'_> {
    pub(super) fn with_values(&self, variant: Variant, heads: usize) -> Variant {
        let split = self.channel_split(heads);
        let mut variant = variant.constant("CHANNELS", split.channels).constant("CHANNEL_BLOCKS", split.blocks);
        if let Some(rotation) = self.format.value.rotation() {
            let turn = Turn { rotation, direction: Direction::Back };
            let rotated = variant.import("output_rotation", "attend/output_rotation/hadamard.wgsl");
            variant = with_turn(rotated, turn, self.shape.head_dim());
        }
        let Some(bits) = self.format.value.code_bits() else { return self.with_float_weights(variant) };
        let by_value = |field| {
            let variant = match bits {
                Bits::Three => variant
                    .clone()
                    .alias("ValueVector", "array<u32, 3>")
                    .import("value_codes", "attend/value_codes/three.wgsl"),
                bits => variant.clone().constant("VALUE_BITS", bits.count() as usize),
            };
            self.with_float_weights(variant).import("value_field", field)
        };
        let bytes = CodeBytes::new(&self.format.value, self.shape.head_dim());
        let integers =
            || with_value_bytes(variant.clone(), bits, &self.format.value).float("VALUE_MIDDLE", bytes.middle);
        match self.format.value.grouping() {
            Some(Grouping::Token) => {
                integers().import("value_ranges", "attend/value_ranges/token.wgsl").float("VALUE_UNIT", bytes.unit)
            }
            Some(Grouping::ChannelTokens(tokens)) => by_value("attend/value_field/channel_tokens.wgsl")
                .constant("VALUE_TOKEN_GROUPS", crate::TILE_TOKENS / tokens),
            Some(Grouping::TokenChannels(channels)) => match self.value_groups() {
                Some(groups) => {
                    let variant = with_value_bytes(variant, bits, &self.format.value);
                    self.with_value_groups(variant, bits, groups, split.channels)
                }
                None => by_value("attend/value_field/token_channels.wgsl").constant("VALUE_GROUP_CHANNELS", channels),
            },
            Some(Grouping::Channel) | None if self.byte_weights() => self.with_byte_weights(integers(), bits, &bytes),
            Some(Grouping::Channel) | None => integers(),
        }
    }

    fn with_byte_weights(&self, variant: Variant, bits: Bits, bytes: &CodeBytes) -> Variant {
        // Bytes are made unsigned by adding 128.
        let middle = bytes.middle - 128.0 / bytes.step;
        let variant = variant.float("VALUE_MIDDLE", middle);
        self.with_weight_blocks(variant, bits)
    }

    /// Weights of one byte, relative to the largest of their block.
    pub(super) fn with_weight_blocks(&self, variant: Variant, bits: Bits) -> Variant {
        let variant = variant.import("values", "attend/values/byte.wgsl");
        // The eight lanes of a block of weights lie among so many: two neighbours for each of the words of a vector.
        let lanes = match bits {
            Bits::Three => 8,
            bits => 4 * bits.planes().max(2),
        };
        match self.capabilities.subgroups {
            Some(sizes) if sizes.min as usize >= lanes && sizes.max as usize <= INVOCATIONS => variant
                .import("block_max", "attend/block_max/subgroup.wgsl")
                .import("numbering", "attend/numbering/subgroup.wgsl"),
            _ => variant,
        }
    }

    fn with_float_weights(&self, variant: Variant) -> Variant {
        let variant = variant.import("values", "attend/values/fma.wgsl");
        match self.capabilities.f16 {
            true => variant.with_f16().alias("Weights", "vec4<f16>"),
            false => variant,
        }
    }
}

fn with_value_bytes(variant: Variant, bits: Bits, format: &TensorFormat) -> Variant {
    match (bits, format) {
        (Bits::Three, TensorFormat::Codebook(_)) => variant
            .import("value_bytes", "attend/value_bytes/three.wgsl")
            .import("three_bytes", "attend/three_bytes/levels.wgsl"),
        (Bits::Three, _) => variant.import("value_bytes", "attend/value_bytes/three.wgsl"),
        // Two levels are an affine grid.
        (bits, TensorFormat::Codebook(_)) if bits != Bits::One => variant
            .import("value_bytes", "attend/value_bytes/levels.wgsl")
            .constant("VALUE_BITS", bits.count() as usize),
        (bits, _) => variant.constant("VALUE_BITS", bits.count() as usize).constant("VALUE_MASK", top_bits(bits)),
    }
}
